"""LLVM IR of what the race detector makes of a tcgen05.commit that machine code executes (`native_units`)."""

from __future__ import annotations

from cute_kernels.emulator.native_shadow_code import load_words
from cute_kernels.emulator.native_sync_code import FOLLOWED_BYTES, agent, context, point, pointers
from cute_kernels.emulator.sync_point import FOLLOWED_WORDS, POINT_WORDS, ROWS, Order
from cute_kernels.emulator.tensor_races import STREAM_WORDS

#: A tcgen05.commit, in words of 64 bits: `tensor_races.STREAM_WORDS`, lane, mbarriers; then of each mbarrier its
#: `POINT_WORDS`, its phase, whether that completes.
COMMIT_WORDS = ("STREAM", "LANE", "TARGETS")
TARGET_WORDS = ("POINT", "PHASE", "COMPLETES")
MOST_TARGETS = 16

# `TensorRaces.commit` and `committed`: it arrives when it is issued. The first of a stream to an mbarrier is Python's.
_COMMIT = f"""
define internal i1 @known_stream(ptr %point, i64 %column) {{
entry:
{point("STREAM_COUNT", "STREAMS")}{pointers("STREAMS")}
  br label %each
each:
  %i = phi i64 [0, %entry], [%i.next, %other]
  %more = icmp slt i64 %i, %STREAM_COUNT
  br i1 %more, label %look, label %no
look:
  %p = getelementptr i64, ptr %streams, i64 %i
  %known = load i64, ptr %p
  %same = icmp eq i64 %known, %column
  br i1 %same, label %yes, label %other
other:
  %i.next = add i64 %i, 1
  br label %each
yes:
  ret i1 1
no:
  ret i1 0
}}
define i32 @watch_commit(ptr %t, ptr %w) {{
entry:
{load_words("%w", COMMIT_WORDS, COMMIT_WORDS)}{pointers("STREAM")}
  %targets = getelementptr i64, ptr %w, i64 {len(COMMIT_WORDS)}
  %flushed = call i1 @flush(ptr %t)
  br i1 %flushed, label %who, label %no
who:{context("AGENT")}
{agent("WIDTH", "NUMBER", "SCRATCH")}{pointers("SCRATCH")}
{load_words("%stream", STREAM_WORDS, STREAM_WORDS)}
  %lane = trunc i64 %LANE to i32
  %mask = shl i32 1, %lane
  call void @snapshot(ptr %agent, i32 %mask)
  %commits = add i64 %COMMITS, 1
  call void @set_column(i64 %SCRATCH, i64 %WIDTH, i64 %COLUMN, i64 %commits)
  br label %check
check:
  %c = phi i64 [0, %who], [%c.next, %check.next]
  %c.more = icmp slt i64 %c, %TARGETS
  br i1 %c.more, label %check.one, label %committed
check.one:
  %c.o = mul i64 %c, {len(TARGET_WORDS)}
  %target = getelementptr i64, ptr %targets, i64 %c.o
{load_words("%target", TARGET_WORDS, TARGET_WORDS)}{pointers("POINT")}
  %known = call i1 @initialised(ptr %agent, ptr %point)
  %streamed = call i1 @known_stream(ptr %point, i64 %COLUMN)
{point("FOLLOWED")}{pointers("FOLLOWED")}
  %row.o = mul i64 %NUMBER, {FOLLOWED_BYTES}
  %row = getelementptr i8, ptr %followed, i64 %row.o
{load_words("%row", FOLLOWED_WORDS, ("COMMIT_COLUMN",))}
  %none = icmp slt i64 %COMMIT_COLUMN, 0
  %same = icmp eq i64 %COMMIT_COLUMN, %COLUMN
  %one.stream = or i1 %none, %same
  %k.1 = and i1 %known, %streamed
  %k.2 = and i1 %k.1, %one.stream
  br i1 %k.2, label %check.phase, label %no
check.phase:
  %last = icmp ne i64 %COMPLETES, 0
  br i1 %last, label %overtaking, label %check.next
overtaking:
  %late = call i1 @overtakes(ptr %point, i64 %PHASE, ptr %scratch)
  br i1 %late, label %no, label %check.next
check.next:
  %c.next = add i64 %c, 1
  br label %check
committed:
  store i64 %commits, ptr %COMMITS.p
  store i64 0, ptr %IDENTITY.p
  call void @advance(ptr %agent)
  br label %act
act:
  %a = phi i64 [0, %committed], [%a.next, %act.next]
  %a.more = icmp slt i64 %a, %TARGETS
  br i1 %a.more, label %act.one, label %yes
act.one:
  %a.o = mul i64 %a, {len(TARGET_WORDS)}
  %a.target = getelementptr i64, ptr %targets, i64 %a.o
  %a.point.p = getelementptr i64, ptr %a.target, i64 {TARGET_WORDS.index("POINT")}
  %a.point = load ptr, ptr %a.point.p
  %a.phase.p = getelementptr i64, ptr %a.target, i64 {TARGET_WORDS.index("PHASE")}
  %a.phase = load i64, ptr %a.phase.p
  %a.completes.p = getelementptr i64, ptr %a.target, i64 {TARGET_WORDS.index("COMPLETES")}
  %a.completes = load i64, ptr %a.completes.p
  call void @gather(ptr %agent, ptr %a.point, i64 %SCRATCH, i64 {int(Order.SYNC | Order.WIDE)})
  %a.followed.p = getelementptr i64, ptr %a.point, i64 {POINT_WORDS.index("FOLLOWED")}
  %a.followed = load ptr, ptr %a.followed.p
  %a.row.o = mul i64 %NUMBER, {FOLLOWED_BYTES}
  %a.row = getelementptr i8, ptr %a.followed, i64 %a.row.o
  %a.completed.p = getelementptr i64, ptr %a.point, i64 {POINT_WORDS.index("COMPLETED")}
  %a.completed = load i64, ptr %a.completed.p
  %a.next.phase = add i64 %a.completed, 1
  %note.column = getelementptr i64, ptr %a.row, i64 {FOLLOWED_WORDS.index("COMMIT_COLUMN")}
  store i64 %COLUMN, ptr %note.column
  %note.clock = getelementptr i64, ptr %a.row, i64 {FOLLOWED_WORDS.index("COMMIT")}
  store i64 %commits, ptr %note.clock
  %note.phase = getelementptr i64, ptr %a.row, i64 {FOLLOWED_WORDS.index("COMMIT_PHASE")}
  store i64 %a.next.phase, ptr %note.phase
  %a.last = icmp ne i64 %a.completes, 0
  br i1 %a.last, label %completed, label %act.next
completed:
  call void @complete(ptr %agent, ptr %a.point, i64 %a.phase)
  br label %act.next
act.next:
  %a.next = add i64 %a, 1
  br label %act
yes:
  ret i32 1
no:
  ret i32 0
}}
define internal void @set_column(i64 %clocks, i64 %width, i64 %column, i64 %clock) {{
entry:
  %first = inttoptr i64 %clocks to ptr
  %clock.s = trunc i64 %clock to i32
  br label %each
each:
  %r = phi i64 [0, %entry], [%r.next, %each]
  %r.w = mul i64 %r, %width
  %r.c = add i64 %r.w, %column
  %cell = getelementptr i32, ptr %first, i64 %r.c
  store i32 %clock.s, ptr %cell
  %r.next = add i64 %r, 1
  %more = icmp slt i64 %r.next, {ROWS}
  br i1 %more, label %each, label %done
done:
  ret void
}}
"""


def commit() -> str:
    """``i32 @watch_commit(t, commit)``: tcgen05.commit (`COMMIT_WORDS`); 0: nothing is done, Python decides."""
    return _COMMIT
