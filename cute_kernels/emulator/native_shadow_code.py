"""LLVM IR of the shadow memory's fast path (`native_shadow`): one access is checked, and then recorded."""

from __future__ import annotations

from cute_kernels.emulator.native_memory import LOG, LOG_ENTRY
from cute_kernels.emulator.shadow import GRANULE, LANE_BITS

# A request, in words of 64 bits. Places are rows of COUNT places each: row i begins at byte OFFSETS[i] of the memory
# (which must be a multiple of 16), or without OFFSETS at place BASE + i * STRIDE.
FIELDS = (
    "WRITE", "STRONG",
    "WRITES", "LAYERS", "LAYER_COUNT", "PLACES", "SPLIT",  # `Plane.addresses`, `Shadow.split_address`
    "OFFSETS", "ROWS", "BASE", "STRIDE", "COUNT",  # the places
    "KNOWN", "WIDTH", "OWN", "LANES", "LANE", "EXEMPT", "FLOOR",  # who looks: `shadow.View`; LANES are one per row
    "COLUMNS", "CLOCKS", "GENERIC",  # `Epochs.addresses`
    "IDENTITY", "ADD_LANES", "FENCED", "READ_KNOWN", "READ_COLUMN",  # what is recorded, and what a read has to know
)  # fmt: skip


def _load(*names: str) -> str:
    """Loads fields of the request ``%q`` into registers of their names."""
    return "\n".join(
        f"  %{name}.p = getelementptr i64, ptr %q, i64 {FIELDS.index(name)}\n  %{name} = load i64, ptr %{name}.p"
        for name in names
    )


def _store(**values: str) -> str:
    return "\n".join(
        f"  %{name}.p = getelementptr i64, ptr %q, i64 {FIELDS.index(name)}\n  store i64 {value}, ptr %{name}.p"
        for name, value in values.items()
    )


def _each_place(body: str, row: str) -> str:
    """Loops over all places: ``body`` finds the place in ``%p`` and goes to ``next``, ``row`` ends what begins a row.

    Expects ``%q``, ``%ROWS``, ``%COUNT``; goes on at the label ``end``. ``%start`` and ``%lane`` are the row's first
    place and its lane.
    """
    return f"""
  br label %rows
rows:
  %row = phi i64 [0, %entry], [%row.next, %row.end]
  %row.more = icmp ult i64 %row, %ROWS
  br i1 %row.more, label %row.body, label %end
row.body:
  %start = call i64 @first(ptr %q, i64 %row)
  %lane = call i64 @lane(ptr %q, i64 %row)
{row}
  br label %row.good
row.good:
  br label %places
places:
  %c = phi i64 [0, %row.good], [%c.next, %next]
  %c.more = icmp ult i64 %c, %COUNT
  br i1 %c.more, label %place, label %row.end
row.end:
  %row.next = add i64 %row, 1
  br label %rows
place:
  %p = add i64 %start, %c
{body}
next:
  %c.next = add i64 %c, 1
  br label %places
"""


_PLACES = f"""
define internal i64 @first(ptr %q, i64 %row) alwaysinline {{
{_load("OFFSETS", "BASE", "STRIDE")}
  %regular = icmp eq i64 %OFFSETS, 0
  br i1 %regular, label %computed, label %listed
computed:
  %far = mul i64 %row, %STRIDE
  %place = add i64 %BASE, %far
  ret i64 %place
listed:
  %offsets = inttoptr i64 %OFFSETS to ptr
  %o.p = getelementptr i64, ptr %offsets, i64 %row
  %o = load i64, ptr %o.p
  %low = and i64 %o, {GRANULE - 1}
  %whole = icmp eq i64 %low, 0
  %granule = ashr i64 %o, 4
  %result = select i1 %whole, i64 %granule, i64 -1
  ret i64 %result
}}
define internal i64 @lane(ptr %q, i64 %row) alwaysinline {{
{_load("LANES", "LANE")}
  %one = icmp eq i64 %LANES, 0
  br i1 %one, label %same, label %listed
same:
  ret i64 %LANE
listed:
  %lanes = inttoptr i64 %LANES to ptr
  %l.p = getelementptr i64, ptr %lanes, i64 %row
  %l = load i64, ptr %l.p
  ret i64 %l
}}
"""

