"""LLVM IR of barriers and MMAs for `native_units`, and the structures that it shares with its functions."""

from __future__ import annotations

from collections.abc import Sequence

from cute_kernels.emulator.mbarrier import ARRIVER, EXPECTED, MAX_COUNT, PENDING, PHASE, POINT, ROW_WORDS, TX
from cute_kernels.emulator.native_commit_code import COMMIT_WORDS, MOST_TARGETS, TARGET_WORDS
from cute_kernels.emulator.native_memory import (
    CTA_ENTRY,
    CTA_SIZE,
    CTA_SLOTS,
    CTA_TABLE,
    PROGRESS,
    UNIT_BARRIERS,
    UNIT_COMMITS,
    UNIT_COMPLETIONS,
    UNIT_EXECUTE,
    UNIT_FLAGS,
    UNIT_JOBS,
    UNIT_MMAS,
    WATCHES,
)

#: Flags of the units: waits succeed whenever they can; asynchronous work takes effect when it is issued.
WAITS, EAGER = 1, 2
#: Words of the arguments of a tensor copy: tensor map, shared address, mbarrier, five coordinates.
MAP, SHARED, BARRIER, COORDINATES = range(4)
RANKS = 5
#: With detectors, behind them: number of the warp, its lane, index of the instruction.
WHO, LANE, INSTRUCTION = range(COORDINATES + RANKS, COORDINATES + RANKS + 3)
PLANS, NO_MAP = 16, -1
#: Words of a plan, the tensor map as the copy needs it. Dimensions that it lacks have extent 1.
PLAN_KEY, PLAN_HOST, PLAN_CONTENT = 0, 1, 2  # address in the kernel, host address, 64 bytes
PLAN_RANK, PLAN_ELEMENT, PLAN_ROW_BYTES, PLAN_BOX_BYTES, PLAN_BASE, PLAN_SHIFT, PLAN_MASK = range(10, 17)
PLAN_LOADS, PLAN_STORES = 17, 18  # whether machine code may execute them
PLAN_STRIDES, PLAN_TILE, PLAN_EXTENTS = 19, 24, 29  # of every dimension; the stride of the innermost is not used
PLAN_ROWS, PLAN_PITCH = 34, 35  # of a box that is rows at one pitch; 0 rows for others
PLAN_WORDS = 36
PLAN_CONTENT_WORDS = 8


#: MMAs that are kept, a power of two; each in the entry that `job_slot` says: its key, the address of its job, and what
#: tells the race detector (`tensor_races.WATCHED_WORDS`) or 0.
JOBS = 1024
JOB_ENTRY = 10
KEY_WORDS = 8  # CTA group, who (rank, lane, warp), accumulator, A, B, instruction descriptor, whether it accumulates, 0
#: Commits that are kept, likewise: who, mbarrier, multicast mask or -1; number of the label plus one, and with
#: detectors `tensor_races.STREAM_WORDS`, else 0.
COMMITS = 256
COMMIT_KEY, COMMIT_ENTRY = 3, 5
#: Texts of copies for the race detector that are kept, likewise: bytes, shared address, mbarrier or -1, warp; the text.
TEXTS = 1024
TEXT_KEY, TEXT_ENTRY = 4, 5
_HASH = 0x9E3779B97F4A7C15  # 2^64 / golden ratio


def job_slot(key: Sequence[int], slots: int = JOBS) -> int:
    """The entry of an MMA (of a text, for `TEXTS`), given its key."""
    mixed = 0
    for word in key:
        mixed = (mixed * 31 + word) & 0xFFFFFFFFFFFFFFFF
    return (mixed * _HASH & 0xFFFFFFFFFFFFFFFF) >> 64 - slots.bit_length() + 1


