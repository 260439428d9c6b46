"""Atomics: atom, red; their asynchronous forms on the shared memory of a cluster, st.async and red.async; st.bulk."""

import itertools
from collections.abc import Sequence

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.isa.instructions.accesses import watch
from cute_kernels.emulator.isa.instructions.memory import SPACES, address_value
from cute_kernels.emulator.isa.instructions.sync import each_lane, lane_numbers
from cute_kernels.emulator.isa.ptx.families import always_varies, as_integer
from cute_kernels.emulator.isa.ptx.operand_syntax import data_operand, policy_operand
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS, Instruction, Vector, items_of
from cute_kernels.emulator.machine.graph.block import BlockBuilder, Call
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import CANONICAL, Pack, Value
from cute_kernels.emulator.machine.state.async_engine import AsyncOp
from cute_kernels.emulator.machine.state.lane_masks import LaneValues
from cute_kernels.emulator.machine.units.copies.generic_accesses import space_of
from cute_kernels.emulator.machine.units.copies.reductions import combine
from cute_kernels.emulator.machine.units.sm import Warp
from cute_kernels.emulator.races.memory_order import Strength, access_strength, lane_vector
from cute_kernels.emulator.races.tracker import Operation

_NAMES = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_UPDATES = (
    "and|or|xor b{32,64}", "inc|dec u32", "min|max {u,s}{32,64}", "add u32|s32|u64|f32|f64",
    "add noftz f16|f16x2|bf16|bf16x2", "add v{2,4} f32", "add|min|max noftz v{2,4,8} f16|bf16",
    "add|min|max noftz v{2,4} f16x2|bf16x2",
)  # fmt: skip
_EXCHANGES = ("cas b{16,32,64,128}", "exch b{32,64,128}")
_STORE, _ATOMIC = CONSTANTS["METER_STORE"], CONSTANTS["METER_ATOMIC"]
_MOST_BULK = 1 << 24  # bytes of st.bulk


def atomic(
    warp: Warp, mask: int, space: str, name: str, type_: str, strength: Strength, address: LaneValues,
    values: tuple[LaneValues, ...],
) -> np.ndarray:
    """Lane by lane, in lane order: returns the old values, [32] or (vectors) [elements, 32]. ``warp``, ``mask``: who
    executes. ``space``: ``"global"``, ``"shared"`` or ``"generic"``. ``name``: operation. ``type_``: of one element.
    ``strength``: how it orders other accesses. ``address``: of each lane. ``values``: the vector to combine with, or
    for cas what to compare with and the new one; of 128 bits both halves."""
    size = TYPE_BITS[type_] // 8
    count = len(values) // 2 if name == "cas" else len(values)
    dtype = np.dtype(f"u{size}")
    old = np.zeros((count, 32), dtype)
    operands = [np.broadcast_to(np.asarray(value, dtype), 32) for value in values]
    addresses = np.broadcast_to(np.asarray(address).astype(np.uint64), 32)
    if warp.cluster.meter is not None:
        _count(warp, mask, space, addresses, size * count)
    changed = False
    for lane in range(32):
        if not mask >> lane & 1:
            continue
        where = int(addresses[lane])
        if where % (size * count):
            raise IllegalAccess(f"misaligned atomic of {size * count} bytes at {where:#x}").know("misaligned")
        given = np.array([operand[lane] for operand in operands], dtype)
        old[:, lane], different = _update(warp, *_place(warp, space, where), name, type_, given)
        changed |= different
    if changed:
        warp.cluster.progress += 1
    else:
        warp.cluster.look(mask, addresses, size * count)
    if warp.cluster.tracker is not None:
        _watch(warp, mask, space, addresses, size * count, strength)
    return old if count > 1 else old[0]


def _place(warp: Warp, space: str, address: int) -> tuple[str, int]:
    """(global or shared; address in it), which are all that atomics may access (PTX ISA, "atom")."""
    kind, where = space_of(space, address)
    if kind not in ("global", "shared"):
        raise IllegalAccess(
            f"atomic at {address:#x}, an address of {'local memory' if kind == 'local' else 'the kernel parameters'}: "
            "atomics are for global and shared memory"
        ).know("out-of-bounds")
    return kind, where


def _update(warp: Warp, space: str, where: int, name: str, type_: str, given: np.ndarray) -> tuple[np.ndarray, bool]:
    """One read-modify-write; returns what was there, and whether that is different now."""
    count = len(given) // 2 if name == "cas" else len(given)
    nbytes = count * given.itemsize
    if space == "shared":
        cells = warp.cluster.memory.view(where, nbytes)
    else:
        cells = warp.cluster.gmem.view(where, nbytes, write=True)
    before = np.frombuffer(bytes(cells), given.dtype)
    if name == "cas":
        new = given[count:] if (before == given[:count]).all() else before
    else:
        new = combine(name, type_, before.view(np.uint8), given.view(np.uint8), flush=space == "global")
    raw = np.ascontiguousarray(new).view(np.uint8)
    if space == "shared":
        cells = warp.cluster.memory.view(where, nbytes, write=True)
    cells[:] = raw
    return before, raw.tobytes() != before.tobytes()


