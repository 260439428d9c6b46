"""LLVM IR of what the race detector makes of mbarriers that machine code arrives at and waits for (`native_units`).

As in `native_copies_code`, each function works off the log, then finds out whether the operation is one that Python has
to see (an mbarrier whose initialisation is not known to the warp, a phase that overtakes a warp), and only then changes
clocks as `happens_before.Agent` and `sync_point.SyncPoint` do. Strict agents are Python's.
"""

from __future__ import annotations

from cute_kernels.emulator.happens_before import AGENT_WORDS, PENDING, Offset
from cute_kernels.emulator.native_memory import CONTEXT_WORDS, Tables
from cute_kernels.emulator.native_shadow_code import load_words
from cute_kernels.emulator.sync_point import FOLLOWED_WORDS, POINT_WORDS, PROXIES, READ, ROWS, SCOPED, Order, Row

assert PENDING == (1, 2, 3, 4), "one copy takes them over"
FOLLOWED_BYTES = 8 * len(FOLLOWED_WORDS)


def pointers(*names: str) -> str:
    """Words as pointers in registers of their names in small letters."""
    return "".join(f"\n  %{name.lower()} = inttoptr i64 %{name} to ptr" for name in names)


def context(*names: str) -> str:
    """Words of the context of the warp that runs, of which ``%t`` has the address, as pointers (FLOOR as a number)."""
    return f"""
  %context.p = getelementptr i8, ptr %t, i64 {Tables.context.offset}
  %context = load ptr, ptr %context.p
{load_words("%context", CONTEXT_WORDS, names)}{pointers(*(name for name in names if name != "FLOOR"))}"""


def agent(*names: str) -> str:
    """Words of ``%agent``."""
    return load_words("%agent", AGENT_WORDS, names)


def point(*names: str) -> str:
    return load_words("%point", POINT_WORDS, names)


def _row(result: str, matrix: str, row: int) -> str:
    """The address of a row, in ``result`` as a pointer and ``result.i``; expects WIDTH."""
    return f"""
  {result}.o = mul i64 %WIDTH, {4 * row}
  {result}.i = add i64 {matrix}, {result}.o
  {result} = inttoptr i64 {result}.i to ptr"""


def _join_rows(name: str, target: str, source: str, row: int, count: int = 1) -> str:
    """Joins rows of two matrices."""
    return f"""{_row(f"%{name}.t", target, row)}{_row(f"%{name}.s", source, row)}
  %{name}.n = mul i64 %WIDTH, {count}
  call void @join(ptr %{name}.t, ptr %{name}.s, i64 %{name}.n)"""


def _inside(result: str, matrix: str, kind: Row) -> str:
    """The row of a kind of what CTA ``%rank`` passed on inside; expects WIDTH."""
    return f"""
  {result}.r = mul i64 %rank, {len(SCOPED)}
  {result}.n = add i64 {result}.r, {SCOPED.index(kind)}
  {result}.w = mul i64 {result}.n, %WIDTH
  {result}.o = mul i64 {result}.w, 4
  {result}.i = add i64 {matrix}, {result}.o
  {result} = inttoptr i64 {result}.i to ptr"""


_SHARE = f"""
; `Agent._share`
define internal void @share(ptr %agent, i64 %clocks, i64 %rows, i32 %mask) {{
entry:
{agent("WIDTH", "PRIVATE")}{pointers("PRIVATE")}
  %count = load i64, ptr %private
  br label %each
each:
  %i = phi i64 [0, %entry], [%i.next, %next]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %done
look:
  %i.o = mul i64 %i, 3
  %i.1 = add i64 %i.o, 1
  %p = getelementptr i64, ptr %private, i64 %i.1
  %column = load i64, ptr %p
  %lane.p = getelementptr i64, ptr %p, i64 1
  %lane = load i64, ptr %lane.p
  %clock.p = getelementptr i64, ptr %p, i64 2
  %clock = load i64, ptr %clock.p
  %lane.s = trunc i64 %lane to i32
  %bit = shl i32 1, %lane.s
  %named = and i32 %mask, %bit
  %mine = icmp ne i32 %named, 0
  br i1 %mine, label %add, label %next
add:
  call void @raise_column(i64 %clocks, i64 %WIDTH, i64 %rows, i64 %column, i64 %clock)
  br label %next
next:
  %i.next = add i64 %i, 1
  br label %each
done:
  ret void
}}
"""

