"""LLVM IR of what the race detector makes of copies, bulk groups and MMAs that machine code executes (`native_units`).

Each function first works off the log of the warp, so that the clocks are those of the program order. Then it checks all
accesses of the operation, and only when every one is in order it records them and changes clocks, as `sanitizer`,
`tensor_races` and `async_engine.BulkGroups` do; else it changes nothing and Python decides.
"""

from __future__ import annotations

from cute_kernels.emulator.async_engine import THREAD_WORDS
from cute_kernels.emulator.happens_before import Offset
from cute_kernels.emulator.launch_shadow import REGION_WORDS
from cute_kernels.emulator.native_memory import Tables
from cute_kernels.emulator.native_shadow_code import load_words, store_fields
from cute_kernels.emulator.native_sync_code import agent, context, pointers
from cute_kernels.emulator.shadow import EPOCH_WORDS, GRANULE
from cute_kernels.emulator.sync_point import POINT_WORDS, Row
from cute_kernels.emulator.tensor_races import STREAM_WORDS, WATCHED_WORDS

#: A tensor copy, in words of 64 bits: who (lane, instruction), the text of its epochs; of a load the `POINT_WORDS` of
#: its mbarrier, whether its destination is in the other CTA of that one's pair, the phase and whether that completes;
#: `Plane.address` of the shared memory, its bytes there; its rows in global memory.
COPY_WORDS = (
    "LANE", "INSTRUCTION", "TEXT", "POINT", "PAIR", "PHASE", "COMPLETES",
    "SHADOW", "OFFSET", "NBYTES", "START", "PITCH", "COUNT", "ROW",
)  # fmt: skip
_CHECK, _RECORD = 0, 1


_FLUSH = f"""
define internal i1 @flush(ptr %t) {{
entry:
  %used.p = getelementptr i8, ptr %t, i64 {Tables.log_used.offset}
  %used = load i64, ptr %used.p
  %empty = icmp eq i64 %used, 0
  br i1 %empty, label %yes, label %work
work:{context()}
  %log.p = getelementptr i8, ptr %t, i64 {Tables.log.offset}
  %log = load ptr, ptr %log.p
  %done.p = getelementptr i8, ptr %t, i64 {Tables.log_done.offset}
  %done = load i64, ptr %done.p
  %ready = call i64 @observe(ptr %context, ptr %log, i64 %done, i64 %used)
  store i64 %ready, ptr %done.p
  %all = icmp eq i64 %ready, %used
  br i1 %all, label %clear, label %no
clear:
  store i64 0, ptr %done.p
  store i64 0, ptr %used.p
  br label %yes
yes:
  ret i1 1
no:
  ret i1 0
}}
"""

# An access of a copy, to shared (``%global`` 0) or global memory: checked, or recorded.
_ACCESS = f"""
define internal i1 @asynchronous(
  ptr %t, i64 %do, i64 %write, i64 %global, i64 %shadow, i64 %base, i64 %stride, i64 %rows, i64 %count, i64 %lane,
  i64 %identity, i64 %column
) {{
entry:{context("AGENT", "EPOCHS", "FLOOR", "REQUEST")}
{agent("CLOCKS", "WIDTH", "BASE")}
  %q = getelementptr i8, ptr %request, i64 0
  %writes = icmp ne i64 %write, 0
  %of.global = icmp ne i64 %global, 0
  %pitch = mul i64 %WIDTH, 4
  %known.row = select i1 %writes, i64 {int(Row.ACQUIRED)}, i64 {int(Row.VISIBLE)}
  %known.o = mul i64 %pitch, %known.row
  %known = add i64 %CLOCKS, %known.o
  %fenced.row = select i1 %of.global, i64 {int(Row.PROXY_GLOBAL)}, i64 {int(Row.PROXY)}
  %fenced.o = mul i64 %pitch, %fenced.row
  %fenced.i = add i64 %CLOCKS, %fenced.o
  %fenced = select i1 %writes, i64 0, i64 %fenced.i
  %own.reads = add i64 %BASE, {int(Offset.READ)}
  %exempt = select i1 %writes, i64 %own.reads, i64 -1
  %floor = select i1 %of.global, i64 %FLOOR, i64 0
{store_fields(
    WRITE="%write", STRONG=0, SHADOW="%shadow", GRAIN=GRANULE, OFFSETS=0, ROWS="%rows", BASE="%base", STRIDE="%stride",
    COUNT="%count", ORIGIN=0, KNOWN="%known", WIDTH="%WIDTH", OWN="%BASE", LANES=0, LANE="%lane", EXEMPT="%exempt",
    FLOOR="%floor", EPOCHS="%EPOCHS", IDENTITY="%identity", ADD_LANES=0, FENCED="%fenced", READ_KNOWN=0,
    READ_COLUMN="%column")}
  %checking = icmp eq i64 %do, {_CHECK}
  br i1 %checking, label %check, label %write.down
check:
  %good = call i1 @rows(ptr %q, i64 0)
  ret i1 %good
write.down:
  call void @record(ptr %q)
  ret i1 1
}}
"""

