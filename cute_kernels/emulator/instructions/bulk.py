"""Bulk asynchronous copies: TMA tensor loads and stores, bulk groups."""

from __future__ import annotations

import re
from collections.abc import Callable

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.graph.block import BlockBuilder, Call
from cute_kernels.emulator.graph.families import family
from cute_kernels.emulator.graph.values import Constant, Value
from cute_kernels.emulator.instructions.accesses import space_of, view_bytes
from cute_kernels.emulator.instructions.memory import address_value
from cute_kernels.emulator.instructions.sync import each_lane, lane_numbers
from cute_kernels.emulator.observe.races.launch_accesses import MAP_BYTES
from cute_kernels.emulator.ptx.decode import Instruction, Memory, Operand, Vector
from cute_kernels.emulator.ptx.families import as_integer
from cute_kernels.emulator.state.lane_masks import LaneValues
from cute_kernels.emulator.units.core_units import Issuer
from cute_kernels.emulator.units.sm import Warp

_RANK = re.compile(r"([1-5])d")


#: The driver API (cuTensorMapEncodeTiled) requires this of tensor maps; a copy faults with "misaligned address" on an
#: H200 where it is not met, although the PTX ISA leaves it unsaid.
_MAP_ALIGNMENT = 64


def tensor_descriptor(warp: Warp, address: int) -> bytes:
    """The 128 bytes of a tensor map.

    Raises:
        IllegalAccess: misaligned, or not in memory that the launch may read.
    """
    if address % _MAP_ALIGNMENT:
        raise IllegalAccess(f"tensor map at {address:#x}, which is not {_MAP_ALIGNMENT}-byte aligned")
    if warp.cluster.tracker is not None and space_of(warp, "generic", address)[0] == "global":
        warp.cluster.tracker.launch.maps.add(address)
    return bytes(view_bytes(warp, "generic", address, MAP_BYTES))


def changing_map(warp: Warp, address: int) -> int | None:
    """The address of a tensor map that the kernel may change while a copy reads it, for the race detector; else None.

    The core keeps no account of what reads maps: copies through these are Python's.
    """
    if warp.agent is None or not warp.cluster.tracker.launch.makes_maps:
        return None
    return address if space_of(warp, "generic", address)[0] == "global" else None


def tma_load(
    warp: Warp,
    mask: int,
    destination: LaneValues,
    descriptor: LaneValues,
    coords: tuple[LaneValues, ...],
    barrier: LaneValues,
    cta_group: int | None,
    multicast: LaneValues | None,
    offsets: tuple[LaneValues, ...] | None,
) -> None:
    """cp.async.bulk.tensor to shared memory, once per executing lane; ``offsets`` of .im2col."""
    cluster, count = warp.cluster, len(coords)
    cluster.progress += 1
    use_mask = multicast is not None
    more = (*([multicast] if use_mask else []), *(offsets or ()))
    values = each_lane(mask, destination, descriptor, barrier, *coords, *more)
    for number, lane in zip(lane_numbers(mask), values):
        if warp.agent is not None:
            cluster.tracker.enter(warp.agent, number)
        content, changing = tensor_descriptor(warp, lane[1]), changing_map(warp, lane[1])
        place = [signed32(c) for c in lane[3 : 3 + count]]
        ctas = lane[3 + count] & 0xFFFF if use_mask else None
        by_core = cluster.units is not None and changing is None and offsets is None
        if by_core and cluster.units.learn(lane[1], content):
            issuer = Issuer(warp.number, number, warp.executing())
            if cluster.units.load((lane[1], lane[0], lane[2]), place, ctas, cta_group == 2, issuer):
                continue
        cluster.tma.load(
            content,
            place,
            lane[0],
            lane[2],
            rank=warp.cta.rank,
            cta_group=cta_group,
            multicast=ctas,
            offsets=None if offsets is None else [offset & 0xFFFF for offset in lane[3 + count + use_mask :]],
            describe=f"by {warp.label}",
            map_address=changing,
        )


