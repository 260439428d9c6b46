"""Whole MMAs of E4M3 as the core executes them, against exact arithmetic, for every instruction set that it has."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from cute_kernels.emulator.machine.units.matrix import products
from cute_kernels.emulator.machine.units.matrix.operands import E4M3
from cute_kernels.emulator.machine.units.matrix.products import LANES, Accumulator, Kind, Rows
from tests.emulator.core_variants import VARIANTS, each_variant

K = 32
variant = pytest.fixture(each_variant, scope="module", autouse=True, params=VARIANTS)


def operands(seed: int, rows: int, largest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bytes of shared memory, places of the rows, their values [rows, 32]); magnitudes have codes up to ``largest``,
    which the rows contain."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, largest + 1, 16 * 700).astype(np.uint8) | rng.choice([0, 128], 16 * 700).astype(np.uint8)
    places = rng.permutation(700)[: 2 * rows].reshape(rows, 2)
    data[16 * places[:, 0]] = largest  # products of equal signs in every row
    data[16 * places[rows // 2] + 3] = largest | 128
    chunks = data.view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(-1, 16)
    return data, places, chunks[places].reshape(rows, K)


class Mma:
    """An MMA of one CTA or of two: operands of magnitudes up to given codes, and an accumulator."""

    def __init__(self, ctas: int, n: int, codes: tuple[int, int] = (0x54, 0x54), seed: int = 5) -> None:
        self.n, rng = n, np.random.default_rng(seed)
        self.a = [operands(seed + r, LANES, codes[0]) for r in range(ctas)]
        self.b = [operands(seed + 10 + r, n // ctas, codes[1]) for r in range(ctas)]
        self.data = [np.concatenate([a[0], b[0]]) for a, b in zip(self.a, self.b)]
        self.states = [np.ones(len(data), np.uint8) for data in self.data]
        self.places = [(a[1], b[1] + len(a[0]) // 16) for a, b in zip(self.a, self.b)]
        self.cells = [(rng.integers(-(1 << 23), 1 << 23, (n, LANES)) * 2.0**-9).astype(np.float32) for _ in self.a]

    def execute(self, accumulate: bool, checked: bool = True) -> bool:
        parts = []
        for r, places in enumerate(self.places):
            states = self.states[r].ctypes.data if checked else None
            rows = [Rows(self.data[r].ctypes.data, states, each.ctypes.data) for each in places]
            parts.append((*rows, self.cells[r].ctypes.data))
        accumulator = Accumulator("f32", accumulate, False)
        described = products.describe(LANES, self.n, Kind(E4M3), Kind(E4M3), accumulator, parts)
        return products.execute(described)

    def expected(self, accumulate: bool) -> list[np.ndarray]:
        """float64 holds the sums of these operands exactly: 53 bits above products of 2^-18."""
        b = np.concatenate([x[2] for x in self.b])
        with np.errstate(invalid="ignore"):
            return [
                (b @ a[2].T + (cells if accumulate else 0)).astype(np.float32) for a, cells in zip(self.a, self.cells)
            ]


# 0x67 is 60, the largest value of 16 bits; 0x57 and 0x58 are 15 and 16: 32 x 16 x 16 x 2^18 is 2^31. The last two
# are of one operand that 16 bits do not hold and a small one: 64 and 1, 448 and 0.5.
CODES = [(0x7E, 0x7E), (0x67, 0x67), (0x57, 0x58), (0x58, 0x58), (0x67, 0x3F), (0x68, 0x38), (0x30, 0x7E)]


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(("ctas", "n"), [(1, 8), (1, 24), (1, 256), (2, 16), (2, 48), (2, 256)])
def test_whole_instructions(ctas: int, n: int, codes: tuple[int, int]) -> None:
    mma = Mma(ctas, n, codes)
    for accumulate in (True, False, True):
        expected = mma.expected(accumulate)
        assert mma.execute(accumulate)
        for cells, want in zip(mma.cells, expected):
            np.testing.assert_array_equal(cells, want)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("codes", [(0x57, 0x57), (0x58, 0x58), (0x67, 0x47), (0x67, 0x48)])
def test_largest_sums(codes: tuple[int, int], sign: int) -> None:
    """All products at their limit and of one sign: the sums just fit in 31 bits, or just do not."""
    values = [float(np.array([code], np.uint8).view(ml_dtypes.float8_e4m3fn)[0]) for code in codes]
    mma = Mma(1, 8)
    data, (a, b) = mma.data[0], mma.places[0]
    data[(16 * a[..., None] + np.arange(16)).reshape(-1)] = codes[0]
    data[(16 * b[..., None] + np.arange(16)).reshape(-1)] = codes[1] | (128 if sign < 0 else 0)
    assert mma.execute(False)
    assert (mma.cells[0] == np.float32(sign * K * values[0] * values[1])).all()


@pytest.mark.parametrize(("row", "lane"), [(0, 0), (7, 127), (8, 16), (13, 47), (18, 80), (23, 100)])
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_that_fp32_does_not_hold_are_rounded_once(row: int, lane: int, sign: int) -> None:
    """2^24 + 1 and 1 in units of 2^-18: rounding the former to FP32 before the addition would lose both units."""
    mma = Mma(1, 24)
    data, (a, b) = mma.data[0], mma.places[0]
    data[:] = 0
    data[16 * a[lane, 0] : 16 * a[lane, 0] + 2] = 0x50, 0x01  # 8 and 2^-9
    data[16 * b[row, 0] : 16 * b[row, 0] + 2] = np.array([0x50, 0x01]) | (128 if sign < 0 else 0)
    cells = mma.cells[0]
    cells[:] = 0
    cells[row, lane] = sign * 2.0**-18
    assert mma.execute(True)
    assert cells[row, lane] == sign * (64 + 2.0**-17)
    cells[row, lane] = 0
    assert not cells.any()


@pytest.mark.parametrize("bits", [0x7FC00001, 0xFFC12345, 0x7F800001])
@pytest.mark.parametrize(("row", "lane"), [(0, 0), (7, 127), (13, 47)])
def test_nan_in_an_accumulator_becomes_the_canonical_one(row: int, lane: int, bits: int) -> None:
    mma = Mma(1, 16, (0x30, 0x38))  # sums that FP32 holds
    cells = mma.cells[0]
    cells[3, 5] = np.inf
    cells.view(np.uint32)[row, lane] = bits
    (expected,) = mma.expected(True)
    assert mma.execute(True)
    assert cells.view(np.uint32)[row, lane] == 0x7FFFFFFF
    np.testing.assert_array_equal(cells, expected)


@pytest.mark.parametrize("cta", [0, 1])
@pytest.mark.parametrize("operand", [0, 1])
def test_nan_and_large_numbers_stay_in_their_rows(cta: int, operand: int) -> None:
    for code in (0x7F, 0xFF, 0x7E):
        mma = Mma(2, 32)
        row = 7
        at = 16 * int(mma.places[cta][operand][row, 1]) + 5
        mma.data[cta][at] = code
        value = np.array([code], np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)[0]
        (mma.b if operand else mma.a)[cta][2][row, 21] = value
        expected = mma.expected(True)
        assert mma.execute(True)
        for cells, want in zip(mma.cells, expected):
            np.testing.assert_array_equal(cells, want)
        assert np.isnan(mma.cells[cta]).any() == (code != 0x7E)


@pytest.mark.parametrize("cta", [0, 1])
@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("fault", ["state a", "state b", "part of an mbarrier"])
def test_what_is_not_executed_changes_nothing(cta: int, at: int, fault: str) -> None:
    """In the first or last column or row of either CTA: a byte that is no data."""
    mma = Mma(2, 32)
    where = 16 * int(mma.places[cta][fault == "state b"][at, at]) + 15
    mma.states[cta][where] = 2 if "mbarrier" in fault else 0
    assert mma.execute(True, checked=False)
    before = [cells.copy() for cells in mma.cells]
    assert not mma.execute(True)
    assert all(np.array_equal(cells, old) for cells, old in zip(mma.cells, before))


def test_products_are_rounded_once() -> None:
    """Against rationals, so that the float64 of the other tests is one thing less to believe."""
    mma = Mma(1, 24, (0x7E, 0x7E))
    old = mma.cells[0].copy()
    assert mma.execute(True)
    rng = np.random.default_rng(3)
    for row, lane in zip(rng.integers(0, 24, 100), rng.integers(0, LANES, 100)):
        exact = sum((Fraction(x) * Fraction(y) for x, y in zip(mma.b[0][2][row], mma.a[0][2][lane])), Fraction(0))
        exact += Fraction(float(old[row, lane]))
        assert Fraction(float(exact)) == exact  # 53 bits hold the sum, so this rounds once:
        assert mma.cells[0][row, lane] == np.float32(float(exact))
