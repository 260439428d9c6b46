"""Launches of one mma.sync or mma.sp on operands that are given as matrices."""

from __future__ import annotations

import ctypes

import numpy as np

from cute_kernels.emulator import Options
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.machine.units.matrix.arithmetic import EXACTLY, Arithmetic, generation
from cute_kernels.emulator.machine.units.matrix.mma_sync import Form, table
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

BITS = {"b1": 1, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8, "f16": 16, "bf16": 16, "tf32": 32, "f64": 64}


def registers(codes: np.ndarray, bits: int, word: int = 32) -> np.ndarray:
    """[registers, 32] of the bit patterns of A's rows or B's columns [rows, K], one element at a time."""
    rows, k = codes.shape
    per = word // bits
    out = np.zeros((rows * k * bits // (32 * word), 32), f"u{word // 8}")
    for j, lane, i in np.ndindex(*out.shape, per):
        row = lane // 4 + 8 * (j % (rows // 8))
        column = (j // (rows // 8) * 4 + lane % 4) * per + i
        out[j, lane] |= out.dtype.type(int(codes[row, column]) << bits * i)
    return out


def accumulators(values: np.ndarray) -> np.ndarray:
    """[registers, 32] of [m, 8], two FP16 in each register."""
    m, size = len(values), values.itemsize
    elements = np.zeros((m // 4, 32), values.dtype)
    for i, lane in np.ndindex(*elements.shape):
        elements[i, lane] = values[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]
    if size > 2:
        return elements.view(f"u{size}")
    return np.ascontiguousarray(elements.reshape(-1, 2, 32).transpose(0, 2, 1)).view(np.uint32)[..., 0]


def multiply_in_core(
    form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray, arithmetic: Arithmetic = EXACTLY
) -> np.ndarray:
    """D of ``count`` instructions that the core executes: uint32 [count, registers, 32] of A, B and C -> of D."""
    entries = table([form], arithmetic)
    registers = np.concatenate((a, b, c, np.empty_like(c)), axis=1, dtype=np.uint32)
    offsets = np.arange(registers.shape[1], dtype=np.uint32) * registers.strides[1]
    for instruction in registers:
        if not library().warp_mma(ctypes.addressof(entries), instruction.ctypes.data, offsets.ctypes.data):
            arithmetic.sums("mma", form.a_type.name, form.c_type)  # raises
    return registers[:, -c.shape[1] :]


def execute(
    opcode: str, *operands: np.ndarray, selector: int | None = None, target: str = "sm_90a", arithmetic: str = "exact",
    guard: str = "",
) -> np.ndarray:  # fmt: skip
    """Registers of D, of those of A, B, C and, with a selector, of the metadata [1, 32]."""
    word = operands[0].itemsize
    kind, size = ("r", "b32") if word == 4 else ("d", "b64")
    sources, names, number = [], [], 10
    for operand in operands:
        own = [f"%{kind}{number + j}" for j in range(len(operand))]
        number += len(own)
        names.append(f"{{{', '.join(own)}}}")
        sources += own
    results = [f"%{kind}{number + j}" for j in range(len(operands[2]))]
    names.insert(0, f"{{{', '.join(results)}}}")
    if selector is not None:
        names[4] = f"{names[4][1:-1]}, {selector}"
    loads = [f"ld.global.{size} {name}, [%d1+{32 * word * j}];" for j, name in enumerate(sources)]
    stores = [f"st.global.{size} [%d2+{32 * word * j}], {name};" for j, name in enumerate(results)]
    head = f"mov.u32 %r1, %laneid; ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mad.wide.u32 %d1, %r1, {word}, %d1;"
    body = [head, f"mad.wide.u32 %d2, %r1, {word}, %d2; setp.lt.u32 %p1, %r1, 16;", *loads,
            f"{guard} {opcode} {', '.join(names)};", *stores, "ret;"]  # fmt: skip
    out = aligned(np.zeros((len(results), 32), operands[0].dtype))
    text = module("\n".join(body)).replace("sm_100a", target)
    other = arithmetic == "silicon" and generation(target) != generation("sm_90a")
    hardware = "sums of another generation" if other else None
    launch(text, aligned(np.concatenate(operands)), out, options=Options(arithmetic=arithmetic), hardware=hardware)
    return out
