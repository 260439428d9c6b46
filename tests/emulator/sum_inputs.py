"""Operands in which rounding shows: any bit pattern, far exponents, cancellation, subnormal numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np

NBYTES = {"e4m3": 1, "e5m2": 1, "f16": 2, "bf16": 2, "tf32": 4}
_NUMPY = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
#: Bits of exponent and of fraction.
_FIELDS = {"e4m3": (4, 3), "e5m2": (5, 2), "f16": (5, 10), "bf16": (8, 7), "tf32": (8, 23), "f32": (8, 23)}
STYLES = ("normal", "bits", "near", "far", "cancelling", "subnormal", "special")


def words(name: str) -> type:
    """The NumPy type of bit patterns."""
    return np.uint32 if name == "f32" else _WORDS[NBYTES[name]]


def _pattern(rng: np.random.Generator, name: str, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """Random signs and fractions, encoded exponents of ``low`` to ``high``."""
    exponent_bits, fraction_bits = _FIELDS[name]
    field = rng.integers(low, high + 1, shape, dtype=np.uint32)
    fraction = rng.integers(0, 1 << fraction_bits, shape, dtype=np.uint32)
    sign = rng.integers(0, 2, shape, dtype=np.uint32)
    return (sign << (exponent_bits + fraction_bits) | field << fraction_bits | fraction).astype(words(name))


def numbers(rng: np.random.Generator, name: str, shape: tuple[int, ...], style: str) -> np.ndarray:
    """Bit patterns of a type (or ``"f32"``) in one of `STYLES`."""
    exponent_bits, fraction_bits = _FIELDS[name]
    most, middle = (1 << exponent_bits) - 2, 1 << exponent_bits - 1
    if style == "bits":
        return rng.integers(0, 1 << (exponent_bits + fraction_bits + 1), shape, dtype=np.uint64).astype(words(name))
    if style == "near":  # every term reaches into the sum
        return _pattern(rng, name, shape, middle - 3, middle + 2)
    if style == "far":  # a few large ones, many that lose most of their digits
        spread = min(most - 1, 20)
        return _pattern(rng, name, shape, middle - spread // 2, middle + spread // 2)
    if style == "subnormal":
        return _pattern(rng, name, shape, 0, 2)
    values = rng.normal(0, 1, shape).astype(np.float32)
    values[rng.random(shape) < 0.1] = 0
    if name in ("tf32", "f32"):
        patterns = values.view(np.uint32)
    else:
        patterns = values.astype(_NUMPY[name]).view(words(name))
    if style == "special":
        top = np.array([most + 1 << fraction_bits, (2 << exponent_bits + fraction_bits) - 1], np.uint64)
        chosen = top[rng.integers(0, 2, shape)].astype(words(name))
        patterns = np.where(rng.random(shape) < 0.01, chosen, patterns)
    return patterns


def operands(
    rng: np.random.Generator, types: tuple[str, str], d_type: str, style: str, count: int, m: int, n: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bit patterns of A [count, m, K], B [count, n, K] and C [count, m, n], with K of 32 bytes."""
    k = 32 // NBYTES[types[0]]
    a, b = (numbers(rng, name, (count, rows, k), style) for name, rows in zip(types, (m, n)))
    if style == "cancelling":  # pairs of products that differ in their last digits
        sign = words(types[1])(1 << 8 * NBYTES[types[1]] - 1)
        a[..., 1::2] = a[..., ::2]
        b[..., 1::2] = b[..., ::2] ^ sign ^ rng.integers(0, 2, b[..., ::2].shape).astype(b.dtype)
    c = numbers(rng, d_type, (count, m, n), {"cancelling": "far"}.get(style, style))
    return a, b, np.where(rng.random(c.shape) < 0.1, c.dtype.type(0), c)
