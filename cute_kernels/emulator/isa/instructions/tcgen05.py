"""Fifth-generation tensor core: allocation, loads and stores of tensor memory, MMA, commit, fences."""

from collections.abc import Callable, Sequence

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.isa.instructions.accesses import enter, watch
from cute_kernels.emulator.isa.instructions.memory import Access, address_value
from cute_kernels.emulator.isa.instructions.sync import each_lane, lane_numbers, require_whole_warp
from cute_kernels.emulator.isa.ptx.families import always_varies, as_integer
from cute_kernels.emulator.isa.ptx.program import Instruction, Memory, Operand, Vector, items_of
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.state.lane_masks import LaneValues
from cute_kernels.emulator.machine.state.tmem import COLUMNS, HALVES, SHAPE_NUMBERS, SHAPES
from cute_kernels.emulator.machine.state.warp import Wait
from cute_kernels.emulator.machine.units.matrix.tensor_copy import COMPRESSED, copy_to_tensor_memory, shift_rows
from cute_kernels.emulator.machine.units.matrix.tensor_mma import KIND_NAMES
from cute_kernels.emulator.machine.units.sm import Warp
from cute_kernels.emulator.races.happens_before import Offset

_MOST_DISABLED = CONSTANTS["MOST_DISABLED"]  # registers of a mask of lanes


def _cta_group(instruction: Instruction) -> int:
    return 2 if "cta_group::2" in instruction.parts else 1


def alloc(warp: Warp, mask: int, destination: int, columns: int, cta_group: int) -> bool | None:
    """tcgen05.alloc: blocks while the columns are not free; with cta_group::2 a warp of each CTA of the pair takes part
    and each allocates in its own CTA (at equal addresses, since both CTAs allocate in the same order)."""
    require_whole_warp(warp, mask, "tcgen05.alloc")
    if cta_group == 2:
        base = _together(warp, "alloc", (columns,), _allocated)
    else:
        base = warp.cta.tmem.alloc(columns)
        if base is None:
            tmem = warp.cta.tmem
            warp.wait = Wait("tcgen05.alloc", lambda: tmem.has_room(columns), lambda: tmem.lacks(columns))
        else:
            _allocated([(warp, base)], (columns,))
    if base is None:
        return None
    warp.cluster.progress += 1
    warp.cluster.memory.view(destination, 4, write=True)[:] = np.frombuffer(base.to_bytes(4, "little"), np.uint8)
    watch(warp, 1, "shared", np.array([destination], np.int64), 4, True)
    return True


def _allocated(parts: Sequence[tuple[Warp, int]], operands: tuple[int, ...]) -> None:
    """Warps, of both CTAs of a pair together, have allocated columns from the second of each part on."""
    for warp, base in parts:
        memory, cluster = warp.cta.tmem, warp.cluster
        memory.note_alloc(base, warp.executing(), warp.label)
        if cluster.may_wait_for_columns(memory):
            text = "CTAs of a multiprocessor allocate tensor memory in an order that may leave them waiting"
            cluster.places.add(("pool", warp.executing(), text))
    if parts[0][0].agent is not None:
        parts[0][0].cluster.tracker.tensor.allocate([(warp.agent, base) for warp, base in parts], *operands)


