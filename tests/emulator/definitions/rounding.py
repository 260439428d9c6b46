"""Rounding that NumPy does not offer, as functions of arrays of any shape.

Every result is correctly rounded in one step, as IEEE 754 and the PTX ISA ask for. The tool is *round to odd*: an
intermediate result in a wider format that is inexact gets an odd last bit, after which a second rounding to a format
with at least two bits less gives what rounding once would have given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

_QUIET_F64, _INVALID_F64 = np.uint64(1 << 51), np.uint64(0xFFF8 << 48)
NAN_F32 = np.uint32(0x7FFFFFFF)  # PTX ISA: the canonical NaN of f32 results
NAN_F16 = np.uint16(0x7FFF)  # of f16 and bf16 results

_F32_HALFWAY = np.uint64(0x10000000)
_F32_DROPPED = np.uint64(0x1FFFFFFF)
_F32_TINY = np.float32(2.0**-126)


def canonical_f32(x: np.ndarray) -> np.ndarray:
    """Replaces every NaN by the canonical one. x: f32 of any shape."""
    nan = x != x
    if nan.any():
        x = np.where(nan, NAN_F32, x.view(np.uint32)).view(np.float32)
    return x


def flush_f32(x: np.ndarray) -> np.ndarray:
    """The .ftz modifier: subnormals become zeros of the same sign."""
    tiny = np.abs(x) < _F32_TINY
    if tiny.any():
        x = np.where(tiny, np.copysign(np.float32(0), x), x)
    return x


def sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b in f64, rounded to odd. a, b: f64."""
    with np.errstate(invalid="ignore", over="ignore"):
        s = a + b
        bb = s - a
        error = (a - (s - bb)) + (b - bb)  # TwoSum: a + b == s + error exactly
    return _nudge_odd(s, error)


def _nudge_odd(s: np.ndarray, error: np.ndarray) -> np.ndarray:
    bits = s.view(np.uint64)
    even = (error != 0) & np.isfinite(s) & np.isfinite(error) & ((bits & np.uint64(1)) == 0)
    away = (error > 0) == (s > 0)  # the exact sum is larger in magnitude than s
    step = np.where(even, np.where(away, 1, -1), 0)
    return (bits.view(np.int64) + step).view(np.float64)


def fma_f32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c with one rounding to nearest even. a, b, c: f32.

    The product of two f32 is exact in f64. The f64 sum may be inexact, and then rounding it again to f32 is wrong
    only where the f64 sum lies exactly half-way between two f32 or where f32 is subnormal; only these are redone.
    """
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        total = product + c
        result = total.astype(np.float32)
        suspect = (total.view(np.uint64) & _F32_DROPPED) == _F32_HALFWAY
        suspect |= np.abs(result) <= _F32_TINY
        if suspect.any():
            exact = sum_to_odd(product, np.broadcast_to(c, total.shape).astype(np.float64))
            result = np.where(suspect, exact.astype(np.float32), result)
    return canonical_f32(result)


def clamp_f32(x: np.ndarray) -> np.ndarray:
    """.sat: into [0, 1], NaN to +0."""
    return np.where(x > 0, np.minimum(x, np.float32(1)), np.float32(0)).astype(np.float32)


#: Rounding towards zero, down, up.
DIRECTIONS = ("rz", "rm", "rp")


def fma_directed_f32(mode: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once in a direction of `DIRECTIONS`. a, b, c: f32."""
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        wide = np.broadcast_to(c, np.broadcast(product, c).shape).astype(np.float64)
        exact = np.where(np.isfinite(product) & np.isfinite(wide), sum_to_odd(product, wide), product + wide)
        near = exact.astype(np.float32)
        back = near.astype(np.float64)
        down, up = np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))
        lower = np.where((back > exact), down, near)
        upper = np.where((back < exact), up, near)
        result = {"rm": lower, "rp": upper, "rz": np.where(exact > 0, lower, upper)}[mode]
        result = np.where(np.isfinite(exact), result, near)
        if mode == "rm":  # a sum that cancels is -0
            cancels = (exact == 0) & (np.signbit(product) != np.signbit(wide))
            result = np.where(cancels, np.float32(-0.0), result)
    return canonical_f32(result.astype(np.float32))