_ORDERED = f"""
define internal i1 @ordered(i32 %id, ptr %q, ptr %known, i64 %own, i64 %lane, i64 %exempt, i1 %strong) alwaysinline {{
{_load("COLUMNS", "CLOCKS", "GENERIC", "WIDTH", "FLOOR")}
  %never = icmp eq i32 %id, 0
  br i1 %never, label %yes, label %some
some:
  %id.wide = zext i32 %id to i64
  %number = lshr i64 %id.wide, {LANE_BITS}
  %later = icmp sge i64 %number, %FLOOR
  br i1 %later, label %ours, label %no
ours:
  %columns = inttoptr i64 %COLUMNS to ptr
  %column.p = getelementptr i32, ptr %columns, i64 %number
  %column.first = load i32, ptr %column.p
  %column.wide = sext i32 %column.first to i64
  %id.lane = and i64 %id.wide, {(1 << LANE_BITS) - 1}
  %column = add i64 %column.wide, %id.lane
  %inside = icmp ult i64 %column, %WIDTH
  br i1 %inside, label %look, label %no
look:
  %clocks = inttoptr i64 %CLOCKS to ptr
  %clock.p = getelementptr i32, ptr %clocks, i64 %number
  %clock = load i32, ptr %clock.p
  %known.p = getelementptr i32, ptr %known, i64 %column
  %known.clock = load i32, ptr %known.p
  %past = icmp sle i32 %clock, %known.clock
  %exempted = icmp eq i64 %column, %exempt
  %behind = sub i64 %column, %own
  %same = icmp eq i64 %behind, %lane
  %a.warp = icmp sge i64 %own, 0
  %a.lane = icmp sge i64 %lane, 0
  %mine.1 = and i1 %same, %a.warp
  %mine = and i1 %mine.1, %a.lane
  %generic = inttoptr i64 %GENERIC to ptr
  %kind.p = getelementptr i8, ptr %generic, i64 %number
  %kind = load i8, ptr %kind.p
  %kind.strong = icmp eq i8 %kind, 2
  %both = and i1 %kind.strong, %strong
  %r.1 = or i1 %past, %exempted
  %r.2 = or i1 %mine, %both
  %r = or i1 %r.1, %r.2
  ret i1 %r
yes:
  ret i1 1
no:
  ret i1 0
}}
"""

# A read takes the first layer whose reader it replaces: none, one of its own column, one that is known to be earlier.
_LAYER = f"""
define internal i64 @layer(ptr %q, i64 %p) alwaysinline {{
entry:
{_load("LAYERS", "LAYER_COUNT", "COLUMNS", "CLOCKS", "WIDTH", "READ_KNOWN", "READ_COLUMN")}
  %layers = inttoptr i64 %LAYERS to ptr
  %columns = inttoptr i64 %COLUMNS to ptr
  %clocks = inttoptr i64 %CLOCKS to ptr
  %known = inttoptr i64 %READ_KNOWN to ptr
  %ordered = icmp ne i64 %READ_KNOWN, 0
  br label %layer
layer:
  %n = phi i64 [0, %entry], [%n.next, %taken]
  %more = icmp ult i64 %n, %LAYER_COUNT
  br i1 %more, label %look, label %none
look:
  %layer.p = getelementptr ptr, ptr %layers, i64 %n
  %plane = load ptr, ptr %layer.p
  %id.p = getelementptr i32, ptr %plane, i64 %p
  %id = load i32, ptr %id.p
  %never = icmp eq i32 %id, 0
  br i1 %never, label %free, label %reader
reader:
  %id.wide = zext i32 %id to i64
  %number = lshr i64 %id.wide, {LANE_BITS}
  %column.p = getelementptr i32, ptr %columns, i64 %number
  %column.short = load i32, ptr %column.p
  %column = sext i32 %column.short to i64
  %same = icmp eq i64 %column, %READ_COLUMN
  br i1 %same, label %free, label %other
other:
  %inside = icmp ult i64 %column, %WIDTH
  %may = and i1 %inside, %ordered
  br i1 %may, label %compare, label %taken
compare:
  %clock.p = getelementptr i32, ptr %clocks, i64 %number
  %clock = load i32, ptr %clock.p
  %known.p = getelementptr i32, ptr %known, i64 %column
  %known.clock = load i32, ptr %known.p
  %past = icmp sle i32 %clock, %known.clock
  br i1 %past, label %free, label %taken
taken:
  %n.next = add i64 %n, 1
  br label %layer
free:
  ret i64 %n
none:
  ret i64 -1
}}
"""

