"""LLVM IR of what the race detector makes of a warp's log: accesses, and synchronisation inside the warp.

Machine code of warps logs what the detector has to know (`native_memory`), in program order; here the log is worked
off without Python. A function decides what it can, or changes nothing and says so: then the entry is for Python, for
the functions of `happens_before.Agent`, `sanitizer` and `tensor_races` that do the same.
"""

from __future__ import annotations

from cute_kernels.emulator.happens_before import AGENT_WORDS, LANES, Offset
from cute_kernels.emulator.launch_shadow import REGION_WORDS
from cute_kernels.emulator.native_commit_code import commit
from cute_kernels.emulator.native_copies_code import copies
from cute_kernels.emulator.native_memory import CONTEXT_WORDS, EVENT, LOG, LOG_ENTRY
from cute_kernels.emulator.native_shadow_code import load_words, splat, store_fields
from cute_kernels.emulator.native_shadow_rows import accesses
from cute_kernels.emulator.native_sync_code import synchronisation
from cute_kernels.emulator.shadow import EPOCH_WORDS, GENERIC, LANE_BITS
from cute_kernels.emulator.sync_point import Row
from cute_kernels.emulator.tmem import LANE_GROUP
from cute_kernels.emulator.tmem import LANES as TENSOR_LANES

_GROUPS = TENSOR_LANES // LANE_GROUP


def _context(*names: str) -> str:
    pointers = "".join(f"\n  %{name.lower()} = inttoptr i64 %{name} to ptr" for name in names if name != "FLOOR")
    return load_words("%context", CONTEXT_WORDS, names) + pointers


def _agent(*names: str) -> str:
    return load_words("%agent", AGENT_WORDS, names)


def _word(name: str) -> str:
    return f"i64 {AGENT_WORDS.index(name)}"


def _row(name: str, row: Row) -> str:
    """``%name``: the clocks of a row, ``%name.i`` their address; expects CLOCKS and WIDTH."""
    return f"""
  %{name}.o = mul i64 %WIDTH, {4 * row}
  %{name}.i = add i64 %CLOCKS, %{name}.o
  %{name} = inttoptr i64 %{name}.i to ptr"""


_ENTRY = """
  %mask.p = getelementptr i8, ptr %entry, i64 4
  %mask = load i32, ptr %mask.p, align 4
  %argument.p = getelementptr i8, ptr %entry, i64 8
  %argument = load i32, ptr %argument.p, align 4
  %instruction.p = getelementptr i8, ptr %entry, i64 12
  %instruction = load i32, ptr %instruction.p, align 4
  %lane.p = getelementptr i8, ptr %entry, i64 16"""

_EPOCHS = f"""
define internal i1 @room(ptr %epochs) alwaysinline {{
{load_words("%epochs", EPOCH_WORDS, ("COUNT", "CAPACITY"))}
  %some = icmp slt i64 %COUNT, %CAPACITY
  ret i1 %some
}}
define internal i64 @new_epoch(ptr %epochs, i64 %column, i64 %clock, i64 %text, i8 %kind, i32 %place) {{
{load_words("%epochs", EPOCH_WORDS, EPOCH_WORDS)}
  %columns = inttoptr i64 %COLUMNS to ptr
  %clocks = inttoptr i64 %CLOCKS to ptr
  %kinds = inttoptr i64 %GENERIC to ptr
  %texts = inttoptr i64 %TEXTS to ptr
  %column.p = getelementptr i32, ptr %columns, i64 %COUNT
  %column.short = trunc i64 %column to i32
  store i32 %column.short, ptr %column.p
  %clock.p = getelementptr i32, ptr %clocks, i64 %COUNT
  %clock.short = trunc i64 %clock to i32
  store i32 %clock.short, ptr %clock.p
  %kind.p = getelementptr i8, ptr %kinds, i64 %COUNT
  store i8 %kind, ptr %kind.p
  %text.p = getelementptr i32, ptr %texts, i64 %COUNT
  %text.short = trunc i64 %text to i32
  store i32 %text.short, ptr %text.p
  %places = inttoptr i64 %INSTRUCTIONS to ptr
  %place.p = getelementptr i32, ptr %places, i64 %COUNT
  store i32 %place, ptr %place.p
  %next = add i64 %COUNT, 1
  store i64 %next, ptr %COUNT.p
  %identity = shl i64 %COUNT, {LANE_BITS}
  ret i64 %identity
}}
"""