# The region of the launch that a range of global memory is in: `Shadow.address`, 0 where nothing is kept of it because
# nobody may write there, -1: for Python.
_REGION = f"""
define internal i64 @region(ptr %t, i64 %low, i64 %end, ptr %origin) {{
entry:{context("LAUNCH")}
  %table.i = load i64, ptr %launch
  %table = inttoptr i64 %table.i to ptr
  %count.p = getelementptr i64, ptr %launch, i64 1
  %count = load i64, ptr %count.p
  br label %search
search:
  %r = phi i64 [0, %entry], [%r.next, %look]
  %more = icmp slt i64 %r, %count
  br i1 %more, label %look, label %unknown
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
  store i64 %ORIGIN, ptr %origin
  %read.only = icmp eq i64 %WRITABLE, 0
  %untracked = icmp eq i64 %TRACKED, 0
  %shadow = select i1 %untracked, i64 -1, i64 %TRACKED
  %result = select i1 %read.only, i64 0, i64 %shadow
  ret i64 %result
unknown:
  ret i64 -1
}}
define internal i1 @room_for(ptr %epochs, i64 %n) {{
{load_words("%epochs", EPOCH_WORDS, ("COUNT", "CAPACITY"))}
  %after = add i64 %COUNT, %n
  %fits = icmp sle i64 %after, %CAPACITY
  ret i1 %fits
}}
"""

_GLOBAL_PLACES = """
  %origin.p = alloca i64
  %less = sub i64 %COUNT, 1
  %span = mul i64 %less, %PITCH
  %span.row = add i64 %span, %ROW
  %end = add i64 %START, %span.row"""
_FIND_REGION = """
  %global.shadow = call i64 @region(ptr %t, i64 %START, i64 %end, ptr %origin.p)
  %origin = load i64, ptr %origin.p
  %base = sub i64 %START, %origin
  %kept = icmp sge i64 %global.shadow, 0
  %tracked = icmp sgt i64 %global.shadow, 0"""


def _of_shared(do: int, write: int, identity: str, column: str) -> str:
    return (
        f"call i1 @asynchronous(ptr %t, i64 {do}, i64 {write}, i64 0, i64 %SHADOW, i64 %OFFSET, i64 0, i64 1, "
        f"i64 %NBYTES, i64 %LANE, i64 {identity}, i64 {column})"
    )


def _of_global(do: int, write: int, identity: str, column: str) -> str:
    return (
        f"call i1 @asynchronous(ptr %t, i64 {do}, i64 {write}, i64 1, i64 %global.shadow, i64 %base, i64 %PITCH, "
        f"i64 %COUNT, i64 %ROW, i64 %LANE, i64 {identity}, i64 {column})"
    )