# Neighbours mostly have the same history: an identity that was found to be in order is not looked up again, unless the
# lane that looks is another.
_VERIFY_PLACES = _each_place(
    """
  br i1 %some.split, label %granule, label %whole
granule:
  %s.p = getelementptr i8, ptr %split, i64 %p
  %s = load i8, ptr %s.p
  %s.whole = icmp eq i8 %s, 0
  br i1 %s.whole, label %whole, label %no
whole:
  %w.p = getelementptr i32, ptr %writes, i64 %p
  %w = load i32, ptr %w.p
  %w.good = load i32, ptr %good.write
  %w.again = icmp eq i32 %w, %w.good
  br i1 %w.again, label %written, label %w.ask
w.ask:
  %w.past = call i1 @ordered(i32 %w, ptr %q, ptr %known, i64 %OWN, i64 %lane, i64 %EXEMPT, i1 %strong)
  br i1 %w.past, label %w.proxy, label %no
w.proxy:
  br i1 %asynchronous, label %w.fence, label %w.note
w.fence:
  %w.fenced = call i1 @ordered(i32 %w, ptr %q, ptr %fenced, i64 -1, i64 -1, i64 -1, i1 0)
  br i1 %w.fenced, label %w.note, label %no
w.note:
  store i32 %w, ptr %good.write
  br label %written
written:
  br i1 %is.write, label %readers, label %reading
readers:
  %n = phi i64 [0, %written], [%n.next, %reader.good]
  %n.more = icmp ult i64 %n, %LAYER_COUNT
  br i1 %n.more, label %reader, label %next
reader:
  %layer.p = getelementptr ptr, ptr %layers, i64 %n
  %layer = load ptr, ptr %layer.p
  %r.p = getelementptr i32, ptr %layer, i64 %p
  %r = load i32, ptr %r.p
  %r.good = load i32, ptr %good.read
  %r.again = icmp eq i32 %r, %r.good
  br i1 %r.again, label %reader.good, label %r.ask
r.ask:
  %r.past = call i1 @ordered(i32 %r, ptr %q, ptr %known, i64 %OWN, i64 %lane, i64 %EXEMPT, i1 %strong)
  br i1 %r.past, label %r.note, label %no
r.note:
  store i32 %r, ptr %good.read
  br label %reader.good
reader.good:
  %n.next = add i64 %n, 1
  br label %readers
reading:
  br i1 %no.layer, label %no, label %first.layer
first.layer:
  %l = load ptr, ptr %layers
  %l.p = getelementptr i32, ptr %l, i64 %p
  %l.id = load i32, ptr %l.p
  %l.good = load i32, ptr %good.layer
  %l.again = icmp eq i32 %l.id, %l.good
  br i1 %l.again, label %next, label %l.ask
l.ask:
  %l.n = call i64 @layer(ptr %q, i64 %p)
  %l.free = icmp eq i64 %l.n, 0
  br i1 %l.free, label %l.note, label %l.other
l.note:
  store i32 %l.id, ptr %good.layer
  br label %next
l.other:
  %l.none = icmp slt i64 %l.n, 0
  br i1 %l.none, label %no, label %next
""",
    """
  %last = add i64 %start, %COUNT
  %low = icmp sge i64 %start, 0
  %high = icmp sle i64 %last, %PLACES
  %inside = and i1 %low, %high
  br i1 %inside, label %row.inside, label %no
row.inside:
  br i1 %one.lane, label %row.good, label %forget
forget:
  store i32 0, ptr %good.write
  store i32 0, ptr %good.read""",
)

