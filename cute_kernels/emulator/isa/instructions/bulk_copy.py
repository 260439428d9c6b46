"""Bulk copies and reductions of byte ranges, and reductions through tensor maps."""

from cute_kernels.emulator.isa.instructions.bulk import (
    bulk_operation,
    mode_of,
    rank_of,
    tensor_operands,
    tensor_store,
)
from cute_kernels.emulator.isa.instructions.memory import address_value
from cute_kernels.emulator.isa.instructions.sync import each_lane
from cute_kernels.emulator.isa.ptx.operand_syntax import policy_operand
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.state.lane_masks import LaneValues
from cute_kernels.emulator.machine.units.copies.bulk import LOAD, SEND, STORE
from cute_kernels.emulator.machine.units.copies.generic_accesses import view_bytes
from cute_kernels.emulator.machine.units.copies.reductions import OPERATIONS, TYPES
from cute_kernels.emulator.machine.units.sm import Warp

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
