"""Tensor maps that kernels make or change: tensormap.replace, tensormap.cp_fenceproxy, fence.proxy.tensormap."""

import numpy as np

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.isa.instructions.memory import address_value
from cute_kernels.emulator.isa.instructions.sync import each_lane, lane_numbers, require_whole_warp
from cute_kernels.emulator.isa.ptx.families import as_integer
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.state.lane_masks import LaneValues
from cute_kernels.emulator.machine.units.copies.generic_accesses import space_of
from cute_kernels.emulator.machine.units.copies.tensor_map import NBYTES, REPLACEABLE, replace
from cute_kernels.emulator.machine.units.sm import Warp

_ALIGNMENT = 128

_FIELDS = 64  # bytes that carry the fields of tiled modes; CuTe DSL leaves the others uninitialised


def _bytes_of(warp: Warp, space: str, address: int, *, write: bool) -> np.ndarray:
    kind, where = space_of(space, address)
    if where % _ALIGNMENT:
        raise IllegalAccess(f"tensor map at {where:#x}, which is not {_ALIGNMENT}-byte aligned")
    if kind != "shared":
        return warp.cluster.gmem.view(where, NBYTES, write=write)
    fields = warp.cluster.memory.view(where, _FIELDS, write=write)
    return np.concatenate([fields, np.zeros(NBYTES - _FIELDS, np.uint8)])


def tensormap_replace(
    warp: Warp, mask: int, space: str, address: LaneValues, name: str, ordinal: int, value: LaneValues
) -> None:
    """tensormap.replace by each executing lane, through the generic proxy."""
    warp.cluster.progress += 1
    for lane, (where, new) in zip(lane_numbers(mask), each_lane(mask, address, value)):
        cells = _bytes_of(warp, space, where, write=False)
        changed = np.frombuffer(replace(bytes(cells), name, ordinal, new), np.uint8)
        kind, place = space_of(space, where)
        if kind == "shared":
            warp.cluster.memory.view(place, _FIELDS, write=True)[:] = changed[:_FIELDS]
            places = place + np.arange(0, _FIELDS, 16, dtype=np.int64)
            if warp.agent is not None:
                warp.cluster.tracker.generic(warp.agent, lane, "shared", places, 16, True)
        else:
            _bytes_of(warp, space, where, write=True)[:] = changed
            _watch(warp, lane, where)


def _watch(warp: Warp, lane: int, address: int) -> None:
    """A lane (-1: the warp) writes a tensor map in global memory, which no copy may be reading."""
    if warp.agent is not None:
        places = address + np.arange(0, NBYTES, 16, dtype=np.int64)
        warp.cluster.tracker.generic(warp.agent, lane, "global", places, 16, True)


def _replace_operands(parts: tuple[str, ...]) -> str:
    indexed = {"box_dim", "global_dim", "global_stride", "element_stride"} & set(parts)
    return "[addr], " + ("ord:imm, " if indexed else "") + "new_val"


@family(
    "tensormap.replace.tile", destinations=0, operands=_replace_operands,
    qualifiers="global_address|global_stride global|shared::cta? b1024 b64; rank|box_dim|global_dim|element_stride|"
    "elemtype|interleave_layout|swizzle_mode|fill_mode|swizzle_atomicity global|shared::cta? b1024 b32",
)  # fmt: skip
def _replace(block: BlockBuilder, instruction: Instruction) -> None:
    """tensormap.replace.tile: every field, in global or shared memory."""
    name, *rest = instruction.parts[3:]
    space = "shared" if "shared::cta" in rest else "global" if "global" in rest else "generic"
    operands = list(instruction.operands)
    address = address_value(block, operands[0], 32 if space == "shared" else 64)
    ordinal = as_integer(instruction, operands.pop(1)) if REPLACEABLE[name] else 0
    if not 0 <= ordinal <= REPLACEABLE[name]:
        raise instruction.refuse(f"ordinal of .{name}: it is 0 to {REPLACEABLE[name]}")
    value = block.value(operands[1], int(rest[-1][1:]))
    block.call(tensormap_replace, space, address, name, ordinal, block.whole(value))


def copy_tensor_map(warp: Warp, mask: int, target: LaneValues, source: LaneValues) -> None:
    """tensormap.cp_fenceproxy: one copy for the warp."""
    require_whole_warp(warp, mask, "tensormap.cp_fenceproxy")
    warp.cluster.progress += 1
    for where, origin in set(each_lane(mask, target, source)):
        _bytes_of(warp, "global", where, write=True)[:] = _bytes_of(warp, "shared", origin, write=False)
        _watch(warp, -1, where)


@family(
    "tensormap.cp_fenceproxy", destinations=0, operands="[dst], [src], size:imm",
    qualifiers="global shared::cta tensormap::generic release $scope sync aligned",
)  # fmt: skip
def _copy(block: BlockBuilder, instruction: Instruction) -> None:
    """tensormap.cp_fenceproxy: copies a tensor map from shared to global memory; memory is coherent here."""
    target, source, nbytes = instruction.operands
    if as_integer(instruction, nbytes) != NBYTES:
        raise instruction.refuse(f"a size other than {NBYTES}")
    block.call(copy_tensor_map, address_value(block, target, 64), address_value(block, source))


@family(
    "fence.proxy.tensormap::generic", destinations=0,
    operands=lambda parts: "[addr], size:imm" if "acquire" in parts else "", qualifiers="acquire|release $scope",
)  # fmt: skip
def _fence(block: BlockBuilder, instruction: Instruction) -> None:
    """fence.proxy.tensormap: no effect, memory is coherent here."""
