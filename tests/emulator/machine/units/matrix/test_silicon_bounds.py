"""Tensor cores' sums on both sides of each bound at which the core adds in another way, against integers."""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn

from cute_kernels.emulator.machine.units.matrix.arithmetic import Arithmetic, Sums
from tests.emulator.aligned_sums import Rules
from tests.emulator.machine.units.matrix.test_silicon import CASES, check, rules_of
from tests.emulator.sum_inputs import NBYTES, words

E4M3 = ("e4m3", "e4m3")
UNITS = [("tcgen05", "sm_100a"), ("wgmma", "sm_90a"), ("mma", "sm_89"), ("mma", "sm_120a")]


def rules_for(unit: tuple[str, str], types: tuple[str, str] = E4M3, d_type: str = "f32") -> tuple[Sums, Rules]:
    return Arithmetic("silicon", unit[1]).sums(unit[0], types[0], d_type), rules_of(*unit, types, d_type)


def codes(values: np.ndarray) -> np.ndarray:
    """E4M3 bit patterns."""
    return values.astype(float8_e4m3fn).view(np.uint8)


def bits(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).view(np.uint32)


def signs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice([-1.0, 1.0], shape)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("size", [2.0**exponent for exponent in (-3, 5, 8, 9, 10, 11, 12, 13, 22, 23, 24, 25, 40, 126)])
def test_cutting_by_d(unit: tuple[str, str], size: float) -> None:
    """E4M3 of all exponents below 16, and a D by which products lose from no to all digits: with F of 13, 15 of them
    where D is 2^10, and 16 where it is 2^11. D is on the grid of the products or off it; some of them are larger."""
    rng = np.random.default_rng(int(np.log2(size)) + 50)
    a, b = (rng.integers(0, 0x58, (1, rows, 32), dtype=np.uint8) for rows in (80, 8))
    for x in (a, b):
        x ^= rng.choice(np.array([0, 0x80], np.uint8), x.shape)
    c = size * rng.uniform(1, 2, (1, 80, 8)) * signs(rng, (1, 80, 8))
    c[:, :, ::4] = np.trunc(c[:, :, ::4] * 2.0**18) / 2.0**18
    c[:, ::7] *= 2
    check(a, b, bits(c), E4M3, "f32", *rules_for(unit))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("x", "y"), [(13, 13), (13, 14), (14, 14), (14, 15), (15, 15), (15, 16), (16, 16)])
def test_sums_of_products_that_fill_31_bits(unit: tuple[str, str], x: float, y: float) -> None:
    """32 equal products, in units of 2^-18: beside 14 * 14 a D below 2^11 has no room, and 16 * 16 have none alone."""
    rng = np.random.default_rng(5)
    a, b = np.full((1, 32, 32), float(x)), np.full((1, 8, 32), float(y))
    a[:, ::3, 5], b[:, ::5, 7] = 2.0**-9, 3 * 2.0**-9  # that nothing is cut is not sure
    a[:, 1::2] *= -1
    c = rng.uniform(1900, 2047, (1, 32, 8)) * np.sign(a[:, :, :1])
    check(codes(a), codes(b), bits(c), E4M3, "f32", *rules_for(unit))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("size", [1.0, 2.0, 4.0, 8.0, 16.0, 64.0])
def test_a_d_above_all_products_that_is_cut_by_its_own_exponent(unit: tuple[str, str], size: float) -> None:
    """Products are multiples of 2^-3 below 4; D is on the grid that those leave, with more digits than F."""
    rng = np.random.default_rng(7)
    a, b = (rng.choice([0.0, 1.0, 1.25], (1, rows, 32)) * signs(rng, (1, rows, 32)) for rows in (80, 8))
    a *= rng.random(a.shape) < 0.1
    c = (size + np.arange(640).reshape(1, 80, 8) % 64 * 2.0**-13) * signs(rng, (1, 80, 8))
    check(codes(a), codes(b), bits(c), E4M3, "f32", *rules_for(unit))