_POINTS = f"""
; `RaceTracker.check_initialised`
define internal i1 @initialised(ptr %agent, ptr %point) {{
entry:
{agent("CLOCKS", "WIDTH", "STRICT")}
{point("INIT_COLUMN", "INIT_CLOCK")}{_row("%visible", "%CLOCKS", Row.VISIBLE)}
  %strict = icmp ne i64 %STRICT, 0
  %unknown = icmp eq i64 %INIT_CLOCK, 0
  %python = or i1 %strict, %unknown
  br i1 %python, label %no, label %look
look:
  %init.p = getelementptr i32, ptr %visible, i64 %INIT_COLUMN
  %init = load i32, ptr %init.p
  %init.w = sext i32 %init to i64
  %good = icmp sge i64 %init.w, %INIT_CLOCK
  ret i1 %good
no:
  ret i1 0
}}
; `SyncPoint.overtaken`, when the row ``%order`` will have been gathered as well
define internal i1 @overtakes(ptr %point, i64 %phase, ptr %order) {{
entry:
{point("WARPS", "FOLLOWED", "BASES", "GATHERED")}{pointers("FOLLOWED", "BASES", "GATHERED")}
  %before = sub i64 %phase, 1
  br label %each
each:
  %i = phi i64 [0, %entry], [%i.next, %next]
  %more = icmp slt i64 %i, %WARPS
  br i1 %more, label %look, label %no
look:
  %row.o = mul i64 %i, {FOLLOWED_BYTES}
  %row = getelementptr i8, ptr %followed, i64 %row.o
{load_words("%row", FOLLOWED_WORDS, ("PHASE", "CLOCK"))}
  %some = icmp sge i64 %PHASE, 0
  %last = icmp eq i64 %PHASE, %before
  %waited = and i1 %some, %last
  br i1 %waited, label %compare, label %next
compare:
  %base.p = getelementptr i64, ptr %bases, i64 %i
  %base = load i64, ptr %base.p
  %column = add i64 %base, {READ}
  %g.p = getelementptr i32, ptr %gathered, i64 %column
  %g = load i32, ptr %g.p
  %o.p = getelementptr i32, ptr %order, i64 %column
  %o = load i32, ptr %o.p
  %known = call i32 @llvm.smax.i32(i32 %g, i32 %o)
  %known.w = sext i32 %known to i64
  %late = icmp slt i64 %known.w, %CLOCK
  br i1 %late, label %yes, label %next
next:
  %i.next = add i64 %i, 1
  br label %each
yes:
  ret i1 1
no:
  ret i1 0
}}
; `RaceTracker.completed`, after `@overtakes`
define internal void @complete(ptr %agent, ptr %point, i64 %phase) {{
entry:
{agent("WIDTH")}
{point(*POINT_WORDS)}{pointers("FOLLOWED", "GATHERED", "AVAILABLE", "USED")}
  br label %each
each:
  %i = phi i64 [0, %entry], [%i.next, %next]
  %more = icmp slt i64 %i, %WARPS
  br i1 %more, label %look, label %done
look:
  %row.o = mul i64 %i, {FOLLOWED_BYTES}
  %row = getelementptr i8, ptr %followed, i64 %row.o
{load_words("%row", FOLLOWED_WORDS, ("PHASE",))}
  %earlier = icmp slt i64 %PHASE, %phase
  %left = select i1 %earlier, i64 -1, i64 %PHASE
  store i64 %left, ptr %PHASE.p
  br label %next
next:
  %i.next = add i64 %i, 1
  br label %each
done:
  %completed = add i64 %COMPLETED, 1
  store i64 %completed, ptr %COMPLETED.p
  %counts = icmp sge i64 %COLUMN, 0
  br i1 %counts, label %count, label %copy
count:
  %completed.s = trunc i64 %completed to i32
  br label %column
column:
  %r = phi i64 [0, %count], [%r.next, %column]
  %r.w = mul i64 %r, %WIDTH
  %r.c = add i64 %r.w, %COLUMN
  %cell = getelementptr i32, ptr %gathered, i64 %r.c
  store i32 %completed.s, ptr %cell
  %r.next = add i64 %r, 1
  %r.more = icmp slt i64 %r.next, {int(Row.TENSOR)}
  br i1 %r.more, label %column, label %copy
copy:
  %nbytes = mul i64 %WIDTH, {4 * ROWS}
  call void @llvm.memcpy.p0.p0.i64(ptr %available, ptr %gathered, i64 %nbytes, i1 0)
  %pitch = mul i64 %WIDTH, {4 * len(SCOPED)}
  br label %cta
cta:
  %k = phi i64 [0, %copy], [%k.next, %cta.next]
  %k.more = icmp slt i64 %k, %RANKS
  br i1 %k.more, label %cta.look, label %end
cta.look:
  %used.p = getelementptr i64, ptr %used, i64 %k
  %is.used = load i64, ptr %used.p
  %some = icmp ne i64 %is.used, 0
  br i1 %some, label %cta.copy, label %cta.next
cta.copy:
  %k.o = mul i64 %k, %pitch
  %from.i = add i64 %INSIDE, %k.o
  %from = inttoptr i64 %from.i to ptr
  %to.i = add i64 %INSIDE_AVAILABLE, %k.o
  %to = inttoptr i64 %to.i to ptr
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %pitch, i1 0)
  br label %cta.next
cta.next:
  %k.next = add i64 %k, 1
  br label %cta
end:
  ret void
}}
; `SyncPoint.gather`
define internal void @gather(ptr %agent, ptr %point, i64 %clocks, i64 %order) {{
entry:
{agent("WIDTH", "RANK")}
{point("GATHERED", "RANKS", "INSIDE", "USED")}{pointers("USED")}
  %rank = add i64 %RANK, 0
  %single = icmp eq i64 %RANKS, 1
  %wide.b = and i64 %order, {int(Order.WIDE)}
  %wide = icmp ne i64 %wide.b, 0
  %whole = or i1 %single, %wide
  br i1 %whole, label %all, label %some
all:{_join_rows("all", "%GATHERED", "%clocks", 0, ROWS)}
  br label %inside
some:{_join_rows("first", "%GATHERED", "%clocks", Row.ORDER, 2)}
{_join_rows("proxies", "%GATHERED", "%clocks", PROXIES[0], len(PROXIES))}
  %sync.b = and i64 %order, {int(Order.SYNC)}
  %sync = icmp ne i64 %sync.b, 0
  br i1 %sync, label %tensor, label %inside
tensor:{_join_rows("tensor", "%GATHERED", "%clocks", Row.TENSOR)}
  br label %inside
inside:
  br i1 %single, label %done, label %within
within:
  %used.p = getelementptr i64, ptr %used, i64 %rank
  store i64 1, ptr %used.p
{_inside("%in.v", "%INSIDE", Row.VISIBLE)}{_row("%visible", "%clocks", Row.VISIBLE)}
  call void @join(ptr %in.v, ptr %visible, i64 %WIDTH)
{_inside("%in.t", "%INSIDE", Row.TENSOR)}{_row("%tensors", "%clocks", Row.TENSOR)}
  call void @join(ptr %in.t, ptr %tensors, i64 %WIDTH)
  br label %done
done:
  ret void
}}
"""


