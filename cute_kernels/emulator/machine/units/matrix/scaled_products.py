"""Dot products of elements of four, six and eight bits with scales of their blocks of K, in NumPy.

The sums are those of `matrix.arithmetic`: exact ones that are rounded once to nearest even, or aligned terms as a chip
adds them. With scales, a term is a product times the scales of its row of A and of B; its exponent is the sum of all
four encoded exponents. Of pairs of FP4, a term is the exact sum of 16 products, and its exponent that of the scales.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cute_kernels.emulator.machine.units.copies.tensor_map import CHUNK
from cute_kernels.emulator.machine.units.matrix.arithmetic import Sums
from cute_kernels.emulator.machine.units.matrix.operands import E2M1_PAIRS, E4M3, E5M2, K_BYTES, ElementType
from cute_kernels.emulator.machine.units.matrix.products import Kind, multiply_rows

GROUP = 16  # products of pairs of FP4 that are added before they are aligned
_NO_EXPONENT = -(1 << 14)
_ROWS = 16  # of A at once, which bounds the memory that products take
_GROUP_OF_ROWS = 16  # in products of the core
#: Of a product of two scales: exponents of products times it are above the lowest one, and in the range of FP32.
_MOST_SHIFT = 90
_DIGITS = 3  # behind the point, at most
#: What the core multiplies.
EIGHT_BITS = {element.name: element for element in (E4M3, E5M2)}
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
    return values, np.where(finite == 0, _NO_EXPONENT, exponents)


@dataclass(frozen=True)
class Numbers:
    """Numbers of one type.

    Attributes:
        values: float64.
        exponents: int of the same shape, as they are encoded; of zero, NaN and infinities `_NO_EXPONENT`.
        codes: uint8 of the same shape, the bits of which ``values`` are made.
        name: the type.
        negated: ``values`` have the other sign.
    """

    values: np.ndarray
    exponents: np.ndarray
    codes: np.ndarray
    name: str
    negated: bool = False

    @classmethod
    def of(cls, codes: np.ndarray, name: str, negated: bool = False) -> Numbers:
        """From uint8 codes of a type."""
        values, exponents = _tables(name)
        return cls(-values[codes] if negated else values[codes], exponents[codes], codes, name, negated)

    @property
    def eight_bits(self) -> bool:
        """Whether the core multiplies them as they are."""
        return self.name in EIGHT_BITS

    def part(self, first: int, last: int) -> Numbers:
        """Some of the columns."""
        columns = (slice(None), slice(first, last))
        return Numbers(self.values[columns], self.exponents[columns], self.codes[columns], self.name, self.negated)

    @property
    def finite(self) -> np.ndarray:
        """The values, with 0 in the place of NaN and infinities."""
        return np.where(np.isfinite(self.values), self.values, 0)


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


def dot_products(a: Side, b: Side, old: np.ndarray | None, d_type: str, sums: Sums) -> np.ndarray:
    """uint32 [rows of A, rows of B]: cells of D, of FP16 in their lower halves.

    Args:
        a, b: operands.
        old: uint32 cells that are added, or None.
        d_type: ``"f32"`` or ``"f16"``.
        sums: how to add.
    """
    shape = len(a.elements.values), len(b.elements.values)
    c = np.zeros(shape) if old is None else _values_of(old, d_type)
    with np.errstate(all="ignore"):
        finite_c = np.where(np.isfinite(c), c, 0)
        if not sums.fraction:
            result = _exact(a, b, finite_c)
            bits = result.astype(np.float32).view(np.uint32) if d_type == "f32" else _halves(result)
        else:
            grouped = a.elements.values.shape[1] > K_BYTES
            aligned = _aligned_groups if grouped else _aligned
            result = aligned(a, b, finite_c, d_type, sums)
            bits = _cut(result) if d_type == "f32" else _halves(result)
            result = bits & np.uint32(0x7FFFFFFF if d_type == "f32" else 0x7FFF)  # what is cut to zero is +0 as well
        bits = np.where(result == 0, np.uint32(0), bits)
        return _with_specials(bits, a, b, c, d_type)


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


def _with_specials(bits: np.ndarray, a: Side, b: Side, c: np.ndarray, d_type: str) -> np.ndarray:
    """Puts NaN and infinities where operands have some."""
    numbers = [x.values for side in (a, b) for x in (side.elements, side.scales) if x is not None]
    if all(np.isfinite(x).all() for x in (*numbers, c)):
        return bits
    plain = c.copy()
    for part_a, part_b, scale in _blocks(a, b):
        plain += part_a.values @ part_b.values.T * scale
    nan, infinity = (0x7FFFFFFF, 0x7F800000) if d_type == "f32" else (0x7FFF, 0x7C00)
    sign = np.where(plain < 0, np.uint32(0x80000000 if d_type == "f32" else 0x8000), np.uint32(0))
    bits = np.where(np.isinf(plain), sign | np.uint32(infinity), bits)
    return np.where(np.isnan(plain), np.uint32(nan), bits)


def _blocks(a: Side, b: Side) -> list[tuple[Numbers, Numbers, np.ndarray | float]]:
    """Both operands in each block of K, and the product of their scales [rows of A, rows of B]."""
    if a.scales is None or b.scales is None:
        return [(a.elements, b.elements, 1.0)]
    count = a.scales.values.shape[1]
    size = a.elements.values.shape[1] // count
    found = []
    for i in range(count):
        parts = [x.part(i * size, (i + 1) * size) for x in (a.elements, b.elements)]
        found.append((*parts, np.multiply.outer(a.scales.values[:, i], b.scales.values[:, i])))
    return found


# --- exact sums -----------------------------------------------------------------------------------------------------


def _parts(values: np.ndarray) -> list[np.ndarray]:
    """Parts of which all products have so few digits that sums of 32 are exact in float64.

    Multiples of 2^-9 up to 2^9 are one part, as all of E4M3 and narrower types are. E5M2 has two: numbers of at least
    1, multiples of 2^-2 below 2^16, and the others, multiples of 2^-16. Sums of any two parts lie within 2^41 units.
    """
    units = values * 2.0**9
    if (np.abs(values) <= 2.0**9).all() and (units == np.trunc(units)).all():
        return [values]
    small = np.abs(values) < 1
    return [np.where(small, 0, values), np.where(small, values, 0)]


def _exact(a: Side, b: Side, c: np.ndarray) -> np.ndarray:
    """float64: exact sums, rounded to odd; rounding that once more, to FP32 or FP16, cannot go wrong."""
    terms = []
    for part_a, part_b, scale in _blocks(a, b):
        scale = np.where(np.isfinite(scale), scale, 0)
        for x in _parts(part_a.finite):
            terms.extend(x @ y.T * scale for y in _parts(part_b.finite))
    return _rounded_to_odd([*(term for term in terms if term.any()), c])


def _two_sum(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _rounded_to_odd(terms: list[np.ndarray]) -> np.ndarray:
    """Sum by parts that do not overlap, the largest last (Shewchuk, 1997, Grow-Expansion)."""
    parts: list[np.ndarray] = []
    for term in terms:
        for i, part in enumerate(parts):
            term, parts[i] = _two_sum(term, part)
        parts.append(term)
    total, rest = parts[-1], np.zeros_like(parts[-1])
    for part in reversed(parts[:-1]):
        found = rest != 0
        more, error = _two_sum(total, part)
        total, rest = np.where(found, total, more), np.where(found, rest, error)
    bits = total.view(np.int64)
    away = np.where((rest > 0) == (total > 0), 1, -1)
    return np.where((rest != 0) & (bits & 1 == 0), bits + away, bits).view(np.float64)


# --- aligned sums ---------------------------------------------------------------------------------------------------


def _exponents_of(c: np.ndarray, d_type: str, sums: Sums) -> np.ndarray:
    """Encoded exponents of C, of zeros the lowest one."""
    exponents = np.maximum(np.frexp(c)[1] - 1, -126 if d_type == "f32" else -14)
    return np.where(c == 0, sums.lowest, exponents)


def _power(exponents: np.ndarray) -> np.ndarray:
    return np.ldexp(1.0, exponents)


def _aligned(a: Side, b: Side, c: np.ndarray, d_type: str, sums: Sums) -> np.ndarray:
    """float64 [rows of A, rows of B]: sums of cut terms, not rounded yet. One scale at most, a power of two."""
    shift = np.zeros(c.shape, np.int32)
    if a.scales is not None and b.scales is not None:
        shift = np.add.outer(a.scales.exponents[:, 0], b.scales.exponents[:, 0]).astype(np.int32)
    if d_type == "f32" and a.elements.eight_bits and b.elements.eight_bits:
        result, done = _scaled_afterwards(a.elements, b.elements, c, shift, sums)
    else:
        result, done = _uncut(a.elements, b.elements, c, shift, d_type, sums)
    for first in range(0, len(c), _ROWS):
        rows = np.arange(first, min(first + _ROWS, len(c)))
        columns = np.flatnonzero(~done[rows].all(axis=0))
        place = np.ix_(rows, columns)
        top = _largest_exponents(a.elements.exponents[rows], b.elements.exponents[columns]) + shift[place]
        top = np.maximum(_exponents_of(c[place], d_type, sums), top)
        terms = a.elements.finite[rows, None] * b.elements.finite[columns]
        total = np.trunc(terms * _power(shift[place] + sums.fraction - top)[..., None]).sum(axis=-1)
        result[place] = (total + np.trunc(c[place] * _power(sums.fraction - top))) * _power(top - sums.fraction)
    return result


def _scaled_afterwards(
    a: Numbers, b: Numbers, c: np.ndarray, shift: np.ndarray, sums: Sums
) -> tuple[np.ndarray, np.ndarray]:
    """float64 sums, cut to FP32, and where they are right: products of unscaled elements, of which D is scaled.

    A power of two that all terms have in common changes nothing but the exponent of the result, where neither the
    lowest exponent nor the range of FP32 matters: with a scale and a result that are not too small, and no infinity.
    """
    inside = np.abs(shift) <= _MOST_SHIFT
    shift = np.where(inside, shift, 0)
    start = np.ldexp(c, -shift)
    inside &= _is_normal(c) & _is_normal(start)
    count = len(a.codes)
    padded = [np.pad(x.codes, ((0, -len(x.codes) % _GROUP_OF_ROWS), (0, 0)))[None] for x in (a, b)]
    cells = np.zeros((1, padded[1].shape[1], padded[0].shape[1]), np.float32)
    cells[0, : len(b.codes), :count] = np.where(inside, start, 0).T
    kinds = tuple(Kind(EIGHT_BITS[x.name], x.negated) for x in (a, b))
    multiply_rows(*padded, cells.view(np.uint32), kinds, "f32", add=True, sums=sums)
    result = np.ldexp(cells[0, : len(b.codes), :count].T.astype(np.float64), shift)
    return result, inside & _is_normal(result)


def _is_normal(x: np.ndarray) -> np.ndarray:
    """Whether numbers are 0 or in the range of normal numbers of FP32."""
    size = np.abs(x)
    return (x == 0) | (size >= 2.0**-126) & (size < 2.0**128)


def _uncut(
    a: Numbers, b: Numbers, c: np.ndarray, shift: np.ndarray, d_type: str, sums: Sums
) -> tuple[np.ndarray, np.ndarray]:
    """float64 sums, and where they are right: no product has digits below the last one that is kept."""
    top = np.maximum(_exponents_of(c, d_type, sums), _largest_exponents(a.exponents, b.exponents) + shift)
    last = top - sums.fraction
    result = np.ldexp(a.finite @ b.finite.T, shift) + np.ldexp(np.trunc(np.ldexp(c, -last)), last)
    return result, _least_digits(a)[:, None] + _least_digits(b) + shift >= last


def _largest_exponents(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """int32 [rows of A, rows of B]: of products of elements with such exponents."""
    left, right = a.astype(np.int16), b.astype(np.int16)
    largest = np.full((len(left), len(right)), 2 * _NO_EXPONENT, np.int16)
    for k in range(left.shape[1]):
        np.maximum(largest, np.add.outer(left[:, k], right[:, k]), out=largest)
    return largest.astype(np.int32)


def _least_digits(numbers: Numbers) -> np.ndarray:
    """int [rows]: all elements of a row are multiples of two to the power of it, zeros too."""
    lowest = np.where(numbers.exponents == _NO_EXPONENT, -_NO_EXPONENT, numbers.exponents).min(axis=1)
    return lowest - _DIGITS


def _aligned_groups(a: Side, b: Side, c: np.ndarray, d_type: str, sums: Sums) -> np.ndarray:
    """Sums of pairs of FP4, whose products are added in groups before they are aligned."""
    groups = a.elements.values.shape[1] // GROUP
    per_scale = groups // a.scales.values.shape[1]
    tops = _exponents_of(c, d_type, sums)
    terms = []
    for i in range(groups):
        x, y = (side.elements.values[:, i * GROUP : (i + 1) * GROUP] for side in (a, b))
        scale = np.multiply.outer(a.scales.finite[:, i // per_scale], b.scales.finite[:, i // per_scale])
        exponents = np.add.outer(a.scales.exponents[:, i // per_scale], b.scales.exponents[:, i // per_scale])
        some = (x != 0).astype(float) @ (y != 0).astype(float).T > 0
        tops = np.where(some & (scale != 0), np.maximum(tops, exponents), tops)
        terms.append((x @ y.T, scale))
    units = _power(sums.fraction - tops)
    total = np.trunc(c * units)
    for dot, scale in terms:
        total += np.trunc(dot * (scale * units))
    return total * _power(tops - sums.fraction)
