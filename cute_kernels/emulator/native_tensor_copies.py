"""LLVM IR of tensor copies in machine code, for `native_units`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES, word_count, words
from cute_kernels.emulator.core.library import address
from cute_kernels.emulator.mbarrier import MAX_COUNT
from cute_kernels.emulator.native_memory import CTA_ENTRY, CTA_TABLE, Cta, Tables
from cute_kernels.emulator.tensor_map import CHUNK
from cute_kernels.emulator.tma import SHARED_ALIGNMENT

_Barrier, _Plan, _CopyArguments = (STRUCTURES[name] for name in ("Barrier", "Plan", "CopyArguments"))
PENDING, PHASE, POINT, TX = (getattr(_Barrier, name).offset // 8 for name in ("pending", "phase", "point", "tx"))
_PLAN_NAMES = (
    "base", "box_bytes", "content", "element", "extents", "host", "loads", "mask", "pitch", "rank", "row_bytes", "rows",
    "shift", "stores", "strides", "tile",
)  # fmt: skip
(
    PLAN_BASE, PLAN_BOX_BYTES, PLAN_CONTENT, PLAN_ELEMENT, PLAN_EXTENTS, PLAN_HOST, PLAN_LOADS, PLAN_MASK, PLAN_PITCH,
    PLAN_RANK, PLAN_ROW_BYTES, PLAN_ROWS, PLAN_SHIFT, PLAN_STORES, PLAN_STRIDES, PLAN_TILE,
) = (getattr(_Plan, name).offset // 8 for name in _PLAN_NAMES)  # fmt: skip
PLAN_WORDS, PLAN_CONTENT_WORDS = ctypes.sizeof(_Plan) // 8, CONSTANTS["CONTENT_WORDS"]
SHARED, BARRIER, COORDINATES, WHO, LANE, INSTRUCTION = (
    getattr(_CopyArguments, name).offset // 8
    for name in ("shared", "barrier", "coordinates", "warp", "lane", "instruction")
)
PLANS, RANKS, EAGER, TEXTS, TEXT_KEY = (CONSTANTS[name] for name in ("PLANS", "RANKS", "EAGER", "TEXTS", "TEXT_KEY"))
TEXT_ENTRY = ctypes.sizeof(STRUCTURES["TextEntry"]) // 8
COPY_WORDS, COPY_COUNT = words("WatchedCopy"), word_count("WatchedCopy")
OWN_SHADOW = words("Context")["shadow"]
_HASH = 0x9E3779B97F4A7C15  # of `key_slot`


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
            field(f"%{name}.{d}", "%plan", 8 * (first + d))
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
entry:{heads}{field("%row", "%plan", 8 * PLAN_ROW_BYTES)}{field("%shift", "%plan", 8 * PLAN_SHIFT)}
{field("%mask", "%plan", 8 * PLAN_MASK)}
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
  %x.{d} = sext i32 %x.{d}.s to i64{field(f"%n.{d}", "%plan", 8 * (PLAN_TILE + d))}
{field(f"%e.{d}", "%plan", 8 * (PLAN_EXTENTS + d))}
  %room.{d} = sub i64 %e.{d}, %n.{d}
  %below.{d} = icmp sle i64 %x.{d}, %room.{d}
  %above.{d} = icmp sge i64 %x.{d}, 0
  %in.{d} = and i1 %below.{d}, %above.{d}
  %all.{d} = and i1 %in.{d}, {f"%all.{d - 1}" if d else "true"}""")
    return f"""
define internal ptr @plan(ptr %t, ptr %x, i32 %rank, i64 %ability) {{
entry:{field("%flags", "%t", Tables.unit_flags.offset)}
  %f = and i64 %flags, {EAGER}
  %eager = icmp ne i64 %f, 0
  br i1 %eager, label %search, label %none
search:
  %map = load i64, ptr %x{field("%plans", "%t", Tables.plans.offset, "ptr")}
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
compare:{field("%host", "%plan", 8 * PLAN_HOST, "ptr")}
  %then.p = getelementptr i8, ptr %plan, i64 {8 * PLAN_CONTENT}
  %now = load <{PLAN_CONTENT_WORDS} x i64>, ptr %host, align 1
  %then = load <{PLAN_CONTENT_WORDS} x i64>, ptr %then.p, align 8
  %changed = icmp ne <{PLAN_CONTENT_WORDS} x i64> %now, %then
  %changes = bitcast <{PLAN_CONTENT_WORDS} x i1> %changed to i8
  %same = icmp eq i8 %changes, 0
  br i1 %same, label %check, label %none
check:{field("%rank.p", "%plan", 8 * PLAN_RANK)}
  %rank.w = zext i32 %rank to i64
  %ranked = icmp eq i64 %rank.p, %rank.w
  %able.p = getelementptr i64, ptr %plan, i64 %ability
  %able.w = load i64, ptr %able.p
  %able = icmp ne i64 %able.w, 0
  %kind = and i1 %ranked, %able
{"".join(inside)}
{field("%element", "%plan", 8 * PLAN_ELEMENT)}
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
  %c = getelementptr i8, ptr %t, i64 %c.h{field("%size", "%c", Cta.size.offset)}
{field("%box", "%plan", 8 * PLAN_BOX_BYTES)}
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
    lines = [field("%base", "%plan", 8 * PLAN_BASE), field("%element", "%plan", 8 * PLAN_ELEMENT)]
    total = "%base"
    for d in range(RANKS):
        step = "%element" if d == 0 else f"%stride.{d}"
        if d:
            lines.append(field(step, "%plan", 8 * (PLAN_STRIDES + d)))
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
  %data = load ptr, ptr %c{field("%nbytes", "%plan", 8 * PLAN_BOX_BYTES)}"""


