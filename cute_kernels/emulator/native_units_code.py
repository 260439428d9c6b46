"""LLVM IR of the functions of `native_units`, and the structures that they share with it."""

from __future__ import annotations

from collections.abc import Sequence

from cute_kernels.emulator.mbarrier import ARRIVER, EXPECTED, MAX_COUNT, PENDING, PHASE, ROW_WORDS, TX
from cute_kernels.emulator.native_memory import (
    CTA_ENTRY,
    CTA_SIZE,
    CTA_SLOTS,
    CTA_TABLE,
    PROGRESS,
    UNIT_BARRIERS,
    UNIT_COMPLETIONS,
    UNIT_EXECUTE,
    UNIT_FLAGS,
    UNIT_JOBS,
    UNIT_LOADED,
    UNIT_MMAS,
    UNIT_PLANS,
    UNIT_STORED,
)
from cute_kernels.emulator.tensor_map import CHUNK
from cute_kernels.emulator.tma import SHARED_ALIGNMENT

#: Flags of the units: waits succeed whenever they can; asynchronous work takes effect when it is issued.
WAITS, EAGER = 1, 2
#: Words of the arguments of a tensor copy: tensor map, shared address, mbarrier, five coordinates.
MAP, SHARED, BARRIER, COORDINATES = range(4)
RANKS = 5
PLANS, NO_MAP = 16, -1
#: Words of a plan, the tensor map as the copy needs it. Dimensions that it lacks have extent 1.
PLAN_KEY, PLAN_HOST, PLAN_CONTENT = 0, 1, 2  # address in the kernel, host address, 64 bytes
PLAN_RANK, PLAN_ELEMENT, PLAN_ROW_BYTES, PLAN_BOX_BYTES, PLAN_BASE, PLAN_SHIFT, PLAN_MASK = range(10, 17)
PLAN_LOADS, PLAN_STORES = 17, 18  # whether machine code may execute them
PLAN_STRIDES, PLAN_TILE, PLAN_EXTENTS = 19, 24, 29  # of every dimension; the stride of the innermost is not used
PLAN_WORDS = 34
PLAN_CONTENT_WORDS = 8


#: MMAs that are kept, a power of two; each in the entry that `job_slot` says: its key, and the address of its job.
JOBS = 256
JOB_ENTRY = 16
KEY_WORDS = 8  # shape, CTA rank, accumulator, A, B, instruction descriptor, whether it accumulates, 0
_HASH = 0x9E3779B97F4A7C15  # 2^64 / golden ratio


def job_slot(key: Sequence[int]) -> int:
    """The entry of an MMA, given its key."""
    mixed = 0
    for word in key:
        mixed = (mixed * 31 + word) & 0xFFFFFFFFFFFFFFFF
    return (mixed * _HASH & 0xFFFFFFFFFFFFFFFF) >> 64 - JOBS.bit_length() + 1


def module() -> str:
    """All of them."""
    return _barriers() + _move() + _find_plan() + _copies() + _mma()


def _field(result: str, base: str, offset: int, type_: str = "i64") -> str:
    """Loads a field of a structure."""
    return f"""
  {result}.p = getelementptr i8, ptr {base}, i64 {offset}
  {result} = load {type_}, ptr {result}.p"""


def _add(name: str, offset: int, value: str) -> str:
    """Adds to a word of the tables."""
    return f"""
  %{name}.p = getelementptr i8, ptr %t, i64 {offset}
  %{name}.old = load i64, ptr %{name}.p
  %{name}.new = add i64 %{name}.old, {value}
  store i64 %{name}.new, ptr %{name}.p"""


def _barriers() -> str:
    """Functions on rows of mbarriers.

    * ``ptr @find(t, address)``: the row of a live barrier, or null.
    * ``void @settle(t, row)``: completes the phase if nothing is pending.
    * ``i32 @mbarrier_passed(t, address, parity)``: 1 if the phase of this parity has completed; 0: Python decides.
    * ``i64 @mbarrier_arrive(t, address, count, bytes, arriver)``: expects the bytes and arrives; the phase, or -1.
    """
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
  %c = getelementptr i8, ptr %t, i64 %c.h{_field("%size", "%c", CTA_SIZE)}
  %inside = icmp ult i64 %offset, %size
  br i1 %inside, label %slot, label %none
slot:{_field("%slots", "%c", CTA_SLOTS, "ptr")}
  %item = lshr i64 %offset, 3
  %slot.p = getelementptr i16, ptr %slots, i64 %item
  %number = load i16, ptr %slot.p
  %live = icmp ne i16 %number, 0
  br i1 %live, label %row, label %none