def find_entry(result: str, base: str, words: Sequence[str], table: str, slots: int, entry: int, missing: str) -> str:
    """Code for the entry of a key of ``words`` (registers): ``result``, a pointer; goes to ``missing`` without one.

    Args:
        result: of the entry. ``base``: prefix of other registers and labels.
        words: the key.
        table: register with the table's address.
        slots, entry: entries of the table, and words of each.
        missing: label.
    """
    lines, mixed = [], "0"
    vector = f"<{len(words)} x i64>"
    key = "poison"
    for i, word in enumerate(words):
        lines.append(f"""
  {base}.m.{i} = mul i64 {mixed}, 31
  {base}.mix.{i} = add i64 {base}.m.{i}, {word}
  {base}.k.{i} = insertelement {vector} {key}, i64 {word}, i32 {i}""")
        mixed, key = f"{base}.mix.{i}", f"{base}.k.{i}"
    label = base[1:]
    return f"""{"".join(lines)}
  {base}.hash = mul i64 {mixed}, {_HASH - (1 << 64)}
  {base}.slot = lshr i64 {base}.hash, {64 - slots.bit_length() + 1}
  {base}.o = mul i64 {base}.slot, {8 * entry}
  {result} = getelementptr i8, ptr {table}, i64 {base}.o
  {base}.known = load {vector}, ptr {result}, align 8
  {base}.differ = icmp ne {vector} {base}.known, {key}
  {base}.bits = bitcast <{len(words)} x i1> {base}.differ to i{len(words)}
  {base}.same = icmp eq i{len(words)} {base}.bits, 0
  br i1 {base}.same, label %{label}.found, label %{missing}
{label}.found:"""


def field(result: str, base: str, offset: int, type_: str = "i64") -> str:
    """Loads a field of a structure."""
    return f"""
  {result}.p = getelementptr i8, ptr {base}, i64 {offset}
  {result} = load {type_}, ptr {result}.p"""


def add(name: str, offset: int, value: str) -> str:
    """Adds to a word of the tables."""
    return f"""
  %{name}.p = getelementptr i8, ptr %t, i64 {offset}
  %{name}.old = load i64, ptr %{name}.p
  %{name}.new = add i64 %{name}.old, {value}
  store i64 %{name}.new, ptr %{name}.p"""


def barriers() -> str:
    """Functions on rows of mbarriers.

    * ``ptr @find(t, address)``: the row of a live barrier, or null.
    * ``void @settle(t, row)``: completes the phase if nothing is pending.
    * ``i32 @mbarrier_passed(t, address, parity, order)``: 1 if the phase of this parity has completed; 0: Python
      decides.
    * ``i64 @mbarrier_arrive(t, address, count, bytes, arriver, mask, order)``: expects the bytes and arrives; the
      phase, or -1.
    * ``@watched_mbarrier_passed`` and ``@watched_mbarrier_arrive`` do the same with detectors.
    """
    functions = "".join(_wait(watched) + _arrive(watched) for watched in (False, True))
    return f"""
define internal ptr @find(ptr %t, i64 %a) {{
entry:
  %rank = lshr i64 %a, 24
  %offset = and i64 %a, 16777215
  %ranks = load i64, ptr %t
  %exists = icmp ult i64 %rank, %ranks
  %low = and i64 %a, 7
  %aligned = icmp eq i64 %low, 0
  %sound = and i1 %exists, %aligned
  br i1 %sound, label %cta, label %none
cta:
  %c.o = mul i64 %rank, {CTA_ENTRY}
  %c.h = add i64 %c.o, {CTA_TABLE}
  %c = getelementptr i8, ptr %t, i64 %c.h{field("%size", "%c", CTA_SIZE)}
  %inside = icmp ult i64 %offset, %size
  br i1 %inside, label %slot, label %none
slot:{field("%slots", "%c", CTA_SLOTS, "ptr")}
  %item = lshr i64 %offset, 3
  %slot.p = getelementptr i16, ptr %slots, i64 %item
  %number = load i16, ptr %slot.p
  %live = icmp ne i16 %number, 0
  br i1 %live, label %row, label %none
row:{field("%rows", "%t", UNIT_BARRIERS, "ptr")}
  %n = zext i16 %number to i64
  %n.0 = sub i64 %n, 1
  %r.o = mul i64 %n.0, {8 * ROW_WORDS}
  %r = getelementptr i8, ptr %rows, i64 %r.o
  ret ptr %r
none:
  ret ptr null
}}
define internal void @settle(ptr %t, ptr %row) {{
entry:{field("%pending", "%row", 8 * PENDING)}{field("%tx", "%row", 8 * TX)}
  %left = or i64 %pending, %tx
  %complete = icmp eq i64 %left, 0
  br i1 %complete, label %next, label %done
next:{field("%phase", "%row", 8 * PHASE)}{field("%expected", "%row", 8 * EXPECTED)}
  %phase.next = add i64 %phase, 1
  store i64 %phase.next, ptr %phase.p
  store i64 %expected, ptr %pending.p{add("completions", UNIT_COMPLETIONS, "1")}
  br label %done
done:
  ret void
}}
{functions}
"""