# `RaceTracker.copy`, its accesses, and `complete_copy` at once: it completes when it is issued.
_LOAD = f"""
define i32 @watch_load(ptr %t, ptr %w) {{
entry:
{load_words("%w", COPY_WORDS, COPY_WORDS)}{pointers("POINT")}{_GLOBAL_PLACES}
  %flushed = call i1 @flush(ptr %t)
  br i1 %flushed, label %known, label %no
known:{context("AGENT", "EPOCHS")}
{agent("WIDTH", "SCRATCH")}{pointers("SCRATCH")}
{load_words("%point", POINT_WORDS, ("GATHERED", "COMPLETED", "COLUMN")).replace("%COLUMN", "%phases")}
{pointers("GATHERED")}{_FIND_REGION}
  %initialised = call i1 @initialised(ptr %agent, ptr %point)
  %room = call i1 @room_for(ptr %epochs, i64 1)
  %k.1 = and i1 %kept, %initialised
  %k.2 = and i1 %k.1, %room
  br i1 %k.2, label %ready, label %no
ready:
  ; what is known to be over when the copy is
  %lane = trunc i64 %LANE to i32
  %mask = shl i32 1, %lane
  call void @order_row(ptr %agent, i32 %mask)
  %last = icmp ne i64 %COMPLETES, 0
  br i1 %last, label %overtaking, label %shared
overtaking:
  %late = call i1 @overtakes(ptr %point, i64 %PHASE, ptr %scratch)
  br i1 %late, label %no, label %shared
shared:
  %s = {_of_shared(_CHECK, 1, "0", "0")}
  br i1 %s, label %source, label %no
source:
  br i1 %tracked, label %global, label %record
global:
  %g = {_of_global(_CHECK, 0, "0", "%phases")}
  br i1 %g, label %record, label %no
record:
  %phase = add i64 %COMPLETED, 1
  %place = trunc i64 %INSTRUCTION to i32
  %identity = call i64 @new_epoch(ptr %epochs, i64 %phases, i64 %phase, i64 %TEXT, i8 0, i32 %place)
  %s.done = {_of_shared(_RECORD, 1, "%identity", "%phases")}
  br i1 %tracked, label %record.global, label %pass
record.global:
  %g.done = {_of_global(_RECORD, 0, "%identity", "%phases")}
  br label %pass
pass:
  call void @join(ptr %gathered, ptr %scratch, i64 %WIDTH)
  call void @advance(ptr %agent)
  %pair.o = mul i64 %PAIR, 2
  %copy.o = add i64 %pair.o, {POINT_WORDS.index("COPY")}
  %copy.p = getelementptr i64, ptr %point, i64 %copy.o
  %copy = load i64, ptr %copy.p
  %newer = icmp slt i64 %copy, %phase
  br i1 %newer, label %note, label %noted
note:
  store i64 %phase, ptr %copy.p
  %copy.id.p = getelementptr i64, ptr %copy.p, i64 1
  store i64 %identity, ptr %copy.id.p
  br label %noted
noted:
  br i1 %last, label %completed, label %yes
completed:
  call void @complete(ptr %agent, ptr %point, i64 %PHASE)
  br label %yes
yes:
  ret i32 1
no:
  ret i32 0
}}
"""

_STORING = f"""
define internal ptr @bulk_thread(ptr %agent, i64 %lane) {{
entry:
{agent("STORING", "BULK")}{pointers("BULK")}
  %bits = lshr i64 %STORING, %lane
  %bit = and i64 %bits, 1
  %stores = icmp ne i64 %bit, 0
  br i1 %stores, label %yes, label %no
yes:
  %thread.p = getelementptr ptr, ptr %bulk, i64 %lane
  %thread = load ptr, ptr %thread.p
  ret ptr %thread
no:
  ret ptr null
}}
"""

# `RaceTracker.bulk`, its accesses and `BulkGroups.issue`.
_STORE = f"""
define i32 @watch_store(ptr %t, ptr %w) {{
entry:
{load_words("%w", COPY_WORDS, COPY_WORDS)}{_GLOBAL_PLACES}
  %flushed = call i1 @flush(ptr %t)
  br i1 %flushed, label %who, label %no
who:{context("AGENT", "EPOCHS")}
  %thread = call ptr @bulk_thread(ptr %agent, i64 %LANE)
  %missing = icmp eq ptr %thread, null
  br i1 %missing, label %no, label %known
known:
{load_words("%thread", THREAD_WORDS, ("COMMITTED", "READS", "WRITES"))}{_FIND_REGION}
  %room = call i1 @room_for(ptr %epochs, i64 2)
  %may = and i1 %tracked, %room
  br i1 %may, label %shared, label %no
shared:
  %s = {_of_shared(_CHECK, 0, "0", "%READS")}
  br i1 %s, label %global, label %no
global:
  %g = {_of_global(_CHECK, 1, "0", "%WRITES")}
  br i1 %g, label %record, label %no
record:
  %group = add i64 %COMMITTED, 1
  %place = trunc i64 %INSTRUCTION to i32
  %reads = call i64 @new_epoch(ptr %epochs, i64 %READS, i64 %group, i64 %TEXT, i8 0, i32 %place)
  %writes = call i64 @new_epoch(ptr %epochs, i64 %WRITES, i64 %group, i64 %TEXT, i8 0, i32 %place)
  %s.done = {_of_shared(_RECORD, 0, "%reads", "%READS")}
  %g.done = {_of_global(_RECORD, 1, "%writes", "%WRITES")}
  %stored.p = getelementptr i64, ptr %thread, i64 {THREAD_WORDS.index("STORED")}
  store i64 %group, ptr %stored.p
  %identity.p = getelementptr i64, ptr %thread, i64 {THREAD_WORDS.index("IDENTITY")}
  store i64 %reads, ptr %identity.p
  ret i32 1
no:
  ret i32 0
}}
"""