def _states() -> str:
    """``i1 @all_data/@no_barrier(states, n)``: whether bytes hold data, none is of an mbarrier; n: a multiple of 16."""
    text = ""
    wants = {"all_data": "eq <16 x i8> %v, splat (i8 1)", "no_barrier": "ne <16 x i8> %v, splat (i8 2)"}
    for name, wanted in wants.items():
        text += f"""
define internal i1 @{name}(ptr %states, i64 %n) {{
entry:
  br label %each
each:
  %i = phi i64 [0, %entry], [%i.next, %each]
  %so.far = phi <16 x i1> [splat (i1 1), %entry], [%all, %each]
  %p = getelementptr i8, ptr %states, i64 %i
  %v = load <16 x i8>, ptr %p, align 1
  %good = icmp {wanted}
  %all = and <16 x i1> %so.far, %good
  %i.next = add i64 %i, 16
  %more = icmp ult i64 %i.next, %n
  br i1 %more, label %each, label %done
done:
  %bits = bitcast <16 x i1> %all to i16
  %every = icmp eq i16 %bits, -1
  ret i1 %every
}}
"""
    return text


def _watch(store: bool) -> str:
    """With detectors, after ``ready``: states of the bytes, and what the race detector says. Goes on at ``go``, or at
    ``no`` where Python has to decide; that includes stores from another CTA.
    """
    name, signal = ("watch_store", "-1") if store else ("watch_load", "%b")
    values = {
        "lane": "%lane", "instruction": "%instruction", "text": "%text", "point": "0" if store else "%point",
        "pair": "0" if store else "%apart", "phase": "0" if store else "%phase",
        "completes": "0" if store else "%completes", "shadow": "%shadow", "offset": "%offset", "nbytes": "%nbytes",
        "start": "%start.i", "pitch": "%pitch", "count": "%rows", "row": "%row.bytes",
    }  # fmt: skip
    words_of_copy = "".join(
        f"""
  %c.{word} = getelementptr i64, ptr %w, i64 {COPY_WORDS[word]}
  store i64 {value}, ptr %c.{word}"""
        for word, value in values.items()
    )
    fields = "".join(
        field(f"%{name}", base, 8 * at) for name, base, at in (
            ("lane", "%x", LANE), ("who", "%x", WHO), ("instruction", "%x", INSTRUCTION), ("rows", "%plan", PLAN_ROWS),
            ("pitch", "%plan", PLAN_PITCH), ("row.bytes", "%plan", PLAN_ROW_BYTES),
        )
    )  # fmt: skip
    own = f"""{field("%context", "%t", Tables.context.offset, "ptr")}
{field("%own", "%context", 8 * OWN_SHADOW)}
  %sound = icmp eq i64 %own, %shadow"""
    known = f"""{field("%point", "%row", 8 * POINT)}
  %sound = icmp ne i64 %point, 0"""
    find = find_entry("%entry.p", "%f", ["%nbytes", "%s", signal, "%who"], "%texts", TEXTS, TEXT_ENTRY, "no")
    return f"""{field("%states", "%c", Cta.states.offset, "ptr")}
  %states.first = getelementptr i8, ptr %states, i64 %offset
  %as.wanted = call i1 @{"all_data" if store else "no_barrier"}(ptr %states.first, i64 %nbytes)
  br i1 %as.wanted, label %described, label %no
described:{fields}{field("%shadow", "%c", Cta.shadow.offset)}
  %start.i = ptrtoint ptr %start to i64
  %in.rows = icmp ne i64 %rows, 0{own if store else known}
  %simple = and i1 %in.rows, %sound
  br i1 %simple, label %named, label %no
named:{field("%texts", "%t", Tables.texts.offset, "ptr")}{find}{field("%text", "%entry.p", 8 * TEXT_KEY)}{words_of_copy}
  %told = call i32 inttoptr (i64 {address(name)} to ptr)(ptr %t, ptr %w)
  %in.order = icmp ne i32 %told, 0
  br i1 %in.order, label %go, label %no
go:"""


