"""Warp-level matrix multiplication: the arithmetic and the register fragments of mma.sync.

How one instruction adds is in `matrix.arithmetic`: as measured on a GPU of the target's generation, or exactly with one
rounding to the accumulator's type. Integers are exact and wrap, or saturate with .satfinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cute_kernels.emulator.units.matrix.arithmetic import EXACTLY, Arithmetic
from cute_kernels.emulator.units.matrix.operands import (
    BF16,
    E4M3,
    E5M2,
    F16,
    K_BYTES,
    S8,
    TF32,
    U8,
    ElementType,
)
from cute_kernels.emulator.units.matrix.products import Kind, multiply_rows

_LEAST_ROWS = 16  # of A in a product
_EIGHT_BITS = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
TYPES = {element.name: element for element in (F16, BF16, TF32, E4M3, E5M2, S8, U8)}
#: Shape -> element types that exist for it (PTX ISA, mma: matrix shapes).
SHAPES = {
    (16, 8, 4): ("tf32",),
    (16, 8, 8): ("f16", "bf16", "tf32"),
    (16, 8, 16): ("f16", "bf16", "s8", "u8", "e4m3", "e5m2"),
    (16, 8, 32): ("s8", "u8", "e4m3", "e5m2"),
    (8, 8, 16): ("s8", "u8"),
}


@dataclass(frozen=True)
class Form:
    """One form of the instruction.

    Attributes:
        m, n, k: shape.
        a_type, b_type: element types.
        c_type: accumulator, ``"f32"``, ``"f16"`` or ``"s32"``, of C and D alike.
        saturate: integers saturate.
    """

    m: int
    n: int
    k: int
    a_type: ElementType
    b_type: ElementType
    c_type: str
    saturate: bool = False

    @property
    def a_registers(self) -> int:
        """32-bit registers of A in each thread."""
        return self.m * self.k * self.a_type.nbytes // 128

    @property
    def b_registers(self) -> int:
        """32-bit registers of B in each thread."""
        return self.n * self.k * self.b_type.nbytes // 128

    @property
    def c_registers(self) -> int:
        """32-bit registers of C, and of D, in each thread."""
        return self.m * self.n * (2 if self.c_type == "f16" else 4) // 128


# --- fragments (PTX ISA, "Matrix fragments for mma"): lane l belongs to row l / 4 of eight ---------------------------


def operand_rows(registers: np.ndarray, rows: int) -> np.ndarray:
    """Rows of A, or columns of B: uint32 [count, registers, 32] -> uint8 [count, rows, bytes of K].

    Register j of lane l is row ``l / 4 + 8 * (j % (rows / 8))``; its four bytes are number ``l % 4`` of the 16 bytes of
    K that the registers ``j / (rows / 8)`` hold.
    """
    count, size, _ = registers.shape
    eights = rows // 8
    words = registers.reshape(count, size // eights, eights, 8, 4).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(words).reshape(count, rows, -1).view(np.uint8)


def accumulator_rows(registers: np.ndarray, rows: int, dtype: type) -> np.ndarray:
    """C: uint32 [count, registers, 32] -> [count, rows, 8].

    Lane l holds the columns ``2 * (l % 4)`` and the next one, of row ``l / 4`` and then of row ``l / 4 + 8``.
    """
    count = len(registers)
    lanes = np.ascontiguousarray(registers.transpose(0, 2, 1)).view(dtype)
    return lanes.reshape(count, 8, 4, rows // 8, 2).transpose(0, 3, 1, 2, 4).reshape(count, rows, 8)


def accumulator_registers(matrix: np.ndarray) -> np.ndarray:
    """The inverse: [count, rows, 8] -> uint32 [count, registers, 32]."""
    count, rows, _ = matrix.shape
    lanes = matrix.reshape(count, rows // 8, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(count, 32, -1)
    return np.ascontiguousarray(lanes).view(np.uint32).transpose(0, 2, 1)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def multiply(
    form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray, arithmetic: Arithmetic = EXACTLY
) -> np.ndarray:
    """D of ``count`` instructions: uint32 [count, registers, 32] of A, B and C -> the same of D."""
    rows = operand_rows(a, form.m), operand_rows(b, form.n)
    dtype = np.uint16 if form.c_type == "f16" else np.uint32
    cells = np.zeros((len(a), form.n, max(form.m, _LEAST_ROWS)), np.uint32)
    cells[:, :, : form.m] = accumulator_rows(c, form.m, dtype).transpose(0, 2, 1)
    if form.a_type in _EIGHT_BITS and arithmetic.splits_fp8():
        _multiply_in_halves(form, *rows, cells, arithmetic)
    else:
        sums = arithmetic.sums("mma", form.a_type.name, form.c_type)
        kinds = Kind(form.a_type), Kind(form.b_type)
        padded = (_padded(x, least) for x, least in zip(rows, (_LEAST_ROWS, form.n)))
        multiply_rows(*padded, cells, kinds, form.c_type, add=True, saturate=form.saturate, sums=sums)
    return accumulator_registers(cells[:, :, : form.m].transpose(0, 2, 1).astype(dtype))


def _multiply_in_halves(
    form: Form, a: np.ndarray, b: np.ndarray, cells: np.ndarray, arithmetic: Arithmetic
) -> None:
    """FP8 as two products of FP16 and an addition of C (`matrix.arithmetic.SPLIT_FP8`), into ``cells``."""
    sums = arithmetic.sums("mma", F16.name, form.c_type)
    halves = [
        x.view(element).astype(np.float16).reshape(*x.shape[:2], -1, 2, 2)
        for x, element in ((a, _EIGHT_BITS[form.a_type]), (b, _EIGHT_BITS[form.b_type]))
    ]
    products = np.zeros_like(cells)
    for half in range(2):
        rows = [np.ascontiguousarray(x[:, :, :, half]).reshape(*x.shape[:2], -1).view(np.uint8) for x in halves]
        padded = (_padded(x, least) for x, least in zip(rows, (_LEAST_ROWS, form.n)))
        multiply_rows(*padded, products, (Kind(F16), Kind(F16)), form.c_type, add=half > 0, sums=sums)
    dtype, bits, nan = (np.float16, np.uint16, 0x7FFF) if form.c_type == "f16" else (np.float32, np.uint32, 0x7FFFFFFF)
    terms = [x.astype(bits).view(dtype) for x in (cells, products)]
    with np.errstate(all="ignore"):
        total = terms[0] + terms[1]
    cells[...] = np.where(np.isnan(total), nan, total.view(bits))


def _padded(rows: np.ndarray, least: int) -> np.ndarray:
    """With zeros up to the rows and the bytes of K that a product has."""
    count, size, nbytes = rows.shape
    return np.pad(rows, ((0, 0), (0, max(least - size, 0)), (0, K_BYTES - nbytes)))