def f64_to_f32_odd(x: np.ndarray) -> np.ndarray:
    """f64 to f32 rounded to odd (finite overflow stays finite: the odd value below infinity)."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    bits = near.view(np.int32)
    wide = near.astype(np.float64)
    with np.errstate(invalid="ignore"):
        inexact = (wide != x) & ~np.isnan(x)
        away = np.abs(wide) > np.abs(x)  # near was rounded away from zero
    truncated = np.where(inexact & away, bits - 1, bits)
    return np.where(inexact, truncated | 1, bits).astype(np.int32).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """f32 to the bits (uint16) of bf16, to nearest even."""
    bits = x.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    nan = x != x
    if nan.any():
        rounded = np.where(nan, NAN_F16, rounded)
    return rounded


def f32_to_bf16_truncated(x: np.ndarray) -> np.ndarray:
    """f32 to bits of bf16, towards zero (.rz)."""
    truncated = (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(x != x, NAN_F16, truncated)


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """Bits (uint16) of bf16 to f32, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f64_to_bf16(x: np.ndarray) -> np.ndarray:
    """f64 to bits of bf16 with one rounding to nearest even."""
    return f32_to_bf16(f64_to_f32_odd(x))


def f32_to_f16(x: np.ndarray) -> np.ndarray:
    """f32 to the bits (uint16) of f16, to nearest even."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = x.astype(np.float16).view(np.uint16)
    nan = x != x
    return np.where(nan, NAN_F16, bits) if nan.any() else bits


def f64_to_f16(x: np.ndarray) -> np.ndarray:
    """f64 to bits of f16 with one rounding to nearest even."""
    return f32_to_f16(f64_to_f32_odd(x))


def fma_bf16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c on bits of bf16 with one rounding."""
    with np.errstate(all="ignore"):
        product = bf16_to_f32(a).astype(np.float64) * bf16_to_f32(b)
        return f64_to_bf16(sum_to_odd(product, bf16_to_f32(c).astype(np.float64)))


def add_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b on bits of bf16. f32 has more than 2 * 8 + 2 significant bits and bf16's exponents, so rounding the f32 sum
    again is the same as rounding once (sums of subnormals are exact)."""
    with np.errstate(all="ignore"):
        return f32_to_bf16(bf16_to_f32(a) + bf16_to_f32(b))


def mul_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a * b on bits of bf16: exact in f64, rounded once."""
    with np.errstate(all="ignore"):
        return f64_to_bf16(bf16_to_f32(a).astype(np.float64) * bf16_to_f32(b))


def fma_f16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c on bits of f16: product and sum are exact in f64 (at most 22 + 58 bits apart are never needed)."""
    with np.errstate(all="ignore"):
        wide = [x.view(np.float16).astype(np.float64) for x in (a, b, c)]
        return f64_to_f16(sum_to_odd(wide[0] * wide[1], wide[2]))


def add_f16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b on bits of f16: exact in f64, rounded once."""
    with np.errstate(all="ignore"):
        return f64_to_f16(a.view(np.float16).astype(np.float64) + b.view(np.float16))


def mul_f16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a * b on bits of f16: exact in f64, rounded once."""
    with np.errstate(all="ignore"):
        return f64_to_f16(a.view(np.float16).astype(np.float64) * b.view(np.float16))


def lowest_f32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min.f32: the number if one operand is NaN; -0 < +0."""
    return canonical_f32(_ordered(a, b, np.minimum, both_zero_negative=np.logical_or))


def highest_f32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max.f32: the number if one operand is NaN; +0 > -0."""
    return canonical_f32(_ordered(a, b, np.maximum, both_zero_negative=np.logical_and))


def _ordered(a: np.ndarray, b: np.ndarray, choose: np.ufunc, both_zero_negative: np.ufunc) -> np.ndarray:
    # Not np.fmin: for a signalling NaN it returns NaN on some code paths.
    result = np.where(a != a, b, np.where(b != b, a, choose(a, b)))
    zeros = (a == 0) & (b == 0)
    if zeros.any():
        negative = both_zero_negative(np.signbit(a), np.signbit(b))
        result = np.where(zeros, np.where(negative, np.float32(-0.0), np.float32(0.0)), result)
    return result


def lowest_f64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min.f64: the number if one operand is NaN; -0 < +0."""
    return _ordered(a, b, np.minimum, both_zero_negative=np.logical_or)


def highest_f64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max.f64: the number if one operand is NaN; +0 > -0."""
    return _ordered(a, b, np.maximum, both_zero_negative=np.logical_and)


def lowest_nan_f32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min.NaN.f32: NaN if one operand is; -0 < +0."""
    return np.where((a != a) | (b != b), NAN_F32.view(np.float32), lowest_f32(a, b))


