"""Bulk copies and reductions of byte ranges, and reductions through tensor maps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_kernels.emulator.graph.block import BlockBuilder
from cute_kernels.emulator.graph.families import family
from cute_kernels.emulator.instructions.accesses import enter, view_bytes
from cute_kernels.emulator.instructions.bulk import (
    RANKS,
    changing_map,
    mode_of,
    rank_of,
    signed32,
    tensor_descriptor,
    tensor_operand,
    whole_call,
)
from cute_kernels.emulator.instructions.memory import address_value
from cute_kernels.emulator.instructions.sync import each_lane, lane_numbers
from cute_kernels.emulator.ptx.decode import TYPE_BITS, Instruction
from cute_kernels.emulator.units.copies.reductions import DTYPES, operations

if TYPE_CHECKING:
    from cute_kernels.emulator.state.lane_masks import LaneValues
    from cute_kernels.emulator.units.sm import Warp

_SPACES = ("global", "shared::cta", "shared::cluster")
_COMPLETIONS = ("mbarrier::complete_tx::bytes", "bulk_group")
_OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def bulk_load(
    warp: Warp, mask: int, target: LaneValues, source: LaneValues, nbytes: LaneValues, barrier: LaneValues,
    multicast: LaneValues | None,
) -> None:  # fmt: skip
    """cp.async.bulk from global to shared memory by each executing lane."""
    warp.cluster.progress += 1
    use_mask = multicast is not None
    operands = (target, source, nbytes, barrier, *([multicast] if use_mask else []))
    for lane, (where, address, size, signal, *ctas) in zip(lane_numbers(mask), each_lane(mask, *operands)):
        enter(warp, lane)
        warp.cluster.bulk.load(address, where, size, signal, ctas[0] & 0xFFFF if use_mask else None, f"by {warp.label}")


def bulk_send(
    warp: Warp, mask: int, target: LaneValues, source: LaneValues, nbytes: LaneValues, barrier: LaneValues,
    reduction: str | None,
) -> None:  # fmt: skip
    """cp.async.bulk and cp.reduce.async.bulk between the shared memories of a cluster by each executing lane."""
    warp.cluster.progress += 1
    values = each_lane(mask, target, source, nbytes, barrier)
    for lane, (where, address, size, signal) in zip(lane_numbers(mask), values):
        enter(warp, lane)
        warp.cluster.bulk.send(address, where, size, signal, reduction, f"by {warp.label}")


def bulk_store(
    warp: Warp, mask: int, target: LaneValues, source: LaneValues, nbytes: LaneValues, reduction: str | None,
    keep: LaneValues | None,
) -> None:  # fmt: skip
    """cp.async.bulk and cp.reduce.async.bulk from shared to global memory by each executing lane."""
    warp.cluster.progress += 1
    use_mask = keep is not None
    for lane in lane_numbers(mask):
        ((where, address, size, *bits),) = each_lane(1 << lane, target, source, nbytes, *([keep] if use_mask else []))
        warp.stores_in_bulk(lane)
        enter(warp, lane)
        warp.cluster.bulk.store(
            address,
            where,
            size,
            reduction,
            bits[0] if use_mask else None,
            thread=(warp.cta.rank, warp.index, lane),
            describe=f"by {warp.label}",
        )


def _reduction(instruction: Instruction, parts: list[str]) -> tuple[str, str]:
    type_ = instruction.parts[-1]
    names = [part for part in parts if part in _OPERATIONS]
    kinds = operations(type_) if type_ in DTYPES else set()
    if type_ in ("u64", "s64"):
        kinds = kinds | {"inc", "dec"} if type_ == "u64" else kinds
    if len(names) != 1 or names[0] not in kinds:
        raise instruction.refuse(f"{instruction.opcode} is not implemented")
    return names[0], type_


_BULK = (*_SPACES, *_COMPLETIONS, "L2::cache_hint")


@family("cp.reduce.async.bulk", destinations=0, qualifiers=(*_BULK, *_OPERATIONS, "noftz", *TYPE_BITS))
@family("cp.async.bulk", destinations=0, qualifiers=(*_BULK, "multicast::cluster", "cp_mask"))
def _bulk(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.bulk, cp.reduce.async.bulk: global to shared (multicast), shared to global, shared to shared."""
    reduces = instruction.parts[1] == "reduce"
    parts = instruction.parts[2 if reduces else 1 :]
    spaces = [part for part in parts if part in _SPACES]
    completions = [part for part in parts if part in _COMPLETIONS]
    if len(spaces) != 2 or len(completions) != 1:
        raise instruction.refuse("destination, source and completion mechanism are needed")
    reduction = _reduction(instruction, parts) if reduces else None
    operands = list(instruction.operands)
    keep = block.value(operands.pop(), 16) if "cp_mask" in parts else None
    if "L2::cache_hint" in parts:
        operands.pop()  # an eviction priority
    multicast = block.value(operands.pop(), 16) if "multicast::cluster" in parts else None
    grouped = completions[0] == "bulk_group"
    if len(operands) != (3 if grouped else 4) or grouped != (spaces[0] == "global"):
        raise instruction.refuse("this form of a bulk copy is not implemented")
    target, source = address_value(block, operands[0], 64 if grouped else 32), operands[1]
    nbytes = block.value(operands[2], 32)
    if grouped:
        block.call(bulk_store, target, address_value(block, source), nbytes, reduction, keep)
        return
    barrier = address_value(block, operands[3])
    if spaces[1] == "global":
        if reduces:
            raise instruction.refuse("reductions from global memory do not exist")
        block.call(bulk_load, target, address_value(block, source, 64), nbytes, barrier, multicast)
        return
    block.call(bulk_send, target, address_value(block, source), nbytes, barrier, reduction)