# Lanes that all store to one place are the warp's own affair (`RaceTracker._generic`): for Python.
_GENERIC = f"""
define internal i1 @generic(ptr %context, ptr %entry, i1 %is.write, i1 %global) {{
begin:
  %offsets = alloca [{LANES} x i64], align 64
  %lanes = alloca [{LANES} x i64], align 64
  %places = alloca [{LANES} x i64], align 64
{_context("AGENT", "EPOCHS", "SHADOW", "LAUNCH", "FLOOR", "REQUEST")}
  %q = getelementptr i8, ptr %request, i64 0
{_ENTRY}
{_agent("CLOCKS", "WIDTH", "BASE", "RANK", "CLOCK", "READ_IDENTITY", "TEXT")}
{_row("visible", Row.VISIBLE)}
  %offsets.i = ptrtoint ptr %offsets to i64
  %lanes.i = ptrtoint ptr %lanes to i64
  %bytes = zext i32 %argument to i64
  %room = call i1 @room(ptr %epochs)
  %all.lanes = icmp eq i32 %mask, -1
  br i1 %room, label %which, label %no
which:
  br i1 %all.lanes, label %wide, label %gather
wide:
  %t.a = load <{LANES} x i64>, ptr %lane.p, align 8
  %t.rank = ashr <{LANES} x i64> %t.a, splat (i64 24)
{splat("t.rank.own", "%RANK", "i64", LANES)}
  %t.own = icmp eq <{LANES} x i64> %t.rank, %t.rank.own
  %t.own.bits = bitcast <{LANES} x i1> %t.own to i{LANES}
  %t.own.all = icmp eq i{LANES} %t.own.bits, -1
  %t.here = or i1 %t.own.all, %global
  br i1 %t.here, label %t.mine, label %no
t.mine:
  %t.low = and <{LANES} x i64> %t.a, splat (i64 16777215)
  %t.o = select i1 %global, <{LANES} x i64> %t.a, <{LANES} x i64> %t.low
  store <{LANES} x i64> %t.o, ptr %offsets, align 64
  store <{LANES} x i64> <{", ".join(f"i64 {lane}" for lane in range(LANES))}>, ptr %lanes, align 64
  %t.first = extractelement <{LANES} x i64> %t.o, i64 0
{splat("t.firsts", "%t.first", "i64", LANES)}
  %t.changed = xor <{LANES} x i64> %t.o, %t.firsts
  %t.differ = call i64 @llvm.vector.reduce.or.v{LANES}i64(<{LANES} x i64> %t.changed)
  %t.least = call i64 @llvm.vector.reduce.smin.v{LANES}i64(<{LANES} x i64> %t.o)
  %t.most = call i64 @llvm.vector.reduce.smax.v{LANES}i64(<{LANES} x i64> %t.o)
  br label %gathered
gather:
  %m = phi i32 [%mask, %which], [%m.rest, %mine]
  %g.n = phi i64 [0, %which], [%n.next, %mine]
  %g.differ = phi i64 [0, %which], [%differ.next, %mine]
  %g.low = phi i64 [{(1 << 63) - 1}, %which], [%low.next, %mine]
  %g.high = phi i64 [0, %which], [%high.next, %mine]
  %none = icmp eq i32 %m, 0
  br i1 %none, label %gathered, label %lane
lane:
  %lane.n = call i32 @llvm.cttz.i32(i32 %m, i1 true)
  %lane.w = zext i32 %lane.n to i64
  %m.less = sub i32 %m, 1
  %m.rest = and i32 %m, %m.less
  %a.p = getelementptr i64, ptr %lane.p, i64 %lane.w
  %a = load i64, ptr %a.p, align 8
  %a.rank = ashr i64 %a, 24
  %own = icmp eq i64 %a.rank, %RANK
  %here = or i1 %own, %global
  br i1 %here, label %mine, label %no
mine:
  %a.offset = and i64 %a, 16777215
  %offset = select i1 %global, i64 %a, i64 %a.offset
  %o.p = getelementptr i64, ptr %offsets, i64 %g.n
  store i64 %offset, ptr %o.p
  %l.p = getelementptr i64, ptr %lanes, i64 %g.n
  store i64 %lane.w, ptr %l.p
  %o.first = load i64, ptr %offsets
  %changed = xor i64 %offset, %o.first
  %differ.next = or i64 %g.differ, %changed
  %low.next = call i64 @llvm.smin.i64(i64 %g.low, i64 %offset)
  %high.next = call i64 @llvm.smax.i64(i64 %g.high, i64 %offset)
  %n.next = add i64 %g.n, 1
  br label %gather
gathered:
  %n = phi i64 [{LANES}, %t.mine], [%g.n, %gather]
  %differ = phi i64 [%t.differ, %t.mine], [%g.differ, %gather]
  %low = phi i64 [%t.least, %t.mine], [%g.low, %gather]
  %high = phi i64 [%t.most, %t.mine], [%g.high, %gather]
  %several = icmp ugt i64 %n, 1
  %together = icmp eq i64 %differ, 0
  %same = and i1 %several, %together
  %same.store = and i1 %same, %is.write
  br i1 %same.store, label %no, label %where
where:
  br i1 %global, label %regions, label %ask
regions:
  %end = add i64 %high, %bytes
  %table.i = load i64, ptr %launch
  %table = inttoptr i64 %table.i to ptr
  %count.p = getelementptr i64, ptr %launch, i64 1
  %regions.n = load i64, ptr %count.p
  br label %search
search:
  %r = phi i64 [0, %regions], [%r.next, %look]
  %r.more = icmp slt i64 %r, %regions.n
  br i1 %r.more, label %look, label %no
look:
  %r.o = mul i64 %r, {len(REGION_WORDS)}
  %region = getelementptr i64, ptr %table, i64 %r.o
{load_words("%region", REGION_WORDS, REGION_WORDS)}
  %after = icmp sge i64 %low, %START
  %before = icmp sle i64 %end, %END
  %contains = and i1 %after, %before
  %r.next = add i64 %r, 1
  br i1 %contains, label %found, label %search
found:
  %read.only = icmp eq i64 %WRITABLE, 0
  br i1 %read.only, label %yes, label %tracked
tracked:
  %shadowed = icmp ne i64 %TRACKED, 0
  br i1 %shadowed, label %ask, label %no
ask:
  %shadow.i = phi i64 [%SHADOW, %where], [%TRACKED, %tracked]
  %origin = phi i64 [0, %where], [%ORIGIN, %tracked]
  %floor = select i1 %global, i64 %FLOOR, i64 0
  %read.known = select i1 %global, i64 0, i64 %visible.i
  %reads = add i64 %BASE, {int(Offset.READ)}
  %write = zext i1 %is.write to i64
{store_fields(
    WRITE="%write", STRONG=0, SHADOW="%shadow.i", GRAIN=16, OFFSETS="%offsets.i", ROWS="%n", COUNT="%bytes",
    ORIGIN="%origin", KNOWN="%visible.i", WIDTH="%WIDTH", OWN="%BASE", LANES="%lanes.i", LANE=-1, EXEMPT="%reads",
    FLOOR="%floor", EPOCHS="%EPOCHS", ADD_LANES="%write", FENCED=0, READ_KNOWN="%read.known", READ_COLUMN="%reads",
)}
  br i1 %all.lanes, label %fit, label %rows
fit:
  %plane.all = call ptr @lanes_fit(ptr %q, ptr %places)
  %apart = icmp eq ptr %plane.all, null
  br i1 %apart, label %rows, label %identify
rows:
  %good = call i1 @rows(ptr %q, i64 0)
  br i1 %good, label %identify, label %no
identify:
  %plane = phi ptr [%plane.all, %fit], [null, %rows]
  %word = add i64 %write, {AGENT_WORDS.index("READ_IDENTITY")}
  %identity.p = getelementptr i64, ptr %agent, i64 %word
  %identity.old = load i64, ptr %identity.p
  %known = icmp ne i64 %identity.old, 0
  br i1 %known, label %record, label %new
new:
  %column = select i1 %is.write, i64 %BASE, i64 %reads
  %text = add i64 %TEXT, %write
  %identity.new = call i64 @new_epoch(ptr %epochs, i64 %column, i64 %CLOCK, i64 %text, i8 {GENERIC}, i32 %instruction)
  store i64 %identity.new, ptr %identity.p
  br label %record
record:
  %identity = phi i64 [%identity.old, %identify], [%identity.new, %new]
  %by.rows = icmp eq ptr %plane, null
  br i1 %by.rows, label %record.rows, label %record.all
record.all:
  %identity.short = trunc i64 %identity to i32
  call void @lanes_record(ptr %q, ptr %plane, ptr %places, i32 %identity.short)
  br label %yes
record.rows:
{store_fields(IDENTITY="%identity")}
  call void @record(ptr %q)
  br label %yes
yes:
  ret i1 1
no:
  ret i1 0
}}
"""

