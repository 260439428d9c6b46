"""Dot products of elements of four, six and eight bits with scales of their blocks of K (``core/scaled_sums.c``).

The sums are those of `matrix.arithmetic`: exact ones that are rounded once to nearest even, or aligned terms as a chip
adds them.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cute_kernels.emulator.core.layout import STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.machine.units.copies.tensor_map import CHUNK
from cute_kernels.emulator.machine.units.matrix.arithmetic import Sums
from cute_kernels.emulator.machine.units.matrix.operands import E2M1_PAIRS, K_BYTES, ElementType

GROUP = 16  # products of pairs of FP4 that are added before they are aligned
_NO_EXPONENT = -(1 << 14)
_Product = STRUCTURES["ScaledProduct"]
#: Name -> NumPy type, and exponent of its subnormal numbers.
_TYPES = {
    "e4m3": (ml_dtypes.float8_e4m3fn, -6),
    "e5m2": (ml_dtypes.float8_e5m2, -14),
    "e2m3": (ml_dtypes.float6_e2m3fn, 0),
    "e3m2": (ml_dtypes.float6_e3m2fn, -2),
    "e2m1": (ml_dtypes.float4_e2m1fn, 0),
    "e2m1x2": (ml_dtypes.float4_e2m1fn, 0),
    "ue8m0": (ml_dtypes.float8_e8m0fnu, -127),
    "ue4m3": (ml_dtypes.float8_e4m3fn, -6),
}
_BITS = {"e2m3": 6, "e3m2": 6, "e2m1": 4, "e2m1x2": 4, "ue4m3": 7}


@functools.cache
def _tables(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Values and encoded exponents of all 256 codes, of which bits that the type does not have do not count."""
    dtype, lowest = _TYPES[name]
    codes = np.arange(256, dtype=np.uint8) & np.uint8((1 << _BITS.get(name, 8)) - 1)
    values = codes.view(dtype).astype(np.float64)
    finite = np.where(np.isfinite(values), values, 0)
    exponents = np.maximum(np.frexp(finite)[1] - 1, lowest)
    return values, np.where(finite == 0, _NO_EXPONENT, exponents).astype(np.int32)


@dataclass(frozen=True)
class Numbers:
    """Numbers of one type."""

    values: np.ndarray  # float64
    exponents: np.ndarray  # int32 of the same shape, as they are encoded; of zero, NaN and infinities `_NO_EXPONENT`

    @classmethod
    def of(cls, codes: np.ndarray, name: str, negated: bool = False) -> Numbers:
        """From uint8 codes of a type."""
        values, exponents = _tables(name)
        return cls(-values[codes] if negated else values[codes], exponents[codes])


def codes_of_rows(rows: np.ndarray, element: ElementType) -> np.ndarray:
    """uint8 [rows, bytes] as they lie in shared memory, in chunks of 16 -> codes [rows, elements]."""
    if element is E2M1_PAIRS:
        return np.stack([rows & 15, rows >> 4], axis=-1).reshape(len(rows), -1)
    held = rows.reshape(len(rows), -1, CHUNK)[..., : element.held]
    if element.held == CHUNK:
        return rows
    bits = _BITS[element.name]
    spread = np.unpackbits(held, axis=-1, bitorder="little").reshape(len(rows), -1, bits)
    return np.packbits(spread, axis=-1, bitorder="little")[..., 0]


def cells_of_codes(codes: np.ndarray, element: ElementType) -> np.ndarray:
    """The inverse of `codes_of_cells`: what tcgen05.cp with decompression writes."""
    return codes << np.uint8((8 - _BITS.get(element.name, 8)) // 2)


def codes_of_cells(rows: np.ndarray, element: ElementType) -> np.ndarray:
    """uint8 [rows, 32] of tensor memory -> codes [rows, K]: four bits lie in bits 2 to 5 of a byte, six in bits 1 to 6.

    So NVIDIA says in examples/python/CuTeDSL/experimental/primitives/tcgen05/cp_narrow_a_to_tmem_mma.py of CUTLASS.
    """
    if element is E2M1_PAIRS:
        return codes_of_rows(rows, element)
    bits = _BITS.get(element.name, 8)
    return rows >> np.uint8((8 - bits) // 2) & np.uint8((1 << bits) - 1)


@dataclass(frozen=True)
class Side:
    """An operand: elements [rows, K], and None or scales [rows, blocks of K]."""

    elements: Numbers
    scales: Numbers | None = None

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Values and exponents of elements, then those of scales: of none, one of 1 for each row."""
        one = np.ones((len(self.elements.values), 1)), np.zeros((len(self.elements.values), 1), np.int32)
        scales = one if self.scales is None else (self.scales.values, self.scales.exponents)
        return self.elements.values, self.elements.exponents, *scales


def dot_products(a: Side, b: Side, old: np.ndarray | None, d_type: str, sums: Sums) -> np.ndarray:
    """uint32 [rows of A, rows of B]: cells of D, of FP16 in their lower halves. ``a``, ``b``: operands. ``old``: uint32
    cells that are added, or None. ``d_type``: ``"f32"`` or ``"f16"``. ``sums``: how to add."""
    shape, k = (len(a.elements.values), len(b.elements.values)), a.elements.values.shape[1]
    c, result = np.zeros(shape) if old is None else _values_of(old, d_type), np.empty(shape)
    kept = [[np.ascontiguousarray(array) for array in side.arrays()] for side in (a, b)]
    group, least = GROUP if k > K_BYTES else 1, -126 if d_type == "f32" else -14
    described = _Product(
        *shape, k, kept[0][2].shape[1], group, sums.fraction, sums.lowest, least,
        *(tuple(array.ctypes.data for array in arrays) for arrays in kept), c.ctypes.data, result.ctypes.data,
    )  # fmt: skip
    library().scaled_product(ctypes.byref(described))
    with np.errstate(all="ignore"):
        if d_type == "f16":
            bits, size = _halves(result), np.uint32(0x7FFF)
        else:
            bits = _cut(result) if sums.fraction else result.astype(np.float32).view(np.uint32)
            size = np.uint32(0x7FFFFFFF)  # NaN, too
    zero = (bits & size if sums.fraction else result) == 0  # what is cut to zero is +0 as well
    return np.where(np.isnan(result), size, np.where(zero, np.uint32(0), bits))


def _values_of(cells: np.ndarray, d_type: str) -> np.ndarray:
    if d_type == "f32":
        return np.ascontiguousarray(cells).view(np.float32).astype(np.float64)
    return (cells & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float64)


def _halves(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


def _cut(x: np.ndarray) -> np.ndarray:
    """To FP32, toward zero; 2^128 and more become infinity."""
    near = x.astype(np.float32)
    bits = near.view(np.uint32)
    return np.where((np.abs(near.astype(np.float64)) > np.abs(x)) & (np.abs(x) < 2.0**128), bits - 1, bits)
