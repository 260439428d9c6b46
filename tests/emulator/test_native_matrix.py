"""Machine code for E4M3 products against exact arithmetic, and the tensor core with and without it."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from cute_kernels.config import Sm100PatchEmbedConfig
from cute_kernels.emulator import Options, native_matrix
from cute_kernels.emulator.native_matrix import LANES, E4m3Unit, K, e4m3_unit
from cute_kernels.emulator.native_mma import SUMS_LIMIT, Part, make_job
from cute_kernels.runtime.emulated import launch as emulate
from tests.emulator.kernel_inputs import make_case

HOSTS = {
    "avx512": ("avx512f", "avx512bw", "avx2", "sse2", "fma"),
    "avx2": ("avx2", "sse2", "fma"),
    "sse2": ("sse2",),
    "others": (),
}


@pytest.fixture(scope="module", params=HOSTS.values(), ids=HOSTS)
def unit(request: pytest.FixtureRequest) -> E4m3Unit:
    """As compiled for hosts with these instruction sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_matrix, "has_feature", request.param.__contains__)
        return E4m3Unit()


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


def load(unit: E4m3Unit, a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> None:
    half = len(b[1]) // 2
    assert unit.load_a(a[0].ctypes.data, None, a[1].ctypes.data)
    assert unit.load_b(b[0].ctypes.data, None, b[1].ctypes.data, half, 0)
    assert unit.load_b(b[0].ctypes.data, None, b[1][half:].ctypes.data, len(b[1]) - half, half)


# 0x67 is 60, the largest value of 16 bits; 0x54 and 0x58 are 12 and 16: 32 x 16 x 16 x 2^18 is 2^31.
CODES = [(0x7E, 0x7E), (0x67, 0x67), (0x54, 0x54), (0x58, 0x58), (0x67, 0x3F), (0x3F, 0x7E)]
# Sums below 2^31 of one operand that 16 bits do not hold and a small one: 64 and 1, 448 and 0.5.
LARGE_AND_SMALL = [(0x68, 0x38), (0x38, 0x68), (0x7E, 0x30), (0x30, 0x7E)]


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("n", [8, 24, 256])
@pytest.mark.parametrize("accumulate", [False, True])
def test_products_are_rounded_once(unit: E4m3Unit, n: int, accumulate: bool, codes: tuple[int, int]) -> None:
    first, second = operands(1, LANES, codes[0]), operands(2, n, codes[1])
    a, b = first[2], second[2]
    load(unit, first, second)
    rng = np.random.default_rng(3)
    cells = (rng.integers(-(1 << 23), 1 << 23, (n, LANES)) * 2.0**-9).astype(np.float32)
    old = cells.copy()
    unit.multiply(n, cells.ctypes.data, accumulate)
    for row, lane in zip(rng.integers(0, n, 200), rng.integers(0, LANES, 200)):
        exact = sum((Fraction(x) * Fraction(y) for x, y in zip(b[row], a[lane])), Fraction(0))
        exact += Fraction(float(old[row, lane])) if accumulate else 0
        below = np.float32(float(exact))  # 53 bits hold the sum, so this rounds once
        assert Fraction(float(exact)) == exact
        assert cells[row, lane] == below


@pytest.mark.parametrize("codes", LARGE_AND_SMALL)
def test_an_operand_beyond_16_bits(unit: E4m3Unit, codes: tuple[int, int]) -> None:
    first, second = operands(1, LANES, codes[0]), operands(2, 24, codes[1])
    load(unit, first, second)
    cells = np.empty((24, LANES), np.float32)
    unit.multiply(24, cells.ctypes.data, False)
    np.testing.assert_array_equal(cells, (second[2] @ first[2].T).astype(np.float32))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("codes", [(0x57, 0x57), (0x58, 0x58), (0x67, 0x47), (0x67, 0x48)])
def test_largest_sums(unit: E4m3Unit, codes: tuple[int, int], sign: int) -> None:
    """All products at their limit and of one sign: the sums just fit in 31 bits, or just do not."""
    values = [float(np.array([code], np.uint8).view(ml_dtypes.float8_e4m3fn)[0]) for code in codes]
    places = np.arange(2 * LANES).reshape(LANES, 2)
    a = np.full(32 * LANES, codes[0], np.uint8)
    b = np.full(32 * LANES, codes[1] | (128 if sign < 0 else 0), np.uint8)
    load(unit, (a, places), (b, places[:8]))
    cells = np.empty((8, LANES), np.float32)
    unit.multiply(8, cells.ctypes.data, False)
    assert (cells == np.float32(sign * K * values[0] * values[1])).all()


@pytest.mark.parametrize(("row", "lane"), [(0, 0), (7, 127), (8, 16), (13, 47), (18, 80), (23, 100)])
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_that_fp32_does_not_hold_are_rounded_once(unit: E4m3Unit, row: int, lane: int, sign: int) -> None:
    """2^24 + 1 and 1 in units of 2^-18: rounding the former to FP32 before the addition would lose both units."""
    a, b = np.zeros(32 * LANES, np.uint8), np.zeros(32 * 24, np.uint8)
    a[32 * lane : 32 * lane + 2] = 0x50, 0x01  # 8 and 2^-9
    b[32 * row : 32 * row + 2] = 0x50, 0x01
    if sign < 0:
        b[32 * row : 32 * row + 2] |= 128
    places = np.arange(2 * LANES).reshape(LANES, 2)
    load(unit, (a, places), (b, places[:24]))
    cells = np.zeros((24, LANES), np.float32)
    cells[row, lane] = sign * 2.0**-18
    unit.multiply(24, cells.ctypes.data, True)
    assert cells[row, lane] == sign * (64 + 2.0**-17)
    cells[row, lane] = 0
    assert not cells.any()


def test_a_new_operand_replaces_the_old_one(unit: E4m3Unit) -> None:
    """The two ways have scratch memory of their own: neither may use what the other left."""
    for seed, code in enumerate((0x7E, 0x40, 0x7E, 0x40)):
        first, second = operands(2 * seed, LANES, code), operands(2 * seed + 1, 16, code)
        load(unit, first, second)
        cells = np.empty((16, LANES), np.float32)
        unit.multiply(16, cells.ctypes.data, False)
        np.testing.assert_array_equal(cells, (second[2] @ first[2].T).astype(np.float32))


def test_nan_and_uninitialised_bytes_are_refused(unit: E4m3Unit) -> None:
    data, places, _ = operands(4, LANES, 0x7E)
    states = np.ones(len(data), np.uint8)
    where = 16 * int(places[77, 1]) + 5
    address, checked, rows = data.ctypes.data, states.ctypes.data, places.ctypes.data
    assert unit.load_a(address, checked, rows)
    for state in (0, 2):  # never written, part of an mbarrier
        states[where] = state
        assert not unit.load_a(address, checked, rows)
    assert unit.load_a(address, None, rows)
    for pattern in (0x7F, 0xFF):
        data[where] = pattern
        assert not unit.load_a(address, None, rows)


class Mma:
    """An MMA of one CTA or of two: operands of random magnitudes, an accumulator that is the sum of three so far."""

    def __init__(self, ctas: int, n: int, codes: tuple[int, int] = (0x54, 0x54), seed: int = 5) -> None:
        self.n, rng = n, np.random.default_rng(seed)
        self.a = [operands(seed + r, LANES, codes[0]) for r in range(ctas)]
        self.b = [operands(seed + 10 + r, n // ctas, codes[1]) for r in range(ctas)]
        self.data = [np.concatenate([a[0], b[0]]) for a, b in zip(self.a, self.b)]
        self.states = [np.ones(len(data), np.uint8) for data in self.data]
        self.places = [(a[1], b[1] + len(a[0]) // 16) for a, b in zip(self.a, self.b)]
        self.cells = [(rng.integers(-(1 << 23), 1 << 23, (n, LANES)) * 2.0**-9).astype(np.float32) for _ in self.a]
        self.sums = [np.full(n, 3, np.int32) for _ in self.a]
        self.allocated = [np.ones(n, np.uint8) for _ in self.a]

    def execute(self, unit: E4m3Unit, accumulate: bool, checked: bool = True) -> bool:
        parts = []
        for r, (a, b) in enumerate(self.places):
            arrays = (self.data[r], self.states[r], a, b, self.cells[r], self.sums[r], self.allocated[r])
            addresses = [array.ctypes.data for array in arrays]
            addresses[1] = addresses[1] if checked else None
            parts.append(Part(*addresses))
        return unit.execute(make_job(parts, self.n, accumulate).ctypes.data)

    def expected(self, accumulate: bool) -> list[np.ndarray]:
        """float64 holds the sums of these operands exactly: each product is below 2^8 and a multiple of 2^-18."""
        b = np.concatenate([x[2] for x in self.b])
        return [
            (b @ a[2].T + (cells if accumulate else 0)).astype(np.float32) for a, cells in zip(self.a, self.cells)
        ]

    def results(self) -> tuple[list[bytes], list[list[int]]]:
        return [cells.tobytes() for cells in self.cells], [sums.tolist() for sums in self.sums]


@pytest.fixture(scope="module", params=["avx512", "avx2", "sse2"])
def short_unit(request: pytest.FixtureRequest) -> E4m3Unit:
    """As compiled for hosts with products of 16-bit integers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_matrix, "has_feature", HOSTS[request.param].__contains__)
        return E4m3Unit()


@pytest.mark.parametrize(("ctas", "n"), [(1, 8), (1, 24), (1, 256), (2, 16), (2, 48), (2, 256)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_whole_instructions(short_unit: E4m3Unit, ctas: int, n: int, accumulate: bool) -> None:
    mma = Mma(ctas, n)
    expected = mma.expected(accumulate)
    assert mma.execute(short_unit, accumulate)
    for cells, want in zip(mma.cells, expected):
        np.testing.assert_array_equal(cells, want)
    assert all((sums == (4 if accumulate else 1)).all() for sums in mma.sums)
    if not accumulate:
        expected = mma.expected(True)
        assert mma.execute(short_unit, True)
        for cells, want in zip(mma.cells, expected):
            np.testing.assert_array_equal(cells, want)


@pytest.mark.parametrize("cta", [0, 1])
@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("fault", ["nan a", "nan b", "state a", "state b", "free", "mixed", "many"])
def test_instructions_for_python_change_nothing(short_unit: E4m3Unit, cta: int, at: int, fault: str) -> None:
    """In the first or last column or row of either CTA: NaN, a byte that is no data, a column that is not allocated,
    one that is no sum of E4M3 MMAs, or of more than float64 holds exactly. Only accumulation asks what columns are."""
    mma = Mma(2, 32)
    where = {name: 16 * int(places[at, at]) + 15 for name, places in zip("ab", mma.places[cta])}
    if fault.startswith("nan"):
        mma.data[cta][where[fault[-1]]] = 0xFF
    elif fault.startswith("state"):
        mma.states[cta][where[fault[-1]]] = 0
        assert mma.execute(short_unit, True, checked=False)
    elif fault == "free":
        mma.allocated[cta][at] = 0
    else:
        mma.sums[cta][at] = 0 if fault == "mixed" else SUMS_LIMIT
    before = mma.results()
    assert not mma.execute(short_unit, True)
    assert mma.results() == before
    assert mma.execute(short_unit, False) == (fault in ("mixed", "many"))


@pytest.mark.parametrize("cta", [0, 1])
@pytest.mark.parametrize("operand", [0, 1])
def test_one_large_number_is_enough(short_unit: E4m3Unit, cta: int, operand: int) -> None:
    mma = Mma(2, 32)
    assert mma.execute(short_unit, True)
    mma.data[cta][16 * int(mma.places[cta][operand][7, 1])] = 0x7E
    before = mma.results()
    assert not mma.execute(short_unit, True)
    assert mma.results() == before


def test_instructions_up_to_the_limit(short_unit: E4m3Unit) -> None:
    mma = Mma(1, 16)
    mma.sums[0][:] = SUMS_LIMIT - 1
    mma.sums[0][3] = 1
    assert mma.execute(short_unit, True) and (mma.sums[0] == SUMS_LIMIT).all()
    assert not mma.execute(short_unit, True)


# Codes 0x57 and 0x58 are 15 and 16: 32 x 16 x 16 x 2^18 is 2^31.
@pytest.mark.parametrize(
    ("codes", "fits"),
    [((0x57, 0x58), True), ((0x58, 0x58), False), ((0x7E, 0x40), False), ((0x67, 0x38), True), ((0x38, 0x67), True)]
    + [(codes, False) for codes in LARGE_AND_SMALL],
)
def test_operands_that_integers_do_not_hold(short_unit: E4m3Unit, codes: tuple[int, int], fits: bool) -> None:
    mma = Mma(2, 32, codes)
    expected, before = mma.expected(True), mma.results()
    assert mma.execute(short_unit, True) == fits
    if fits:
        assert all((cells == want).all() for cells, want in zip(mma.cells, expected))
    else:
        assert mma.results() == before


@pytest.mark.parametrize("nan", [False, True])
def test_kernel_equals_the_reference(nan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a NaN in one operand the instructions that read it go the general way, the others stay native."""
    case = make_case(batch=3, positions=100, n=328, k=400, sm_count=2, seed=4, config=Sm100PatchEmbedConfig())
    if nan:
        case.tensors.weight.view(dtype=case.tensors.weight.dtype)[5, 40] = float("nan")
        rows = [row for row in range(case.tensors.out.shape[1]) if row != 5]
    products, executed = [], []
    multiply, execute = E4m3Unit.multiply, E4m3Unit.execute
    monkeypatch.setattr(E4m3Unit, "multiply", lambda *args: products.append(multiply(*args)))
    monkeypatch.setattr(E4m3Unit, "execute", lambda *args: (executed.append(execute(*args)), executed[-1])[1])
    report = emulate(case.plan, case.tensors, Options(native=True, completion="lazy"))  # else warps' code repeats them
    whole = sum(executed)  # of both CTAs
    assert whole
    assert (len(products) + 2 * whole < 2 * report.mma_instructions) == nan
    if nan:
        assert case.tensors.out[:, 5].isnan().all()
        assert not case.mismatches()[:, rows].any()
    else:
        assert not case.mismatches().any()


def test_short_launches_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_matrix, "_seen", 0)
    assert native_matrix.unit_if_worth_it(None) is None
    assert native_matrix.unit_if_worth_it(False) is None
    monkeypatch.setattr(native_matrix, "_seen", 1 << 20)
    assert native_matrix.unit_if_worth_it(None) is e4m3_unit()
