"""Rarer instructions between the lanes of a warp or the threads of a CTA: bar.red, match.sync, redux.sync on floats."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.core.pure_operations import evaluate
from cute_kernels.emulator.graph.block import BlockBuilder
from cute_kernels.emulator.graph.families import family
from cute_kernels.emulator.instructions.members import call_members, check_members, varies_with_members
from cute_kernels.emulator.instructions.sync import named_barrier
from cute_kernels.emulator.ptx.decode import Instruction, Pair
from cute_kernels.emulator.ptx.families import always_varies, never_varies
from cute_kernels.emulator.state.lane_masks import LaneValues, block_lanes

if TYPE_CHECKING:
    from cute_kernels.emulator.units.sm import Warp

_BARRIERS = [f"{name}{cta}.red" for name in ("bar", "barrier") for cta in ("", ".cta")]


@family(
    *_BARRIERS, varies=never_varies, blocking=True, operands="d, a:u32, c:pred; d, a:u32, b:u32, c:pred",
    qualifiers="aligned popc and or u32 pred",
)  # fmt: skip
def _bar_red(block: BlockBuilder, instruction: Instruction) -> None:
    """bar.red, barrier.red: .popc.u32, .and.pred, .or.pred."""
    parts = instruction.parts[1:]
    modes = [part for part in parts if part in ("popc", "and", "or")]
    if len(modes) != 1 or parts[-1] != ("u32" if modes[0] == "popc" else "pred"):
        raise instruction.refuse(f"{instruction.opcode} is not implemented")
    destination, *operands = instruction.operands
    predicate = block.value(operands.pop(), 1)
    operation = f"BAR_RED_{modes[0].upper()}"
    (vote,) = named_barrier(block, operation, operands, [predicate], [(parts[-1], True)])
    block.define(destination, vote)


def match(warp: Warp, mask: int, every: bool, value: LaneValues, members: int) -> np.ndarray:
    """match.sync: mask of the lanes with the same value; with ``every`` all or none."""
    check_members(warp, mask, members, "match.sync")
    lanes = np.broadcast_to(np.asarray(value), 32)
    active = block_lanes(mask)
    bits = np.uint64(1) << np.arange(32, dtype=np.uint64)
    masks = ((lanes[:, None] == lanes[None, :]) & active).astype(np.uint64) @ bits
    if every:
        masks = np.where(masks == mask, mask, 0)
    return masks.astype(np.uint32)


def match_all_holds(warp: Warp, mask: int, value: LaneValues, members: int) -> int:
    """The predicate of match.all.sync."""
    return mask if int(match(warp, mask, True, value, members)[block_lanes(mask)][0]) == mask else 0


@family(
    "match.any.sync", "match.all.sync", varies=always_varies,
    operands=lambda parts: f"d{'|p?' if 'all' in parts else ''}:b32, a, membermask:u32",
)  # fmt: skip
def _match(block: BlockBuilder, instruction: Instruction) -> None:
    """match.any.sync, match.all.sync."""
    _, mode, _, type_ = instruction.parts
    if type_ not in ("b32", "b64"):
        raise instruction.refuse(f"{instruction.opcode} is not implemented")
    value = block.whole(block.value(instruction.operands[1], int(type_[1:])))
    members = block.value(instruction.operands[2], 32)
    destination = instruction.operands[0]
    if isinstance(destination, Pair):
        (holds,) = call_members(block, match_all_holds, value, members=members, results=[("pred", False)])
        block.define(destination.predicate, holds)
        destination = destination.value
    (masks,) = call_members(block, match, mode == "all", value, members=members, results=[("u32", False)])
    block.define(destination, masks)


def reduce_f32(warp: Warp, mask: int, name: str, magnitude: bool, nan: bool, value: LaneValues, members: int) -> int:
    """redux.sync.min/max.f32."""
    check_members(warp, mask, members, "redux.sync")
    lanes = np.broadcast_to(np.asarray(value, np.uint32), 32)[block_lanes(mask)]
    numbers = lanes.tolist()
    if magnitude:
        numbers = [evaluate("abs_f32", number) for number in numbers]
    choose = functools.partial(evaluate, f"{name}{'_NaN' if nan else ''}_f32")
    return functools.reduce(choose, numbers, numbers[0])  # with itself first: one NaN becomes the one of results


@family(
    *(f"redux.sync.{name}{a}{n}.f32" for name in ("min", "max") for a in ("", ".abs") for n in ("", ".NaN")),
    varies=varies_with_members, operands="dst, src, membermask:u32",
)  # fmt: skip
def _redux_f32(block: BlockBuilder, instruction: Instruction) -> None:
    """redux.sync.min, .max on f32, with .abs and .NaN."""
    parts = instruction.parts
    value, members = (block.value(operand, 32) for operand in instruction.operands[1:])
    call = (reduce_f32, parts[2], "abs" in parts, "NaN" in parts, value)
    block.define(instruction.operands[0], call_members(block, *call, members=members, results=[("u32", True)])[0])