_VERIFY = f"""
define internal i1 @verify(ptr %q) {{
entry:
{_load("WRITE", "STRONG", "WRITES", "LAYERS", "LAYER_COUNT", "SPLIT", "PLACES", "ROWS", "COUNT")}
{_load("KNOWN", "OWN", "LANES", "EXEMPT", "FENCED")}
  %writes = inttoptr i64 %WRITES to ptr
  %layers = inttoptr i64 %LAYERS to ptr
  %split = inttoptr i64 %SPLIT to ptr
  %known = inttoptr i64 %KNOWN to ptr
  %fenced = inttoptr i64 %FENCED to ptr
  %some.split = icmp ne i64 %SPLIT, 0
  %is.write = icmp ne i64 %WRITE, 0
  %strong = icmp ne i64 %STRONG, 0
  %one.lane = icmp eq i64 %LANES, 0
  %asynchronous = icmp ne i64 %FENCED, 0
  %no.layer = icmp eq i64 %LAYER_COUNT, 0
  %good.write = alloca i32
  %good.read = alloca i32
  %good.layer = alloca i32
  store i32 0, ptr %good.write
  store i32 0, ptr %good.read
  store i32 0, ptr %good.layer
{_VERIFY_PLACES}
end:
  ret i1 1
no:
  ret i1 0
}}
"""

_WRITE_PLACES = _each_place(
    """
  %w.p = getelementptr i32, ptr %writes, i64 %p
  store i32 %id, ptr %w.p
  br label %clear
clear:
  %n = phi i64 [0, %place], [%n.next, %clear.one]
  %n.more = icmp ult i64 %n, %LAYER_COUNT
  br i1 %n.more, label %clear.one, label %next
clear.one:
  %layer.p = getelementptr ptr, ptr %layers, i64 %n
  %layer = load ptr, ptr %layer.p
  %r.p = getelementptr i32, ptr %layer, i64 %p
  store i32 0, ptr %r.p
  %n.next = add i64 %n, 1
  br label %clear
""",
    """
  %lane.some = icmp sge i64 %lane, 0
  %lane.added = and i1 %add, %lane.some
  %lane.short = trunc i64 %lane to i32
  %lane.more = select i1 %lane.added, i32 %lane.short, i32 0
  %id = add i32 %identity, %lane.more""",
)

_READ_PLACES = _each_place(
    """
  %t.p = getelementptr i32, ptr %top, i64 %p
  %t = load i32, ptr %t.p
  %t.good = load i32, ptr %good.layer
  %t.again = icmp eq i32 %t, %t.good
  br i1 %t.again, label %here, label %search
here:
  store i32 %identity, ptr %t.p
  br label %next
search:
  %n = call i64 @layer(ptr %q, i64 %p)
  %first = icmp eq i64 %n, 0
  br i1 %first, label %note, label %deeper
note:
  store i32 %t, ptr %good.layer
  br label %here
deeper:
  %layer.p = getelementptr ptr, ptr %layers, i64 %n
  %layer = load ptr, ptr %layer.p
  %r.p = getelementptr i32, ptr %layer, i64 %p
  store i32 %identity, ptr %r.p
  br label %next
""",
    "",
)

_RECORD = f"""
define internal void @record_write(ptr %q) {{
entry:
{_load("WRITES", "LAYERS", "LAYER_COUNT", "ROWS", "COUNT", "IDENTITY", "ADD_LANES")}
  %writes = inttoptr i64 %WRITES to ptr
  %layers = inttoptr i64 %LAYERS to ptr
  %identity = trunc i64 %IDENTITY to i32
  %add = icmp ne i64 %ADD_LANES, 0
{_WRITE_PLACES}
end:
  ret void
}}
define internal void @record_read(ptr %q) {{
entry:
{_load("LAYERS", "ROWS", "COUNT", "IDENTITY")}
  %layers = inttoptr i64 %LAYERS to ptr
  %identity = trunc i64 %IDENTITY to i32
  %top = load ptr, ptr %layers
  %good.layer = alloca i32
  store i32 0, ptr %good.layer
{_READ_PLACES}
end:
  ret void
}}
define i64 @access(ptr %q) {{
{_load("WRITE")}
  %good = call i1 @verify(ptr %q)
  br i1 %good, label %record, label %no
record:
  %is.write = icmp ne i64 %WRITE, 0
  br i1 %is.write, label %write, label %read
write:
  call void @record_write(ptr %q)
  ret i64 1
read:
  call void @record_read(ptr %q)
  ret i64 1
no:
  ret i64 0
}}
"""

