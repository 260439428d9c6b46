"""Moves, addresses, and exchange between the lanes of a warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.errors import BarrierMisuse
from cute_kernels.emulator.graph.block import BlockBuilder
from cute_kernels.emulator.graph.families import family
from cute_kernels.emulator.graph.values import FULL, Constant, Pack, Value, of_one_type
from cute_kernels.emulator.instructions.integers import binary, shift_by
from cute_kernels.emulator.instructions.members import call_members, check_members, varies_with_members
from cute_kernels.emulator.ptx.decode import (
    TYPE_BITS,
    Immediate,
    Instruction,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Vector,
)
from cute_kernels.emulator.ptx.families import never_varies
from cute_kernels.emulator.state.generic_addresses import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW
from cute_kernels.emulator.state.lane_masks import LaneValues, block_lanes, mask_of

if TYPE_CHECKING:
    from cute_kernels.emulator.units.sm import Warp


@family("mov", operands="d~, a~")
def _mov(block: BlockBuilder, instruction: Instruction) -> None:
    """mov: registers, literals, addresses, special registers, packing and unpacking; an address may have an offset."""
    if len(instruction.parts) != 2 or instruction.parts[1] not in TYPE_BITS:
        raise instruction.refuse(f"{instruction.opcode} is not implemented")
    destination, source = instruction.operands
    bits = TYPE_BITS[instruction.parts[1]]
    if isinstance(source, Vector) and isinstance(destination, Register):
        widths = [block.bits_of(item.name) if isinstance(item, Register) else bits // len(source.items)
                  for item in source.items]  # fmt: skip
        block.define(destination, Pack([block.value(item, w) for item, w in zip(source.items, widths)]))
        return
    value = block.value(source, bits)
    if isinstance(source, Symbol) and source.offset:
        if bits not in (32, 64):
            raise instruction.refuse(f"{instruction.opcode} of an address is not implemented, .u32 and .u64 are")
        value = block.pure(binary("add", f"u{value.bits}"), value, Constant(source.offset, value.bits))
    block.define(destination, value)


def _cvta_varies(instruction: Instruction, varies: Callable[[Operand], bool]) -> bool:
    """An address of local memory stands for another place in each lane, so that what is loaded from it differs."""
    return "local" in instruction.parts or varies(instruction.operands[1])


@family(
    "cvta", varies=_cvta_varies, operands="d, a",
    qualifiers="to global shared shared::cta shared::cluster param const local u64",
)  # fmt: skip
def _cvta(block: BlockBuilder, instruction: Instruction) -> None:
    """cvta: generic addresses of global memory are the addresses themselves; shared, local, param have windows."""
    parts = instruction.parts[1:]
    space = parts[-2]
    source = block.value(instruction.operands[1], 64)
    window = {"local": LOCAL_WINDOW}.get(space, SHARED_WINDOW if space.startswith("shared") else 0)
    if window:
        op = binary("sub" if parts[0] == "to" else "add", "u64")
        source = block.pure(op, source, Constant(window, 64))
    if parts[0] == "param":
        # Symbols already have window addresses; those that went through registers of 32 bits have lost the window.
        source = block.pure(binary("or", "b64"), source, Constant(PARAM_WINDOW, 64))
    block.define(instruction.operands[0], source)


def _shared_address(block: BlockBuilder, instruction: Instruction) -> Value:
    """The first source, an address of shared memory or (without a space) a generic one, as 32 bits of a cluster's."""
    if instruction.parts[-1] == "u32":
        return block.value(instruction.operands[1], 32)
    address = block.whole(block.value(instruction.operands[1], 64))
    if "shared::cluster" not in instruction.parts:
        address = block.pure(binary("sub", "u64"), address, Constant(SHARED_WINDOW, 64))
    return block.resize(address, 32)


@family("mapa.shared::cluster.u32", "mapa.shared::cluster.u64", "mapa.u64", operands="d, a, b:u32")
def _lower_mapa(block: BlockBuilder, instruction: Instruction) -> None:
    """mapa: the same shared offset in another CTA of the cluster; of generic addresses too."""
    address, rank = _shared_address(block, instruction), block.value(instruction.operands[2], 32)
    # A rank outside the cluster is no error here: lanes that never use their result may compute it.
    result = block.pure(of_one_type("map_address", "u32", 2), address, rank)
    if instruction.parts[-1] == "u64":
        result = block.resize(result, 64)
        if "shared::cluster" not in instruction.parts:
            result = block.pure(binary("add", "u64"), result, Constant(SHARED_WINDOW, 64))
    block.define(instruction.operands[0], result)