_TENSOR_LOAD = f"""
define internal i1 @tensor_load(ptr %context, ptr %entry) {{
{_context("AGENT", "EPOCHS", "TENSOR", "REQUEST")}
  %q = getelementptr i8, ptr %request, i64 0
{_ENTRY}
{_agent("CLOCKS", "WIDTH", "BASE", "LOAD_CLOCK", "TEXT", "LOADS", "LOAD_COUNT")}
{_row("tensor.row", Row.TENSOR)}
  %address = load i64, ptr %lane.p, align 8
  %index.p = getelementptr i64, ptr %lane.p, i64 1
  %index = load i64, ptr %index.p, align 8
  %room = call i1 @room(ptr %epochs)
  %small = icmp slt i64 %index, %LOAD_COUNT
  %may = and i1 %room, %small
  br i1 %may, label %ask, label %no
ask:
  %tensor.column = and i64 %address, 65535
  %tensor.lane = lshr i64 %address, 16
  %group = udiv i64 %tensor.lane, {LANE_GROUP}
  %first = mul i64 %tensor.column, {_GROUPS}
  %base = add i64 %first, %group
  %columns = zext i32 %argument to i64
  %loads = add i64 %BASE, {int(Offset.TENSOR_LOAD)}
{store_fields(
    WRITE=0, STRONG=0, SHADOW="%TENSOR", GRAIN=1, OFFSETS=0, ROWS="%columns", BASE="%base", STRIDE=_GROUPS,
    COUNT=32 // LANE_GROUP, ORIGIN=0, KNOWN="%tensor.row.i", WIDTH="%WIDTH", OWN=-1, LANES=0, LANE=-1, EXEMPT=-1,
    FLOOR=0, EPOCHS="%EPOCHS", ADD_LANES=0, FENCED=0, READ_KNOWN="%tensor.row.i", READ_COLUMN="%loads",
)}
  %good = call i1 @rows(ptr %q, i64 0)
  br i1 %good, label %record, label %no
record:
  %clock = add i64 %LOAD_CLOCK, 1
  store i64 %clock, ptr %LOAD_CLOCK.p
  %text = add i64 %TEXT, 2
  %identity = call i64 @new_epoch(ptr %epochs, i64 %loads, i64 %clock, i64 %text, i8 0, i32 %instruction)
  %load.id.p = getelementptr i64, ptr %agent, {_word("LOAD_IDENTITY")}
  store i64 %identity, ptr %load.id.p
  %store.id.p = getelementptr i64, ptr %agent, {_word("STORE_IDENTITY")}
  store i64 0, ptr %store.id.p
  %loads.p = inttoptr i64 %LOADS to ptr
  %load.p = getelementptr i32, ptr %loads.p, i64 %index
  %clock.short = trunc i64 %clock to i32
  store i32 %clock.short, ptr %load.p
{store_fields(IDENTITY="%identity")}
  call void @record(ptr %q)
  ret i1 1
no:
  ret i1 0
}}
define internal void @tensor_wait(ptr %context, ptr %entry) {{
{_context("AGENT")}
{_ENTRY}
{_agent("CLOCKS", "WIDTH", "BASE")}
  %kind = zext i32 %argument to i64
  %which = sub i64 %kind, {int(Offset.TENSOR_LOAD)}
  %word = add i64 %which, {AGENT_WORDS.index("LOAD_CLOCK")}
  %clock.p = getelementptr i64, ptr %agent, i64 %word
  %clock = load i64, ptr %clock.p
  %column = add i64 %BASE, %kind
  call void @raise_column(i64 %CLOCKS, i64 %WIDTH, i64 {int(Row.TENSOR)}, i64 %column, i64 %clock)
{_row("tensor.row", Row.TENSOR)}
  %cell = getelementptr i32, ptr %tensor.row, i64 %column
  %clock.short = trunc i64 %clock to i32
  store i32 %clock.short, ptr %cell
  %clock.next = add i64 %clock, 1
  store i64 %clock.next, ptr %clock.p
  %load.id.p = getelementptr i64, ptr %agent, {_word("LOAD_IDENTITY")}
  store i64 0, ptr %load.id.p
  %store.id.p = getelementptr i64, ptr %agent, {_word("STORE_IDENTITY")}
  store i64 0, ptr %store.id.p
  ret void
}}
define internal void @tensor_fence(ptr %context, ptr %entry) {{
{_context("AGENT")}
{_ENTRY}
{_agent("CLOCKS", "WIDTH", "BEFORE", "INCOMING")}
{_row("tensor.row", Row.TENSOR)}
  %is.before = icmp ne i32 %argument, 0
  br i1 %is.before, label %copy, label %after
copy:
  %before = inttoptr i64 %BEFORE to ptr
  %nbytes = mul i64 %WIDTH, 4
  call void @llvm.memcpy.p0.p0.i64(ptr %before, ptr %tensor.row, i64 %nbytes, i1 0)
  ret void
after:
  %incoming = inttoptr i64 %INCOMING to ptr
  call void @join(ptr %tensor.row, ptr %incoming, i64 %WIDTH)
  ret void
}}
"""