def bulk_prefetch(warp: Warp, mask: int, address: LaneValues, nbytes: LaneValues) -> None:
    """cp.async.bulk.prefetch: the range must exist."""
    for where, size in each_lane(mask, address, nbytes):
        view_bytes(warp, "global", where, size)


@family("cp.async.bulk.prefetch.L2", destinations=0, qualifiers="global L2::cache_hint")
def _prefetch(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.bulk.prefetch.L2: no effect on results; the range is checked."""
    address, nbytes = instruction.operands[:2]
    block.call(bulk_prefetch, address_value(block, address, 64), block.value(nbytes, 32))


def tensor_reduce(
    warp: Warp, mask: int, descriptor: LaneValues, coords: tuple[LaneValues, ...], source: LaneValues, operation: str,
    im2col: bool,
) -> None:
    """cp.reduce.async.bulk.tensor by each executing lane."""
    warp.cluster.progress += 1
    for lane in lane_numbers(mask):
        ((address, where, *place),) = each_lane(1 << lane, descriptor, source, *coords)
        warp.stores_in_bulk(lane)
        enter(warp, lane)
        warp.cluster.tma.store(
            tensor_descriptor(warp, address),
            [signed32(c) for c in place],
            where,
            thread=(warp.cta.rank, warp.index, lane),
            describe=f"by {warp.label}",
            reduction=operation,
            im2col=im2col,
            map_address=changing_map(warp, address),
        )


@family(
    "cp.reduce.async.bulk.tensor", destinations=0,
    qualifiers=(*RANKS, *_OPERATIONS, *"global shared::cta bulk_group L2::cache_hint tile im2col_no_offs".split()),
)  # fmt: skip
def _tensor_reduce(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.reduce.async.bulk.tensor: shared to global, tiled and im2col mode, on the tensor map's element type."""
    rank = rank_of(instruction)
    parts = instruction.parts[2:]
    operands = list(instruction.operands)
    if "L2::cache_hint" in parts:
        operands.pop()
    names = [part for part in parts if part in _OPERATIONS]
    if len(names) != 1 or len(operands) != 2 or "bulk_group" not in parts:
        raise instruction.refuse("this form of a tensor reduction is not implemented")
    mode = mode_of(instruction, parts, "im2col_no_offs", rank)
    descriptor, coords = tensor_operand(block, instruction, operands[0], rank)
    after = [address_value(block, operands[1]), names[0], mode != "tile"]
    whole_call(block, tensor_reduce, [descriptor], coords, after)
