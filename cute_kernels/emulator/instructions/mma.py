"""Warp-level matrix multiplication: mma.sync."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from cute_kernels.emulator.graph.block import BlockBuilder, Call
from cute_kernels.emulator.instructions.sync import require_whole_warp
from cute_kernels.emulator.ptx.decode import Instruction, Vector
from cute_kernels.emulator.ptx.families import always_varies, family
from cute_kernels.emulator.units.matrix.mma_sync import SHAPES, TYPES, Form, multiply

_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_FP8 = ("e4m3", "e5m2")
_INTEGERS = ("s8", "u8")


def parse_form(instruction: Instruction) -> Form:
    """Reads the opcode ``mma.sync.aligned.<shape>.row.col{.satfinite}.<D>.<A>.<B>.<C>``.

    Raises:
        UnsupportedPTX: a form that does not exist or is not implemented (FP64, sub-byte, sparse, block-scaled).
    """
    parts = list(instruction.parts[3:])
    saturate = "satfinite" in parts
    if saturate:
        parts.remove("satfinite")
    match = _SHAPE.fullmatch(parts[0]) if parts else None
    if match is None or len(parts) != 7 or parts[1:3] != ["row", "col"]:
        raise instruction.refuse("mma.sync.aligned.<shape>.row.col.<D>.<A>.<B>.<C> is implemented")
    shape = (int(match[1]), int(match[2]), int(match[3]))
    d_type, a_type, b_type, c_type = parts[3:]
    legal = SHAPES.get(shape, ())
    together = a_type == b_type or {a_type, b_type} <= set(_FP8) or {a_type, b_type} <= set(_INTEGERS)
    if a_type not in legal or b_type not in legal or not together:
        raise instruction.refuse(f"{parts[0]} of .{a_type} and .{b_type} is not implemented")
    accumulators = ("s32",) if a_type in _INTEGERS else ("f32", "f16") if a_type in ("f16", *_FP8) else ("f32",)
    if d_type not in accumulators or c_type != d_type or saturate and d_type != "s32":
        raise instruction.refuse(f"accumulators .{d_type} and .{c_type} of .{a_type} operands are not implemented")
    return Form(*shape, TYPES[a_type], TYPES[b_type], c_type, saturate)


def mma_sync(warp: Any, mask: int, form: Form, a: Any, b: Any, c: Any) -> np.ndarray:
    """mma.sync: uint32 [registers, 32]; operands are one array [32] per register, or an int where it is uniform."""
    require_whole_warp(warp, mask, "mma.sync")
    words = ([np.asarray(x, np.uint32) for x in operand] for operand in (a, b, c))
    stacked = (np.stack([np.broadcast_to(x, (1, 32)) for x in operand], axis=1) for operand in words)
    return multiply(form, *stacked, warp.cluster.arithmetic).reshape(-1, 32)


@family("mma.sync.aligned", varies=always_varies)
def _mma(block: BlockBuilder, instruction: Instruction) -> None:
    """mma.sync: f16, bf16, tf32, e4m3, e5m2 into f32 (f16: of f16 and FP8), s8 and u8 into s32; no sparsity."""
    form = parse_form(instruction)
    d, *sources = (x.items if isinstance(x, Vector) else (x,) for x in instruction.operands)
    wanted = (form.a_registers, form.b_registers, form.c_registers)
    if tuple(map(len, sources)) != wanted or len(d) != form.c_registers:
        raise instruction.refuse(f"{wanted} registers of A, B and C are needed")
    operands = tuple([block.whole(block.value(item, 32)) for item in items] for items in sources)
    call = Call(mma_sync, (form, *operands), effects=False)
    results = block.anchor(
        call, [("u32", False)] * form.c_registers, [value for values in operands for value in values]
    )
    for item, value in zip(d, results):
        block.define(item, value)