def _watched_point(name: str) -> str:
    """With detectors: what the race detector knows of the barrier; goes to ``no`` where it knows nothing."""
    return f"""{field("%point", "%row", 8 * POINT, "ptr")}
  %unknown = icmp eq ptr %point, null
  br i1 %unknown, label %no, label %known
known:{field("%watch", "%t", WATCHES[name], "ptr")}"""


def _wait(watched: bool) -> str:
    tell = "ret i32 1"
    if watched:
        tell = f"""{_watched_point("watch_wait")}
  %before = sub i64 %phase, 1
  %told = call i32 %watch(ptr %t, ptr %point, i64 %order, i64 %before)
  ret i32 %told"""
    return f"""
define i32 @{"watched_" if watched else ""}mbarrier_passed(ptr %t, i64 %a, i32 %parity, i64 %order) {{
entry:{field("%flags", "%t", UNIT_FLAGS)}
  %f = and i64 %flags, {WAITS}
  %plain = icmp ne i64 %f, 0
  br i1 %plain, label %look, label %no
look:
  %row = call ptr @find(ptr %t, i64 %a)
  %missing = icmp eq ptr %row, null
  br i1 %missing, label %no, label %test
test:{field("%phase", "%row", 8 * PHASE)}
  %low = trunc i64 %phase to i32
  %differ = xor i32 %low, %parity
  %passed = and i32 %differ, 1
  %done = icmp ne i32 %passed, 0
  br i1 %done, label %yes, label %no
yes:
  {tell}
no:
  ret i32 0
}}
"""


def _arrive(watched: bool) -> str:
    tell = "  br label %arrive"
    if watched:
        tell = f"""{_watched_point("watch_arrive")}
  %rank = lshr i64 %a, 24
  %ends = or i64 %left, %tx.next
  %completes = icmp eq i64 %ends, 0
  %completes.w = zext i1 %completes to i32
  %told = call i32 %watch(ptr %t, ptr %point, i32 %mask, i64 %order, i64 %rank, i64 %phase, i32 %completes.w)
  %in.order = icmp ne i32 %told, 0
  br i1 %in.order, label %arrive, label %no"""
    return f"""
define i64 @{"watched_" if watched else ""}mbarrier_arrive(
  ptr %t, i64 %a, i64 %count, i64 %nbytes, i64 %arriver, i32 %mask, i64 %order
) {{
entry:
  %row = call ptr @find(ptr %t, i64 %a)
  %missing = icmp eq ptr %row, null
  br i1 %missing, label %no, label %check
check:{field("%pending", "%row", 8 * PENDING)}{field("%tx", "%row", 8 * TX)}{field("%phase", "%row", 8 * PHASE)}
  %tx.next = add i64 %tx, %nbytes
  %count.0 = sub i64 %count, 1
  %counted = icmp ult i64 %count.0, %pending
  %small = icmp sle i64 %tx.next, {MAX_COUNT}
  %left = sub i64 %pending, %count
  %last = icmp eq i64 %left, 0
  %over = icmp slt i64 %tx.next, 0
  %excess = and i1 %last, %over
  %in.range = and i1 %counted, %small
  %fine = xor i1 %excess, true
  %legal = and i1 %in.range, %fine
  br i1 %legal, label %ready, label %no
ready:
{tell}
arrive:
  store i64 %left, ptr %pending.p
  store i64 %tx.next, ptr %tx.p
  %who.p = getelementptr i8, ptr %row, i64 {8 * ARRIVER}
  store i64 %arriver, ptr %who.p
  call void @settle(ptr %t, ptr %row){add("progress", PROGRESS, "1")}
  ret i64 %phase
no:
  ret i64 -1
}}
"""