_SHARED_READ, _SHARED_WRITE = LOG["shared", False], LOG["shared", True]

# Lanes that all store to one place are the warp's own affair (`RaceTracker._generic`): for NumPy.
_OBSERVE = f"""
define i64 @observe(ptr %q, ptr %log, i64 %from, i64 %end, i64 %rank, i64 %reads, i64 %writes) {{
begin:
  %offsets = alloca [32 x i64], align 64
  %lanes = alloca [32 x i64], align 64
  %offsets.i = ptrtoint ptr %offsets to i64
  %lanes.i = ptrtoint ptr %lanes to i64
  br label %entries
entries:
  %e = phi i64 [%from, %begin], [%e.next, %done]
  %more = icmp ult i64 %e, %end
  br i1 %more, label %entry, label %stop
entry:
  %e.o = mul i64 %e, {LOG_ENTRY}
  %e.p = getelementptr i8, ptr %log, i64 %e.o
  %kind = load i32, ptr %e.p, align 4
  %mask.p = getelementptr i8, ptr %e.p, i64 4
  %mask = load i32, ptr %mask.p, align 4
  %bytes.p = getelementptr i8, ptr %e.p, i64 8
  %bytes = load i32, ptr %bytes.p, align 4
  %lane.p = getelementptr i8, ptr %e.p, i64 16
  %is.read = icmp eq i32 %kind, {_SHARED_READ}
  %is.write = icmp eq i32 %kind, {_SHARED_WRITE}
  %shared = or i1 %is.read, %is.write
  %odd = and i32 %bytes, {GRANULE - 1}
  %whole = icmp eq i32 %odd, 0
  %fast = and i1 %shared, %whole
  br i1 %fast, label %gather, label %stop
gather:
  %m = phi i32 [%mask, %entry], [%m.rest, %mine]
  %n = phi i64 [0, %entry], [%n.next, %mine]
  %differ = phi i64 [0, %entry], [%differ.next, %mine]
  %none = icmp eq i32 %m, 0
  br i1 %none, label %ask, label %lane
lane:
  %lane.n = call i32 @llvm.cttz.i32(i32 %m, i1 true)
  %lane.w = zext i32 %lane.n to i64
  %m.less = sub i32 %m, 1
  %m.rest = and i32 %m, %m.less
  %a.p = getelementptr i64, ptr %lane.p, i64 %lane.w
  %a = load i64, ptr %a.p, align 8
  %a.rank = ashr i64 %a, 24
  %own = icmp eq i64 %a.rank, %rank
  br i1 %own, label %mine, label %stop
mine:
  %offset = and i64 %a, 16777215
  %o.p = getelementptr i64, ptr %offsets, i64 %n
  store i64 %offset, ptr %o.p
  %l.p = getelementptr i64, ptr %lanes, i64 %n
  store i64 %lane.w, ptr %l.p
  %o.first = load i64, ptr %offsets
  %changed = xor i64 %offset, %o.first
  %differ.next = or i64 %differ, %changed
  %n.next = add i64 %n, 1
  br label %gather
ask:
  %several = icmp ugt i64 %n, 1
  %together = icmp eq i64 %differ, 0
  %same = and i1 %several, %together
  %same.store = and i1 %same, %is.write
  br i1 %same.store, label %stop, label %request
request:
  %write = zext i1 %is.write to i64
  %identity = select i1 %is.write, i64 %writes, i64 %reads
  %granules = lshr i32 %bytes, 4
  %count = zext i32 %granules to i64
{_store(OFFSETS="%offsets.i", LANES="%lanes.i", ROWS="%n", COUNT="%count", WRITE="%write", IDENTITY="%identity")}
  %good = call i64 @access(ptr %q)
  %fine = icmp ne i64 %good, 0
  br i1 %fine, label %done, label %stop
done:
  %e.next = add i64 %e, 1
  br label %entries
stop:
  ret i64 %e
}}
"""


def module() -> str:
    """The module: ``i64 @access(request)`` and `observe`, as `native_shadow.ShadowUnit` calls them."""
    return "declare i32 @llvm.cttz.i32(i32, i1)" + _PLACES + _ORDERED + _LAYER + _VERIFY + _RECORD + _OBSERVE