def _watch(warp: Warp, mask: int, space: str, addresses: np.ndarray, nbytes: int, strength: Strength) -> None:
    lanes = lane_vector(mask).tolist()
    places = [space_of(space, int(addresses[lane])) for lane in lanes]
    for kind in ("shared", "global"):
        chosen = sum(1 << lane for lane, (found, _) in zip(lanes, places) if found == kind)
        some = np.array([place for found, place in places if found == kind], np.int64)
        watch(warp, chosen, kind, some, nbytes, True, strength)


def _count(warp: Warp, mask: int, space: str, addresses: np.ndarray, size: int) -> None:
    places, chosen = np.zeros(32, np.uint64), {"shared": 0, "global": 0}
    for lane in lane_vector(mask).tolist():
        kind, places[lane] = space_of(space, int(addresses[lane]))
        if kind in chosen:
            chosen[kind] |= 1 << lane
    for kind, lanes in chosen.items():
        warp.cluster.meter.access(_ATOMIC, kind, places.view(np.int64), size, lanes)


def _parts(instruction: Instruction) -> tuple[str, str, str, int]:
    """(space, operation, element type, vector length)."""
    space, name, count = "generic", "", 1
    type_ = instruction.parts[-1]
    for part in instruction.parts[1:-1]:
        if part in ("global", "shared", "shared::cta", "shared::cluster"):
            space = SPACES[part]
        elif part in _NAMES and not name:
            name = part
        elif part in _VECTORS:
            count = _VECTORS[part]
    return space, name, type_, count


def lower_atomic(block: BlockBuilder, instruction: Instruction, first: int) -> tuple[list[Value], int]:
    space, name, type_, count = _parts(instruction)
    operands = list(instruction.operands[first:])
    if "L2::cache_hint" in instruction.parts:
        operands.pop()  # an eviction priority
    bits = TYPE_BITS[type_]
    address = address_value(block, operands[0], 32 if space == "shared" else 64)
    items = operands[1].items if isinstance(operands[1], Vector) and bits < 128 else operands[1:]
    strength = access_strength(instruction.parts[1:-1], atomic=True, write=instruction.parts[0] == "red")
    if bits == 128:
        halves = [block.whole(half) for item in items for half in block.split(block.value(item, bits), 2)]
        call = Call(atomic, [space, name, "b64", strength, address, tuple(halves)])
        return [Pack(block.anchor(call, [("u64", False)] * 2, [address, *halves]))], 1
    values = [block.whole(block.value(item, bits)) for item in items]
    call = Call(atomic, [space, name, type_, strength, address, tuple(values)])
    return block.anchor(call, [(CANONICAL[bits], False)] * count, [address, *values]), count


def update_operands(parts: tuple[str, ...]) -> str:
    data = "b, c" if "cas" in parts else data_operand("b", "T", parts)
    return f"[a], {data}{policy_operand(parts)}"


def _grammar(orders: str, forms: Sequence[str]) -> str:
    texts = [f"{orders}? $scope? global|$shared? $policy? {form}" for form in forms]
    return "; ".join((*texts, "$policy|v{2,4,8} / $shared"))


@family(
    "atom", varies=always_varies, operands=lambda parts: f"{data_operand('d', 'T', parts)}, {update_operands(parts)}",
    qualifiers=_grammar("relaxed|acquire|release|acq_rel", (*_UPDATES, *_EXCHANGES)),
)  # fmt: skip
def _atom(block: BlockBuilder, instruction: Instruction) -> None:
    """atom on integers, f16, bf16 (packed and vectors), f32, f64, exch and cas of b128; global, shared, generic."""
    results, _ = lower_atomic(block, instruction, 1)
    destination = instruction.operands[0]
    items = destination.items if isinstance(destination, Vector) and results[0].bits < 128 else (destination,)
    for item, value in zip(items, results):
        block.define(item, value)


@family("red", destinations=0, operands=update_operands, qualifiers=_grammar("relaxed|release", _UPDATES))
def _red(block: BlockBuilder, instruction: Instruction) -> None:
    """red: atom without a result."""
    lower_atomic(block, instruction, 0)


# --- asynchronous stores and reductions in a cluster ------------------------------------------------------------------