def _together(
    warp: Warp, name: str, operands: tuple[int, ...], done: Callable[..., None] = lambda parts, operands: None
) -> int | None:
    """An operation with cta_group::2; None: the warp waits for its peer. ``done``: as of `PairOperation.join`."""
    return warp.cluster.pair_operations[warp.cta.rank // 2][name].join(warp, operands, done)


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
    require_whole_warp(warp, mask, "tcgen05.relinquish_alloc_permit")
    warp.cta.tmem.relinquish()
    if warp.agent is not None:
        warp.cluster.tracker.tensor.manage(warp.agent, "tcgen05.relinquish_alloc_permit")


@family("tcgen05.relinquish_alloc_permit", destinations=0, operands="", qualifiers="$group sync aligned")
def _relinquish(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.relinquish_alloc_permit."""
    block.call(relinquish)


_MOVED = (
    "sync aligned 32x32b|16x64b|16x128b|16x256b|16x32bx2 x{1,2,4,8,16,32,64,128} pack::16b? b32; "
    "16x128b / x128; 16x256b / x{64,128}"
)


def _form(parts: tuple[str, ...]) -> tuple[str, int, int]:
    """(shape, repetitions, registers) of tcgen05.ld and tcgen05.st."""
    shape, repeat = parts[4], int(parts[5][1:])
    return shape, repeat, repeat * (SHAPES[shape][1] if shape in SHAPES else 1)


def _facts(instruction: Instruction, index: int = 0, pack: bool = False) -> list[int]:
    """Facts of an `Access` of tensor memory."""
    shape, repeat, _ = _form(instruction.parts)
    place = 2 if instruction.parts[1] == "ld" else 1
    split = as_integer(instruction, instruction.operands[place]) if shape == HALVES else 0
    if not 0 <= split <= COLUMNS:
        raise instruction.refuse(f"{split} columns between halves")
    return [SHAPE_NUMBERS[shape], repeat, split, index, int(pack)]


def _moved_operands(parts: tuple[str, ...]) -> str:
    operands = [f"{{r}}{_form(parts)[2]}:b32", "[taddr]" + ", immHalfSplitoff:imm" * ("16x32bx2" in parts)]
    return ", ".join(operands if parts[1] == "ld" else operands[::-1])


@family("tcgen05.ld", varies=always_varies, operands=_moved_operands, qualifiers=_MOVED)
def _ld(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.ld of all shapes; .pack::16b for 32x32b."""
    pack = "pack::16b" in instruction.parts
    if pack and "32x32b" not in instruction.parts:
        raise instruction.refuse(".pack::16b is implemented for 32x32b")
    items = items_of(instruction.operands[0])
    address = block.agreed(address_value(block, instruction.operands[1]))
    access = Access("tensor_load", address, _facts(instruction, instruction.index, pack))
    for item, value in zip(items, block.anchor(access, [("u32", False)] * len(items), [address])):
        block.define(item, value)


def used(warp: Warp, mask: int, loads: tuple[int, ...]) -> None:
    """Tells the race detector that what these tcgen05.ld have loaded is about to be used."""
    if warp.agent is not None:
        warp.agent.loads_used(loads)


@family("tcgen05.st", destinations=0, operands=_moved_operands, qualifiers=_MOVED.replace("pack", "unpack"))
def _st(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.st of all shapes."""
    values = [block.whole(block.value(item, 32)) for item in items_of(instruction.operands[-1])]
    address = block.agreed(address_value(block, instruction.operands[0]))
    block.anchor(Access("tensor_store", address, _facts(instruction), values), [], [address, *values])


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


def _scales_of_a_row(parts: tuple[str, ...], kind: str) -> int:
    """PTX ISA, "Block Scaling"; 0: without."""
    if "block_scale" not in parts:
        return 0
    return 1 if kind == "mxf8f6f4" else 4 if {"scale_vec::4X", "block16"} & set(parts) else 2


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
        lanes = 4 * (2 if "cta_group::2" in parts else 1)
        disabled = (f"{{disable_output_lane}}{lanes}:b32, ", "")
        rests = [f"b_desc:b64, idesc:u32, {lanes}enable_input_d:pred, scale_input_d:imm?" for lanes in disabled]
    return "; ".join(f"[d_tmem], {a}, {rest}" for a in ("a_desc:b64", "[a_tmem]") for rest in rests)


@family("tcgen05.mma", destinations=0, operands=_mma_operands, qualifiers=_MMA)
def _mma(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.mma, dense kinds, with block scaling too; collector hints, which change no result, are ignored."""
    parts, operands = instruction.parts, list(instruction.operands)
    kind = next(part for part in parts if part.startswith("kind::")).removeprefix("kind::")
    count = _scales_of_a_row(parts, kind)
    d, a, b, descriptor, *rest = operands
    scales = [address_value(block, rest.pop(0)) for _ in range(2)] if count else [None, None]
    disabled: tuple[Operand, ...] = rest.pop(0).items if rest and isinstance(rest[0], Vector) else ()
    if len(rest) != 1:
        raise instruction.refuse("scale-input-d is not implemented")
    a_in_tmem, enable = isinstance(a, Memory), block.value(rest[0], 1)
    values = [
        address_value(block, d), address_value(block, a) if a_in_tmem else block.value(a, 64), block.value(b, 64),
        block.value(descriptor, 32), enable, *scales, *(block.value(item, 32) for item in disabled),
    ]  # fmt: skip
    values += [None] * (_MOST_DISABLED - len(disabled))
    facts = KIND_NAMES.index(kind), _cta_group(instruction), int(a_in_tmem), count, int(not enable.uniform)
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
            warp.cluster.tensor_core, shape=shape, multicast=multicast, cta_group=cta_group, rank=warp.cta.rank,
            address=where, matrix=descriptor, held=held, describe=f"by {warp.label}",
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
    multicast = next((part for part in parts if part.startswith("warpx")), "")
    held = next((part for part in parts if part in COMPRESSED), "")
    address, matrix = instruction.operands
    descriptor = block.whole(block.value(matrix, 64))
    block.call(copy, parts[3], multicast, held, _cta_group(instruction), address_value(block, address), descriptor)


def shift(warp: Warp, mask: int, cta_group: int, address: LaneValues) -> None:
    """tcgen05.shift, once per executing lane."""
    warp.cluster.progress += 1
    for lane, (where,) in zip(lane_numbers(mask), each_lane(mask, address)):
        enter(warp, lane)
        shift_rows(
            warp.cluster.tensor_core, cta_group=cta_group, rank=warp.cta.rank, address=where,
            describe=f"by {warp.label}",
        )


@family("tcgen05.shift", destinations=0, operands="[taddr]", qualifiers="$group down")
def _shift(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.shift.down: in 32 lanes, every row of 32 bytes but the last becomes the next one."""
    block.call(shift, _cta_group(instruction), address_value(block, instruction.operands[0]))


@family(
    "tcgen05.commit", destinations=0,
    operands=lambda parts: "[mbar]" + (", ctaMask:u16" if "multicast::cluster" in parts else ""),
    qualifiers="$group mbarrier::arrive::one shared::cluster? multicast::cluster? b64",
)  # fmt: skip
def _commit(block: BlockBuilder, instruction: Instruction) -> None:
    """tcgen05.commit, with multicast."""
    masks = [block.resize(block.value(operand, 16), 32) for operand in instruction.operands[1:]]
    where = address_value(block, instruction.operands[0])
    block.operation("tensor_commit", where, *masks, flags=CONSTANTS["FLAG"] * len(masks))
