"""LLVM IR of the shadow memory's fast path (`native_shadow`): neighbouring places are checked, and then recorded."""

from __future__ import annotations

from collections.abc import Sequence

from cute_kernels.emulator.shadow import EPOCH_WORDS, LANE_BITS, SHADOW_WORDS

# A request, in words of 64 bits. An access is ROWS rows of COUNT: row i begins at OFFSETS[i] - ORIGIN, or without
# OFFSETS at BASE + i * STRIDE. With a GRAIN of 16 these are bytes of a `shadow.Shadow`, with 1 places of a plane.
FIELDS = (
    "WRITE", "STRONG",
    "SHADOW", "GRAIN", "OFFSETS", "ROWS", "BASE", "STRIDE", "COUNT", "ORIGIN",  # the places; SHADOW is `Plane.address`
    "KNOWN", "WIDTH", "OWN", "LANES", "LANE", "EXEMPT", "FLOOR",  # who looks: `shadow.View`; LANES are one per row
    "EPOCHS",  # `Epochs.block`
    "IDENTITY", "ADD_LANES", "FENCED", "READ_KNOWN", "READ_COLUMN",  # what is recorded, and what a read has to know
)  # fmt: skip
#: And a counter behind them: accesses that `native_shadow_lanes` has decided.
REQUEST_WORDS = (*FIELDS, "TOGETHER")
FINE = SHADOW_WORDS.index("FINE_WRITES")
PLANE_WORDS = SHADOW_WORDS[:FINE]
_VECTOR = 8  # places that are looked at together


def load_words(pointer: str, words: Sequence[str], names: Sequence[str]) -> str:
    """Loads words of a block at ``pointer`` into registers of their names."""
    return "\n".join(
        f"  %{name}.p = getelementptr i64, ptr {pointer}, i64 {words.index(name)}\n  %{name} = load i64, ptr %{name}.p"
        for name in names
    )


def load_fields(*names: str) -> str:
    """Loads fields of the request ``%q``."""
    return load_words("%q", REQUEST_WORDS, names)


def store_fields(**values: str) -> str:
    """Sets fields of the request ``%q``."""
    return "\n".join(
        f"  %set.{name} = getelementptr i64, ptr %q, i64 {REQUEST_WORDS.index(name)}\n"
        f"  store i64 {value}, ptr %set.{name}"
        for name, value in values.items()
    )


def splat(name: str, value: str, kind: str, count: int) -> str:
    """``%name``: a vector of ``count`` times a value."""
    vector = f"<{count} x {kind}>"
    return f"""  %{name}.one = insertelement {vector} poison, {kind} {value}, i32 0
  %{name} = shufflevector {vector} %{name}.one, {vector} poison, <{count} x i32> zeroinitializer"""


def epoch_arrays(*names: str) -> str:
    """Addresses of arrays of `Epochs`, as registers of their names in small letters."""
    words = load_words("%epochs", EPOCH_WORDS, names)
    text = f"{load_fields('EPOCHS')}\n  %epochs = inttoptr i64 %EPOCHS to ptr\n{words}"
    return text + "".join(f"\n  %{name.lower()} = inttoptr i64 %{name} to ptr" for name in names)