@family("getctarank.shared::cluster.u32", "getctarank.shared::cluster.u64", "getctarank.u64", operands="d:u32, a")
def _getctarank(block: BlockBuilder, instruction: Instruction) -> None:
    """getctarank: CTA rank of a shared address; of generic addresses too."""
    address = _shared_address(block, instruction)
    block.define(instruction.operands[0], block.pure(shift_by("shr", "u32", 24), address))


# --- between lanes --------------------------------------------------------------------------------------------------


def _elect_lane(warp: Warp, mask: int, members: int) -> int:
    return (mask & -mask).bit_length() - 1


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
        (lane,) = call_members(block, _elect_lane, members=members, results=[("u32", True)], effects=False)
        block.define(pair.value, lane)


def _shuffle(
    warp: Warp, mask: int, mode: str, value: LaneValues, lane: LaneValues, clamp: LaneValues, members: int
) -> tuple[np.ndarray, int]:
    """shfl.sync (PTX ISA pseudocode): returns ([32] values, mask of lanes whose source was in range)."""
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
    values = np.broadcast_to(np.asarray(value, np.uint32), 32)[source]
    return values, mask_of(valid)


def _shuffle_value(warp: Warp, mask: int, *args: LaneValues) -> LaneValues:
    return _shuffle(warp, mask, *args)[0]


def _shuffle_valid(warp: Warp, mask: int, *args: LaneValues) -> int:
    return _shuffle(warp, mask, *args)[1]


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
    arguments = (instruction.parts[2], value, lane, clamp)
    (result,) = call_members(block, _shuffle_value, *arguments, members=members, results=[("u32", False)])
    if isinstance(destination, Pair):
        (valid,) = call_members(block, _shuffle_valid, *arguments, members=members, results=[("pred", False)])
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
)  # fmt: skip
def _lower_vote(block: BlockBuilder, instruction: Instruction) -> None:
    """vote.sync.all/any/uni.pred and vote.sync.ballot.b32."""
    mode, type_ = instruction.parts[2:]
    if mode not in ("all", "any", "uni", "ballot"):
        raise instruction.refuse(f"vote.sync.{mode} is not implemented")
    predicate = block.value(instruction.operands[1], 1)
    members = block.value(instruction.operands[2], 32)
    result = ("u32", True) if mode == "ballot" else ("pred", True)
    (voted,) = call_members(block, _vote, mode, predicate, members=members, results=[result])
    block.define(instruction.operands[0], voted)


def _active(warp: Warp, mask: int) -> int:
    return mask


@family("activemask", varies=never_varies, operands="d")
def _activemask(block: BlockBuilder, instruction: Instruction) -> None:
    """activemask."""
    block.define(instruction.operands[0], block.call(_active, results=[("u32", True)], effects=False)[0])


def _reduce(warp: Warp, mask: int, name: str, signed: bool, value: LaneValues, members: int) -> int:
    check_members(warp, mask, members, "redux.sync")
    lanes = np.broadcast_to(np.asarray(value, np.uint32), 32)[block_lanes(mask)]
    lanes = lanes.view(np.int32) if signed else lanes
    ufunc = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
             "xor": np.bitwise_xor}[name]  # fmt: skip
    return int(ufunc.reduce(lanes)) & FULL


@family("redux.sync", varies=varies_with_members, operands="dst, src, membermask:u32")
def _redux(block: BlockBuilder, instruction: Instruction) -> None:
    """redux.sync: integer reduction over a warp."""
    name, type_ = instruction.parts[2:]
    if type_ not in ("u32", "s32", "b32") or name not in ("add", "min", "max", "and", "or", "xor"):
        raise instruction.refuse(f"redux.sync.{name}.{type_} is not implemented")
    value, members = (block.value(operand, 32) for operand in instruction.operands[1:])
    (result,) = call_members(block, _reduce, name, type_ == "s32", value, members=members, results=[("u32", True)])
    block.define(instruction.operands[0], result)
