"""Matrix products, which `core/matrix.c` computes: what it has to be told of them.

`matrix.arithmetic.Sums` says how an instruction adds: as a chip does, or exactly, which is
``D = round(exact sum over its K of a*b + d)`` with one rounding to nearest even to FP32 or FP16. Either way integers
are exact, and wrap at 32 bits or saturate. NaN results are 0x7FFFFFFF (FP16: 0x7FFF), a sum that is zero is +0. TF32
operands lose their 13 low bits.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cute_kernels.emulator.core import layout
from cute_kernels.emulator.core.library import library as core
from cute_kernels.emulator.machine.units.copies.tensor_map import CHUNK
from cute_kernels.emulator.machine.units.matrix.arithmetic import EXACT, Sums
from cute_kernels.emulator.machine.units.matrix.operands import K_BYTES, ElementType

LANES = layout.CONSTANTS["TENSOR_LANES"]  # of tensor memory, and most rows of A in one CTA
_GROUP = layout.CONSTANTS["LANE_GROUP"]
_Mma = layout.STRUCTURES["Mma"]
_Part = layout.STRUCTURES["MmaPart"]
_Operand = layout.STRUCTURES["MmaOperand"]
_Type = layout.STRUCTURES["MmaType"]


@dataclass(frozen=True)
class Kind:
    """An operand's elements."""

    element: ElementType  # their type
    negated: bool = False  # all change their sign
    # bytes of the pieces in which the 32 bytes of a row lie together: 16 of a K-major matrix in shared memory, one
    # element of an MN-major one, 4 in tensor memory
    unit: int = CHUNK

    def described(self) -> ctypes.Structure:
        """The core's structure."""
        return _Type(layout.CONSTANTS[self.element.name.upper()], self.negated, self.unit)


@dataclass(frozen=True)
class Rows:
    """Where an operand lies, as addresses. ``data``, ``states``: of a memory and of the states of its bytes, None not
    to check them; ``places``: of int64 [rows, 32 / unit], where the pieces of each row are in units."""

    data: int
    states: int | None
    places: int


@dataclass(frozen=True)
class Accumulator:
    """D of 32-bit cells, in which column j (row j of B) is at ``j * column_stride``, and row i (of A) of it at ``i``.
    """

    kind: str  # ``"f32"``, ``"f16"`` (the low half of a cell) or ``"s32"``
    add: bool  # whether the old D is added
    saturate: bool  # integers saturate
    column_stride: int = LANES


#: One CTA's part: A, B and the address of D's cells.
Part = tuple[Rows, Rows, int]


def describe(
    m: int, n: int, a: Kind, b: Kind, d: Accumulator, parts: Sequence[Part], sums: Sums = EXACT
) -> ctypes.Structure:
    """The core's description of ``D[j, i] = round(sum of B[j, k] * A[i, k] + D[j, i])``.

    The caller keeps alive what it has addresses of. ``m``: rows of A in each CTA, a multiple of 16 up to 128; ``n``: of
    B in all CTAs together, a multiple of 8 per CTA, up to 256; ``parts``: of one CTA or of the two of a pair."""
    described = [_Part(_Operand(*_fields(a)), _Operand(*_fields(b)), cells) for a, b, cells in parts]
    kind = layout.CONSTANTS[f"SUM_{d.kind.upper()}"]
    return _Mma(
        len(parts), m, n, a.described(), b.described(), kind, d.add, d.saturate, sums.fraction, sums.result, sums.step,
        sums.lowest, sums.split, d.column_stride, n, 0, _GROUP, tuple(described),
    )  # fmt: skip


def _fields(rows: Rows) -> tuple[int, int | None, int]:
    return rows.data, rows.states, rows.places


def execute(mma: ctypes.Structure) -> bool:
    """False, and nothing done, where a byte is not initialised."""
    return bool(core().mma_execute(ctypes.addressof(mma)))


def multiply_rows(
    a: np.ndarray, b: np.ndarray, d: np.ndarray, kinds: tuple[Kind, Kind], accumulator: str, *, add: bool,
    saturate: bool = False, sums: Sums = EXACT,
) -> None:
    """Products of rows that lie in arrays, into ``d``. ``a``: uint8 [count, m, 32]; m is a multiple of 16 up to 128.
    ``b``: uint8 [count, n, 32]; n is a multiple of 8 up to 256. ``d``: 32 bits [count, n, m], contiguous: D transposed;
    FP16 is the low half of a cell. ``kinds``: of A and of B. ``accumulator``: see `Accumulator`. ``add``, ``saturate``:
    likewise. ``sums``: how floats are added."""
    (count, m, _), n = a.shape, b.shape[1]
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    where = np.arange(max(m, n) * K_BYTES // CHUNK)
    rows = [Rows(array.ctypes.data, None, where.ctypes.data) for array in (a, b)]
    shape = Accumulator(accumulator, add, saturate, m)
    mma = describe(m, n, *kinds, shape, [(*rows, d.ctypes.data)], sums)
    part = mma.parts[0]
    for number in range(count):
        part.a.data = a.ctypes.data + number * a.strides[0]
        part.b.data = b.ctypes.data + number * b.strides[0]
        part.cells = d.ctypes.data + number * d.strides[0]
        execute(mma)
