"""Exchange between the lanes of a warp: elect, shfl, vote, activemask, match, redux."""

import functools
from collections.abc import Callable

import numpy as np

from cute_kernels.emulator.core.pure_operations import evaluate
from cute_kernels.emulator.errors import BarrierMisuse
from cute_kernels.emulator.isa.instructions.members import call_members, check_members, varies_with_members
from cute_kernels.emulator.isa.ptx.families import always_varies, never_varies
from cute_kernels.emulator.isa.ptx.program import Immediate, Instruction, Operand, Pair, Register, Sink
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import FULL, Constant
from cute_kernels.emulator.machine.state.lane_masks import LaneValues, block_lanes, mask_of
from cute_kernels.emulator.machine.units.sm import Warp


def _elect_varies(instruction: Instruction, varies: Callable[[Operand], bool]) -> list[bool]:
    destination = instruction.operands[0]
    if not isinstance(destination, Pair) or not isinstance(destination.value, Register):
        return [True]
    return [varies_with_members(instruction, varies), True]


@family("elect.sync", varies=_elect_varies, operands="d|p:u32, membermask:u32")
def _lower_elect(block: BlockBuilder, instruction: Instruction) -> None:
    """elect.sync: the lowest lane of the mask (PTX leaves the choice open, but it must always be the same)."""
    members = block.value(instruction.operands[1], 32)
    pair = instruction.operands[0]
    block.define(pair.predicate, block.operation("elect", members, results=[("pred", False)])[0])
    if not isinstance(pair.value, Sink):
        lowest = lambda warp, mask, members: (mask & -mask).bit_length() - 1  # noqa: E731
        (lane,) = call_members(block, lowest, members=members, results=[("u32", True)], effects=False)
        block.define(pair.value, lane)


def _shuffle(
    warp: Warp, mask: int, mode: str, values: bool, value: LaneValues, lane: LaneValues, clamp: LaneValues, members: int
) -> np.ndarray | int:
    """shfl.sync (PTX ISA pseudocode): returns [32] values, or the mask of lanes whose source was in range."""
    check_members(warp, mask, members, "shfl.sync")
    lanes = np.arange(32)
    b = np.broadcast_to(np.asarray(lane, np.int64), 32) & 31
    c = np.broadcast_to(np.asarray(clamp, np.int64), 32)
    segment, limit = c >> 8 & 31, c & 31
    highest = (lanes & segment) | (limit & ~segment)
    if mode == "up":
        source = lanes - b
        valid = source >= highest
    elif mode == "down":
        source = lanes + b
        valid = source <= highest
    elif mode == "bfly":
        source = lanes ^ b
        valid = source <= highest
    else:
        source = (lanes & segment) | (b & ~segment)
        valid = source <= highest
    source = np.where(valid, source, lanes) & 31
    inactive = [int(s) for s in source[block_lanes(mask)] if not mask >> int(s) & 1]
    if inactive:
        message = f"shfl.sync reads lane {inactive[0]}, which does not execute it (the value is undefined)"
        raise BarrierMisuse(message).know("divergence")
    return np.broadcast_to(np.asarray(value, np.uint32), 32)[source] if values else mask_of(valid)


def _broadcast(warp: Warp, mask: int, value: LaneValues, lane: int, members: int) -> int:
    check_members(warp, mask, members, "shfl.sync")
    lane &= 31
    if not mask >> lane & 1:
        message = f"shfl.sync reads lane {lane}, which does not execute it (the value is undefined)"
        raise BarrierMisuse(message).know("divergence")
    return value if isinstance(value, int) else int(value[lane])


def _is_broadcast(instruction: Instruction) -> bool:
    """Every lane reads the same lane, if its number is the same in all. That lane is in range then."""
    return instruction.parts[2] == "idx" and instruction.operands[3] == Immediate(31)


def _shuffle_varies(instruction: Instruction, varies: Callable[[Operand], bool]) -> bool:
    return not _is_broadcast(instruction) or varies(instruction.operands[2]) or varies_with_members(instruction, varies)


