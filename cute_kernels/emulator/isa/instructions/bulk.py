"""Bulk asynchronous copies and reductions: TMA tensor loads and stores, ranges of bytes, bulk groups."""

import re
from collections.abc import Sequence

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.isa.instructions.memory import address_value
from cute_kernels.emulator.isa.instructions.sync import each_lane
from cute_kernels.emulator.isa.ptx.families import as_integer
from cute_kernels.emulator.isa.ptx.operand_syntax import policy_operand
from cute_kernels.emulator.isa.ptx.program import Instruction, Operand, items_of
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import Constant, Value
from cute_kernels.emulator.machine.state.lane_masks import LaneValues
from cute_kernels.emulator.machine.units.copies.bulk import LOAD, SEND, STORE, tensor_descriptor
from cute_kernels.emulator.machine.units.copies.generic_accesses import view_bytes
from cute_kernels.emulator.machine.units.copies.reductions import OPERATIONS, TYPES
from cute_kernels.emulator.machine.units.copies.tensor_map import decode
from cute_kernels.emulator.machine.units.sm import Warp

_RANK = re.compile(r"[1-5]d")
_RANKS, _SPATIAL = CONSTANTS["RANKS"], CONSTANTS["SPATIAL"]


def prefetch_descriptor(warp: Warp, mask: int, address: LaneValues) -> None:
    """prefetch.tensormap."""
    for (where,) in each_lane(mask & -mask, address):
        decode(tensor_descriptor(warp.cluster, where))


@family("prefetch.tensormap", "prefetch.param.tensormap", "prefetch.const.tensormap", destinations=0, operands="[a]")
def _prefetch_tensormap(block: BlockBuilder, instruction: Instruction) -> None:
    """prefetch.tensormap: no effect on results; a tensor map with a mode that is not implemented is refused."""
    block.call(prefetch_descriptor, address_value(block, instruction.operands[0], 64))


#: Modes of copies, and the numbers that the core has of them.
_MODES = {
    "tile": CONSTANTS["MODE_TILED"], "im2col": CONSTANTS["MODE_PIXELS"], "im2col_no_offs": CONSTANTS["MODE_PIXELS"],
    "im2col::w": CONSTANTS["MODE_W"], "im2col::w::128": CONSTANTS["MODE_W_128"],
    "tile::gather4": CONSTANTS["MODE_FOURS"], "tile::scatter4": CONSTANTS["MODE_FOURS"],
}  # fmt: skip
_WITH_OFFSETS = ("im2col", "im2col::w", "im2col::w::128")


def tensor_operand(
    block: BlockBuilder, instruction: Instruction, operand: Operand, rank: int
) -> tuple[Value, list[Value]]:
    """(descriptor address, coordinates) of ``[map, {c0, c1, ...}]``."""
    items, fours = operand.extra[0].items, {"tile::gather4", "tile::scatter4"} & set(instruction.parts)
    if len(items) != (_RANKS if fours else rank):
        raise instruction.refuse(f"{len(items)} coordinates for a {rank}-dimensional copy")
    return address_value(block, operand, 64), [block.value(item, 32) for item in items]


def rank_of(parts: tuple[str, ...]) -> int:
    """Dimensions of a tensor copy."""
    return int(next(part for part in parts if _RANK.fullmatch(part))[0])


def _offsets_operand(parts: tuple[str, ...]) -> str:
    """Offsets of all spatial dimensions; of W alone, how many pixels more are loaded, and the offset."""
    mode = mode_of(parts)
    return f", {{im2colInfo}}{rank_of(parts) - 2 if mode == 'im2col' else 2}:u16" if mode in _WITH_OFFSETS else ""


def tensor_operands(parts: tuple[str, ...]) -> str:
    """Operands of a tensor copy."""
    if "bulk_group" in parts:
        return f"[tensorMap{{coords}}], [src]{policy_operand(parts)}"
    multicast = ", ctaMask:u16" if "multicast::cluster" in parts else ""
    return f"[dst], [tensorMap{{coords}}], [mbar]{_offsets_operand(parts)}{multicast}{policy_operand(parts)}"


