"""Dot products with elements of four and six bits and with block scaling, against Python's integers and fractions."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.machine.units.matrix import operands
from cute_kernels.emulator.machine.units.matrix.arithmetic import EXACT, Arithmetic
from cute_kernels.emulator.machine.units.matrix.scaled_products import Numbers, Side, dot_products
from tests.emulator.aligned_sums import NAN, Number, Rules, decode, dot, encode, product, scaled_dot

BITS = {element.name: 8 for element in operands.EIGHT_BITS_AND_LESS.values()} | {"e2m3": 6, "e3m2": 6, "e2m1": 4}
UNSCALED = [("e2m3", "e2m3"), ("e3m2", "e4m3"), ("e5m2", "e2m1"), ("e2m1", "e2m1")]
#: Kind, types of A, B and scales, K, scales of a row; F, lowest exponent and group, written down from the papers.
SCALED = [
    ("mxf8f6f4", ("e4m3", "e4m3", "ue8m0"), 32, 1, (25, -133, 1)),
    ("mxf8f6f4", ("e5m2", "e5m2", "ue8m0"), 32, 1, (25, -133, 1)),
    ("mxf8f6f4", ("e2m3", "e5m2", "ue8m0"), 32, 1, (25, -133, 1)),
    ("mxf8f6f4", ("e3m2", "e2m1", "ue8m0"), 32, 1, (25, -133, 1)),
    ("mxf4", ("e2m1", "e2m1", "ue8m0"), 64, 2, (35, -139, 16)),
    ("mxf4nvf4", ("e2m1", "e2m1", "ue8m0"), 64, 4, (35, -139, 16)),
    ("mxf4nvf4", ("e2m1", "e2m1", "ue4m3"), 64, 4, (35, -139, 16)),
]
#: How far apart operands are: "any" bit patterns, scales "near" each other, sums that "cancel", and results around the
#: "lowest" number.
STYLES = ("any", "near", "cancel", "lowest")


def inputs(
    rng: np.random.Generator, types: tuple[str, ...], k: int, count: int, style: str, shape: tuple[int, int] = (12, 10)
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Codes of A and B [rows, K], of their scales [rows, count], and bits of C [rows of A, rows of B]."""
    elements = [rng.integers(0, 1 << BITS[name], (n, k)).astype(np.uint8) for name, n in zip(types, shape)]
    for x, name in zip(elements, types):
        if style != "any" and name in ("e4m3", "e5m2"):
            x &= 0xBF  # no NaN
        x[rng.random(x.shape) < 0.2] = 0
        x[:1] = 0  # a row of zeros
    scale_type = types[2] if len(types) > 2 else "ue8m0"
    near, least = ((50, 66), (0, 12)) if scale_type == "ue4m3" else ((115, 139), (45, 70))
    low, high = {"any": (0, 256), "lowest": least}.get(style, near)
    scales = [rng.integers(low, high, (n, count)).astype(np.uint8) for n in shape]
    c = (rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 30, shape)).astype(np.float32)
    if style == "lowest":
        c *= np.float32(2.0**-130)
    if style == "cancel":
        half = k // 2
        for x, name, sign in zip(elements, types, (0, 1)):
            x[:, half:] = x[:, :half] ^ (sign << BITS[name] - 1)
        c *= np.float32(2.0**-25)
    c[:, ::3] = 0
    if style == "any":
        c.reshape(-1)[:4] = (np.inf, -np.inf, np.nan, -0.0)
    return elements, scales, c.view(np.uint32)


def sides(elements: list[np.ndarray], scales: list[np.ndarray] | None, types: tuple[str, ...]) -> list[Side]:
    given = [Numbers.of(x, types[2]) for x in scales] if scales is not None else (None, None)
    return [Side(Numbers.of(x, name), scale) for x, name, scale in zip(elements, types, given)]


def agree(got: np.ndarray, want: np.ndarray) -> None:
    wrong = np.argwhere(got != want)
    assert not len(wrong), f"{len(wrong)} of {got.size}, first {wrong[0]}: {got[tuple(wrong[0])]:#x}, not " + (
        f"{want[tuple(wrong[0])]:#x}"
    )


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("case", SCALED, ids=lambda case: f"{case[0]}-{'-'.join(case[1])}")
def test_scaled_sums_of_silicon(case: tuple, style: str) -> None:
    kind, types, k, count, (fraction, lowest, group) = case
    rng = np.random.default_rng(sum(map(ord, f"{case}{style}")))
    elements, scales, c = inputs(rng, types, k, count, style)
    sums = Arithmetic("silicon", "sm_100a").scaled_sums(kind)
    got = dot_products(*sides(elements, scales, types), c, "f32", sums)
    rules, want = Rules(fraction, 0, 32, lowest), np.empty_like(c)
    for i, j in np.ndindex(c.shape):
        rows, factors = ((x[0][i].tolist(), x[1][j].tolist()) for x in (elements, scales))
        want[i, j] = scaled_dot(rows, factors, int(c[i, j]), types, rules, group)
    agree(got, want)
    agree(dot_products(*sides(elements, scales, types), None, "f32", sums)[:, 0], dot_products(
        *sides(elements, scales, types), 0 * c, "f32", sums)[:, 0])  # fmt: skip


