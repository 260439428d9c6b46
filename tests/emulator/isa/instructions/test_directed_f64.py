"""f64 sums, products and fused multiply-adds rounded toward zero, down and up, against exact rationals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from cute_kernels.emulator import Options
from tests.emulator.ieee import F64
from tests.emulator.isa.instructions.test_nan_f64 import by_lanes, by_warps

INFINITY, LARGEST, ONE, SIGN = F64.infinity, F64.infinity - 1, 1023 << 52, F64.sign_bit
#: Zeros, subnormal numbers, 1 and its neighbours, the largest number, infinities.
EDGES = [0, 1, (1 << 52) - 1, 1 << 52, ONE, ONE - 1, ONE + 1, 2046 << 52, LARGEST, INFINITY]
OPERATIONS = {"add": 2, "sub": 2, "mul": 2, "fma": 3}


def rounded(value: Fraction, mode: str, zero_negative: bool) -> int:
    """The FP64 next to an exact value in a direction."""
    inward = F64.round(value, zero_negative=zero_negative, toward_zero=True)
    away = mode == "rm" and value < 0 or mode == "rp" and value > 0
    return inward + 1 if away and F64.value(inward) != value else inward


def product_and_sum(mode: str, a: int, b: int, c: int) -> int:
    negative = F64.negative(a) != F64.negative(b), F64.negative(c)
    total = F64.value(a) * F64.value(b) + F64.value(c)
    return rounded(total, mode, all(negative) or mode == "rm" and any(negative))


def expected(name: str, mode: str, row: tuple[int, ...]) -> int:
    nearest = {"add": F64.add, "sub": lambda a, b: F64.add(a, b ^ SIGN), "mul": F64.mul, "fma": F64.fma}[name](*row)
    if any(x & ~SIGN >= INFINITY for x in row):  # no rounding; which NaN is left open
        return 0xFFF8 << 48 if F64.is_nan(nearest) else nearest
    if name == "mul":
        negative = F64.negative(row[0]) != F64.negative(row[1])
        return rounded(F64.value(row[0]) * F64.value(row[1]), mode, negative)
    forms: dict[str, Callable[..., tuple[int, int, int]]] = {
        "add": lambda a, b: (a, ONE, b), "sub": lambda a, b: (a, ONE, b ^ SIGN), "fma": lambda *three: three,
    }  # fmt: skip
    return product_and_sum(mode, *forms[name](*row))


def rows_of(count: int) -> np.ndarray:
    signed = [x | sign for x in EDGES for sign in (0, SIGN)]
    every = np.array(list(itertools.product(signed, repeat=count)), np.uint64)
    rng = np.random.default_rng(count)
    edges = every if count < 3 else every[rng.permutation(len(every))[:1500]]
    bits = rng.integers(0, 1 << 52, (1500, count), dtype=np.uint64)
    exponents = rng.integers(960, 1090, bits.shape).astype(np.uint64)
    drawn = bits | exponents << np.uint64(52) | rng.integers(0, 2, bits.shape).astype(np.uint64) << np.uint64(63)
    drawn[::5, -1] = drawn[::5, 0] ^ np.uint64(SIGN)  # sums cancel
    if count == 3:
        product = drawn[1::5, 0].view(np.float64) * drawn[1::5, 1].view(np.float64)
        drawn[1::5, 2] = (-product).view(np.uint64)  # and leave what rounding has cut
    return np.concatenate([edges, drawn])


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_rounded_once_in_a_direction(name: str, mode: str):
    rows = rows_of(OPERATIONS[name])
    wanted = [expected(name, mode, tuple(row)) for row in rows.tolist()]
    assert len(set(wanted)) > 1000
    found = by_lanes(f"{name}.{mode}.f64", rows, Options()).tolist()
    triples = zip(rows.tolist(), found, wanted, strict=True)
    wrong = [(row, got, want) for row, got, want in triples if got != want]
    assert not wrong, [tuple(map(hex, (*row, got, want))) for row, got, want in wrong[:3]]
    assert by_warps(f"{name}.{mode}.f64", rows[-1], Options()) == wanted[-1]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_an_infinite_addend_outweighs_a_product_beyond_all_numbers(mode: str):
    rows = np.array([[LARGEST, LARGEST, INFINITY | SIGN], [LARGEST, LARGEST | SIGN, INFINITY]], np.uint64)
    found = by_lanes(f"fma.{mode}.f64", rows, Options())
    assert found.tolist() == [INFINITY | SIGN, INFINITY]