@family(
    "cp.async.bulk.tensor", destinations=0, operands=tensor_operands,
    qualifiers="$dims shared::cluster|shared::cta global tile|im2col|im2col::w|im2col::w::128|tile::gather4? "
    "mbarrier::complete_tx::bytes multicast::cluster? $policy? $group?; $dims global shared::cta "
    "tile|im2col_no_offs|tile::scatter4? bulk_group $policy?; multicast::cluster / shared::cta; "
    "im2col|im2col::w|im2col::w::128|im2col_no_offs / {1,2}d; tile::gather4|tile::scatter4 / {1,3,4,5}d",
)  # fmt: skip
def _bulk_tensor(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.bulk.tensor: global to shared (multicast, cta_group) and shared to global, tiled (packed 4- and 6-bit
    elements too), .tile::gather4 and .tile::scatter4, and im2col mode, its loads along W alone too."""
    parts = instruction.parts
    rank, mode = rank_of(parts), mode_of(parts)
    operands = list(instruction.operands)
    if "L2::cache_hint" in parts:
        operands.pop()  # an eviction priority
    if "bulk_group" in parts:
        tensor_store(block, instruction, operands, rank, mode)
        return
    multicast = block.value(operands.pop(), 16) if "multicast::cluster" in parts else None
    offsets = [block.value(item, 16) for item in items_of(operands[3])] if mode in _WITH_OFFSETS else []
    descriptor, coords = tensor_operand(block, instruction, operands[1], rank)
    destination, barrier = address_value(block, operands[0]), address_value(block, operands[2])
    bulk_operation(
        block, [LOAD, rank, _MODES[mode], "cta_group::2" in parts, 0, 0],
        [destination, descriptor, barrier, None, multicast], coords, offsets,
    )  # fmt: skip


def tensor_store(
    block: BlockBuilder, instruction: Instruction, operands: Sequence[Operand], rank: int, mode: str, reduction: int = 0
) -> None:
    """A store to ``[map, {coordinates}]``, or a reduction by number."""
    descriptor, coords = tensor_operand(block, instruction, operands[0], rank)
    facts = [STORE, rank, _MODES[mode], 0, reduction, 0]
    bulk_operation(block, facts, [address_value(block, operands[1]), descriptor, None, None, None], coords)


def bulk_operation(
    block: BlockBuilder, facts: Sequence[int], operands: Sequence[Value | None], coords: Sequence[Value] = (),
    offsets: Sequence[Value] = (),
) -> None:  # fmt: skip
    """A bulk copy in the core. ``facts``: kind, dimensions of the tensor map or 0, mode (`_MODES`), whether for a pair
    of CTAs, reduction, its type. ``operands``: address in shared memory; of the map, in global memory, or of what is
    sent; mbarrier; bytes; mask. ``coords``, ``offsets``: of a tensor copy."""
    lists = (coords, _RANKS), (offsets, _SPATIAL)
    rest = [value for values, room in lists for value in (*values, *[None] * (room - len(values)))]
    values = [None if value is None else block.whole(value) for value in (*operands, *rest)]
    block.operation("bulk_copy", *values, facts=[int(fact) for fact in facts])


def mode_of(parts: Sequence[str]) -> str:
    """``tile``, or another mode of a copy."""
    return next((part for part in parts if part in _MODES), "tile")


@family(
    "cp.async.bulk.prefetch.tensor", destinations=0,
    operands=lambda parts: f"[tensorMap{{coords}}]{_offsets_operand(parts)}{policy_operand(parts)}",
    qualifiers="$dims L2 global tile|im2col|im2col::w|im2col::w::128|tile::gather4? $policy?; "
    "im2col|im2col::w|im2col::w::128 / {1,2}d; tile::gather4 / {1,3,4,5}d",
)  # fmt: skip
def _bulk_prefetch(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.bulk.prefetch.tensor: into L2 only, no effect on results; the descriptor is checked."""
    descriptor, _ = tensor_operand(block, instruction, instruction.operands[0], rank_of(instruction.parts))
    block.call(prefetch_descriptor, descriptor)


# --- ranges of bytes, and reductions ----------------------------------------------------------------------------------

_SENT = "shared::cluster shared::cta mbarrier::complete_tx::bytes"
_STORED = "global shared::cta bulk_group"


def _operands(parts: tuple[str, ...]) -> str:
    barrier = "" if "bulk_group" in parts else ", [mbar]"
    multicast = ", ctaMask:u16" if "multicast::cluster" in parts else ""
    mask = ", byteMask:u16" if "cp_mask" in parts else ""
    return f"[dst], [src], size:u32{barrier}{multicast}{policy_operand(parts)}{mask}"


@family(
    "cp.reduce.async.bulk", destinations=0, operands=_operands,
    qualifiers="; ".join((
        *(f"{_SENT} {form}" for form in ("and|or|xor b32", "add u32|s32|u64", "min|max u32|s32", "inc|dec u32")),
        *(f"{_STORED} $policy? {form}" for form in (
            "and|or|xor b{32,64}", "add u32|s32|u64|f32|f64", "add noftz f16|bf16", "min|max {u,s}{32,64}|f16|bf16",
            "inc|dec u{32,64}",
        )),
    )),
)  # fmt: skip
@family(
    "cp.async.bulk", destinations=0, operands=_operands,
    qualifiers="shared::cluster|shared::cta global mbarrier::complete_tx::bytes multicast::cluster? $policy?; "
    f"{_SENT}; {_STORED} $policy? cp_mask?; multicast::cluster / shared::cta",
)  # fmt: skip
def _bulk(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.bulk, cp.reduce.async.bulk: global to shared (multicast), shared to global, shared to shared."""
    reduces = instruction.parts[1] == "reduce"
    parts = instruction.parts
    reduction = (OPERATIONS.index(parts[-3 if "noftz" in parts else -2]), TYPES.index(parts[-1])) if reduces else (0, 0)
    operands = list(instruction.operands)
    keep = block.value(operands.pop(), 16) if "cp_mask" in parts else None
    if "L2::cache_hint" in parts:
        operands.pop()  # an eviction priority
    multicast = block.value(operands.pop(), 16) if "multicast::cluster" in parts else None
    grouped = "bulk_group" in parts
    kind = STORE if grouped else LOAD if "global" in parts else SEND
    target = address_value(block, operands[0], 64 if grouped else 32)
    source, nbytes = address_value(block, operands[1], 64 if kind == LOAD else 32), block.value(operands[2], 32)
    shared, other = (source, target) if grouped else (target, source)
    signal = None if grouped else address_value(block, operands[3])
    bulk_operation(block, [kind, 0, 0, 0, *reduction], [shared, other, signal, nbytes, keep if grouped else multicast])


def bulk_prefetch(warp: Warp, mask: int, address: LaneValues, nbytes: LaneValues) -> None:
    """cp.async.bulk.prefetch: the range must exist."""
    for where, size in each_lane(mask, address, nbytes):
        view_bytes(warp.cluster, "global", where, size)


@family(
    "cp.async.bulk.prefetch.L2", destinations=0, operands=lambda parts: f"[src], size:u32{policy_operand(parts)}",
    qualifiers="global $policy?",
)  # fmt: skip
def _prefetch(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.bulk.prefetch.L2: no effect on results; the range is checked."""
    address, nbytes = instruction.operands[:2]
    block.call(bulk_prefetch, address_value(block, address, 64), block.value(nbytes, 32))


@family(
    "cp.reduce.async.bulk.tensor", destinations=0, operands=tensor_operands,
    qualifiers="$dims global shared::cta add|min|max|inc|dec|and|or|xor tile|im2col_no_offs|tile::scatter4? bulk_group "
    "$policy?; im2col_no_offs / {1,2}d; tile::scatter4 / {1,3,4,5}d",
)  # fmt: skip
def _tensor_reduce(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.reduce.async.bulk.tensor: shared to global, tiled and im2col mode, on the tensor map's element type."""
    parts = instruction.parts
    operands = list(instruction.operands)
    if "L2::cache_hint" in parts:
        operands.pop()
    operation = next(OPERATIONS.index(part) for part in parts[1:] if part in OPERATIONS[1:])
    tensor_store(block, instruction, operands, rank_of(parts), mode_of(parts), operation)


# --- bulk groups ----------------------------------------------------------------------------------------------------


@family("cp.async.bulk.commit_group", destinations=0, operands="", qualifiers="")
def _commit(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.bulk.commit_group."""
    block.operation("bulk_commit")


@family("cp.async.bulk.wait_group", destinations=0, blocking=True, operands="N:imm", qualifiers="read?")
def _wait(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.bulk.wait_group, wait_group.read."""
    parts = instruction.parts[1:]
    count = as_integer(instruction, instruction.operands[0])
    if count < 0:
        raise instruction.refuse("the number of groups must not be negative")
    flags = CONSTANTS["FLAG"] if "read" in parts else 0
    block.operation("bulk_wait", Constant(count, 64), flags=flags, blocking=True)