def _each_thread(body: str, name: str) -> str:
    """``body`` for every lane of the mask that issued bulk stores, which continues at ``%NAME.next``."""
    before = "begin" if name == "check" else "act"
    return f"""
  br label %{name}
{name}:
  %{name}.m = phi i32 [%storing, %{before}], [%{name}.rest, %{name}.next]
  %{name}.none = icmp eq i32 %{name}.m, 0
  br i1 %{name}.none, label %{name}.done, label %{name}.lane
{name}.lane:
  %{name}.n = call i32 @llvm.cttz.i32(i32 %{name}.m, i1 true)
  %{name}.less = sub i32 %{name}.m, 1
  %{name}.rest = and i32 %{name}.m, %{name}.less
  %{name}.wide = zext i32 %{name}.n to i64
  %{name}.thread = call ptr @bulk_thread(ptr %agent, i64 %{name}.wide)
{body}
{name}.next:
  br label %{name}
{name}.done:"""


def _word(name: str, base: str, word: str) -> str:
    return f"""
  {name}.p = getelementptr i64, ptr {base}, i64 {THREAD_WORDS.index(word)}
  {name} = load i64, ptr {name}.p"""


_WAIT_WORDS = ("COMMITTED", "WAITED", "READS", "WRITES")
# `commit_group` where Python keeps nothing of the open group, `wait_group` where it keeps nothing of the groups that
# are waited for: stores in machine code are complete when they are issued.
_GROUPS = f"""
define i32 @bulk_commit(ptr %t, i32 %mask) {{
begin:{context("AGENT")}
{agent("STORING")}
  %all = trunc i64 %STORING to i32
  %storing = and i32 %mask, %all
{_each_thread(_word("%open", "%check.thread", "OPEN") + '''
  %closed = icmp eq i64 %open, 0
  br i1 %closed, label %check.next, label %no''', "check")}
  br label %act
act:
{_each_thread(_word("%groups", "%count.thread", "COMMITTED") + '''
  %groups.next = add i64 %groups, 1
  store i64 %groups.next, ptr %groups.p
  br label %count.next''', "count")}
  ret i32 1
no:
  ret i32 0
}}
define i32 @bulk_wait(ptr %t, i32 %mask, i64 %newest, i32 %read) {{
entry:
  %flushed = call i1 @flush(ptr %t)
  br i1 %flushed, label %begin, label %no
begin:{context("AGENT")}
{agent("STORING", "LIVE", "CLOCKS", "WIDTH", "PRIVATE")}{pointers("PRIVATE")}
  %all = trunc i64 %STORING to i32
  %storing = and i32 %mask, %all
  %of.writes = icmp eq i32 %read, 0
{_each_thread(_word("%oldest", "%check.thread", "OLDEST") + _word("%so.far", "%check.thread", "COMMITTED") + '''
  %last.kept = sub i64 %so.far, %newest
  %free = icmp sgt i64 %oldest, %last.kept
  br i1 %free, label %check.next, label %no''', "check")}
  br label %act
act:
{_each_thread(
    "".join(_word(f"%{word.lower()}", "%wait.thread", word) for word in _WAIT_WORDS) + '''
  %last = sub i64 %committed, %newest
  %later = call i64 @llvm.smax.i64(i64 %waited, i64 %last)
  store i64 %later, ptr %waited.p
  %bit = shl i64 1, %wait.wide
  %alone = icmp eq i64 %LIVE, %bit
  call void @complete_in_lane(ptr %agent, i1 %alone, i64 %wait.wide, i64 %reads, i64 %last)
  br i1 %of.writes, label %written, label %wait.next
written:
  call void @complete_in_lane(ptr %agent, i1 %alone, i64 %wait.wide, i64 %writes, i64 %last)
  br label %wait.next''', "wait")}
  ret i32 1
no:
  ret i32 0
}}
; `Agent.complete_in_lane`
define internal void @complete_in_lane(ptr %agent, i1 %alone, i64 %lane, i64 %column, i64 %clock) {{
entry:
{agent("CLOCKS", "WIDTH", "PRIVATE")}{pointers("PRIVATE")}
  br i1 %alone, label %all, label %one
all:
  call void @raise_column(i64 %CLOCKS, i64 %WIDTH, i64 {int(Row.TENSOR)}, i64 %column, i64 %clock)
  ret void
one:
  %count = load i64, ptr %private
  br label %search
search:
  %i = phi i64 [0, %one], [%i.next, %other]
  %i.o = mul i64 %i, 3
  %i.1 = add i64 %i.o, 1
  %p = getelementptr i64, ptr %private, i64 %i.1
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %new
look:
  %known = load i64, ptr %p
  %same = icmp eq i64 %known, %column
  br i1 %same, label %set, label %other
other:
  %i.next = add i64 %i, 1
  br label %search
new:
  %count.next = add i64 %count, 1
  store i64 %count.next, ptr %private
  br label %set
set:
  store i64 %column, ptr %p
  %lane.p = getelementptr i64, ptr %p, i64 1
  store i64 %lane, ptr %lane.p
  %clock.p = getelementptr i64, ptr %p, i64 2
  store i64 %clock, ptr %clock.p
  ret void
}}
"""