row:{_field("%rows", "%t", UNIT_BARRIERS, "ptr")}
  %n = zext i16 %number to i64
  %n.0 = sub i64 %n, 1
  %r.o = mul i64 %n.0, {8 * ROW_WORDS}
  %r = getelementptr i8, ptr %rows, i64 %r.o
  ret ptr %r
none:
  ret ptr null
}}
define internal void @settle(ptr %t, ptr %row) {{
entry:{_field("%pending", "%row", 8 * PENDING)}{_field("%tx", "%row", 8 * TX)}
  %left = or i64 %pending, %tx
  %complete = icmp eq i64 %left, 0
  br i1 %complete, label %next, label %done
next:{_field("%phase", "%row", 8 * PHASE)}{_field("%expected", "%row", 8 * EXPECTED)}
  %phase.next = add i64 %phase, 1
  store i64 %phase.next, ptr %phase.p
  store i64 %expected, ptr %pending.p{_add("completions", UNIT_COMPLETIONS, "1")}
  br label %done
done:
  ret void
}}
define i32 @mbarrier_passed(ptr %t, i64 %a, i32 %parity) {{
entry:{_field("%flags", "%t", UNIT_FLAGS)}
  %f = and i64 %flags, {WAITS}
  %plain = icmp ne i64 %f, 0
  br i1 %plain, label %look, label %no
look:
  %row = call ptr @find(ptr %t, i64 %a)
  %missing = icmp eq ptr %row, null
  br i1 %missing, label %no, label %test
test:{_field("%phase", "%row", 8 * PHASE)}
  %low = trunc i64 %phase to i32
  %differ = xor i32 %low, %parity
  %passed = and i32 %differ, 1
  ret i32 %passed
no:
  ret i32 0
}}
define i64 @mbarrier_arrive(ptr %t, i64 %a, i64 %count, i64 %nbytes, i64 %arriver) {{
entry:
  %row = call ptr @find(ptr %t, i64 %a)
  %missing = icmp eq ptr %row, null
  br i1 %missing, label %no, label %check
check:{_field("%pending", "%row", 8 * PENDING)}{_field("%tx", "%row", 8 * TX)}
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
  br i1 %legal, label %arrive, label %no
arrive:{_field("%phase", "%row", 8 * PHASE)}
  store i64 %left, ptr %pending.p
  store i64 %tx.next, ptr %tx.p
  %who.p = getelementptr i8, ptr %row, i64 {8 * ARRIVER}
  store i64 %arriver, ptr %who.p
  call void @settle(ptr %t, ptr %row){_add("progress", PROGRESS, "1")}
  ret i64 %phase
no:
  ret i64 -1
}}
"""


def _chunks(count: int, store: bool) -> str:
    """``count`` chunks of a row at once, whose places differ by an XOR within the row."""
    lines = []
    for i in range(count):
        lines.append(f"""
  %w.s.{i} = xor i64 %turn, {CHUNK * i}
  %w.m.{i} = getelementptr i8, ptr %near, i64 %w.s.{i}
  %w.g.{i} = getelementptr i8, ptr %far, i64 {CHUNK * i}""")
        source, target = (f"%w.m.{i}", f"%w.g.{i}") if store else (f"%w.g.{i}", f"%w.m.{i}")
        lines.append(f"  %w.v.{i} = load <{CHUNK} x i8>, ptr {source}, align 1")
        lines.append(f"  store <{CHUNK} x i8> %w.v.{i}, ptr {target}, align 1")
    return "\n".join(lines)


def _move() -> str:
    """``void @move_load/@move_store(plan, data, offset, start)``: all of a box between shared and global memory.

    Box rows lie one after the other in shared memory, each turned by the swizzle; ``start`` is the global address of
    the first. Rows of 128 bytes, the span of the widest swizzle, are moved without a loop.
    """
    text = ""
    for store in (False, True):
        heads = "".join(
            _field(f"%{name}.{d}", "%plan", 8 * (first + d))
            for name, first in (("n", PLAN_TILE), ("step", PLAN_STRIDES)) for d in range(1, RANKS)
        )  # fmt: skip
        loops = []
        for d in range(RANKS - 1, 0, -1):  # the outermost dimension first
            outer = "entry" if d == RANKS - 1 else f"d{d + 1}"
            place = "%start" if d == RANKS - 1 else f"%g.{d + 1}"
            near = "%first" if d == RANKS - 1 else f"%m.{d + 1}"
            loops.append(f"""
  br label %d{d}