_CLOCKS = f"""
define internal void @join(ptr %target, ptr %source, i64 %width) {{
entry:
  br label %each
each:
  %i = phi i64 [0, %entry], [%i.next, %each]
  %t.p = getelementptr i32, ptr %target, i64 %i
  %s.p = getelementptr i32, ptr %source, i64 %i
  %t = load i32, ptr %t.p
  %s = load i32, ptr %s.p
  %later = call i32 @llvm.smax.i32(i32 %t, i32 %s)
  store i32 %later, ptr %t.p
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, %width
  br i1 %more, label %each, label %done
done:
  ret void
}}
define internal void @raise_column(i64 %clocks, i64 %width, i64 %rows, i64 %column, i64 %clock) {{
entry:
  %pitch = mul i64 %width, 4
  %column.o = mul i64 %column, 4
  %first = add i64 %clocks, %column.o
  %clock.short = trunc i64 %clock to i32
  br label %each
each:
  %i = phi i64 [0, %entry], [%i.next, %each]
  %o = mul i64 %i, %pitch
  %at = add i64 %first, %o
  %p = inttoptr i64 %at to ptr
  %old = load i32, ptr %p
  %later = call i32 @llvm.smax.i32(i32 %old, i32 %clock.short)
  store i32 %later, ptr %p
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, %rows
  br i1 %more, label %each, label %done
done:
  ret void
}}
; `Agent._cover`; ``reads``: whether loads are covered where all lanes are.
define internal void @cover(ptr %agent, ptr %row, i32 %mask, i1 %reads) {{
entry:
{_agent("BASE", "LIVE", "CLOCK")}
  %clock = trunc i64 %CLOCK to i32
  %live = trunc i64 %LIVE to i32
  %present = and i32 %mask, %live
  %all = icmp eq i32 %present, %live
  %lanes.p = getelementptr i32, ptr %row, i64 %BASE
  %old = load <{LANES} x i32>, ptr %lanes.p, align 4
  %one = insertelement <{LANES} x i32> poison, i32 %clock, i32 0
  %splat = shufflevector <{LANES} x i32> %one, <{LANES} x i32> poison, <{LANES} x i32> zeroinitializer
  %covered = select i1 %all, i32 -1, i32 %mask
  %bits = bitcast i32 %covered to <{LANES} x i1>
  %new = select <{LANES} x i1> %bits, <{LANES} x i32> %splat, <{LANES} x i32> %old
  store <{LANES} x i32> %new, ptr %lanes.p, align 4
  %some = xor i1 %all, 1
  %too = or i1 %some, %reads
  br i1 %too, label %read, label %done
read:
  %read.p = getelementptr i32, ptr %lanes.p, i64 {int(Offset.READ)}
  store i32 %clock, ptr %read.p
  br label %done
done:
  ret void
}}
define internal void @advance(ptr %agent) {{
{_agent("CLOCK")}
  %next = add i64 %CLOCK, 1
  store i64 %next, ptr %CLOCK.p
  %ids.p = getelementptr i64, ptr %agent, {_word("READ_IDENTITY")}
  store <4 x i64> zeroinitializer, ptr %ids.p, align 8
  ret void
}}
define internal void @converge(ptr %context, ptr %entry) {{
begin:
{_context("AGENT")}
{_ENTRY}
{_agent("CLOCKS", "WIDTH", "PRIVATE")}
{_row("order", Row.ORDER)}
{_row("acquired", Row.ACQUIRED)}
{_row("visible", Row.VISIBLE)}
  call void @cover(ptr %agent, ptr %order, i32 %mask, i1 0)
  call void @cover(ptr %agent, ptr %acquired, i32 %mask, i1 0)
  call void @cover(ptr %agent, ptr %visible, i32 %mask, i1 0)
  %private = inttoptr i64 %PRIVATE to ptr
  %count = load i64, ptr %private
  br label %each
each:
  %i = phi i64 [0, %begin], [%i.next, %next]
  %kept = phi i64 [0, %begin], [%kept.next, %next]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %done
look:
  %i.o = mul i64 %i, 3
  %i.1 = add i64 %i.o, 1
  %from = getelementptr i64, ptr %private, i64 %i.1
  %column = load i64, ptr %from
  %lane.q = getelementptr i64, ptr %from, i64 1
  %lane = load i64, ptr %lane.q
  %clock.q = getelementptr i64, ptr %from, i64 2
  %clock = load i64, ptr %clock.q
  %lane.short = trunc i64 %lane to i32
  %bit = shl i32 1, %lane.short
  %named = and i32 %mask, %bit
  %shared = icmp ne i32 %named, 0
  br i1 %shared, label %share, label %keep
share:
  call void @raise_column(i64 %CLOCKS, i64 %WIDTH, i64 {int(Row.TENSOR)}, i64 %column, i64 %clock)
  br label %next
keep:
  %k.o = mul i64 %kept, 3
  %k.1 = add i64 %k.o, 1
  %to = getelementptr i64, ptr %private, i64 %k.1
  store i64 %column, ptr %to
  %to.lane = getelementptr i64, ptr %to, i64 1
  store i64 %lane, ptr %to.lane
  %to.clock = getelementptr i64, ptr %to, i64 2
  store i64 %clock, ptr %to.clock
  %kept.more = add i64 %kept, 1
  br label %next
next:
  %kept.next = phi i64 [%kept, %share], [%kept.more, %keep]
  %i.next = add i64 %i, 1
  br label %each
done:
  store i64 %kept, ptr %private
  call void @advance(ptr %agent)
  ret void
}}
define internal void @fence_proxy(ptr %context, ptr %entry) {{
{_context("AGENT")}
{_ENTRY}
{_agent("CLOCKS", "WIDTH")}
{_row("visible", Row.VISIBLE)}
{_row("proxy", Row.PROXY)}
{_row("proxy.global", Row.PROXY_GLOBAL)}
  %shared.b = and i32 %argument, 1
  %of.shared = icmp ne i32 %shared.b, 0
  br i1 %of.shared, label %shared, label %then
shared:
  call void @join(ptr %proxy, ptr %visible, i64 %WIDTH)
  call void @cover(ptr %agent, ptr %proxy, i32 %mask, i1 1)
  br label %then
then:
  %global.b = and i32 %argument, 2
  %of.global = icmp ne i32 %global.b, 0
  br i1 %of.global, label %global, label %done
global:
  call void @join(ptr %proxy.global, ptr %visible, i64 %WIDTH)
  call void @cover(ptr %agent, ptr %proxy.global, i32 %mask, i1 1)
  br label %done
done:
  call void @advance(ptr %agent)
  ret void
}}
"""