def tma_store(
    warp: Warp, mask: int, descriptor: LaneValues, coords: tuple[LaneValues, ...], source: LaneValues,
    im2col: bool = False,
) -> None:  # fmt: skip
    """cp.async.bulk.tensor to global memory.

    Lanes with equal operands write the same bytes to the same place: one of them (the lowest) does it for all. CuTe
    DSL lets whole warps execute stores, and the hardware's instruction is one per warp as well.
    """
    cluster = warp.cluster
    cluster.progress += 1
    done: set[tuple[int, ...]] = set()
    uniform = all(isinstance(x, int) for x in (descriptor, source, *coords))
    for lane in lane_numbers(mask & -mask if uniform else mask):
        (operands,) = each_lane(1 << lane, descriptor, source, *coords)
        if operands not in done:
            done.add(operands)
            address, where, *place = operands
            first = not warp.storing_lanes >> lane & 1
            warp.stores_in_bulk(lane)
            if warp.agent is not None:
                cluster.tracker.enter(warp.agent, lane)
            content, changing = tensor_descriptor(warp, address), changing_map(warp, address)
            place = [signed32(c) for c in place]
            by_core = cluster.units is not None and changing is None and not im2col
            if by_core and (cluster.units.learn(address, content) or first):
                if cluster.units.store(address, where, place, Issuer(warp.number, lane, warp.executing())):
                    continue
            cluster.tma.store(
                content,
                place,
                where,
                thread=(warp.cta.rank, warp.index, lane),
                describe=f"by {warp.label}",
                im2col=im2col,
                map_address=changing,
            )


