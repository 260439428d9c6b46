"""Sums and products with one rounding, against rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.emulator import exact

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
PRECISIONS = {"e4m3": 4, "e5m2": 3, "f16": 11, "bf16": 8}


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
@given(st.integers(0, 10**6), st.sampled_from([8, 16, 32]), st.booleans())
def test_dot_add_rounds_once_whatever_the_exponents(name: str, seed: int, k: int, with_d: bool):
    rng = np.random.default_rng(seed)
    b, a = random_bits(rng, name, (3, k)), random_bits(rng, name, (4, k))
    d = None
    if with_d:
        spread = np.abs(b).max() * np.abs(a).max() + 2.0**-140
        with np.errstate(over="ignore"):
            d = (rng.standard_normal((3, 4)) * spread * 2.0 ** rng.integers(-60, 10)).astype(np.float32)
        d = np.where(np.isfinite(d), d, 1).astype(np.float32)
    assert_same_bits(exact.dot_add(b, a, d, PRECISIONS[name]), reference(b, a, d))


def test_halfway_cases_that_double_rounding_gets_wrong():
    """1 + 2^-24 is halfway between two FP32 numbers; a bit far below decides, too far for float64 to keep."""
    a = np.array([[1.0, 2.0**-24, 2.0**-60]])
    for sign, expected in ((1, 1 + 2.0**-23), (-1, 1.0)):
        b = np.array([[1.0, 1.0, sign * 2.0**-20]])
        assert float(np.float32(1 + 2.0**-24)) == 1.0, "float64 alone rounds to even"
        assert_same_bits(exact.dot_add(b, a, None, 8), np.array([[expected]], np.float32))
    d = np.array([[1.0]], np.float32)
    tiny = np.array([[2.0**-24, 2.0**-90]])
    assert_same_bits(exact.dot_add(np.ones((1, 2)), tiny, d, 8), np.array([[1 + 2.0**-23]], np.float32))
    assert_same_bits(exact.dot_add(np.array([[1.0, -1.0]]), tiny, d, 8), d)


@given(st.integers(0, 10**6), st.integers(2, 7))
def test_round_sum_of_cancelling_terms(seed: int, count: int):
    rng = np.random.default_rng(seed)
    terms = [rng.standard_normal((4, 4)) * 2.0 ** rng.integers(-80, 80) for _ in range(count)]
    terms += [-terms[0], terms[-1] * 2.0**-53]
    expected = np.array([[nearest_float32(sum(Fraction(t[i, j]) for t in terms)) for j in range(4)] for i in range(4)])
    assert_same_bits(exact.round_sum(terms), expected)


def test_subnormal_results_and_overflow():
    one = np.ones((1, 1))
    for value, d, expected in (
        (2.0**-133, 2.0**-149, 2.0**-133 + 2.0**-149),
        (2.0**-150, 0.0, 0.0),
        (1.5 * 2.0**-149, 0.0, 2.0**-148),
        (2.0**127, 2.0**127, np.inf),
        (-(2.0**127), np.float32(-3.0e38), -np.inf),
    ):
        got = exact.dot_add(one * value, one, np.full((1, 1), d, np.float32), 8)
        assert got[0, 0] == np.float32(expected)


def test_special_values_follow_ieee_and_nan_is_canonical():
    b = np.array([[np.inf, 1.0], [np.nan, 1.0], [0.0, 3.0], [1.0, 2.0**30]])
    a = np.array([[1.0, 1.0], [0.0, 1.0], [-2.0, 2.0**-30]])
    d = np.array([[1, 2, -np.inf], [0, 0, 0], [np.nan, np.inf, 5], [1, 1, 1]], np.float32)
    got = exact.dot_add(b, a, d, 8)
    expected = [[np.inf, np.nan, -np.inf], [np.nan] * 3, [np.nan, np.inf, 5], [2.0**30, 2.0**30 + 1, 0]]
    expected = np.array(expected, np.float32)
    np.testing.assert_array_equal(got, expected)
    assert set(got.view(np.uint32)[np.isnan(got)].tolist()) == {0x7FFFFFFF}


@given(st.integers(0, 10**6))
def test_slices_sum_to_the_values_and_their_products_are_exact(seed: int):
    rng = np.random.default_rng(seed)
    values = random_bits(rng, "bf16", (3, 16))
    parts = exact.slices(values, 8, 16)
    np.testing.assert_array_equal(sum(parts), values)
    for b_part, a_part in exact.exact_pairs(values, values[:2], 8):
        product = exact.dot(b_part, a_part)
        for i, j in np.ndindex(product.shape):
            assert Fraction(product[i, j]) == rational_dot(b_part[i], a_part[j])


@pytest.mark.parametrize("n, m, k", [(256, 128, 32), (100, 128, 32), (8, 16, 8), (1, 1, 1)])
def test_dot_in_blocks(n: int, m: int, k: int):
    rng = np.random.default_rng(0)
    b, a = (rng.integers(-8, 8, (rows, k)).astype(float) for rows in (n, m))
    out = np.empty((n, m))
    assert exact.dot(b, a, out=out) is out
    np.testing.assert_array_equal(out, np.einsum("nk,mk->nm", b.astype(int), a.astype(int)))