@family(
    *(f"shfl.sync.{mode}.b32" for mode in ("idx", "up", "down", "bfly")), varies=_shuffle_varies,
    operands="d|p?, a, b, c, membermask:u32",
)  # fmt: skip
def _shfl(block: BlockBuilder, instruction: Instruction) -> None:
    """shfl.sync: exchange between lanes."""
    value, lane, clamp, members = (block.value(operand, 32) for operand in instruction.operands[1:])
    destination = instruction.operands[0]
    if _is_broadcast(instruction) and lane.uniform:
        (result,) = call_members(block, _broadcast, value, lane, members=members, results=[("u32", True)])
        if isinstance(destination, Pair):
            block.define(destination.predicate, Constant(1, 1))
            destination = destination.value
        block.define(destination, result)
        return
    mode, given = instruction.parts[2], (value, lane, clamp)
    (result,) = call_members(block, _shuffle, mode, True, *given, members=members, results=[("u32", False)])
    if isinstance(destination, Pair):
        (valid,) = call_members(block, _shuffle, mode, False, *given, members=members, results=[("pred", False)])
        block.define(destination.predicate, valid)
        destination = destination.value
    block.define(destination, result)


def _vote(warp: Warp, mask: int, mode: str, predicate: LaneValues, members: int) -> LaneValues:
    check_members(warp, mask, members, "vote.sync")
    voters = (FULL if predicate is True else 0 if predicate is False else predicate) & mask
    if mode == "ballot":
        return voters
    return {"all": voters == mask, "any": voters != 0, "uni": voters in (0, mask)}[mode]


@family(
    "vote.sync", varies=varies_with_members,
    operands=lambda parts: f"d:{'b32' if 'ballot' in parts else 'pred'}, a:pred, membermask:u32",
    qualifiers="all|any|uni pred; ballot b32",
)  # fmt: skip
def _lower_vote(block: BlockBuilder, instruction: Instruction) -> None:
    """vote.sync.all/any/uni.pred and vote.sync.ballot.b32."""
    mode, _ = instruction.parts[2:]
    predicate = block.value(instruction.operands[1], 1)
    members = block.value(instruction.operands[2], 32)
    result = ("u32", True) if mode == "ballot" else ("pred", True)
    (voted,) = call_members(block, _vote, mode, predicate, members=members, results=[result])
    block.define(instruction.operands[0], voted)


@family("activemask", varies=never_varies, operands="d", qualifiers="b32")
def _activemask(block: BlockBuilder, instruction: Instruction) -> None:
    """activemask."""
    active = block.call(lambda warp, mask: mask, results=[("u32", True)], effects=False)
    block.define(instruction.operands[0], active[0])


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
    operands=lambda parts: f"d{'|p?' if 'all' in parts else ''}:b32, a, membermask:u32", qualifiers="b{32,64}",
)  # fmt: skip
def _match(block: BlockBuilder, instruction: Instruction) -> None:
    """match.any.sync, match.all.sync."""
    _, mode, _, type_ = instruction.parts
    value = block.whole(block.value(instruction.operands[1], int(type_[1:])))
    members = block.value(instruction.operands[2], 32)
    destination = instruction.operands[0]
    if isinstance(destination, Pair):
        (holds,) = call_members(block, match_all_holds, value, members=members, results=[("pred", False)])
        block.define(destination.predicate, holds)
        destination = destination.value
    (masks,) = call_members(block, match, mode == "all", value, members=members, results=[("u32", False)])
    block.define(destination, masks)


def _reduce(warp: Warp, mask: int, name: str, signed: bool, value: LaneValues, members: int) -> int:
    check_members(warp, mask, members, "redux.sync")
    lanes = np.broadcast_to(np.asarray(value, np.uint32), 32)[block_lanes(mask)]
    lanes = lanes.view(np.int32) if signed else lanes
    ufunc = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
             "xor": np.bitwise_xor}[name]  # fmt: skip
    return int(ufunc.reduce(lanes)) & FULL


@family(
    "redux.sync", varies=varies_with_members, operands="dst, src, membermask:u32",
    qualifiers="add|min|max {u,s}32; and|or|xor b32",
)  # fmt: skip
def _redux(block: BlockBuilder, instruction: Instruction) -> None:
    """redux.sync: integer reduction over a warp."""
    name, type_ = instruction.parts[2:]
    value, members = (block.value(operand, 32) for operand in instruction.operands[1:])
    (result,) = call_members(block, _reduce, name, type_ == "s32", value, members=members, results=[("u32", True)])
    block.define(instruction.operands[0], result)


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