d{d}:
  %i.{d} = phi i64 [0, %{outer}], [%i.{d}.next, %d{d}.end]
  %g.{d} = phi ptr [{place}, %{outer}], [%g.{d}.next, %d{d}.end]
  %m.{d} = phi i64 [{near}, %{outer}], [%m.{d}.next, %d{d}.end]""")
        ends = []
        for d in range(1, RANKS):
            before = "%m.row" if d == 1 else f"%m.{d - 1}.next"
            after = "done" if d == RANKS - 1 else f"d{d + 1}.end"
            ends.append(f"""
d{d}.end:
  %m.{d}.next = phi i64 [{before}, %{"row.end" if d == 1 else f"d{d - 1}.end"}]
  %i.{d}.next = add i64 %i.{d}, 1
  %g.{d}.next = getelementptr i8, ptr %g.{d}, i64 %step.{d}
  %more.{d} = icmp ult i64 %i.{d}.next, %n.{d}
  br i1 %more.{d}, label %d{d}, label %{after}""")
        source, target = ("%near.p", "%far.p") if store else ("%far.p", "%near.p")
        text += f"""
define internal void @move_{"store" if store else "load"}(ptr %plan, ptr %data, i64 %first, ptr %start) {{
entry:{heads}{_field("%row", "%plan", 8 * PLAN_ROW_BYTES)}{_field("%shift", "%plan", 8 * PLAN_SHIFT)}
{_field("%mask", "%plan", 8 * PLAN_MASK)}
  %wide = icmp eq i64 %row, 128
{"".join(loops)}
  %turn.a = lshr i64 %m.1, %shift
  %turn = and i64 %turn.a, %mask
  %near = getelementptr i8, ptr %data, i64 %m.1
  %far = getelementptr i8, ptr %g.1, i64 0
  %m.row = add i64 %m.1, %row
  br i1 %wide, label %whole, label %each
whole:{_chunks(8, store)}
  br label %row.end
each:
  %c = phi i64 [0, %d1], [%c.next, %each]
  %c.turned = xor i64 %c, %turn
  %near.p = getelementptr i8, ptr %near, i64 %c.turned
  %far.p = getelementptr i8, ptr %far, i64 %c
  %v = load <{CHUNK} x i8>, ptr {source}, align 1
  store <{CHUNK} x i8> %v, ptr {target}, align 1
  %c.next = add i64 %c, {CHUNK}
  %c.more = icmp ult i64 %c.next, %row
  br i1 %c.more, label %each, label %row.end
row.end:
  br label %d1.end
{"".join(ends)}
done:
  ret void
}}
"""
    return text


def _find_plan() -> str:
    """``ptr @plan(t, arguments, rank, ability)``: the plan of the tensor map, if the copy is one for machine code.

    It is where the units are eager, the map is known and unchanged, all of the box is in bounds, the first coordinate
    and the shared address are multiples of what the unit asks for, and the box fits into shared memory; else null.
    """
    inside = []
    for d in range(RANKS):
        inside.append(f"""
  %x.{d}.p = getelementptr i64, ptr %x, i64 {COORDINATES + d}
  %x.{d}.w = load i64, ptr %x.{d}.p
  %x.{d}.s = trunc i64 %x.{d}.w to i32
  %x.{d} = sext i32 %x.{d}.s to i64{_field(f"%n.{d}", "%plan", 8 * (PLAN_TILE + d))}
{_field(f"%e.{d}", "%plan", 8 * (PLAN_EXTENTS + d))}
  %room.{d} = sub i64 %e.{d}, %n.{d}
  %below.{d} = icmp sle i64 %x.{d}, %room.{d}
  %above.{d} = icmp sge i64 %x.{d}, 0
  %in.{d} = and i1 %below.{d}, %above.{d}
  %all.{d} = and i1 %in.{d}, {f"%all.{d - 1}" if d else "true"}""")
    return f"""