def _load(watched: bool) -> str:
    words = f"\n  %w = alloca [{COPY_COUNT} x i64], align 64" if watched else ""
    filled = "\n  call void @llvm.memset.p0.i64(ptr %states.first, i8 1, i64 %nbytes, i1 0)" if watched else ""
    return f"""
define i32 @{"watched_" if watched else ""}tensor_load(ptr %t, ptr %x, i32 %rank, i32 %pair) {{
entry:{words}
  %plan = call ptr @plan(ptr %t, ptr %x, i32 %rank, i64 {PLAN_LOADS})
  %unknown = icmp eq ptr %plan, null
  br i1 %unknown, label %no, label %signal
signal:
  %b.p = getelementptr i64, ptr %x, i64 {BARRIER}
  %b = load i64, ptr %b.p
  %row = call ptr @find(ptr %t, i64 %b)
  %missing = icmp eq ptr %row, null
  br i1 %missing, label %no, label %check
check:{_place()}{field("%pending", "%row", 8 * PENDING)}{field("%tx", "%row", 8 * TX)}
{field("%phase", "%row", 8 * PHASE)}
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
  %ends = or i64 %pending, %tx.next
  %completes.b = icmp eq i64 %ends, 0
  %completes = zext i1 %completes.b to i64
  %l.1 = and i1 %near, %in.range
  %legal = and i1 %l.1, %expected
  br i1 %legal, label %ready, label %no
ready:{_watch(False) if watched else ""}
  call void @move_load(ptr %plan, ptr %data, i64 %offset, ptr %start){filled}
  store i64 %tx.next, ptr %tx.p
  call void @settle(ptr %t, ptr %row){add("progress", Tables.progress.offset, "1")}
{add("loaded", Tables.loaded.offset, "%nbytes")}
  ret i32 1
no:
  ret i32 0
}}
"""


def _store(watched: bool) -> str:
    words = f"\n  %w = alloca [{COPY_COUNT} x i64], align 64" if watched else ""
    return f"""
define i32 @{"watched_" if watched else ""}tensor_store(ptr %t, ptr %x, i32 %rank) {{
entry:{words}
  %plan = call ptr @plan(ptr %t, ptr %x, i32 %rank, i64 {PLAN_STORES})
  %unknown = icmp eq ptr %plan, null
  br i1 %unknown, label %no, label %ready
ready:{_place()}{_watch(True) if watched else ""}
  call void @move_store(ptr %plan, ptr %data, i64 %offset, ptr %start)
{add("progress", Tables.progress.offset, "1")}{add("stored", Tables.stored.offset, "%nbytes")}
  ret i32 1
no:
  ret i32 0
}}
"""


def copies() -> str:
    """The tensor copies: 1 if done, 0 if Python has to do it.

    * ``i32 @tensor_load(t, arguments, rank, pair)``: to shared memory, its bytes counted on the mbarrier; ``pair``:
      that may be in the other CTA of the pair.
    * ``i32 @tensor_store(t, arguments, rank)``: to global memory.
    * ``@watched_tensor_load`` and ``@watched_tensor_store`` do the same with detectors.
    """
    barriers = f"""
define internal ptr @find(ptr %t, i64 %a) {{
  %r = call ptr inttoptr (i64 {address("barrier_at")} to ptr)(ptr %t, i64 %a)
  ret ptr %r
}}
define internal void @settle(ptr %t, ptr %row) {{
  call void inttoptr (i64 {address("barrier_settle")} to ptr)(ptr %t, ptr %row)
  ret void
}}
"""
    text = barriers + _move() + _find_plan() + _states() + "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)\n"
    return text + "".join(_load(watched) + _store(watched) for watched in (False, True))