def _scoped(kind: Row) -> str:
    """``void @scoped_KIND(agent, point, target, order)``: ``target`` learns `SyncPoint.scoped` of a kind."""
    return f"""
define internal void @scoped_{kind.name.lower()}(ptr %agent, ptr %point, ptr %target, i64 %order) {{
entry:
{agent("WIDTH", "RANK")}
{point("AVAILABLE", "RANKS", "INSIDE_AVAILABLE", "COLUMN", "STREAM_COUNT", "STREAMS")}{pointers("STREAMS")}
  %rank = add i64 %RANK, 0
{_row("%wide.row", "%AVAILABLE", kind)}
  %single = icmp eq i64 %RANKS, 1
  %wide.b = and i64 %order, {int(Order.WIDE)}
  %wide = icmp ne i64 %wide.b, 0
  %whole = or i1 %single, %wide
  br i1 %whole, label %all, label %streams.first
all:
  call void @join(ptr %target, ptr %wide.row, i64 %WIDTH)
  br i1 %single, label %done, label %inside
streams.first:
  %counts = icmp sge i64 %COLUMN, 0
  br i1 %counts, label %own, label %each
own:
  call void @take(ptr %target, ptr %wide.row, i64 %COLUMN)
  br label %each
each:
  %i = phi i64 [0, %streams.first], [0, %own], [%i.next, %one]
  %more = icmp slt i64 %i, %STREAM_COUNT
  br i1 %more, label %one, label %inside
one:
  %column.p = getelementptr i64, ptr %streams, i64 %i
  %column = load i64, ptr %column.p
  call void @take(ptr %target, ptr %wide.row, i64 %column)
  %i.next = add i64 %i, 1
  br label %each
inside:{_inside("%in", "%INSIDE_AVAILABLE", kind)}
  call void @join(ptr %target, ptr %in, i64 %WIDTH)
  br label %done
done:
  ret void
}}
"""