def mmas() -> str:
    """``i32 @tensor_mma(t, key, instruction)``: 1 if the MMA was executed (`native_mma`), 0 if Python has to do it.

    With detectors the entry has an address for ``watch_mma`` (`native_copies_code`), which is asked first.
    """
    words = "".join(field(f"%k.{i}", "%x", 8 * i) for i in range(KEY_WORDS))
    find = find_entry("%entry.p", "%f", [f"%k.{i}" for i in range(KEY_WORDS)], "%jobs", JOBS, JOB_ENTRY, "no")
    return f"""
define i32 @tensor_mma(ptr %t, ptr %x, i32 %instruction) {{
entry:{field("%flags", "%t", UNIT_FLAGS)}
  %f = and i64 %flags, {EAGER}
  %eager = icmp ne i64 %f, 0
  br i1 %eager, label %search, label %no
search:{words}{field("%jobs", "%t", UNIT_JOBS, "ptr")}{find}{field("%job", "%entry.p", 8 * KEY_WORDS, "ptr")}
  %empty = icmp eq ptr %job, null
  br i1 %empty, label %no, label %known
known:{field("%watched", "%entry.p", 8 * KEY_WORDS + 8, "ptr")}
  %unwatched = icmp eq ptr %watched, null
  br i1 %unwatched, label %go, label %tell
tell:{field("%watch", "%t", WATCHES["watch_mma"], "ptr")}
  %told = call i32 %watch(ptr %t, ptr %watched, i32 %instruction)
  %in.order = icmp ne i32 %told, 0
  br i1 %in.order, label %go, label %no
go:{field("%execute", "%t", UNIT_EXECUTE, "ptr")}
  %done = call i32 %execute(ptr %job)
  %executed = icmp ne i32 %done, 0
  br i1 %executed, label %yes, label %no
yes:{add("progress", PROGRESS, "1")}{add("mmas", UNIT_MMAS, "1")}
  ret i32 1
no:
  ret i32 0
}}
"""