define internal ptr @plan(ptr %t, ptr %x, i32 %rank, i64 %ability) {{
entry:{_field("%flags", "%t", UNIT_FLAGS)}
  %f = and i64 %flags, {EAGER}
  %eager = icmp ne i64 %f, 0
  br i1 %eager, label %search, label %none
search:
  %map = load i64, ptr %x{_field("%plans", "%t", UNIT_PLANS, "ptr")}
  br label %each
each:
  %i = phi i64 [0, %search], [%i.next, %other]
  %plan.o = mul i64 %i, {8 * PLAN_WORDS}
  %plan = getelementptr i8, ptr %plans, i64 %plan.o
  %key = load i64, ptr %plan
  %hit = icmp eq i64 %key, %map
  br i1 %hit, label %compare, label %other
other:
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, {PLANS}
  br i1 %more, label %each, label %none
compare:{_field("%host", "%plan", 8 * PLAN_HOST, "ptr")}
  %then.p = getelementptr i8, ptr %plan, i64 {8 * PLAN_CONTENT}
  %now = load <{PLAN_CONTENT_WORDS} x i64>, ptr %host, align 1
  %then = load <{PLAN_CONTENT_WORDS} x i64>, ptr %then.p, align 8
  %changed = icmp ne <{PLAN_CONTENT_WORDS} x i64> %now, %then
  %changes = bitcast <{PLAN_CONTENT_WORDS} x i1> %changed to i8
  %same = icmp eq i8 %changes, 0
  br i1 %same, label %check, label %none
check:{_field("%rank.p", "%plan", 8 * PLAN_RANK)}
  %rank.w = zext i32 %rank to i64
  %ranked = icmp eq i64 %rank.p, %rank.w
  %able.p = getelementptr i64, ptr %plan, i64 %ability
  %able.w = load i64, ptr %able.p
  %able = icmp ne i64 %able.w, 0
  %kind = and i1 %ranked, %able
{"".join(inside)}
{_field("%element", "%plan", 8 * PLAN_ELEMENT)}
  %x.bytes = mul i64 %x.0, %element
  %x.low = and i64 %x.bytes, {CHUNK - 1}
  %whole = icmp eq i64 %x.low, 0
  %s.p = getelementptr i64, ptr %x, i64 {SHARED}
  %s = load i64, ptr %s.p
  %s.low = and i64 %s, {SHARED_ALIGNMENT - 1}
  %aligned = icmp eq i64 %s.low, 0
  %s.rank = lshr i64 %s, 24
  %ranks = load i64, ptr %t
  %exists = icmp ult i64 %s.rank, %ranks
  %a.1 = and i1 %kind, %all.{RANKS - 1}
  %a.2 = and i1 %whole, %aligned
  %a.3 = and i1 %a.1, %a.2
  %legal = and i1 %a.3, %exists
  br i1 %legal, label %fit, label %none
fit:
  %c.o = mul i64 %s.rank, {CTA_ENTRY}
  %c.h = add i64 %c.o, {CTA_TABLE}
  %c = getelementptr i8, ptr %t, i64 %c.h{_field("%size", "%c", CTA_SIZE)}{_field("%box", "%plan", 8 * PLAN_BOX_BYTES)}
  %offset = and i64 %s, 16777215
  %end = add i64 %offset, %box
  %fits = icmp ule i64 %end, %size
  br i1 %fits, label %good, label %none
good:
  ret ptr %plan
none:
  ret ptr null
}}
"""


def _place() -> str:
    """The global address of the box, and the data and offset of its shared memory."""
    lines = [_field("%base", "%plan", 8 * PLAN_BASE), _field("%element", "%plan", 8 * PLAN_ELEMENT)]
    total = "%base"
    for d in range(RANKS):
        step = "%element" if d == 0 else f"%stride.{d}"
        if d:
            lines.append(_field(step, "%plan", 8 * (PLAN_STRIDES + d)))
        lines.append(f"""
  %y.{d}.p = getelementptr i64, ptr %x, i64 {COORDINATES + d}
  %y.{d} = load i64, ptr %y.{d}.p
  %y.{d}.n = and i64 %y.{d}, 4294967295
  %y.{d}.b = mul i64 %y.{d}.n, {step}
  %sum.{d} = add i64 {total}, %y.{d}.b""")
        total = f"%sum.{d}"
    return f"""{"".join(lines)}
  %start = inttoptr i64 {total} to ptr
  %s.p = getelementptr i64, ptr %x, i64 {SHARED}
  %s = load i64, ptr %s.p
  %s.rank = lshr i64 %s, 24
  %offset = and i64 %s, 16777215
  %c.o = mul i64 %s.rank, {CTA_ENTRY}
  %c.h = add i64 %c.o, {CTA_TABLE}
  %c = getelementptr i8, ptr %t, i64 %c.h
  %data = load ptr, ptr %c{_field("%nbytes", "%plan", 8 * PLAN_BOX_BYTES)}"""


def _copies() -> str:
    """The tensor copies: 1 if done, 0 if Python has to do it.

    * ``i32 @tensor_load(t, arguments, rank, pair)``: to shared memory, its bytes counted on the mbarrier; ``pair``:
      that may be in the other CTA of the pair.
    * ``i32 @tensor_store(t, arguments, rank)``: to global memory.
    """
    return f"""
