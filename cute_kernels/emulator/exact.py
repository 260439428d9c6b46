"""Matrix products and sums whose only rounding is the last one, to FP32 or FP16.

`dot` works in float64, which is exact as long as all products of an operand pair lie on one grid of 53 bits. Where the
operands' exponents spread wider, they are cut into slices that do satisfy this, and the slice products, each exact, are
added without error by two-sum transformations. The result is nearest to the exact value (ties to even).
"""

from __future__ import annotations

import math

import numpy as np

_DOUBLE_BITS = 53
_BLOCK_PRODUCTS = 1 << 18  # per BLAS call: larger ones wake OpenBLAS's threads, which costs more than the call itself
_BLOCK_RESULTS = 1 << 13  # results per pass: temporaries of 64 KiB stay in the cache and out of mmap
_CANONICAL_NAN = {2: np.uint16(0x7FFF), 4: np.uint32(0x7FFFFFFF)}


def dot(b: np.ndarray, a: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """float64 ``b @ a.T`` of [n, k] and [m, k]; exact when all products lie on one grid of 53 bits."""
    n, k = b.shape
    result = np.empty((n, a.shape[0])) if out is None else out
    rows = max(_BLOCK_PRODUCTS // (a.shape[0] * k), 1)
    if n % rows == 0:
        np.matmul(b.reshape(-1, rows, k), a.T, out=result.reshape(-1, rows, a.shape[0]))
    else:
        for start in range(0, n, rows):
            np.matmul(b[start : start + rows], a.T, out=result[start : start + rows])
    return result


def to_int32(total: np.ndarray, saturate: bool) -> np.ndarray:
    """int32 of exact integer sums below 2^53, which wrap at 32 bits as two's complement does, or saturate."""
    if saturate:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return total.astype(np.int64).astype(np.int32)


def exponent_spread(values: np.ndarray, precision: int) -> int:
    """Bits between the highest bit of the largest and the lowest bit of the smallest nonzero value.

    Args:
        values: finite float64.
        precision: significand bits of the type the values come from.
    """
    magnitude = np.abs(values)
    largest = float(magnitude.max())
    if largest == 0:
        return precision
    smallest = float(np.min(magnitude, where=magnitude > 0, initial=largest))
    return math.frexp(largest)[1] - math.frexp(smallest)[1] + precision


def slices(values: np.ndarray, precision: int, k: int) -> list[np.ndarray]:
    """Summands of ``values`` such that the dot product of any two slices over ``k`` elements is exact in float64."""
    width = (_DOUBLE_BITS - math.ceil(math.log2(k))) // 2 - precision + 1
    exponents = np.frexp(values)[1]
    nonzero = values != 0
    if not nonzero.any():
        return [values]
    index = np.where(nonzero, (int(exponents[nonzero].max()) - exponents) // width, -1)
    return [np.where(index == i, values, 0.0) for i in np.unique(index[nonzero])]


def exact_pairs(b: np.ndarray, a: np.ndarray, precision: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs whose `dot` is exact and whose dots sum to ``b @ a.T`` of finite [n, k] and [m, k] float64 values."""
    k = b.shape[1]
    spread = exponent_spread(b, precision) + exponent_spread(a, precision)
    if spread + math.ceil(math.log2(k)) <= _DOUBLE_BITS:
        return [(b, a)]
    a_parts = slices(a, precision, k)
    return [(b_part, a_part) for b_part in slices(b, precision, k) for a_part in a_parts]


def round_sum(terms: list[np.ndarray], dtype: type = np.float32) -> np.ndarray:
    """The FP32 (or FP16) nearest to the exact sum of finite float64 arrays of one shape."""
    if len(terms) == 1:
        return terms[0].astype(dtype)
    if len(terms) == 2:
        total, error = _two_sum(*terms)
        return (_round_to_odd(total, error) if error.any() else total).astype(dtype)
    parts = list(terms)
    # Sweeps of error-free additions until each part is at most half a unit in the last place of the next larger one:
    # then the last part is the rounded sum and the sign of the one before it says on which side the rest lies.
    changed = True
    while changed:
        changed = False
        for i in range(len(parts) - 1):
            total, error = _two_sum(parts[i], parts[i + 1])
            if not changed and not (np.array_equal(total, parts[i + 1]) and np.array_equal(error, parts[i])):
                changed = True
            parts[i], parts[i + 1] = error, total
    return _round_to_odd(parts[-1], parts[-2]).astype(dtype)


def _two_sum(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(s, e) with s = fl(x + y) and s + e = x + y exactly (Knuth)."""
    total = x + y
    y_part = total - x
    return total, (x - (total - y_part)) + (y - y_part)


def _round_to_odd(total: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """``total + rest`` rounded to odd: rounding that once more, to FP32 or less, cannot go wrong (53 >= 24 + 2)."""
    bits = total.view(np.int64).copy()
    inexact_even = (rest != 0) & (bits & 1 == 0)
    step = np.where((rest > 0) == (total > 0), 1, -1)
    bits += np.where(inexact_even, step, 0)
    return bits.view(np.float64)


def dot_add(
    b: np.ndarray, a: np.ndarray, d: np.ndarray | None, precision: int, dtype: type = np.float32
) -> np.ndarray:
    """``b @ a.T + d`` [n, m] rounded once; NaN is 0x7FFFFFFF (FP16: 0x7FFF), infinities follow IEEE 754.

    Args:
        b: float64 [n, k] of values with ``precision`` significand bits.
        a: float64 [m, k], likewise.
        d: [n, m] of ``dtype``, or None for zero.
        precision: at most 24.
        dtype: of the result, np.float32 or np.float16.
    """
    if not (np.isfinite(a).all() and np.isfinite(b).all() and (d is None or np.isfinite(d).all())):
        return _dot_add_special(b, a, d, precision, dtype)
    pairs = exact_pairs(b, a, precision)
    result = np.empty((len(b), len(a)), dtype)
    rows = max(_BLOCK_RESULTS // len(a), 1)
    with np.errstate(over="ignore"):
        for start in range(0, len(b), rows):
            block = slice(start, start + rows)
            terms = [dot(b_part[block], a_part) for b_part, a_part in pairs]
            result[block] = round_sum(terms if d is None else [*terms, d[block].astype(np.float64)], dtype)
    return result


def _dot_add_special(
    b: np.ndarray, a: np.ndarray, d: np.ndarray | None, precision: int, dtype: type
) -> np.ndarray:
    """`dot_add` where some input is NaN or infinite: float64 tells which results are, the rest is computed without."""
    old = np.zeros((len(b), len(a)), dtype) if d is None else d
    with np.errstate(over="ignore", invalid="ignore"):
        plain = dot(b, a) + old
        b, a, old = (np.where(np.isfinite(x), x, 0).astype(x.dtype) for x in (b, a, old))
        result = np.where(np.isfinite(plain), dot_add(b, a, old, precision, dtype), plain.astype(dtype))
    nan = _CANONICAL_NAN[result.itemsize]
    result.view(nan.dtype)[np.isnan(plain)] = nan
    return result