def highest_nan_f32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max.NaN.f32: NaN if one operand is; +0 > -0."""
    return np.where((a != a) | (b != b), NAN_F32.view(np.float32), highest_f32(a, b))


def with_nan_f64(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """A function of f64 whose NaN results are defined.

    The PTX ISA leaves open which NaN that is, and libraries choose by instruction set and array length. Here it is the
    first operand that is NaN, quiet, and 0xFFF8000000000000 where none is.
    """

    def defined(*args: np.ndarray) -> np.ndarray:
        result = np.asarray(function(*args))
        nan = result != result
        if not nan.any():
            return result
        bits = np.full(result.shape, _INVALID_F64, np.uint64)
        for x in reversed(np.broadcast_arrays(*args)):
            bits = np.where(x != x, np.ascontiguousarray(x).view(np.uint64) | _QUIET_F64, bits)
        return np.where(nan, bits, np.ascontiguousarray(result).view(np.uint64)).view(np.float64)

    return defined


def fma_f64(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str = "rn") -> np.ndarray:
    """a * b + c rounded once, to nearest even or in one of `DIRECTIONS`, by rational arithmetic. a, b, c: f64."""
    a, b, c = np.broadcast_arrays(a, b, c)
    factors = np.isfinite(a) & np.isfinite(b)
    with np.errstate(all="ignore"):
        result = np.where(np.isinf(c) & factors, c, a * b + c)  # a finite product is not infinite
    flat = result.reshape(-1)
    finite = (factors & np.isfinite(c)).reshape(-1)
    for i, (x, y, z) in enumerate(zip(a.ravel().tolist(), b.ravel().tolist(), c.ravel().tolist())):
        if finite[i]:
            exact = Fraction(x) * Fraction(y) + Fraction(z)
            flat[i] = _rounded_f64(exact, mode) if exact else _zero_sum(x, y, z, mode)
    return flat.reshape(result.shape)


def _zero_sum(x: float, y: float, z: float, mode: str) -> float:
    """x * y + z = 0: of the sign of both terms, or, where they differ, -0 if rounded down and else +0."""
    product, addend = math.copysign(1, x) * math.copysign(1, y), math.copysign(1, z)
    return math.copysign(0, addend if product == addend else -(mode == "rm") or 1)


def _rounded_f64(value: Fraction, mode: str) -> float:
    near = _nearest_f64(value)
    if mode == "rn" or near == value:  # floats and fractions are compared exactly
        return near
    down = mode == "rm" or (mode == "rz" and value > 0)
    if (near > value) == down:
        return math.nextafter(near, -math.inf if down else math.inf)
    return near


def _nearest_f64(value: Fraction) -> float:
    try:
        return float(value)  # int / int rounds correctly, subnormals included
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def round_integral(x: np.ndarray, mode: str) -> np.ndarray:
    """Rounds floats to integral values; mode: rni (nearest even), rzi, rmi (down) or rpi (up)."""
    with np.errstate(invalid="ignore"):
        return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](x)


def float_to_integer(x: np.ndarray, mode: str, bits: int, signed: bool) -> np.ndarray:
    """cvt from f32/f64 to an integer: rounds by ``mode`` and clamps to the range.

    NaN gives 0, but the lowest signed pattern where source or destination has 64 bits (PTX ISA, cvt; seen on an H200).

    Returns an array of the unsigned type of ``bits`` bits (bit patterns).
    """
    of_nan = 1 << (bits - 1) if bits == 64 or x.dtype == np.float64 else 0
    low = -(1 << (bits - 1)) if signed else 0
    high = (1 << (bits - 1)) - 1 if signed else (1 << bits) - 1
    with np.errstate(invalid="ignore"):
        whole = round_integral(x.astype(np.float64), mode)
        nan = whole != whole
        # float(high) rounds up to high + 1 for 64 bits: compare before converting, never after.
        above = whole >= float(high)
        below = whole <= float(low)
        safe = np.where(nan | above | below, 0.0, whole)
    wide = safe.astype(np.uint64 if not signed else np.int64)
    unsigned = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    pattern = wide.view(np.uint64)
    mask = (1 << 64) - 1
    pattern = np.where(above, np.uint64(high & mask), np.where(below, np.uint64(low & mask), pattern))
    return np.where(nan, np.uint64(of_nan), pattern).astype(unsigned)