@pytest.mark.parametrize("d_type", ["f32", "f16"])
@pytest.mark.parametrize("types", UNSCALED)
def test_narrow_sums_of_silicon(types: tuple[str, str], d_type: str) -> None:
    for number, style in enumerate(STYLES):
        rng = np.random.default_rng(sum(map(ord, f"{types}{d_type}")) + number)
        elements, _, c = inputs(rng, types, 32, 1, style)
        if d_type == "f16":
            with np.errstate(over="ignore"):
                c = c.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)
            c[np.isnan(c.astype(np.uint16).view(np.float16))] = 0x7E00
        sums = Arithmetic("silicon", "sm_100a").sums("tcgen05", types[0], d_type)
        rules = Rules(25, 0, 32, -133 if d_type == "f32" else -21)
        got = dot_products(*sides(elements, None, types), c, d_type, sums)
        want = np.array([
            [dot(x.tolist(), y.tolist(), int(z), types, d_type, rules) for y, z in zip(elements[1], row)]
            for x, row in zip(elements[0], c)
        ])  # fmt: skip
        agree(got, want)


def exactly(terms: list[Number], form: str) -> int:
    """The sum of all terms, rounded once to nearest even."""
    specials = {term.special for term in terms} - {""}
    if len(specials) > 1 or "nan" in specials:
        return NAN[form]
    if specials:
        return {"f32": (0x7F800000, 0xFF800000), "f16": (0x7C00, 0xFC00)}[form]["-inf" in specials]
    total = sum((Fraction(term.significand) * Fraction(2) ** term.unit for term in terms), Fraction(0))
    if form == "f16":
        unit = min((term.unit for term in terms), default=0)
        return encode(int(total / Fraction(2) ** unit), unit, "f16", 0)
    if not total:
        return 0
    exponent = max(math.floor(math.log2(abs(total.numerator))) - math.floor(math.log2(total.denominator)) - 1, -126)
    while abs(total) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    digits = round(abs(total) / Fraction(2) ** (exponent - 23))  # Python rounds to even
    size = Fraction(digits) * Fraction(2) ** (exponent - 23)
    value = np.float32(np.inf) if size >= Fraction(2) ** 128 else np.float32(float(size))
    return int(value.view(np.uint32)) | (total < 0) << 31


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("case", SCALED, ids=lambda case: f"{case[0]}-{'-'.join(case[1])}")
def test_exact_scaled_sums(case: tuple, style: str) -> None:
    _, types, k, count, _ = case
    rng = np.random.default_rng(sum(map(ord, f"exact{case}{style}")))
    elements, scales, c = inputs(rng, types, k, count, style, (6, 8))
    got, want = dot_products(*sides(elements, scales, types), c, "f32", EXACT), np.empty_like(c)
    for i, j in np.ndindex(c.shape):
        x, y = (decode_all(row, name) for row, name in zip((elements[0][i], elements[1][j]), types))
        u, v = (decode_all(row, types[2]) for row in (scales[0][i], scales[1][j]))
        terms = [product(product(x[n], y[n]), product(u[n * count // k], v[n * count // k])) for n in range(k)]
        want[i, j] = exactly([*terms, decode(int(c[i, j]), "f32")], "f32")
    agree(got, want)


def decode_all(codes: np.ndarray, name: str) -> list[Number]:
    return [decode(int(code), name) for code in codes]


@pytest.mark.parametrize("types", UNSCALED)
def test_exact_narrow_sums(types: tuple[str, str]) -> None:
    rng = np.random.default_rng(5)
    elements, _, c = inputs(rng, types, 32, 1, "near")
    for form in ("f32", "f16"):
        if form == "f16":
            with np.errstate(over="ignore"):
                c = c.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)
        got, want = dot_products(*sides(elements, None, types), c, form, EXACT), np.empty_like(c)
        for i, j in np.ndindex(c.shape):
            x, y = (decode_all(row, name) for row, name in zip((elements[0][i], elements[1][j]), types))
            want[i, j] = exactly([*map(product, x, y), decode(int(c[i, j]), form)], form)
        agree(got, want)


def test_negated_operands_and_unknown_targets() -> None:
    codes = np.arange(64, dtype=np.uint8).reshape(2, 32)
    np.testing.assert_array_equal(Numbers.of(codes, "e2m3", True).values, -Numbers.of(codes, "e2m3").values)
    with pytest.raises(UnsupportedPTX, match="how kind::mxf4 with scales adds on sm_90a is not known"):
        Arithmetic("silicon", "sm_90a").scaled_sums("mxf4")
    assert Arithmetic("exact").scaled_sums("mxf4") is EXACT


def one(pairs: list[list[tuple[float, float]]], exponents: list[int], c: float, types: tuple[str, ...], sums) -> float:
    """D of one row: products per block of K, whose scales are a power of two."""
    dtypes = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    k = 32 if types[0] != "e2m1" else 64
    rows = np.zeros((2, k), np.float32)
    for i, products in enumerate(pairs):
        start = i * k // len(pairs)
        rows[:, start : start + len(products)] = np.transpose(products)
    elements = [row[None].astype(dtypes[name]).view(np.uint8) for row, name in zip(rows, types)]
    scales = [np.array([[127 + e // 2 for e in exponents]]), np.array([[127 + e - e // 2 for e in exponents]])]
    given = sides(elements, [x.astype(np.uint8) for x in scales], (*types, "ue8m0"))
    old = np.array([[c]], np.float32).view(np.uint32)
    return float(dot_products(*given, old, "f32", sums).view(np.float32)[0, 0])


@pytest.mark.parametrize(("last", "c", "want"), [
    (1.0, 1.0, 1 + 2.0**-23), (-1.0, 1.0, 1.0), (-1.0, 1 + 2.0**-23, 1 + 2.0**-23), (0.0, 1 + 2.0**-23, 1 + 2.0**-22),
])  # fmt: skip
def test_what_lies_far_below_half_of_a_digit_decides(last: float, c: float, want: float) -> None:
    """C, 2^-24 and 2^-100: float64 has no room for all three. What is smaller yet, of the other sign, does nothing."""
    types = ("e2m1", "e2m1")
    blocks = [[(1.0, 1.0)], [(last, 1.0)], [(-last, 1.0)], []]
    assert one(blocks, [-24, -100, -170, 0], c, types, EXACT) == want


def test_products_of_e5m2_have_more_digits_than_float64() -> None:
    """In orders of which each loses digits for some way of adding in float64."""
    large, small, other = (57344.0, 57344.0), (2.0**-16, 2.0**-16), (57344.0, -57344.0)
    for group, order in itertools.product((1, 2, 4, 8), itertools.permutations((large, small, other, (0.0, 0.0)))):
        pairs = [product for product in order for _ in range(group)] * (8 // group)
        assert one([pairs], [0], 0.0, ("e5m2", "e5m2"), EXACT) == 2.0**-29


@pytest.mark.parametrize(("exponent", "times", "want"), [(-140, 1, 2.0**-149), (-141, 2, 0.0)])
def test_the_lowest_exponent_of_mxf8f6f4(exponent: int, times: int, want: float) -> None:
    """Odd multiples of 2^-158, then of 2^-159, whose exact sum is 2^-149: -133 - 25 is the last digit that is kept."""
    digits = [(15, 15), (15, 15), (15, 3), (15, 1), (1, 1), (1, 1)] * times
    pairs = [(x * 2.0**-9, y * 2.0**-9) for x, y in digits]
    sums = Arithmetic("silicon", "sm_100a").scaled_sums("mxf8f6f4")
    assert one([pairs], [exponent], 0.0, ("e4m3", "e4m3"), sums) == want


@pytest.mark.parametrize(("shift", "want"), [(0, 2.0**-149), (-1, 0.0)])
def test_the_lowest_exponent_of_pairs_of_fp4(shift: int, want: float) -> None:
    """1023, 1023, 31 and 1 quarters, which make 2^-149 if 2^-174 is kept: -139 - 35; one digit lower they do not."""
    blocks = [
        [(6, 6)] * 7 + [(3, 1), (1.5, 0.5)], [(6, 6)] * 7 + [(3, 1), (1.5, 0.5)],
        [(4, 1), (3, 1), (1.5, 0.5)], [(0.5, 0.5)],
    ]  # fmt: skip
    sums = Arithmetic("silicon", "sm_100a").scaled_sums("mxf4nvf4")
    if shift:  # the last two one digit lower: twice of them are needed, and lose a digit each
        blocks = [blocks[0], blocks[1], [*blocks[2], *blocks[2], (0.5, 0.5)], [(0.5, 0.5)]]
    assert one(blocks, [-157, -167, -172 + shift, -172 + shift], 0.0, ("e2m1", "e2m1"), sums) == want
