"""Fifth-generation tensor core: allocation, loads and stores of tensor memory, MMA, commit, fences."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.isa.instructions.accesses import enter, watch_store
from cute_kernels.emulator.isa.instructions.memory import Access, address_value
from cute_kernels.emulator.isa.instructions.sync import each_lane, lane_numbers, require_whole_warp
from cute_kernels.emulator.isa.ptx.decode import Immediate, Instruction, Memory, Operand, Register, Vector
from cute_kernels.emulator.isa.ptx.families import always_varies, as_integer
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.state.lane_masks import LaneValues
from cute_kernels.emulator.machine.state.tmem import COLUMNS, HALVES, LANES, SHAPE_NUMBERS, SHAPES
from cute_kernels.emulator.machine.state.tmem_pairs import PairWait
from cute_kernels.emulator.machine.state.warp import AllocationWait
from cute_kernels.emulator.machine.units.matrix.tensor_copy import COMPRESSED, copy_to_tensor_memory, shift_rows
from cute_kernels.emulator.machine.units.matrix.tensor_mma import KIND_NAMES
from cute_kernels.emulator.races.happens_before import Offset

if TYPE_CHECKING:
    from cute_kernels.emulator.machine.units.sm import Warp

_GROUPS = ("cta_group::1", "cta_group::2")
_COPIED = ("128x256b", "128x128b", "64x128b", "32x128b")
_MOST_DISABLED = CONSTANTS["MOST_DISABLED"]  # registers of a mask of lanes
_MULTICASTS = ("warpx2::02_13", "warpx2::01_23", "warpx4")


def _cta_group(instruction: Instruction) -> int:
    groups = [part for part in instruction.parts if part in _GROUPS]
    if len(groups) != 1:
        raise instruction.refuse("one .cta_group is needed")
    return int(groups[0][-1])


# --- allocation -----------------------------------------------------------------------------------------------------


def alloc(warp: Warp, mask: int, destination: int, columns: int, cta_group: int) -> bool | None:
    """tcgen05.alloc: blocks while the columns are not free; with cta_group::2 a warp of each CTA of the pair takes part
    and each allocates in its own CTA (at equal addresses, since both CTAs allocate in the same order)."""
    require_whole_warp(warp, mask, "tcgen05.alloc")
    if cta_group == 2:
        base = _together(warp, "alloc", (columns,))
    else:
        base = warp.cta.tmem.alloc(columns)
        if base is None:
            warp.wait = AllocationWait(warp.cta.tmem, columns)
    if base is None:
        return None
    warp.cta.tmem.note_alloc(base, warp.executing(), warp.label)
    warp.cluster.progress += 1
    warp.cluster.memory.view(destination, 4, write=True)[:] = np.frombuffer(base.to_bytes(4, "little"), np.uint8)
    watch_store(warp, 0, destination, 4)
    return True


def _together(warp: Warp, name: str, operands: tuple[int, ...]) -> int | None:
    """An operation with cta_group::2; None: the warp waits for its peer."""
    operation = warp.cluster.pair_operations[warp.cta.rank // 2][name]
    result = operation.join(warp, operands)
    if result is None:
        warp.wait = PairWait(operation, warp.cta.rank)
    return result


@family(
    "tcgen05.alloc", destinations=0, blocking=True, operands="[dst], nCols:u32",
    qualifiers="$group sync aligned shared::cta? b32",
)  # fmt: skip
def _alloc(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.alloc."""
    columns = block.agreed(block.value(instruction.operands[1], 32))
    destination = block.agreed(address_value(block, instruction.operands[0]))
    block.call(alloc, destination, columns, _cta_group(instruction), blocking=True)


def dealloc(warp: Warp, mask: int, address: int, columns: int, cta_group: int) -> bool | None:
    """tcgen05.dealloc; with cta_group::2, as `alloc`."""
    require_whole_warp(warp, mask, "tcgen05.dealloc")
    if cta_group == 2:
        if _together(warp, "dealloc", (address, columns)) is None:
            return None
    else:
        warp.cluster.progress += 1
        warp.cta.tmem.dealloc(address, columns)
    if warp.agent is not None:
        warp.cluster.tracker.tensor.free(warp.agent, address & 0xFFFF, columns)
    return True


