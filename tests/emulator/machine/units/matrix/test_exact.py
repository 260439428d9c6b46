"""Matrix products with one rounding, against rational arithmetic, for every instruction set that this processor has."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator.machine.units.matrix import operands
from cute_kernels.emulator.machine.units.matrix.products import Kind, multiply_rows
from tests.emulator.core_variants import VARIANTS, each_variant
from tests.nightly import examples

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
ELEMENTS = {element.name: element for kind in operands.KINDS.values() for element in kind.values()}

variant = pytest.fixture(each_variant, scope="module", autouse=True, params=VARIANTS)


def nearest_float32(value: Fraction) -> np.float32:
    """The FP32 nearest to a rational number, ties to even, by integer arithmetic alone."""
    if value == 0:
        return np.float32(0)
    magnitude = abs(value)
    exponent = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 25, -149)
    while magnitude / Fraction(2) ** exponent >= 1 << 24:
        exponent += 1
    scaled = magnitude / Fraction(2) ** exponent
    whole, rest = divmod(scaled, 1)
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2)
    rounded = whole * Fraction(2) ** exponent
    return np.float32(math.copysign(float(rounded) if rounded < Fraction(2) ** 128 else math.inf, value))


def rational_dot(x: np.ndarray, y: np.ndarray) -> Fraction:
    return sum((Fraction(p) * Fraction(q) for p, q in zip(x.tolist(), y.tolist(), strict=True)), Fraction(0))


def dot_add(name: str, b: np.ndarray, a: np.ndarray, d: np.ndarray | None, result: type = np.float32) -> np.ndarray:
    """``round(b @ a.T + d)`` of values of a type, [rows, k] with at most 32 bytes of K, among rows of zeros."""
    m, n = -(-len(a) // 16) * 16, -(-len(b) // 8) * 8
    rows = [_bytes(name, x, size) for x, size in ((a, m), (b, n))]
    cells = np.full((1, n, m), 0x7FC00BAD, np.uint32)  # never read without d
    if d is not None:
        cells[0] = 0
        bits = np.ascontiguousarray(d).view(np.uint16 if result is np.float16 else np.uint32)
        cells[0, : len(b), : len(a)] = bits
    kinds = (Kind(ELEMENTS[name]), Kind(ELEMENTS[name]))
    multiply_rows(*rows, cells, kinds, "f16" if result is np.float16 else "f32", add=d is not None)
    bits = cells[0, : len(b), : len(a)]
    return bits.astype(np.uint16).view(np.float16) if result is np.float16 else bits.copy().view(np.float32)


def _bytes(name: str, values: np.ndarray, rows: int) -> np.ndarray:
    dtype = np.dtype(TYPES[name])
    with np.errstate(over="ignore"):
        exact = values.astype(dtype)
    assert np.array_equal(exact.astype(np.float64), values, equal_nan=True), "values of the type"
    padded = np.zeros((1, rows, 32 // dtype.itemsize), dtype)
    padded[0, : len(values), : values.shape[1]] = exact
    return padded.view(np.uint8)


def reference(b: np.ndarray, a: np.ndarray, d: np.ndarray | None) -> np.ndarray:
    result = np.zeros((len(b), len(a)), np.float32)
    for i, j in np.ndindex(result.shape):
        result[i, j] = nearest_float32(rational_dot(b[i], a[j]) + (Fraction(float(d[i, j])) if d is not None else 0))
    return result


def random_bits(rng: np.random.Generator, name: str, shape: tuple[int, int]) -> np.ndarray:
    """Finite values of a type with uniformly random bit patterns: all exponents, subnormals, zeros."""
    dtype = np.dtype(TYPES[name])
    code = np.uint8 if dtype.itemsize == 1 else np.uint16
    bits = rng.integers(0, np.iinfo(code).max, shape, code, endpoint=True)
    with np.errstate(invalid="ignore"):
        values = bits.view(dtype).astype(np.float64)
    return np.where(np.isfinite(values), values, 0.0)


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(got + np.float32(0), expected + np.float32(0))  # a zero's sign is not specified
    assert got.dtype == np.float32


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=examples(12, 200))
@given(st.integers(0, 10**6), st.integers(1, 32), st.booleans())
def test_sums_are_rounded_once_whatever_the_exponents(name: str, seed: int, k: int, with_d: bool):
    rng = np.random.default_rng(seed)
    k = min(k, 32 // np.dtype(TYPES[name]).itemsize)
    b, a = random_bits(rng, name, (3, k)), random_bits(rng, name, (4, k))
    d = None
    if with_d:
        spread = np.abs(b).max() * np.abs(a).max() + 2.0**-140
        with np.errstate(over="ignore"):
            d = (rng.standard_normal((3, 4)) * spread * 2.0 ** rng.integers(-60, 10)).astype(np.float32)
        d = np.where(np.isfinite(d), d, 1).astype(np.float32)
    assert_same_bits(dot_add(name, b, a, d), reference(b, a, d))


@pytest.mark.parametrize("name", TYPES)
def test_sums_that_cancel(name: str):
    """Each product twice, with both signs, and something that is left: the error of float64 decides nothing here."""
    rng = np.random.default_rng(7)
    half = 16 // np.dtype(TYPES[name]).itemsize
    b, a = random_bits(rng, name, (8, half)), random_bits(rng, name, (16, half))
    b, a = np.concatenate([b, -b], axis=1), np.concatenate([a, a], axis=1)
    d = (rng.standard_normal((8, 16)) * 2.0 ** rng.integers(-40, 20, (8, 16))).astype(np.float32)
    assert_same_bits(dot_add(name, b, a, d), d)
    assert not dot_add(name, b, a, np.zeros_like(d)).view(np.uint32).any()  # +0
    a[:, 0] = random_bits(rng, name, (16, 1))[:, 0]
    assert_same_bits(dot_add(name, b, a, d), reference(b, a, d))


def test_halfway_cases_that_double_rounding_gets_wrong():
    """1 + 2^-24 is halfway between two FP32 numbers; a bit far below decides, too far for float64 to keep."""
    a = np.array([[1.0, 2.0**-24, 2.0**-60]])
    for sign, expected in ((1, 1 + 2.0**-23), (-1, 1.0)):
        b = np.array([[1.0, 1.0, sign * 2.0**-20]])
        assert float(np.float32(1 + 2.0**-24)) == 1.0, "float64 alone rounds to even"
        assert_same_bits(dot_add("bf16", b, a, None), np.array([[expected]], np.float32))
    d = np.array([[1.0]], np.float32)
    tiny = np.array([[2.0**-24, 2.0**-90]])
    assert_same_bits(dot_add("bf16", np.ones((1, 2)), tiny, d), np.array([[1 + 2.0**-23]], np.float32))
    assert_same_bits(dot_add("bf16", np.array([[1.0, -1.0]]), tiny, d), d)


def test_ties_go_to_even():
    """On a grid that float64 holds, where half of all sums with 25 digits are halfway."""
    ones, last = np.ones((1, 2)), np.array([[2.0**-23, 2.0**-24]])
    for steps, even in ((0, 0), (1, 2), (2, 2), (3, 4)):
        d = np.array([[1 + steps * 2.0**-23]], np.float32)
        expected = np.array([[1 + even * 2.0**-23]], np.float32)
        assert_same_bits(dot_add("bf16", ones[:, :1], last[:, 1:], d), expected)
    d = np.array([[0.5 - 2.0**-25]], np.float32)
    assert_same_bits(dot_add("bf16", ones, last, d), reference(ones, last, d))


@pytest.mark.parametrize("scale", [1, 2.0**-14, 2.0**-24, 100])
def test_fp16_results(scale: float):
    """All roundings of FP16: subnormal results, ties, overflow, as NumPy converts sums that float64 holds."""
    rng = np.random.default_rng(3)
    b, a = (rng.integers(-64, 65, (size, 16)) / 64 for size in (64, 128))
    b[:, 0] *= 32
    a[:, 1:] *= min(scale, 1)
    a = a.astype(np.float16).astype(np.float64)
    a, b = (a, b) if scale <= 1 else (4 * a, 16 * scale * b)
    d = (rng.standard_normal((64, 128)) * min(scale, 1)).astype(np.float16)
    with np.errstate(over="ignore"):
        sums = b @ a.T + d
        expected = sums.astype(np.float16)
    assert scale <= 1 or np.isinf(expected).any()
    got = dot_add("f16", b, a, d, np.float16)
    assert np.array_equal(got + np.float16(0), expected + np.float16(0))
    assert (expected.astype(float) != sums).any()


@pytest.mark.parametrize("name", ["f16", "e5m2"])
def test_fp16_special_values(name: str):
    b = np.array([[np.inf, 1.0], [np.nan, 1.0], [0.0, 3.0], [1.0, 2.0**10]])
    a = np.array([[1.0, 1.0], [0.0, 1.0], [-2.0, 2.0**-10]])
    d = np.array([[1, 2, -np.inf], [0, 0, 0], [np.nan, np.inf, 5], [1, 1, 1]], np.float16)
    got = dot_add(name, b, a, d, np.float16)
    expected = [[np.inf, np.nan, -np.inf], [np.nan] * 3, [np.nan, np.inf, 5 + 2.0**-8], [1026, 1025, 0]]
    expected = np.array(expected, np.float16)
    np.testing.assert_array_equal(got, expected)
    assert set(got.view(np.uint16)[np.isnan(got)].tolist()) == {0x7FFF}


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("types", list(itertools.product(("s8", "u8"), repeat=2)))
@pytest.mark.parametrize("negated", [False, True])
def test_integers(types: tuple[str, str], saturate: bool, negated: bool):
    """All values, and accumulators at both ends of int32."""
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 256, (1, size, 32)).astype(np.uint8) for size in (32, 24)]
    rows[1][0, 0], rows[0][0, 0] = 0x80, 0x80
    values = [x[0].view(np.int8 if t == "s8" else np.uint8).astype(np.int64) for x, t in zip(rows, types)]
    old = rng.choice([-(2**31), 2**31 - 1, 0, 12345, -54321], (24, 32))
    cells = old.astype(np.int32).view(np.uint32).reshape(1, 24, 32).copy()
    kinds = (Kind(ELEMENTS[types[0]], negated), Kind(ELEMENTS[types[1]]))
    multiply_rows(*rows, cells, kinds, "s32", add=True, saturate=saturate)
    sums = old + (-1 if negated else 1) * (values[1] @ values[0].T)
    assert sums.max() >= 2**31 or sums.min() < -(2**31)
    expected = np.clip(sums, -(2**31), 2**31 - 1) if saturate else (sums + 2**31) % 2**32 - 2**31
    assert np.array_equal(cells[0].view(np.int32), expected)


def test_subnormal_results_and_overflow():
    for factors, d, expected in (
        ((2.0**-100, 2.0**-33), 2.0**-149, 2.0**-133 + 2.0**-149),
        ((2.0**-100, 2.0**-50), 0.0, 0.0),
        ((1.5 * 2.0**-100, 2.0**-49), 0.0, 2.0**-148),
        ((2.0**127, 1.0), 2.0**127, np.inf),
        ((-(2.0**127), 1.0), np.float32(-3.0e38), -np.inf),
    ):
        b, a = (np.full((1, 1), factor) for factor in factors)
        assert dot_add("bf16", b, a, np.full((1, 1), d, np.float32))[0, 0] == np.float32(expected)


def test_special_values_follow_ieee_and_nan_is_canonical():
    b = np.array([[np.inf, 1.0], [np.nan, 1.0], [0.0, 3.0], [1.0, 2.0**30]])
    a = np.array([[1.0, 1.0], [0.0, 1.0], [-2.0, 2.0**-30]])
    d = np.array([[1, 2, -np.inf], [0, 0, 0], [np.nan, np.inf, 5], [1, 1, 1]], np.float32)
    got = dot_add("bf16", b, a, d)
    expected = [[np.inf, np.nan, -np.inf], [np.nan] * 3, [np.nan, np.inf, 5], [2.0**30, 2.0**30 + 1, 0]]
    expected = np.array(expected, np.float32)
    np.testing.assert_array_equal(got, expected)
    assert set(got.view(np.uint32)[np.isnan(got)].tolist()) == {0x7FFFFFFF}


def test_zeros_are_positive():
    """Whatever their signs were: products of zeros, an accumulator of -0, and what cancels."""
    for name in TYPES:
        b, a = np.array([[0.0, -0.0, 1.0, -1.0]]), np.array([[-1.0, 1.0, 1.0, 1.0]])
        for d in (None, np.array([[-0.0]], np.float32), np.array([[0.0]], np.float32)):
            assert dot_add(name, b, a, d).view(np.uint32)[0, 0] == 0
            k = 32 // np.dtype(TYPES[name]).itemsize
            assert dot_add(name, np.full((1, k), -0.0), np.ones((1, k)), d).view(np.uint32)[0, 0] == 0
    # Values on no grid, so that the sum is computed exactly.
    b, a = (np.array([[2.0**60, 2.0**-60] * 8, [-0.0] * 15 + [1.0]]) for _ in range(2))
    a[1] = [1.0] * 15 + [-0.0]
    assert dot_add("bf16", b, a, np.full((2, 2), -0.0, np.float32)).view(np.uint32)[1, 1] == 0