_ORDERED = f"""
define internal i1 @ordered(i32 %id, ptr %q, ptr %known, i64 %own, i64 %lane, i64 %exempt, i1 %strong) alwaysinline {{
  %never = icmp eq i32 %id, 0
  br i1 %never, label %yes, label %some
some:
{load_fields("WIDTH", "FLOOR")}
  %id.wide = zext i32 %id to i64
  %number = lshr i64 %id.wide, {LANE_BITS}
  %later = icmp sge i64 %number, %FLOOR
  br i1 %later, label %ours, label %no
ours:
{epoch_arrays("COLUMNS", "CLOCKS", "GENERIC")}
  %column.p = getelementptr i32, ptr %columns, i64 %number
  %column.first = load i32, ptr %column.p
  %column.wide = sext i32 %column.first to i64
  %id.lane = and i64 %id.wide, {(1 << LANE_BITS) - 1}
  %column = add i64 %column.wide, %id.lane
  %inside = icmp ult i64 %column, %WIDTH
  br i1 %inside, label %look, label %no
look:
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
define internal i64 @layer(ptr %q, ptr %plane, i64 %p) alwaysinline {{
entry:
{load_fields("WIDTH", "READ_KNOWN", "READ_COLUMN")}
{load_words("%plane", PLANE_WORDS, ("LAYERS", "LAYER_COUNT"))}
{epoch_arrays("COLUMNS", "CLOCKS")}
  %layers = inttoptr i64 %LAYERS to ptr
  %known = inttoptr i64 %READ_KNOWN to ptr
  %ordered = icmp ne i64 %READ_KNOWN, 0
  br label %layer
layer:
  %n = phi i64 [0, %entry], [%n.next, %taken]
  %more = icmp ult i64 %n, %LAYER_COUNT
  br i1 %more, label %look, label %none
look:
  %layer.p = getelementptr ptr, ptr %layers, i64 %n
  %reads = load ptr, ptr %layer.p
  %id.p = getelementptr i32, ptr %reads, i64 %p
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


# ``@differs``: the first index from ``%start`` on where an array of int32 is not ``%id``, or ``%end``.
_RUNS = f"""
define internal i64 @differs(ptr %array, i64 %start, i64 %end, i32 %id) {{
entry:
  %one = insertelement <{_VECTOR} x i32> poison, i32 %id, i32 0
  %ids = shufflevector <{_VECTOR} x i32> %one, <{_VECTOR} x i32> poison, <{_VECTOR} x i32> zeroinitializer
  br label %wide
wide:
  %p = phi i64 [%start, %entry], [%p.next, %equal]
  %p.next = add i64 %p, {_VECTOR}
  %fits = icmp sle i64 %p.next, %end
  br i1 %fits, label %compare, label %narrow
compare:
  %v.p = getelementptr i32, ptr %array, i64 %p
  %v = load <{_VECTOR} x i32>, ptr %v.p, align 4
  %ne = icmp ne <{_VECTOR} x i32> %v, %ids
  %bits = bitcast <{_VECTOR} x i1> %ne to i{_VECTOR}
  %same = icmp eq i{_VECTOR} %bits, 0
  br i1 %same, label %equal, label %found
equal:
  br label %wide
found:
  %wider = zext i{_VECTOR} %bits to i32
  %first = call i32 @llvm.cttz.i32(i32 %wider, i1 true)
  %first.w = zext i32 %first to i64
  %at = add i64 %p, %first.w
  ret i64 %at
narrow:
  %k = phi i64 [%p, %wide], [%k.next, %like]
  %more = icmp slt i64 %k, %end
  br i1 %more, label %look, label %none
look:
  %k.p = getelementptr i32, ptr %array, i64 %k
  %k.v = load i32, ptr %k.p
  %alike = icmp eq i32 %k.v, %id
  br i1 %alike, label %like, label %here
like:
  %k.next = add i64 %k, 1
  br label %narrow
here:
  ret i64 %k
none:
  ret i64 %end
}}
define internal void @fill(ptr %array, i64 %start, i64 %end, i32 %id) {{
entry:
  %one = insertelement <{_VECTOR} x i32> poison, i32 %id, i32 0
  %ids = shufflevector <{_VECTOR} x i32> %one, <{_VECTOR} x i32> poison, <{_VECTOR} x i32> zeroinitializer
  br label %wide
wide:
  %p = phi i64 [%start, %entry], [%p.next, %store]
  %p.next = add i64 %p, {_VECTOR}
  %fits = icmp sle i64 %p.next, %end
  br i1 %fits, label %store, label %narrow
store:
  %v.p = getelementptr i32, ptr %array, i64 %p
  store <{_VECTOR} x i32> %ids, ptr %v.p, align 4
  br label %wide
narrow:
  %k = phi i64 [%p, %wide], [%k.next, %one.more]
  %more = icmp slt i64 %k, %end
  br i1 %more, label %one.more, label %done
one.more:
  %k.p = getelementptr i32, ptr %array, i64 %k
  store i32 %id, ptr %k.p
  %k.next = add i64 %k, 1
  br label %narrow
done:
  ret void
}}
"""

# ``@of_earlier_cluster``: whether an access is one that nothing is known of. ``@keep`` notes such a one in those places
# of `Plane.foreign` that have none yet. Where there is one, a write is for Python, which takes it out.
_FOREIGN = f"""
define internal i1 @of_earlier_cluster(ptr %q, i32 %id) alwaysinline {{
{load_fields("FLOOR")}
  %id.wide = zext i32 %id to i64
  %number = lshr i64 %id.wide, {LANE_BITS}
  %before = icmp slt i64 %number, %FLOOR
  %some = icmp ne i32 %id, 0
  %r = and i1 %before, %some
  ret i1 %r
}}
define internal void @keep(ptr %q, ptr %plane, i64 %start, i64 %end, i32 %id) alwaysinline {{
  %earlier = call i1 @of_earlier_cluster(ptr %q, i32 %id)
  br i1 %earlier, label %places, label %done
places:
{load_words("%plane", PLANE_WORDS, ("FOREIGN",))}
  %foreign = inttoptr i64 %FOREIGN to ptr
  call void @fill_free(ptr %foreign, i64 %start, i64 %end, i32 %id)
  br label %done
done:
  ret void
}}
define internal void @fill_free(ptr %array, i64 %start, i64 %end, i32 %id) {{
entry:
  %one = insertelement <{_VECTOR} x i32> poison, i32 %id, i32 0
  %ids = shufflevector <{_VECTOR} x i32> %one, <{_VECTOR} x i32> poison, <{_VECTOR} x i32> zeroinitializer
  br label %wide
wide:
  %p = phi i64 [%start, %entry], [%p.next, %blend]
  %p.next = add i64 %p, {_VECTOR}
  %fits = icmp sle i64 %p.next, %end
  br i1 %fits, label %blend, label %narrow
blend:
  %v.p = getelementptr i32, ptr %array, i64 %p
  %v = load <{_VECTOR} x i32>, ptr %v.p, align 4
  %free = icmp eq <{_VECTOR} x i32> %v, zeroinitializer
  %v.new = select <{_VECTOR} x i1> %free, <{_VECTOR} x i32> %ids, <{_VECTOR} x i32> %v
  store <{_VECTOR} x i32> %v.new, ptr %v.p, align 4
  br label %wide
narrow:
  %k = phi i64 [%p, %wide], [%k.next, %one.more]
  %more = icmp slt i64 %k, %end
  br i1 %more, label %one.more, label %done
one.more:
  %k.p = getelementptr i32, ptr %array, i64 %k
  %k.v = load i32, ptr %k.p
  %k.free = icmp eq i32 %k.v, 0
  %k.new = select i1 %k.free, i32 %id, i32 %k.v
  store i32 %k.new, ptr %k.p
  %k.next = add i64 %k, 1
  br label %narrow
done:
  ret void
}}
"""

# Neighbours mostly have the same history: an identity that was found to be in order is not looked up again. ``%good``
# keeps three of them: of a write, of a read that a write meets, of a reader in the first layer that is replaced.
_VERIFY = f"""
define internal i1 @verify_run(ptr %q, ptr %plane, i64 %start, i64 %count, i64 %lane, ptr %good) {{
entry:
{load_fields("WRITE", "STRONG", "KNOWN", "OWN", "EXEMPT", "FENCED")}
{load_words("%plane", PLANE_WORDS, PLANE_WORDS)}
  %writes = inttoptr i64 %WRITES to ptr
  %layers = inttoptr i64 %LAYERS to ptr
  %known = inttoptr i64 %KNOWN to ptr
  %fenced = inttoptr i64 %FENCED to ptr
  %is.write = icmp ne i64 %WRITE, 0
  %strong = icmp ne i64 %STRONG, 0
  %asynchronous = icmp ne i64 %FENCED, 0
  %no.layer = icmp eq i64 %LAYER_COUNT, 0
  %no.foreign = icmp eq i64 %FOREIGN, 0
  %good.read = getelementptr i32, ptr %good, i64 1
  %good.layer = getelementptr i32, ptr %good, i64 2
  %end = add i64 %start, %count
  %low = icmp slt i64 %start, 0
  %high = icmp sgt i64 %end, %PLACES
  %outside = or i1 %low, %high
  %is.read = xor i1 %is.write, true
  %unreadable = and i1 %is.read, %no.layer
  %impossible = or i1 %outside, %unreadable
  br i1 %impossible, label %no, label %written
written:
  %w.from = phi i64 [%start, %entry], [%w.next, %w.note]
  %w.good = load i32, ptr %good
  %w.p = call i64 @differs(ptr %writes, i64 %w.from, i64 %end, i32 %w.good)
  %w.more = icmp slt i64 %w.p, %end
  br i1 %w.more, label %w.ask, label %w.done
w.ask:
  %w.id.p = getelementptr i32, ptr %writes, i64 %w.p
  %w = load i32, ptr %w.id.p
  %w.past = call i1 @ordered(i32 %w, ptr %q, ptr %known, i64 %OWN, i64 %lane, i64 %EXEMPT, i1 %strong)
  br i1 %w.past, label %w.proxy, label %no
w.proxy:
  br i1 %asynchronous, label %w.fence, label %w.note
w.fence:
  %w.fenced = call i1 @ordered(i32 %w, ptr %q, ptr %fenced, i64 -1, i64 -1, i64 -1, i1 0)
  br i1 %w.fenced, label %w.note, label %no
w.note:
  store i32 %w, ptr %good
  %w.next = add i64 %w.p, 1
  br label %written
w.done:
  br i1 %is.write, label %layer, label %reading
layer:
  %n = phi i64 [0, %w.done], [%n.next, %layer.done]
  %n.more = icmp ult i64 %n, %LAYER_COUNT
  br i1 %n.more, label %readers, label %abroad
readers:
  %layer.p = getelementptr ptr, ptr %layers, i64 %n
  %reads = load ptr, ptr %layer.p
  br label %reader
reader:
  %r.from = phi i64 [%start, %readers], [%r.next, %r.note]
  %r.good = load i32, ptr %good.read
  %r.p = call i64 @differs(ptr %reads, i64 %r.from, i64 %end, i32 %r.good)
  %r.more = icmp slt i64 %r.p, %end
  br i1 %r.more, label %r.ask, label %layer.done
r.ask:
  %r.id.p = getelementptr i32, ptr %reads, i64 %r.p
  %r = load i32, ptr %r.id.p
  %r.past = call i1 @ordered(i32 %r, ptr %q, ptr %known, i64 %OWN, i64 %lane, i64 %EXEMPT, i1 %strong)
  br i1 %r.past, label %r.note, label %no
r.note:
  store i32 %r, ptr %good.read
  %r.next = add i64 %r.p, 1
  br label %reader
layer.done:
  %n.next = add i64 %n, 1
  br label %layer
abroad:
  br i1 %no.foreign, label %yes, label %foreigners
foreigners:
  %foreign = inttoptr i64 %FOREIGN to ptr
  %f.p = call i64 @differs(ptr %foreign, i64 %start, i64 %end, i32 0)
  %f.some = icmp slt i64 %f.p, %end
  br i1 %f.some, label %no, label %yes
reading:
  ; what was met in another plane may need foreign reads, which this plane has to have
  %top = load ptr, ptr %layers
  %met = load i32, ptr %good.layer
  %met.earlier = call i1 @of_earlier_cluster(ptr %q, i32 %met)
  %met.nowhere = and i1 %met.earlier, %no.foreign
  %met.here = select i1 %met.nowhere, i32 0, i32 %met
  store i32 %met.here, ptr %good.layer
  br label %replaced
replaced:
  %l.from = phi i64 [%start, %reading], [%l.next, %l.note], [%l.next.other, %l.kept]
  %l.good = load i32, ptr %good.layer
  %l.p = call i64 @differs(ptr %top, i64 %l.from, i64 %end, i32 %l.good)
  %l.more = icmp slt i64 %l.p, %end
  br i1 %l.more, label %l.ask, label %yes
l.ask:
  %l.n = call i64 @layer(ptr %q, ptr %plane, i64 %l.p)
  %l.none = icmp slt i64 %l.n, 0
  br i1 %l.none, label %no, label %l.found
l.found:
  %l.layer.p = getelementptr ptr, ptr %layers, i64 %l.n
  %l.layer = load ptr, ptr %l.layer.p
  %l.id.p = getelementptr i32, ptr %l.layer, i64 %l.p
  %l.id = load i32, ptr %l.id.p
  %l.earlier = call i1 @of_earlier_cluster(ptr %q, i32 %l.id)
  %l.nowhere = and i1 %l.earlier, %no.foreign
  br i1 %l.nowhere, label %no, label %l.kept
l.kept:
  %l.next.other = add i64 %l.p, 1
  %l.free = icmp eq i64 %l.n, 0
  br i1 %l.free, label %l.note, label %replaced
l.note:
  store i32 %l.id, ptr %good.layer
  %l.next = add i64 %l.p, 1
  br label %replaced
yes:
  ret i1 1
no:
  ret i1 0
}}
"""

_RECORD = f"""
define internal void @write_run(ptr %q, ptr %plane, i64 %start, i64 %count, i32 %id) {{
entry:
{load_words("%plane", PLANE_WORDS, ("WRITES", "LAYERS", "LAYER_COUNT"))}
  %writes = inttoptr i64 %WRITES to ptr
  %layers = inttoptr i64 %LAYERS to ptr
  %end = add i64 %start, %count
  call void @fill(ptr %writes, i64 %start, i64 %end, i32 %id)
  br label %clear
clear:
  %n = phi i64 [0, %entry], [%n.next, %clear.one]
  %n.more = icmp ult i64 %n, %LAYER_COUNT
  br i1 %n.more, label %clear.one, label %done
clear.one:
  %layer.p = getelementptr ptr, ptr %layers, i64 %n
  %layer = load ptr, ptr %layer.p
  call void @fill(ptr %layer, i64 %start, i64 %end, i32 0)
  %n.next = add i64 %n, 1
  br label %clear
done:
  ret void
}}
define internal void @read_run(ptr %q, ptr %plane, i64 %start, i64 %count, i32 %id, ptr %good) {{
entry:
{load_words("%plane", PLANE_WORDS, ("LAYERS",))}
  %layers = inttoptr i64 %LAYERS to ptr
  %top = load ptr, ptr %layers
  %good.layer = getelementptr i32, ptr %good, i64 2
  %end = add i64 %start, %count
  br label %next
next:
  %from = phi i64 [%start, %entry], [%p.next, %here], [%p.next, %deeper]
  %known = load i32, ptr %good.layer
  %p = call i64 @differs(ptr %top, i64 %from, i64 %end, i32 %known)
  call void @keep(ptr %q, ptr %plane, i64 %from, i64 %p, i32 %known)
  call void @fill(ptr %top, i64 %from, i64 %p, i32 %id)
  %p.next = add i64 %p, 1
  %more = icmp slt i64 %p, %end
  br i1 %more, label %search, label %done
search:
  %n = call i64 @layer(ptr %q, ptr %plane, i64 %p)
  %first = icmp eq i64 %n, 0
  br i1 %first, label %here, label %deeper
here:
  %t.p = getelementptr i32, ptr %top, i64 %p
  %t = load i32, ptr %t.p
  call void @keep(ptr %q, ptr %plane, i64 %p, i64 %p.next, i32 %t)
  store i32 %t, ptr %good.layer
  store i32 %id, ptr %t.p
  br label %next
deeper:
  %layer.p = getelementptr ptr, ptr %layers, i64 %n
  %layer = load ptr, ptr %layer.p
  %r.p = getelementptr i32, ptr %layer, i64 %p
  %r = load i32, ptr %r.p
  call void @keep(ptr %q, ptr %plane, i64 %p, i64 %p.next, i32 %r)
  store i32 %id, ptr %r.p
  br label %next
done:
  ret void
}}
"""


def runs() -> str:
    """Functions that check (``@verify_run``) and record (``@write_run``, ``@read_run``) neighbours of a plane."""
    return _ORDERED + _LAYER + _RUNS + _FOREIGN + _VERIFY + _RECORD