@family(
    "tcgen05.dealloc", destinations=0, blocking=True, operands="taddr:u32, nCols:u32",
    qualifiers="$group sync aligned b32",
)  # fmt: skip
def _dealloc(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.dealloc."""
    operands = (block.agreed(block.value(operand, 32)) for operand in instruction.operands)
    block.call(dealloc, *operands, _cta_group(instruction), blocking=True)


def relinquish(warp: Warp, mask: int) -> None:
    """tcgen05.relinquish_alloc_permit."""
    require_whole_warp(warp, mask, "tcgen05.relinquish_alloc_permit")
    warp.cta.tmem.relinquish()


@family("tcgen05.relinquish_alloc_permit", destinations=0, operands="", qualifiers="$group sync aligned")
def _relinquish(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.relinquish_alloc_permit."""
    block.call(relinquish)


# --- loads and stores -----------------------------------------------------------------------------------------------

_REPEAT = re.compile(r"x(\d+)")


_MOVED = (
    "sync aligned 32x32b|16x64b|16x128b|16x256b|16x32bx2 x{1,2,4,8,16,32,64,128} pack::16b? b32; "
    "16x128b / x128; 16x256b / x{64,128}"
)


def _shape(instruction: Instruction) -> tuple[str, int]:
    parts = instruction.parts
    shapes = [part for part in parts if "x" in part and part[0] != "x"]
    repeats = [int(m.group(1)) for part in parts if (m := _REPEAT.fullmatch(part))]
    if len(shapes) != 1 or len(repeats) != 1:
        raise instruction.refuse("one shape and one repetition are needed")
    return shapes[0], repeats[0]


def _facts(
    instruction: Instruction, shape: str, repeat: int, split: int, count: int, index: int = 0, pack: bool = False
) -> list[int]:
    """Facts of an `Access` of tensor memory; raises UnsupportedPTX for those that do not exist."""
    registers, largest = SHAPES[shape][1:] if shape in SHAPES else (1, LANES)
    if repeat > largest:
        raise instruction.refuse(f".{shape}.x{repeat}; legal are powers of two up to x{largest}")
    if count != registers * repeat:
        raise instruction.refuse(f"{count} registers, .{shape}.x{repeat} has {registers * repeat}")
    if not 0 <= split <= COLUMNS:
        raise instruction.refuse(f"{split} columns between halves")
    return [SHAPE_NUMBERS[shape], repeat, split, index, int(pack)]


def _halves(parts: tuple[str, ...]) -> str:
    return ", immHalfSplitoff:imm" if "16x32bx2" in parts else ""


@family(
    "tcgen05.ld", varies=always_varies, operands=lambda parts: f"{{r}}:b32, [taddr]{_halves(parts)}",
    qualifiers=_MOVED,
)  # fmt: skip
def _ld(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.ld of all shapes; .pack::16b for 32x32b."""
    pack = "pack::16b" in instruction.parts
    shape, repeat = _shape(instruction)
    if pack and shape != "32x32b":
        raise instruction.refuse(".pack::16b is implemented for 32x32b")
    destination = instruction.operands[0]
    count = len(destination.items) if isinstance(destination, Vector) else 1
    address = address_value(block, instruction.operands[1])
    address = block.agreed(address)
    split = as_integer(instruction, instruction.operands[2]) if shape == HALVES else 0
    facts = _facts(instruction, shape, repeat, split, count, instruction.index, pack)
    results = block.anchor(Access("tensor_load", address, facts), [("u32", False)] * count, [address])
    for item, value in zip(destination.items if count > 1 else _only(destination), results):
        block.define(item, value)


def used(warp: Warp, mask: int, loads: tuple[int, ...]) -> None:
    """Tells the race detector that what these tcgen05.ld have loaded is about to be used."""
    if warp.agent is not None:
        warp.agent.loads_used(loads)


def _only(destination: Operand) -> tuple[Operand, ...]:
    return destination.items if isinstance(destination, Vector) else (destination,)


@family(
    "tcgen05.st", destinations=0, operands=lambda parts: f"[taddr]{_halves(parts)}, {{r}}:b32",
    qualifiers=_MOVED.replace("pack", "unpack"),
)
def _st(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.st of all shapes."""
    shape, repeat = _shape(instruction)
    source = instruction.operands[-1]
    values = [block.whole(block.value(item, 32)) for item in _only(source)]
    address = address_value(block, instruction.operands[0])
    address = block.agreed(address)
    split = as_integer(instruction, instruction.operands[1]) if shape == HALVES else 0
    facts = _facts(instruction, shape, repeat, split, len(values))
    block.anchor(Access("tensor_store", address, facts, values), [], [address, *values])


@family("tcgen05.wait::ld", "tcgen05.wait::st", destinations=0, operands="", qualifiers="sync aligned")
def _wait(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.wait: loads and stores of tensor memory complete at once here; the detectors are told."""
    parts = instruction.parts[1:]
    kind = Offset.TENSOR_LOAD if "wait::ld" in parts else Offset.TENSOR_STORE
    block.operation("tensor_wait", order=int(kind))


@family("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync", destinations=0, operands="")
def _fence(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.fence: orders what is ordered anyway here; the detector is told."""
    before = instruction.parts[1] == "fence::before_thread_sync"
    block.operation("tensor_fence", order=int(before), watched=True)


# --- matrix multiplication ------------------------------------------------------------------------------------------


#: PTX ISA, "Block Scaling": kind -> scales of a row by .scale_vec or by its alias; the first is the default, if any.
_COUNTS = {
    "mxf8f6f4": {"": 1, "scale_vec::1X": 1, "block32": 1},
    "mxf4": {"": 2, "scale_vec::2X": 2, "block32": 2},
    "mxf4nvf4": {"scale_vec::2X": 2, "scale_vec::4X": 4, "block32": 2, "block16": 4},
}
_VECTORS = {name for counts in _COUNTS.values() for name in counts if name}


def _scales_of_a_row(instruction: Instruction, kinds: list[str]) -> int:
    """How many scales each row has in a tcgen05.mma with .block_scale of the named kinds.

    Raises:
        UnsupportedPTX: a kind without scales, or a number of scales that it does not have.
    """
    named = [part for part in instruction.parts if part in _VECTORS]
    counts = _COUNTS[kinds[0]] if len(kinds) == 1 else {}
    vector = named[0] if named else ""
    if len(named) > 1 or vector not in counts:
        allowed = ", ".join(f".{name}" for name in counts if name) or "none"
        raise instruction.refuse(f"one kind with scales is needed, and one of its numbers of scales ({allowed})")
    return counts[vector]


_HINT = "collector::a::{fill,use,lastuse,discard}?"
_MMA = "; ".join((
    f"$group kind::f16|kind::tf32|kind::f8f6f4|kind::i8 {_HINT}",
    f"$group kind::mxf8f6f4 block_scale scale_vec::1X|block32? {_HINT}",
    f"$group kind::mxf4 block_scale scale_vec::2X|block32? {_HINT}",
    f"$group kind::mxf4nvf4 block_scale scale_vec::2X|scale_vec::4X|block32|block16 {_HINT}",
))  # fmt: skip


def _mma_operands(parts: tuple[str, ...]) -> str:
    if "block_scale" in parts:
        rests = ["b_desc:b64, idesc:u32, [scale_a], [scale_b], enable_input_d:pred"]
    else:
        disabled = ("{disable_output_lane}:b32, ", "")
        rests = [f"b_desc:b64, idesc:u32, {lanes}enable_input_d:pred, scale_input_d:imm?" for lanes in disabled]
    return "; ".join(f"[d_tmem], {a}, {rest}" for a in ("a_desc:b64", "[a_tmem]") for rest in rests)


@family("tcgen05.mma", destinations=0, operands=_mma_operands, qualifiers=_MMA)
def _mma(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.mma, dense kinds, with block scaling too; collector hints, which change no result, are ignored."""
    parts, operands = instruction.parts, list(instruction.operands)
    kinds = [part.removeprefix("kind::") for part in parts if part.startswith("kind::")]
    scaled = "block_scale" in parts
    count = _scales_of_a_row(instruction, kinds) if scaled else 0
    if len(kinds) != 1:
        raise instruction.refuse("one kind is needed")
    d, a, b, descriptor, *rest = operands
    scales = [address_value(block, rest.pop(0)) for _ in range(2)] if scaled else [None, None]
    disabled: tuple[Operand, ...] = rest.pop(0).items if rest and isinstance(rest[0], Vector) else ()
    if len(rest) != 1 or not isinstance(rest[0], (Register, Immediate)) or len(disabled) > _MOST_DISABLED:
        raise instruction.refuse("scale-input-d is not implemented")
    a_in_tmem, enable = isinstance(a, Memory), block.value(rest[0], 1)
    values = [
        address_value(block, d), address_value(block, a) if a_in_tmem else block.value(a, 64), block.value(b, 64),
        block.value(descriptor, 32), enable, *scales, *(block.value(item, 32) for item in disabled),
    ]  # fmt: skip
    values += [None] * (_MOST_DISABLED - len(disabled))
    facts = KIND_NAMES.index(kinds[0]), _cta_group(instruction), int(a_in_tmem), count, int(not enable.uniform)
    block.operation("tensor_mma", *values, facts=facts)


def copy(
    warp: Warp, mask: int, shape: str, multicast: str, held: str, cta_group: int, address: LaneValues,
    matrix: LaneValues,
) -> None:  # fmt: skip
    """tcgen05.cp, once per executing lane."""
    warp.cluster.progress += 1
    for lane, (where, descriptor) in zip(lane_numbers(mask), each_lane(mask, address, matrix)):
        enter(warp, lane)
        copy_to_tensor_memory(
            warp.cluster.tensor_core,
            shape=shape,
            multicast=multicast,
            cta_group=cta_group,
            rank=warp.cta.rank,
            address=where,
            matrix=descriptor,
            held=held,
            describe=f"by {warp.label}",
        )


@family(
    "tcgen05.cp", destinations=0, operands="[taddr], s_desc:b64",
    qualifiers="; ".join(
        f"$group {shape} b8x16? b4x16_p64|b6x16_p32?"
        for shape in ("128x256b|128x128b", "64x128b warpx2::02_13|warpx2::01_23", "32x128b warpx4")
    )
    + "; b8x16 > b4x16_p64|b6x16_p32; b4x16_p64|b6x16_p32 > b8x16",
)  # fmt: skip
def _cp(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.cp of 128x256b, 128x128b, 64x128b.warpx2, 32x128b.warpx4; .b8x16 from .b4x16_p64 and .b6x16_p32."""
    parts = instruction.parts
    shape = [part for part in parts if part in _COPIED]
    multicast = [part for part in parts if part in _MULTICASTS]
    held = [part for part in parts if part in COMPRESSED]
    if len(shape) != 1 or len(multicast) > 1:
        raise instruction.refuse("one shape and at most one multicast are needed")
    if len(held) != ("b8x16" in parts):
        raise instruction.refuse(f".b8x16 and one of .{', .'.join(COMPRESSED)} go together")
    address, matrix = instruction.operands
    descriptor = block.whole(block.value(matrix, 64))
    form = shape[0], "".join(multicast), "".join(held), _cta_group(instruction)
    block.call(copy, *form, address_value(block, address), descriptor)


def shift(warp: Warp, mask: int, cta_group: int, address: LaneValues) -> None:
    """tcgen05.shift, once per executing lane."""
    warp.cluster.progress += 1
    for lane, (where,) in zip(lane_numbers(mask), each_lane(mask, address)):
        enter(warp, lane)
        shift_rows(
            warp.cluster.tensor_core,
            cta_group=cta_group,
            rank=warp.cta.rank,
            address=where,
            describe=f"by {warp.label}",
        )


@family("tcgen05.shift", destinations=0, operands="[taddr]", qualifiers="$group down")
def _shift(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.shift.down: in 32 lanes, every row of 32 bytes but the last becomes the next one."""
    if "down" not in instruction.parts[1:]:
        raise instruction.refuse(".down is expected")
    block.call(shift, _cta_group(instruction), address_value(block, instruction.operands[0]))


@family(
    "tcgen05.commit", destinations=0,
    operands=lambda parts: "[mbar]" + (", ctaMask:u16" if "multicast::cluster" in parts else ""),
    qualifiers="$group mbarrier::arrive::one shared::cluster? multicast::cluster? b64",
)  # fmt: skip
def _commit(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.commit, with multicast."""
    parts = instruction.parts[1:]
    _cta_group(instruction)
    masks = [block.resize(block.value(instruction.operands[1], 16), 32)] if "multicast::cluster" in parts else []
    where = address_value(block, instruction.operands[0])
    block.operation("tensor_commit", where, *masks, flags=CONSTANTS["FLAG"] * len(masks))