_TAKE = """
define internal void @take(ptr %target, ptr %source, i64 %column) {
  %t.p = getelementptr i32, ptr %target, i64 %column
  %s.p = getelementptr i32, ptr %source, i64 %column
  %t = load i32, ptr %t.p
  %s = load i32, ptr %s.p
  %later = call i32 @llvm.smax.i32(i32 %t, i32 %s)
  store i32 %later, ptr %t.p
  ret void
}
"""

_ACQUIRE = f"""
; `Agent.acquire` of an agent that is not strict
define internal void @acquire(ptr %agent, ptr %point, i64 %order) {{
entry:
{agent("CLOCKS", "WIDTH", "NUMBER", "INCOMING", "PENDING")}{pointers("INCOMING", "PENDING")}
{point("AVAILABLE", "COMPLETED", "RANKS", "FOLLOWED")}{pointers("FOLLOWED")}
  %row.o = mul i64 %NUMBER, {FOLLOWED_BYTES}
  %row = getelementptr i8, ptr %followed, i64 %row.o
  %seen.n = add i64 %order, {FOLLOWED_WORDS.index("SEEN")}
  %seen.p = getelementptr i64, ptr %row, i64 %seen.n
  %seen = load i64, ptr %seen.p
  %again = icmp eq i64 %seen, %COMPLETED
  br i1 %again, label %done, label %first
first:
  store i64 %COMPLETED, ptr %seen.p
  %sync.b = and i64 %order, {int(Order.SYNC)}
  %sync = icmp ne i64 %sync.b, 0
  %single = icmp eq i64 %RANKS, 1
  %simple = and i1 %sync, %single
  br i1 %simple, label %whole, label %parts
whole:{_join_rows("whole", "%CLOCKS", "%AVAILABLE", 0, ROWS)}
  br label %done
parts:{_join_rows("order", "%CLOCKS", "%AVAILABLE", Row.ORDER)}
  br i1 %sync, label %synchronising, label %relaxed
synchronising:{_join_rows("acquired", "%CLOCKS", "%AVAILABLE", Row.ACQUIRED)}
{_row("%visible", "%CLOCKS", Row.VISIBLE)}
  call void @scoped_visible(ptr %agent, ptr %point, ptr %visible, i64 %order)
{_join_rows("proxies", "%CLOCKS", "%AVAILABLE", PROXIES[0], len(PROXIES))}
{_row("%tensors", "%CLOCKS", Row.TENSOR)}
  call void @scoped_tensor(ptr %agent, ptr %point, ptr %tensors, i64 {int(Order.WIDE)})
  br label %done
relaxed:
  call void @scoped_tensor(ptr %agent, ptr %point, ptr %incoming, i64 %order)
  %some.p = getelementptr i64, ptr %agent, i64 {AGENT_WORDS.index("SOME_PENDING")}
  store i64 1, ptr %some.p
{_row("%a.source", "%AVAILABLE", Row.ACQUIRED)}
  call void @join(ptr %pending, ptr %a.source, i64 %WIDTH)
{_row("%v.target", "%PENDING", 1)}
  call void @scoped_visible(ptr %agent, ptr %point, ptr %v.target, i64 %order)
{_row("%p.target", "%PENDING", 2)}{_row("%p.source", "%AVAILABLE", PROXIES[0])}
  %p.n = mul i64 %WIDTH, {len(PROXIES)}
  call void @join(ptr %p.target, ptr %p.source, i64 %p.n)
  br label %done
done:
  ret void
}}
define i32 @watch_wait(ptr %t, ptr %point, i64 %order, i64 %phase) {{
entry:
  %flushed = call i1 @flush(ptr %t)
  br i1 %flushed, label %who, label %no
who:{context("AGENT")}
  %known = call i1 @initialised(ptr %agent, ptr %point)
  br i1 %known, label %go, label %no
go:
  call void @acquire(ptr %agent, ptr %point, i64 %order)
{agent("NUMBER", "CLOCK")}
{point("FOLLOWED")}{pointers("FOLLOWED")}
  %row.o = mul i64 %NUMBER, {FOLLOWED_BYTES}
  %row = getelementptr i8, ptr %followed, i64 %row.o
  %clock.p = getelementptr i64, ptr %row, i64 {FOLLOWED_WORDS.index("CLOCK")}
  store i64 %phase, ptr %row
  store i64 %CLOCK, ptr %clock.p
  ret i32 1
no:
  ret i32 0
}}
"""
assert FOLLOWED_WORDS[0] == "PHASE"