def store_async(
    warp: Warp, mask: int, name: str, type_: str, address: LaneValues, barrier: LaneValues,
    values: tuple[LaneValues, ...],
) -> None:
    """st.async (``name`` is "") and red.async by each executing lane: data first, then its bytes on the mbarrier."""
    warp.cluster.progress += 1
    cluster = warp.cluster
    nbytes, issued = TYPE_BITS[type_] // 8, (warp.executing(), warp.number)
    dtype = np.dtype(f"u{nbytes}")
    if cluster.meter is not None:
        places = np.broadcast_to(np.asarray(address, np.int64), 32)
        cluster.meter.access(_STORE, "shared", places, nbytes * len(values), mask)
    for lane, (where, signal, *given) in zip(lane_numbers(mask), each_lane(mask, address, barrier, *values)):
        if where >> 24 != signal >> 24:
            raise IllegalAccess(f"asynchronous store to CTA {where >> 24} signals an mbarrier of CTA {signal >> 24}")
        data = np.array(given, dtype)
        if where % data.nbytes:
            message = f"misaligned asynchronous store of {data.nbytes} bytes at {where:#x}"
            raise IllegalAccess(message).know("misaligned")

        text = f"{name or 'st'}.async of {data.nbytes} bytes by {warp.label} lane {lane}"
        watched = None
        if warp.agent is not None:
            cluster.tracker.enter(warp.agent, lane)
            # The PTX ISA names the operations of the async proxy, and these are not among them.
            watched = cluster.tracker.copy(signal, text, reduces=bool(name), generic=True)
            rank, offset = cluster.memory.resolve(where)
            cluster.ctas[rank].shared.check_bounds(offset, data.nbytes)
            cluster.tracker.async_write(rank, offset, data.nbytes, watched)

        def run(
            where: int = where, signal: int = signal, data: np.ndarray = data, watched: Operation | None = watched
        ) -> None:
            cells = cluster.memory.view(where, data.nbytes, write=not name)
            if watched is not None:
                cluster.tracker.complete_copy(watched, signal, where >> 24)
            cells[:] = combine(name, type_, cells.copy(), data.view(np.uint8)) if name else data.view(np.uint8)
            cluster.barriers.complete_tx(signal, data.nbytes, issued)

        cluster.async_stores += 1
        cluster.engine.submit(AsyncOp(("st.async", cluster.async_stores), run, text))


def store_bulk(warp: Warp, mask: int, space: str, address: LaneValues, nbytes: LaneValues) -> None:
    """st.bulk by each executing lane: zeros; where several lanes write one place, that is one write of all of them."""
    warp.cluster.progress += 1
    ranges = []
    for lane, (start, count) in zip(lane_numbers(mask), each_lane(mask, address, nbytes)):
        found, where = space_of(space, start)
        if found != "shared" or where % 8 or count % 8 or count > _MOST_BULK:
            raise IllegalAccess(
                f"st.bulk of {count} bytes at {start:#x}; legal are multiples of 8, up to {_MOST_BULK:,} bytes, at "
                "multiples of 8 in shared memory"
            )
        if count:
            ranges.append((lane, where, where + count))
    edges = sorted({edge for _, *ends in ranges for edge in ends})
    for first, end in itertools.pairwise(edges):
        lanes = [lane for lane, start, stop in ranges if start <= first < stop]
        if lanes:
            cells = warp.cluster.memory.view(first, end - first, write=True)
            chosen = sum(1 << lane for lane in lanes)
            watch(warp, chosen, "shared", np.full(len(lanes), first, np.int64), end - first, True)
            cells[:] = 0


@family("st.bulk", destinations=0, operands="[a], size:b64, initval:imm", qualifiers="weak? shared::cta?")
def _store_bulk(block: BlockBuilder, instruction: Instruction) -> None:
    """st.bulk: zeros in shared memory."""
    if as_integer(instruction, instruction.operands[2]) != 0:
        raise instruction.refuse("initval of st.bulk is 0")
    space, bits = ("shared", 32) if "shared::cta" in instruction.parts else ("generic", 64)
    address = address_value(block, instruction.operands[0], bits)
    block.call(store_bulk, space, address, block.value(instruction.operands[1], 64))


def _lower_async(block: BlockBuilder, instruction: Instruction, name: str, type_: str) -> None:
    target, source, barrier = instruction.operands
    values = [block.whole(block.value(item, TYPE_BITS[type_])) for item in items_of(source)]
    addresses = [address_value(block, target), address_value(block, barrier)]
    block.anchor(Call(store_async, [name, type_, *addresses, tuple(values)]), [], [*addresses, *values])


_ASYNC = "shared::cluster? mbarrier::complete_tx::bytes"


def _async_operands(parts: tuple[str, ...]) -> str:
    return f"[a], {data_operand('b', 'T', parts)}, [mbar]"


@family(
    "st.async", destinations=0, operands=_async_operands,
    qualifiers=f"weak? {_ASYNC} v{{2,4}}? {{b,u,s}}32|f32; weak? {_ASYNC} v2? {{b,u,s}}64|f64",
)  # fmt: skip
def _st_async(block: BlockBuilder, instruction: Instruction) -> None:
    """st.async to the shared memory of a CTA of the cluster, with mbarrier completion."""
    _lower_async(block, instruction, "", instruction.parts[-1])


@family(
    "red.async", destinations=0, operands=_async_operands,
    qualifiers="; ".join(
        f"relaxed? cluster? {_ASYNC} {form}"
        for form in ("inc|dec u32", "min|max {u,s}32", "and|or|xor b32", "add u32|s32|u64")
    )
    + "; relaxed > cluster; cluster > relaxed",
)  # fmt: skip
def _red_async(block: BlockBuilder, instruction: Instruction) -> None:
    """red.async on integers in the shared memory of a CTA of the cluster, with mbarrier completion."""
    *_, name, type_ = instruction.parts
    _lower_async(block, instruction, name, type_)