_ACCESSES = "".join(
    f"""
access.{kind}:
  %r.{kind} = call i1 @generic(ptr %context, ptr %entry, i1 {int(write)}, i1 {int(space == "global")})
  br i1 %r.{kind}, label %done, label %stop"""
    for (space, write), kind in LOG.items()
)
_SYNCHRONISATION = "".join(
    f"""
{name}:
  call void @{name}(ptr %context, ptr %entry)
  br label %done"""
    for name in ("converge", "fence_proxy", "tensor_wait", "tensor_fence")
)

_OBSERVE = f"""
define i64 @observe(ptr %context, ptr %log, i64 %from, i64 %end) {{
begin:
  br label %entries
entries:
  %e = phi i64 [%from, %begin], [%e.next, %done]
  %more = icmp slt i64 %e, %end
  br i1 %more, label %next, label %stop
next:
  %e.o = mul i64 %e, {LOG_ENTRY}
  %entry = getelementptr i8, ptr %log, i64 %e.o
  %kind = load i32, ptr %entry, align 4
  switch i32 %kind, label %stop [
    {" ".join(f"i32 {kind}, label %access.{kind}" for kind in LOG.values())}
    {" ".join(f"i32 {kind}, label %{name}" for name, kind in EVENT.items())}
  ]
{_ACCESSES}
{_SYNCHRONISATION}
tensor_load:
  %loaded = call i1 @tensor_load(ptr %context, ptr %entry)
  br i1 %loaded, label %done, label %stop
done:
  %e.next = add i64 %e, 1
  br label %entries
stop:
  ret i64 %e
}}
"""

_DECLARATIONS = f"""
declare i32 @llvm.cttz.i32(i32, i1)
declare i32 @llvm.smax.i32(i32, i32)
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
declare i64 @llvm.vector.reduce.smin.v{LANES}i64(<{LANES} x i64>)
declare i64 @llvm.vector.reduce.smax.v{LANES}i64(<{LANES} x i64>)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
"""


def module() -> str:
    """The module: `accesses`, ``i64 @observe(context, log, first, end)``, `synchronisation`,
    `commit` and `copies`.

    ``@observe`` works entries off and returns the number of the first that is for Python, or ``end``.
    """
    log = _EPOCHS + _CLOCKS + _GENERIC + _TENSOR_LOAD + _OBSERVE
    return _DECLARATIONS + accesses() + log + synchronisation() + commit() + copies()
