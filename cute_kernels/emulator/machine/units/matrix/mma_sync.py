"""Warp-level matrix multiplication: the arithmetic and the register fragments of mma.sync and mma.sp.

How one instruction adds is in `matrix.arithmetic`: as measured on a GPU of the target's generation, or exactly with one
rounding to the accumulator's type. Integers are exact and wrap, or saturate with .satfinite. The core multiplies
(``core/warp_mma.c``) all but f64 and elements below a byte; the metadata of mma.sp is in `matrix.structured_sparsity`.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.pure_operations import apply
from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.machine.units.matrix.arithmetic import Arithmetic, Sums
from cute_kernels.emulator.machine.units.matrix.operands import (
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
from cute_kernels.emulator.machine.units.matrix.products import Accumulator, Kind, Rows, describe, multiply_rows
from cute_kernels.emulator.machine.units.matrix.structured_sparsity import check_places, of_each_row, places

_ROWS, _COLUMNS = CONSTANTS["MMA_SYNC_ROWS"], CONSTANTS["MMA_SYNC_COLUMNS"]
_WarpMma = STRUCTURES["WarpMma"]
F64, S4, U4, B1 = ElementType("f64", 8), ElementType("s4", 1), ElementType("u4", 1), ElementType("b1", 1)
#: Elements that are smaller than a byte, in bits.
_SMALL = {S4: 4, U4: 4, B1: 1}
TYPES = {element.name: element for element in (F16, BF16, TF32, E4M3, E5M2, S8, U8, F64, S4, U4, B1)}
#: Shape -> element types that exist for it (PTX ISA, mma: matrix shapes).
SHAPES = {
    (8, 8, 4): ("f64",),
    (8, 8, 16): ("s8", "u8"),
    (8, 8, 32): ("s4", "u4"),
    (8, 8, 128): ("b1",),
    (16, 8, 4): ("tf32", "f64"),
    (16, 8, 8): ("f16", "bf16", "tf32", "f64"),
    (16, 8, 16): ("f16", "bf16", "s8", "u8", "e4m3", "e5m2", "f64"),
    (16, 8, 32): ("s8", "u8", "e4m3", "e5m2", "s4", "u4"),
    (16, 8, 64): ("s4", "u4"),
    (16, 8, 128): ("b1",),
    (16, 8, 256): ("b1",),
}
#: The same of mma.sp.
SPARSE_SHAPES = {
    (16, 8, 8): ("tf32",),
    (16, 8, 16): ("f16", "bf16", "tf32"),
    (16, 8, 32): ("f16", "bf16", "s8", "u8"),
    (16, 8, 64): ("s8", "u8", "e4m3", "e5m2", "s4", "u4"),
    (16, 8, 128): ("s4", "u4"),
}


@dataclass(frozen=True)
class Sparsity:
    """How metadata places the elements of A. ``selector``: which threads of every four give the metadata; ``ordered``:
    ::ordered_metadata."""

    selector: int
    ordered: bool


@dataclass(frozen=True)
class Form:
    """One form of the instruction."""

    # m, n, k: shape
    m: int
    n: int
    k: int
    # a_type, b_type: element types
    a_type: ElementType
    b_type: ElementType
    c_type: str  # accumulator, ``"f32"``, ``"f16"``, ``"s32"`` or ``"f64"``, of C and D alike
    saturate: bool = False  # integers saturate
    variant: str = ""  # of f64 how sums are rounded, of b1 the operation on bits
    sparsity: Sparsity | None = None  # of mma.sp

    @property
    def in_core(self) -> bool:
        """Whether the core executes it."""
        return self.sparsity is None and self.a_type not in (F64, *_SMALL)

    @property
    def register_bits(self) -> int:
        """Bits of each register of an operand."""
        return 64 if self.a_type is F64 else 32

    @property
    def stored_bytes(self) -> int:
        """Bytes of a row of A in registers."""
        return self.k * _SMALL.get(self.a_type, 8 * self.a_type.nbytes) // (16 if self.sparsity else 8)

    @property
    def a_registers(self) -> int:
        """Registers of A in each thread."""
        return self.m * self.stored_bytes // (4 * self.register_bits)

    @property
    def b_registers(self) -> int:
        """Registers of B in each thread."""
        return self.n * self.stored_bytes * (2 if self.sparsity else 1) // (4 * self.register_bits)

    @property
    def c_registers(self) -> int:
        """Registers of C, and of D, in each thread."""
        return self.m * self.n * (2 if self.c_type == "f16" else 4) // 128


# --- fragments (PTX ISA, "Matrix fragments for mma"): lane l belongs to row l / 4 of eight ---------------------------


def operand_rows(registers: np.ndarray, rows: int) -> np.ndarray:
    """Rows of A, or columns of B: [count, registers, 32] -> uint8 [count, rows, bytes of K].

    Register j of lane l is row ``l / 4 + 8 * (j % (rows / 8))``; its bytes are number ``l % 4`` of the four pieces of K
    that the registers ``j / (rows / 8)`` hold. Registers have 32 bits, of f64 64.
    """
    count, size, _ = registers.shape
    eights = rows // 8
    words = registers.reshape(count, size // eights, eights, 8, 4).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(words).reshape(count, rows, -1).view(np.uint8)


def accumulator_rows(registers: np.ndarray, rows: int, dtype: type) -> np.ndarray:
    """C: [count, registers, 32] -> [count, rows, 8].

    Lane l holds the columns ``2 * (l % 4)`` and the next one, of row ``l / 4`` and then of row ``l / 4 + 8``.
    """
    count = len(registers)
    lanes = np.ascontiguousarray(registers.transpose(0, 2, 1)).view(dtype)
    return lanes.reshape(count, 8, 4, rows // 8, 2).transpose(0, 3, 1, 2, 4).reshape(count, rows, 8)


def accumulator_registers(matrix: np.ndarray) -> np.ndarray:
    """The inverse: [count, rows, 8] -> [count, registers, 32]."""
    count, rows, _ = matrix.shape
    words = np.uint64 if matrix.itemsize == 8 else np.uint32
    lanes = matrix.reshape(count, rows // 8, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(count, 32, -1)
    return np.ascontiguousarray(lanes).view(words).transpose(0, 2, 1)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def multiply(
    form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray, arithmetic: Arithmetic, metadata: np.ndarray | None
) -> np.ndarray:
    """D of ``count`` instructions of a form that is not `Form.in_core`: [count, registers, 32] of A, B, C -> of D.

    Registers are uint32, of f64 uint64; ``metadata`` of mma.sp is uint32 [count, 32].
    """
    rows = operand_rows(a, form.m), operand_rows(b, form.n)
    dtype = {"f16": np.uint16, "f64": np.uint64}.get(form.c_type, np.uint32)
    old = accumulator_rows(c, form.m, dtype)
    if form.sparsity is not None:
        d = _multiply_sparse(form, *rows, old, arithmetic, metadata)
    elif form.a_type is F64:
        d = _doubles(*(x.view(np.uint64) for x in rows), old, form.variant)
    elif form.a_type is B1:
        d = _common_bits(*rows, old, form.variant)
    else:
        d = _multiply_nibbles(form, rows[0][:, :, None], rows[1][:, None], old)
    return accumulator_registers(d.astype(dtype))


@functools.lru_cache(maxsize=256)
def _described(form: Form, arithmetic: Arithmetic) -> ctypes.Structure:
    try:
        sums = arithmetic.sums("mma", form.a_type.name, form.c_type)
    except UnsupportedPTX:  # raised again by an instruction that adds so
        sums = Sums(CONSTANTS["UNKNOWN_SUMS"])
    d = Accumulator(form.c_type, True, form.saturate, _ROWS)
    nowhere = Rows(0, None, 0)  # an operation knows its operands and accumulators
    kinds = Kind(form.a_type), Kind(form.b_type)
    mma = describe(_ROWS, _COLUMNS, *kinds, d, [(nowhere, nowhere, 0)], sums)
    return _WarpMma(mma, form.m, form.stored_bytes)


def table(forms: Sequence[Form], arithmetic: Arithmetic) -> ctypes.Array[ctypes.Structure]:
    """Forms for the core, in their order: an array of `WarpMma`, some with UNKNOWN_SUMS."""
    return (_WarpMma * len(forms))(*(_described(form, arithmetic) for form in forms))


def _multiply_nibbles(form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return _integers(_nibbles(a, form.a_type is S4), _nibbles(b, form.b_type is S4), c, form.saturate)


def _multiply_sparse(
    form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray, arithmetic: Arithmetic, metadata: np.ndarray
) -> np.ndarray:
    """D [count, 16, 8]: each row of A is multiplied with what of B its elements go with, as a dense product."""
    unit = np.uint16 if form.a_type.nbytes > 1 else np.uint8
    stored, sparsity = a.view(unit), form.sparsity
    where = places(metadata, sparsity.selector, form.stored_bytes, stored.itemsize)
    check_places(where, stored, ordered=sparsity.ordered, tf32=form.a_type is TF32)
    chosen = of_each_row(b.view(unit), where).view(np.uint8)
    if form.a_type in _SMALL:
        return _multiply_nibbles(form, a[:, :, None], chosen, c)
    # Columns of B are the rows of these products.
    cells = np.zeros((len(a) * form.m, _COLUMNS, _ROWS), np.uint32)
    cells[:, 0, : form.n] = c.reshape(-1, form.n)
    rows = chosen.reshape(-1, form.n, form.stored_bytes), a.reshape(-1, 1, form.stored_bytes)
    sums = arithmetic.sums("mma", form.a_type.name, form.c_type)
    kinds = Kind(form.b_type), Kind(form.a_type)
    padded = (_padded(array, least) for array, least in zip(rows, (_ROWS, _COLUMNS)))
    multiply_rows(*padded, cells, kinds, form.c_type, add=True, saturate=form.saturate, sums=sums)
    return cells[:, 0, : form.n].reshape(c.shape)


def _padded(rows: np.ndarray, least: int) -> np.ndarray:
    """Rows of an operand with zeros up to the rows and the bytes of K that a product has."""
    _, size, nbytes = rows.shape
    return np.pad(rows, ((0, 0), (0, max(least - size, 0)), (0, K_BYTES - nbytes)))


# --- what the core does not have: f64, single bits, integers of four bits. Sums of integers are exact, and wrap at 32
# bits or saturate once; f64 is a chain of fused multiply-adds in order of K, which begins with C, each rounded --------

_BITS = {"xor": np.bitwise_xor, "and": np.bitwise_and}


def _doubles(a: np.ndarray, b: np.ndarray, c: np.ndarray, rounding: str) -> np.ndarray:
    """Bit patterns of f64, uint64 [count, m, K], [count, n, K] and [count, m, n] -> D like C."""
    d = c.reshape(-1)
    for k in range(a.shape[-1]):
        factors = (np.broadcast_to(x, c.shape).reshape(-1) for x in (a[:, :, None, k], b[:, None, :, k]))
        d = apply("fma_f64" if rounding == "rn" else f"fma_{rounding}_f64", *factors, d)
    return d.reshape(c.shape)


def _common_bits(a: np.ndarray, b: np.ndarray, c: np.ndarray, operation: str) -> np.ndarray:
    """How many bits of rows are 1 after ``operation``: uint8 [count, m, bytes], [count, n, bytes]; C and D uint32."""
    bits = np.unpackbits(_BITS[operation](a[:, :, None], b[:, None]), axis=-1)
    return c + bits.sum(-1, dtype=np.uint32)


def _nibbles(rows: np.ndarray, signed: bool) -> np.ndarray:
    """Elements of four bits, the lower one of a byte first: uint8 [..., bytes] -> int64 [..., 2 bytes]."""
    elements = np.stack((rows & 15, rows >> 4), -1).reshape(*rows.shape[:-1], -1).astype(np.int64)
    return (elements ^ 8) - 8 if signed else elements


def _integers(a: np.ndarray, b: np.ndarray, c: np.ndarray, saturate: bool) -> np.ndarray:
    """int64 [count, m, 1, K] and [count, 1 or m, n, K], uint32 [count, m, n] -> D like C."""
    total = (a * b).sum(-1) + c.view(np.int32)
    return (np.clip(total, -(2**31), 2**31 - 1) if saturate else total).astype(np.uint32)