# What an arrival passes on, in the agent's scratch matrix: `Agent.snapshot`, and the relaxed part of `Agent.release`.
_RELEASE = f"""
define internal void @snapshot(ptr %agent, i32 %mask) {{
entry:
{agent("CLOCKS", "WIDTH", "SCRATCH")}{pointers("CLOCKS", "SCRATCH")}
  %nbytes = mul i64 %WIDTH, {4 * ROWS}
  call void @llvm.memcpy.p0.p0.i64(ptr %scratch, ptr %clocks, i64 %nbytes, i1 0)
{"".join(f'''{_row(f"%row.{row}", "%SCRATCH", row)}
  call void @cover(ptr %agent, ptr %row.{row}, i32 %mask, i1 1)''' for row in range(Row.PROXY))}
  call void @share(ptr %agent, i64 %SCRATCH, i64 {int(Row.TENSOR)}, i32 %mask)
  ret void
}}
; in the first row alone: `Agent.order`
define internal void @order_row(ptr %agent, i32 %mask) {{
entry:
{agent("CLOCKS", "WIDTH", "SCRATCH")}{pointers("CLOCKS", "SCRATCH")}
  %nbytes = mul i64 %WIDTH, 4
  call void @llvm.memcpy.p0.p0.i64(ptr %scratch, ptr %clocks, i64 %nbytes, i1 0)
  call void @cover(ptr %agent, ptr %scratch, i32 %mask, i1 1)
  call void @share(ptr %agent, i64 %SCRATCH, i64 1, i32 %mask)
  ret void
}}
define internal void @relaxed(ptr %agent, i32 %mask) {{
entry:
{agent("WIDTH", "SCRATCH", "BEFORE", "FENCED")}{pointers("BEFORE")}
  %nbytes = mul i64 %WIDTH, 4
  call void @order_row(ptr %agent, i32 %mask)
{_row("%others", "%SCRATCH", Row.ACQUIRED)}{_row("%tensors", "%SCRATCH", Row.TENSOR)}
  call void @llvm.memcpy.p0.p0.i64(ptr %tensors, ptr %before, i64 %nbytes, i1 0)
  %more = mul i64 %nbytes, {len(PENDING)}
  %fenced.some = icmp ne i64 %FENCED, 0
  br i1 %fenced.some, label %copy, label %zero
copy:{_row("%fenced", "%FENCED", Row.ACQUIRED)}
  call void @llvm.memcpy.p0.p0.i64(ptr %others, ptr %fenced, i64 %more, i1 0)
  ret void
zero:
  call void @llvm.memset.p0.i64(ptr %others, i8 0, i64 %more, i1 0)
  ret void
}}
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
define i32 @watch_arrive(ptr %t, ptr %point, i32 %mask, i64 %order, i64 %rank, i64 %phase, i32 %completes) {{
entry:
  %flushed = call i1 @flush(ptr %t)
  br i1 %flushed, label %who, label %no
who:{context("AGENT")}
{agent("WIDTH", "BASE", "RANK", "NUMBER", "CLOCK", "SCRATCH", "FENCED", "FENCED_ORDER", "FENCED_INITS")}
{pointers("SCRATCH")}
{point("GATHERED", "FOLLOWED", "COMPLETED")}{pointers("FOLLOWED")}
  %known = call i1 @initialised(ptr %agent, ptr %point)
  %sync.b = and i64 %order, {int(Order.SYNC)}
  %sync = icmp ne i64 %sync.b, 0
  ; a fence that reaches less far than a relaxed arrival after it
  %less = xor i64 %FENCED_ORDER, -1
  %farther.a = and i64 %order, %less
  %farther.b = and i64 %farther.a, {int(Order.WIDE)}
  %farther = icmp ne i64 %farther.b, 0
  %fenced.some = icmp ne i64 %FENCED, 0
  %is.relaxed = xor i1 %sync, true
  %f.1 = and i1 %farther, %fenced.some
  %mixed = and i1 %f.1, %is.relaxed
  %plain = xor i1 %mixed, true
  %may = and i1 %known, %plain
  br i1 %may, label %what, label %no
what:
  br i1 %sync, label %synchronising, label %relaxed
synchronising:
  call void @snapshot(ptr %agent, i32 %mask)
  br label %passed
relaxed:
  call void @relaxed(ptr %agent, i32 %mask)
  br label %passed
passed:
  %last = icmp ne i32 %completes, 0
  br i1 %last, label %overtaking, label %go
overtaking:
  %late = call i1 @overtakes(ptr %point, i64 %phase, ptr %scratch)
  br i1 %late, label %no, label %go
go:
  %remote = icmp ne i64 %rank, %RANK
  br i1 %remote, label %note, label %gathering
note:
  %row.o = mul i64 %NUMBER, {FOLLOWED_BYTES}
  %row = getelementptr i8, ptr %followed, i64 %row.o
  %arrived.p = getelementptr i64, ptr %row, i64 {FOLLOWED_WORDS.index("ARRIVED")}
  store i64 %CLOCK, ptr %arrived.p
  %in.phase.p = getelementptr i64, ptr %row, i64 {FOLLOWED_WORDS.index("ARRIVED_PHASE")}
  %in.phase = add i64 %COMPLETED, 1
  store i64 %in.phase, ptr %in.phase.p
  br label %gathering
gathering:
  call void @gather(ptr %agent, ptr %point, i64 %SCRATCH, i64 %order)
  br i1 %sync, label %advanced, label %inits
inits:{_row("%visible", "%GATHERED", Row.VISIBLE)}
  %init.column = add i64 %BASE, {int(Offset.INIT)}
  %init.p = getelementptr i32, ptr %visible, i64 %init.column
  %init = load i32, ptr %init.p
  %fenced.init = trunc i64 %FENCED_INITS to i32
  %init.later = call i32 @llvm.smax.i32(i32 %init, i32 %fenced.init)
  store i32 %init.later, ptr %init.p
  br label %advanced
advanced:
  call void @advance(ptr %agent)
  br i1 %last, label %completed, label %yes
completed:
  call void @complete(ptr %agent, ptr %point, i64 %phase)
  br label %yes
yes:
  ret i32 1
no:
  ret i32 0
}}
"""

def synchronisation() -> str:
    """The functions, which stand behind those of `native_events_code`; 0: nothing is done, Python decides.

    * ``i32 @watch_wait(t, point, order, phase)``: a wait for a phase of an mbarrier succeeded.
    * ``i32 @watch_arrive(t, point, mask, order, rank, phase, completes)``: lanes arrive at an mbarrier of a CTA, in a
      phase that is complete then or not.
    """
    scoped = "".join(_scoped(kind) for kind in SCOPED)
    return _SHARE + _POINTS + scoped + _TAKE + _ACQUIRE + _RELEASE