def signed32(value: int) -> int:
    """A 32-bit pattern as two's complement."""
    return (value & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def prefetch_descriptor(warp: Warp, mask: int, address: LaneValues) -> None:
    """prefetch.tensormap."""
    for (where,) in each_lane(mask & -mask, address):
        warp.cluster.tma.prefetch(tensor_descriptor(warp, where))


@family("prefetch.tensormap", "prefetch.param.tensormap", "prefetch.const.tensormap", destinations=0)
def _prefetch_tensormap(block: BlockBuilder, instruction: Instruction) -> None:
    """prefetch.tensormap: no effect on results; a tensor map with a mode that is not implemented is refused."""
    block.call(prefetch_descriptor, address_value(block, instruction.operands[0], 64))


_PARTS = ("global", "L2::cache_hint", "mbarrier::complete_tx::bytes", "bulk_group")
_MODES = ("tile", "im2col", "im2col_no_offs")
_COPIED = ("shared::cta", "shared::cluster", "multicast::cluster", "cta_group::1", "cta_group::2")
RANKS = tuple(f"{rank}d" for rank in range(1, 6))


def tensor_operand(
    block: BlockBuilder, instruction: Instruction, operand: Operand, rank: int
) -> tuple[Value, list[Value]]:
    """(descriptor address, coordinates) of ``[map, {c0, c1, ...}]``."""
    if not isinstance(operand, Memory) or len(operand.extra) != 1 or not isinstance(operand.extra[0], Vector):
        raise instruction.refuse("a tensor operand [map, {coordinates}] is expected")
    items = operand.extra[0].items
    if len(items) != rank:
        raise instruction.refuse(f"{len(items)} coordinates for a {rank}-dimensional copy")
    return address_value(block, operand, 64), [block.value(item, 32) for item in items]


def rank_of(instruction: Instruction) -> int:
    """Dimensions of a tensor copy."""
    ranks = [int(m.group(1)) for part in instruction.parts if (m := _RANK.fullmatch(part))]
    if len(ranks) != 1:
        raise instruction.refuse("the dimension of the tensor copy is missing")
    return ranks[0]


@family("cp.async.bulk.tensor", destinations=0, qualifiers=(*_PARTS, *_MODES, *RANKS, *_COPIED))
def _bulk_tensor(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.bulk.tensor: global to shared (multicast, cta_group) and shared to global, tiled (packed 4- and 6-bit
    elements too) and im2col mode."""
    rank = rank_of(instruction)
    parts = instruction.parts[1:]
    spaces = [part for part in parts if part in ("global", "shared::cta", "shared::cluster")]
    mode = mode_of(instruction, parts, "im2col_no_offs" if spaces[0] == "global" else "im2col", rank)
    operands = list(instruction.operands)
    if "L2::cache_hint" in parts:
        operands.pop()  # an eviction priority
    if spaces[0] == "global":
        if "bulk_group" not in parts or len(operands) != 2:
            raise instruction.refuse("this form of a tensor store is not implemented")
        descriptor, coords = tensor_operand(block, instruction, operands[0], rank)
        whole_call(block, tma_store, [descriptor], coords, [address_value(block, operands[1]), mode != "tile"])
        return
    multicast = block.value(operands.pop(), 16) if "multicast::cluster" in parts else None
    offsets = _offsets(block, instruction, operands.pop(3), rank) if mode == "im2col" and len(operands) == 4 else None
    if "mbarrier::complete_tx::bytes" not in parts or len(operands) != 3 or (offsets is None) != (mode == "tile"):
        raise instruction.refuse("this form of a tensor load is not implemented")
    descriptor, coords = tensor_operand(block, instruction, operands[1], rank)
    group = 2 if "cta_group::2" in parts else 1 if "cta_group::1" in parts else None
    destination, barrier = address_value(block, operands[0]), address_value(block, operands[2])
    whole_call(block, tma_load, [destination, descriptor], coords, [barrier, group, multicast, offsets])


def mode_of(instruction: Instruction, parts: list[str], im2col: str, rank: int) -> str:
    """``tile``, or the im2col mode of this kind of copy."""
    modes = [part for part in parts if part in _MODES] or ["tile"]
    if len(modes) != 1 or modes[0] not in ("tile", im2col):
        raise instruction.refuse(f"the mode of this copy is .tile or .{im2col}")
    if modes[0] != "tile" and rank < 3:
        raise instruction.refuse(f".{modes[0]} needs 3 to 5 dimensions")
    return modes[0]


def _offsets(block: BlockBuilder, instruction: Instruction, operand: Operand, rank: int) -> tuple[Value, ...] | None:
    """The values of ``{offset of W, ...}``."""
    if not isinstance(operand, Vector) or len(operand.items) != rank - 2:
        raise instruction.refuse(f"{rank - 2} im2col offsets are expected for a {rank}-dimensional copy")
    return tuple(block.whole(block.value(item, 16)) for item in operand.items)


def whole_call(
    block: BlockBuilder, function: Callable[..., None], before: list[object], coords: list[Value], after: list[object]
) -> None:
    """A call with the coordinates as one tuple argument."""
    coords = [block.whole(value) for value in coords]
    flat = [item for value in after for item in (value if isinstance(value, tuple) else (value,))]
    values = [v for v in (*before, *coords, *flat) if hasattr(v, "uniform")]
    block.anchor(Call(function, [*before, tuple(coords), *after]), [], values)


@family("cp.async.bulk.prefetch.tensor", destinations=0, qualifiers=(*_PARTS, *_MODES, *RANKS, "L2"))
def _bulk_prefetch(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.bulk.prefetch.tensor: into L2 only, no effect on results; the descriptor is checked."""
    rank = rank_of(instruction)
    parts = instruction.parts[1:]
    mode_of(instruction, parts, "im2col", rank)
    descriptor, _ = tensor_operand(block, instruction, instruction.operands[0], rank)
    block.call(prefetch_descriptor, descriptor)


# --- bulk groups ----------------------------------------------------------------------------------------------------


@family("cp.async.bulk.commit_group", destinations=0, qualifiers="")
def _commit(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.bulk.commit_group."""
    block.operation("bulk_commit")


@family("cp.async.bulk.wait_group", destinations=0, blocking=True, qualifiers="read")
def _wait(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.bulk.wait_group, wait_group.read."""
    parts = instruction.parts[1:]
    count = as_integer(instruction, instruction.operands[0])
    if count < 0:
        raise instruction.refuse("the number of groups must not be negative")
    flags = CONSTANTS["FLAG"] if "read" in parts else 0
    block.operation("bulk_wait", Constant(count, 64), flags=flags, blocking=True)