def commits() -> str:
    """``i32 @tensor_commit(t, who, address, multicast)``: 1 if the commit has arrived, 0 if Python has to do it.

    ``multicast`` is the mask of CTAs, or -1. With detectors the entry has a stream for ``watch_commit``.
    """
    find = find_entry("%entry.p", "%f", ["%who", "%a", "%multicast"], "%commits", COMMITS, COMMIT_ENTRY, "no")
    words, head = len(TARGET_WORDS), len(COMMIT_WORDS)
    return f"""
define i32 @tensor_commit(ptr %t, i64 %who, i64 %a, i64 %multicast) {{
entry:
  %w = alloca [{head + MOST_TARGETS * words} x i64], align 64
  %rows = alloca [{MOST_TARGETS} x ptr], align 64{field("%flags", "%t", UNIT_FLAGS)}
  %f = and i64 %flags, {EAGER}
  %eager = icmp ne i64 %f, 0
  br i1 %eager, label %search, label %no
search:{field("%commits", "%t", UNIT_COMMITS, "ptr")}{find}{field("%label", "%entry.p", 8 * COMMIT_KEY)}
{field("%stream", "%entry.p", 8 * COMMIT_KEY + 8)}
  %unknown = icmp eq i64 %label, 0
  br i1 %unknown, label %no, label %spread
spread:
  %offset = and i64 %a, 16777215
  %own.rank = lshr i64 %a, 24
  %own.bit = shl i64 1, %own.rank
  %single = icmp slt i64 %multicast, 0
  %mask = select i1 %single, i64 %own.bit, i64 %multicast
  %watched = icmp ne i64 %stream, 0
  br label %each
each:
  %m = phi i64 [%mask, %spread], [%rest, %good]
  %n = phi i64 [0, %spread], [%n.next, %good]
  %none = icmp eq i64 %m, 0
  br i1 %none, label %all, label %target
target:
  %rank = call i64 @llvm.cttz.i64(i64 %m, i1 true)
  %m.less = sub i64 %m, 1
  %rest = and i64 %m, %m.less
  %base = shl i64 %rank, 24
  %where = or i64 %base, %offset
  %row = call ptr @find(ptr %t, i64 %where)
  %missing = icmp eq ptr %row, null
  %many = icmp uge i64 %n, {MOST_TARGETS}
  %impossible = or i1 %missing, %many
  br i1 %impossible, label %no, label %look
look:{field("%pending", "%row", 8 * PENDING)}{field("%tx", "%row", 8 * TX)}{field("%phase", "%row", 8 * PHASE)}
{field("%point", "%row", 8 * POINT)}
  %expected = icmp sgt i64 %pending, 0
  %only = icmp eq i64 %pending, 1
  %over = icmp slt i64 %tx, 0
  %excess = and i1 %only, %over
  %fine = xor i1 %excess, true
  %legal.1 = and i1 %expected, %fine
  %pointed = icmp ne i64 %point, 0
  %unwatched = xor i1 %watched, true
  %seen = or i1 %pointed, %unwatched
  %legal = and i1 %legal.1, %seen
  br i1 %legal, label %good, label %no
good:
  %complete = icmp eq i64 %tx, 0
  %completes.b = and i1 %only, %complete
  %completes = zext i1 %completes.b to i64
  %at.n = mul i64 %n, {words}
  %at = add i64 %at.n, {head}
  %p.point = getelementptr i64, ptr %w, i64 %at
  store i64 %point, ptr %p.point
  %p.phase = getelementptr i64, ptr %p.point, i64 1
  store i64 %phase, ptr %p.phase
  %p.completes = getelementptr i64, ptr %p.point, i64 2
  store i64 %completes, ptr %p.completes
  %p.row = getelementptr ptr, ptr %rows, i64 %n
  store ptr %row, ptr %p.row
  %n.next = add i64 %n, 1
  br label %each
all:
  br i1 %watched, label %tell, label %act
tell:
  %lane.b = lshr i64 %who, 8
  %lane = and i64 %lane.b, 255
  store i64 %stream, ptr %w
  %p.lane = getelementptr i64, ptr %w, i64 1
  store i64 %lane, ptr %p.lane
  %p.n = getelementptr i64, ptr %w, i64 2
  store i64 %n, ptr %p.n{field("%watch", "%t", WATCHES["watch_commit"], "ptr")}
  %told = call i32 %watch(ptr %t, ptr %w)
  %in.order = icmp ne i32 %told, 0
  br i1 %in.order, label %act, label %no
act:
  br label %arrive
arrive:
  %i = phi i64 [0, %act], [%i.next, %arrived]
  %more = icmp ult i64 %i, %n
  br i1 %more, label %arrived, label %yes
arrived:
  %r.p = getelementptr ptr, ptr %rows, i64 %i
  %r = load ptr, ptr %r.p{field("%left", "%r", 8 * PENDING)}
  %left.less = sub i64 %left, 1
  store i64 %left.less, ptr %left.p
  %who.p = getelementptr i8, ptr %r, i64 {8 * ARRIVER}
  store i64 %label, ptr %who.p
  call void @settle(ptr %t, ptr %r)
  %i.next = add i64 %i, 1
  br label %arrive
yes:{add("progress", PROGRESS, "1")}
  ret i32 1
no:
  ret i32 0
}}
declare i64 @llvm.cttz.i64(i64, i1)
"""