# `TensorRaces.issue`. Accesses that were recorded before one that is not in order are recorded again by Python, under
# the same identity.
_MMA = f"""
define internal i1 @written(i64 %flags, i64 %columns) {{
entry:
  %first = inttoptr i64 %flags to ptr
  br label %each
each:
  %i = phi i64 [0, %entry], [%i.next, %good]
  %p = getelementptr i8, ptr %first, i64 %i
  %f = load <8 x i8>, ptr %p, align 1
  %missing = icmp eq <8 x i8> %f, zeroinitializer
  %bits = bitcast <8 x i1> %missing to i8
  %all = icmp eq i8 %bits, 0
  br i1 %all, label %good, label %no
good:
  %i.next = add i64 %i, 8
  %more = icmp ult i64 %i.next, %columns
  br i1 %more, label %each, label %yes
yes:
  ret i1 1
no:
  ret i1 0
}}
define i32 @watch_mma(ptr %t, ptr %w, i32 %instruction) {{
entry:
{load_words("%w", WATCHED_WORDS, WATCHED_WORDS)}
  %written.1 = call i1 @written(i64 %FULL, i64 %COLUMNS)
  %written.2 = call i1 @written(i64 %FULL_PAIR, i64 %COLUMNS)
  %written.all = and i1 %written.1, %written.2
  br i1 %written.all, label %flushing, label %no
flushing:
  %flushed = call i1 @flush(ptr %t)
  br i1 %flushed, label %who, label %no
who:{context("AGENT", "EPOCHS", "REQUEST")}
  %stream = inttoptr i64 %STREAM to ptr
  %list = inttoptr i64 %LIST to ptr
{load_words("%stream", STREAM_WORDS, STREAM_WORDS)}
  %begun = icmp ne i64 %IDENTITY, 0
  br i1 %begun, label %issue, label %begin
begin:
  %room = call i1 @room(ptr %epochs)
  br i1 %room, label %new, label %no
new:
  %clock = add i64 %COMMITS, 1
  %identity.new = call i64 @new_epoch(ptr %epochs, i64 %COLUMN, i64 %clock, i64 %TEXT, i8 0, i32 %instruction)
  store i64 %identity.new, ptr %IDENTITY.p
  br label %issue
issue:
  %identity = phi i64 [%IDENTITY, %who], [%identity.new, %new]
  store i64 %identity, ptr %LATEST.p
  %n = call i64 @pipelined(
    ptr %request, ptr %list, i64 %COUNT, ptr %agent, i64 %identity, i64 %LANE, i64 %COLUMN)
  %all = icmp eq i64 %n, %COUNT
  %result = zext i1 %all to i32
  ret i32 %result
no:
  ret i32 0
}}
"""


def copies() -> str:
    """The functions, which stand behind those of `native_events_code`; 0: nothing is done, Python decides.

    * ``i32 @watch_load/@watch_store(t, copy)``: a copy (`COPY_WORDS`) that is complete when it is issued.
    * ``i32 @watch_mma(t, watched, instruction)``: an MMA (`tensor_races.WATCHED_WORDS`).
    * ``i32 @bulk_commit(t, mask)``, ``i32 @bulk_wait(t, mask, newest, read)``: bulk groups of the executing lanes.
    """
    return _FLUSH + _ACCESS + _REGION + _LOAD + _STORING + _STORE + _GROUPS + _MMA
