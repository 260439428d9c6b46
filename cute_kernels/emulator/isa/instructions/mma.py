"""Warp-level matrix multiplication: mma.sync, and mma.sp with a sparse A."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.isa.instructions.mma_kinds import lower_kind
from cute_kernels.emulator.isa.instructions.sync import require_whole_warp
from cute_kernels.emulator.isa.ptx.decode import Instruction, Vector
from cute_kernels.emulator.isa.ptx.families import always_varies, as_integer
from cute_kernels.emulator.machine.graph.block import BlockBuilder, Call
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import Value
from cute_kernels.emulator.machine.units.matrix.mma_sync import SHAPES, SPARSE_SHAPES, TYPES, Form, Sparsity, multiply
from cute_kernels.emulator.machine.units.matrix.structured_sparsity import threads_with_metadata

if TYPE_CHECKING:
    from cute_kernels.emulator.machine.state.lane_masks import LaneValues
    from cute_kernels.emulator.machine.units.sm import Warp

_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_FP8 = ("e4m3", "e5m2")
_INTEGERS = (("s8", "u8"), ("s4", "u4"))
_ACCUMULATORS = {"f64": ("f64",), "f16": ("f32", "f16"), **dict.fromkeys(_FP8, ("f32", "f16"))}
_ACCUMULATORS |= dict.fromkeys((*sum(_INTEGERS, ()), "b1"), ("s32",))
#: What else the opcode may say, by type of A; the first is the default.
_VARIANTS = {"f64": ("rn", "rz", "rm", "rp"), "b1": ("xor.popc", "and.popc")}
_EXTRA = frozenset((*_VARIANTS["f64"], "xor", "and", "popc", "satfinite"))


def parse_form(instruction: Instruction) -> Form:
    """Reads the opcode ``mma{.sp}.sync.aligned.<shape>.row.col{.satfinite}.<D>.<A>.<B>.<C>``, and a selector.

    f64 may have a rounding, b1 has .xor.popc or .and.popc.

    Raises:
        UnsupportedPTX: a form that does not exist or is not implemented.
    """
    sparse = instruction.parts[1] != "sync"
    given = instruction.parts[4 if sparse else 3 :]
    parts, extra = ([part for part in given if (part in _EXTRA) == wanted] for wanted in (False, True))
    match = _SHAPE.fullmatch(parts[0]) if parts else None
    if match is None or len(parts) != 7 or parts[1:3] != ["row", "col"]:
        name = ".".join(instruction.parts[: 4 if sparse else 3])
        raise instruction.refuse(f"{name}.<shape>.row.col.<D>.<A>.<B>.<C> is implemented")
    shape = (int(match[1]), int(match[2]), int(match[3]))
    d_type, a_type, b_type, c_type = parts[3:]
    legal = (SPARSE_SHAPES if sparse else SHAPES).get(shape, ())
    together = a_type == b_type or any({a_type, b_type} <= set(types) for types in (_FP8, *_INTEGERS))
    if a_type not in legal or b_type not in legal or not together:
        raise instruction.refuse(f"{parts[0]} of .{a_type} and .{b_type} is not implemented")
    if d_type not in _ACCUMULATORS.get(a_type, ("f32",)) or c_type != d_type:
        raise instruction.refuse(f"accumulators .{d_type} and .{c_type} of .{a_type} operands are not implemented")
    variants = _VARIANTS.get(a_type, ("", "satfinite") if d_type == "s32" else ("",))
    variant = ".".join(extra) or ("" if a_type == "b1" else variants[0])
    if variant not in variants:
        raise instruction.refuse(f"qualifiers of .{a_type} are {', '.join(filter(None, variants)) or 'none'}")
    form = Form(*shape, TYPES[a_type], TYPES[b_type], c_type, variant == "satfinite", variant.removesuffix(".popc"))
    return _with_selector(instruction, form) if sparse else form


def _with_selector(instruction: Instruction, dense: Form) -> Form:
    selector = as_integer(instruction, instruction.operands[5])
    form = replace(dense, sparsity=Sparsity(selector, instruction.parts[1] == "sp::ordered_metadata"))
    groups = 4 // threads_with_metadata(form.stored_bytes, 2 if form.a_type.nbytes > 1 else 1)
    if not 0 <= selector < groups:
        legal = "0" if groups == 1 else f"0 to {groups - 1}"
        raise instruction.refuse(f"sparsity selector {selector}; of this shape and type {legal} are legal")
    return form


def mma_sync(
    warp: Warp, mask: int, form: Form, a: tuple[LaneValues, ...], b: tuple[LaneValues, ...],
    c: tuple[LaneValues, ...], metadata: LaneValues | None,
) -> np.ndarray:  # fmt: skip
    """mma.sp, and mma.sync of types that the core does not multiply: [registers, 32].

    Operands are one array [32] per register, or an int where it is uniform; ``metadata``: of mma.sp, else None.
    """
    require_whole_warp(warp, mask, "mma.sync" if form.sparsity is None else "mma.sp")
    if metadata is not None:
        metadata = np.broadcast_to(np.asarray(metadata, np.uint32), (1, 32))
    dtype = np.uint64 if form.register_bits == 64 else np.uint32
    words = ([np.asarray(x, dtype) for x in operand] for operand in (a, b, c))
    stacked = (np.stack([np.broadcast_to(x, (1, 32)) for x in operand], axis=1) for operand in words)
    return multiply(form, *stacked, warp.cluster.arithmetic, metadata).reshape(-1, 32)


_FORM = (
    "m8n8k{4,16,32,128}|m16n8k{4,8,16,32,64,128,256} row col $round? xor|and? popc? satfinite? s32|f16|f32|f64"
)
_NARROW = "e4m3|e5m2|e2m3|e3m2|e2m1"
_KINDS = (
    f"m16n8k32 row col kind::f8f6f4 f32|f16 {_NARROW} {_NARROW} f32|f16; m16n8k32|m16n8k64 row col "
    f"kind::mxf8f6f4|kind::mxf4|kind::mxf4nvf4 block_scale scale_vec::{{1X,2X,4X}}? f32 {_NARROW} {_NARROW} f32 "
    "ue8m0|ue4m3"
)
_AB = "f16|bf16|tf32|e4m3|e5m2|{s,u}{8,4}|b1|f64"


def _operands(parts: tuple[str, ...]) -> str:
    """The metadata and the selector follow in the sparse forms."""
    bits = "b64" if "f64" in parts else "b32"
    sparse = ", {e}1:b32, f:imm" if parts[1:2] != ("sync",) else ""
    if "block_scale" in parts:
        sparse = ", {scale_a}1:b32, {ids_a}2:u16, {scale_b}1:b32, {ids_b}2:u16"
    return ", ".join(f"{{{name}}}:{bits}" for name in "dabc") + sparse


@family(
    "mma.sync.aligned", "mma.sp.sync.aligned", "mma.sp::ordered_metadata.sync.aligned", varies=always_varies,
    operands=_operands, qualifiers=f"{_FORM} {_AB} {_AB} s32|f16|f32|f64; {_KINDS}",
)  # fmt: skip
def _mma(block: BlockBuilder, instruction: Instruction) -> None:
    """mma.sync: f16, bf16, tf32, e4m3, e5m2 into f32 (f16: of f16 and FP8), s8, u8, s4, u4 and b1 into s32, f64; mma.sp
    of all but the latter two. On sm_120 dense FP6, FP4, block scaling.
    """
    if any(part.startswith("kind::") for part in instruction.parts):
        lower_kind(block, instruction)
        return
    form = parse_form(instruction)
    d, *sources = (x.items if isinstance(x, Vector) else (x,) for x in instruction.operands[:4])
    wanted = (form.a_registers, form.b_registers, form.c_registers)
    if tuple(map(len, sources)) != wanted or len(d) != form.c_registers:
        raise instruction.refuse(f"{wanted} registers of A, B and C are needed")
    bits = form.register_bits
    operands = ([block.value(item, bits) for item in items] for items in sources)
    metadata = block.whole(block.value(instruction.operands[4], 32)) if form.sparsity else None
    for item, value in zip(d, multiply_registers(block, form, *operands, metadata=metadata)):
        block.define(item, value)


def multiply_registers(
    block: BlockBuilder, form: Form, *operands: Sequence[Value], metadata: Value | None = None
) -> list[Value]:
    """Adds an mma.sync or mma.sp to the block: the registers of D, of those of A, B and C."""
    operands = tuple([block.whole(value) for value in values] for values in operands)
    values = [value for values in operands for value in values]
    results = [(f"u{form.register_bits}", False)] * form.c_registers
    if form.in_core:
        number = block.context.number_of(form)
        return block.operation("warp_mma", *values, facts=[number], in_lanes=True, results=results, effects=False)
    call = Call(mma_sync, (form, *operands, metadata), effects=form.sparsity is not None)
    return block.anchor(call, results, [*values, metadata] if form.sparsity else values)