@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("top", [1.0, 2.0, 16.0, 64.0])
def test_last_digits_around_the_quantum(top: float, beyond: int) -> None:
    """Of `wgmma`: two products of `top` that cancel, and others whose last digit is the quantum, or next to it."""
    rng = np.random.default_rng(6)
    last = int(np.log2(top)) - 13 + beyond
    a, b = np.zeros((1, 80, 32)), np.zeros((1, 8, 32))
    for k in range(2, 32):
        first = int(rng.integers(max(-9, last + 3), min(-3, last + 9) + 1))  # last digit of A's; B's has the rest of it
        a[..., k] = 2.0**first * rng.choice([1.0, 3.0, 5.0, 7.0], (1, 80)) * signs(rng, (1, 80))
        b[..., k] = 2.0 ** (last - first) * rng.choice([1.0, 3.0, 5.0, 7.0], (1, 8)) * signs(rng, (1, 8))
    a[..., :2] = 2.0 ** (int(np.log2(top)) // 2)
    b[..., 0], b[..., 1] = top / a[0, 0, 0], -top / a[0, 0, 0]
    check(codes(a), codes(b), bits(np.zeros((1, 80, 8))), E4M3, "f32", *rules_for(("wgmma", "sm_90a")))


#: Type -> bias of the exponent, bits of fraction, largest exponent field.
FIELDS = {"e4m3": (7, 3, 15), "e5m2": (15, 2, 30), "f16": (15, 10, 30), "bf16": (127, 7, 254), "tf32": (127, 23, 254)}


def pattern(name: str, exponent: int, fraction: int) -> int:
    bias, digits, _ = FIELDS[name]
    return exponent + bias << digits | fraction << (13 if name == "tf32" else 0)


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize(("unit", "target", "types", "d_type"), CASES)
def test_products_around_the_exponent_from_which_on_they_are_cut(
    unit: str, target: str, types: tuple[str, str], d_type: str, beyond: int
) -> None:
    """Two large products that cancel, and small ones, odd multiples of their last digits, around F below the large."""
    sums, rules = rules_for((unit, target), types, d_type)
    rng = np.random.default_rng(beyond + 5)
    digits = [FIELDS[name][1] if name != "tf32" else 10 for name in types]
    distance = sums.fraction - sum(digits) + beyond
    large = [min(6, FIELDS[name][2] - FIELDS[name][0]) for name in types]
    small = [exponent - distance // 2 for exponent in large]
    small[1] -= distance % 2
    k, rows = 32 // NBYTES[types[0]], (32, 8)
    operands = []
    for name, count, exponents, own in zip(types, rows, zip(large, small), digits):
        lowest = 1 - FIELDS[name][0]
        x = np.zeros((1, count, k), words(name))
        unit = pattern(name, 0, 1) - pattern(name, 0, 0)  # of the fraction
        x[...] = pattern(name, max(exponents[1], lowest), 0) + unit * (rng.integers(0, 1 << own, x.shape) | 1)
        x |= rng.choice(np.array([0, 1 << 8 * NBYTES[name] - 1], words(name)), x.shape)
        x[..., 0] = x[..., 1] = pattern(name, exponents[0], 0)
        operands.append(x)
    operands[1][..., 1] |= words(types[1])(1 << 8 * NBYTES[types[1]] - 1)
    c = np.zeros((1, *rows), np.uint32)
    c[:, ::2, ::2] = 0x3C00 if d_type == "f16" else 0x3F800001
    check(*operands, c, types, d_type, sums, rules)


@pytest.mark.parametrize(("unit", "target", "types", "d_type"), CASES)
def test_an_infinite_d_beside_others(unit: str, target: str, types: tuple[str, str], d_type: str) -> None:
    """Operands are finite: so D alone decides, in a few places among others."""
    rng = np.random.default_rng(8)
    k, rows = 32 // NBYTES[types[0]], (32, 8)
    one = [1 << FIELDS[name][1] for name in types]
    operands = [
        (pattern(name, 0, 0) + rng.integers(0, one_, (1, count, k))).astype(words(name))
        for name, count, one_ in zip(types, rows, one)
    ]
    c = rng.normal(0, 3, (1, *rows)).astype(np.float16 if d_type == "f16" else np.float32)
    special = rng.random(c.shape) < 0.05
    c[special] = rng.choice([np.inf, -np.inf, np.nan], special.sum())
    cells = c.view(np.uint16 if d_type == "f16" else np.uint32).astype(np.uint32)
    check(*operands, cells, types, d_type, *rules_for((unit, target), types, d_type))