define i32 @tensor_load(ptr %t, ptr %x, i32 %rank, i32 %pair) {{
entry:
  %plan = call ptr @plan(ptr %t, ptr %x, i32 %rank, i64 {PLAN_LOADS})
  %unknown = icmp eq ptr %plan, null
  br i1 %unknown, label %no, label %signal
signal:
  %b.p = getelementptr i64, ptr %x, i64 {BARRIER}
  %b = load i64, ptr %b.p
  %row = call ptr @find(ptr %t, i64 %b)
  %missing = icmp eq ptr %row, null
  br i1 %missing, label %no, label %check
check:{_place()}{_field("%pending", "%row", 8 * PENDING)}{_field("%tx", "%row", 8 * TX)}
  %b.rank = lshr i64 %b, 24
  %apart = xor i64 %b.rank, %s.rank
  %paired = zext i32 %pair to i64
  %near = icmp ule i64 %apart, %paired
  %tx.next = sub i64 %tx, %nbytes
  %in.range = icmp sge i64 %tx.next, -{MAX_COUNT}
  %over = icmp slt i64 %tx.next, 0
  %last = icmp eq i64 %pending, 0
  %excess = and i1 %over, %last
  %expected = xor i1 %excess, true
  %l.1 = and i1 %near, %in.range
  %legal = and i1 %l.1, %expected
  br i1 %legal, label %go, label %no
go:
  call void @move_load(ptr %plan, ptr %data, i64 %offset, ptr %start)
  store i64 %tx.next, ptr %tx.p
  call void @settle(ptr %t, ptr %row){_add("progress", PROGRESS, "1")}{_add("loaded", UNIT_LOADED, "%nbytes")}
  ret i32 1
no:
  ret i32 0
}}
define i32 @tensor_store(ptr %t, ptr %x, i32 %rank) {{
entry:
  %plan = call ptr @plan(ptr %t, ptr %x, i32 %rank, i64 {PLAN_STORES})
  %unknown = icmp eq ptr %plan, null
  br i1 %unknown, label %no, label %go
go:{_place()}
  call void @move_store(ptr %plan, ptr %data, i64 %offset, ptr %start)
{_add("progress", PROGRESS, "1")}{_add("stored", UNIT_STORED, "%nbytes")}
  ret i32 1
no:
  ret i32 0
}}
"""


def _mma() -> str:
    """``i32 @tensor_mma(t, key)``: 1 if the MMA was executed (`native_mma`), 0 if Python has to do it."""
    mixing, mixed = [], "0"
    for i in range(KEY_WORDS):
        mixing.append(f"""
  %k.{i}.p = getelementptr i64, ptr %x, i64 {i}
  %k.{i} = load i64, ptr %k.{i}.p
  %k.{i}.m = mul i64 {mixed}, 31
  %mix.{i} = add i64 %k.{i}.m, %k.{i}""")
        mixed = f"%mix.{i}"
    key = f"<{KEY_WORDS} x i64>"
    return f"""
define i32 @tensor_mma(ptr %t, ptr %x) {{
entry:{_field("%flags", "%t", UNIT_FLAGS)}
  %f = and i64 %flags, {EAGER}
  %eager = icmp ne i64 %f, 0
  br i1 %eager, label %search, label %no
search:{"".join(mixing)}
  %hash = mul i64 {mixed}, {_HASH - (1 << 64)}
  %slot = lshr i64 %hash, {64 - JOBS.bit_length() + 1}{_field("%jobs", "%t", UNIT_JOBS, "ptr")}
  %slot.o = mul i64 %slot, {8 * JOB_ENTRY}
  %entry.p = getelementptr i8, ptr %jobs, i64 %slot.o
  %known = load {key}, ptr %entry.p, align 8
  %wanted = load {key}, ptr %x, align 8
  %differ = icmp ne {key} %known, %wanted
  %bits = bitcast <{KEY_WORDS} x i1> %differ to i{KEY_WORDS}
  %same = icmp eq i{KEY_WORDS} %bits, 0
  br i1 %same, label %found, label %no
found:{_field("%job", "%entry.p", 8 * KEY_WORDS, "ptr")}
  %empty = icmp eq ptr %job, null
  br i1 %empty, label %no, label %go
go:{_field("%execute", "%t", UNIT_EXECUTE, "ptr")}
  %done = call i32 %execute(ptr %job)
  %executed = icmp ne i32 %done, 0
  br i1 %executed, label %yes, label %no
yes:{_add("progress", PROGRESS, "1")}{_add("mmas", UNIT_MMAS, "1")}
  ret i32 1
no:
  ret i32 0
}}
"""
