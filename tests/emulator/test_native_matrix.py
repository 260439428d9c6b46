"""Machine code for E4M3 products against exact arithmetic, and the tensor core with and without it."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from cute_kernels.config import TileConfig
from cute_kernels.emulator import Options, native_matrix
from cute_kernels.emulator.native_matrix import LANES, E4m3Unit, K, e4m3_unit
from cute_kernels.launch import emulate
from tests.emulator.kernel_inputs import make_case


@pytest.fixture(scope="module", params=[(32, True), (8, True), (8, False)], ids=["wide", "narrow", "without fma"])
def unit(request: pytest.FixtureRequest) -> E4m3Unit:
    """As compiled for hosts with AVX-512, with AVX2 and with neither."""
    width, fused = request.param
    with pytest.MonkeyPatch.context() as patch:
        features = {"avx512f": width == 32, "fma": fused}
        patch.setattr(native_matrix, "has_feature", features.__getitem__)
        return E4m3Unit()


def operands(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bytes of shared memory, places of the rows, their values [rows, 32])."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, 16 * 700).astype(np.uint8)
    data[data & 0x7F == 0x7F] = 0x7E  # no NaN, but the largest magnitude
    places = rng.permutation(700)[: 2 * rows].reshape(rows, 2)
    chunks = data.view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(-1, 16)
    return data, places, chunks[places].reshape(rows, K)


@pytest.mark.parametrize("n", [8, 24, 256])
@pytest.mark.parametrize("accumulate", [False, True])
def test_products_are_rounded_once(unit: E4m3Unit, n: int, accumulate: bool) -> None:
    a_data, a_places, a = operands(1, LANES)
    b_data, b_places, b = operands(2, n)
    assert unit.load_a(a_data, None, a_places)
    assert unit.load_b(b_data, None, b_places[: n // 2], 0)
    assert unit.load_b(b_data, None, b_places[n // 2 :], n // 2)
    rng = np.random.default_rng(3)
    cells = (rng.integers(-(1 << 23), 1 << 23, (n, LANES)) * 2.0**-9).astype(np.float32)
    old = cells.copy()
    unit.multiply(n, cells, accumulate)
    for row, lane in zip(rng.integers(0, n, 200), rng.integers(0, LANES, 200)):
        exact = sum((Fraction(x) * Fraction(y) for x, y in zip(b[row], a[lane])), Fraction(0))
        exact += Fraction(float(old[row, lane])) if accumulate else 0
        below = np.float32(float(exact))  # 53 bits hold the sum, so this rounds once
        assert Fraction(float(exact)) == exact
        assert cells[row, lane] == below


def test_nan_and_uninitialised_bytes_are_refused(unit: E4m3Unit) -> None:
    data, places, _ = operands(4, LANES)
    states = np.ones(len(data), np.uint8)
    where = 16 * int(places[77, 1]) + 5
    assert unit.load_a(data, states, places)
    for state in (0, 2):  # never written, part of an mbarrier
        states[where] = state
        assert not unit.load_a(data, states, places)
    assert unit.load_a(data, None, places)
    for pattern in (0x7F, 0xFF):
        data[where] = pattern
        assert not unit.load_a(data, None, places)


@pytest.mark.parametrize("nan", [False, True])
def test_kernel_equals_the_reference(nan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a NaN in one operand the instructions that read it go the general way, the others stay native."""
    case = make_case(batch=3, positions=100, n=328, k=400, sm_count=2, seed=4, config=TileConfig())
    if nan:
        case.tensors.weight.view(dtype=case.tensors.weight.dtype)[5, 40] = float("nan")
        rows = [row for row in range(case.tensors.out.shape[1]) if row != 5]
    products = []
    multiply = E4m3Unit.multiply
    monkeypatch.setattr(E4m3Unit, "multiply", lambda *args: products.append(multiply(*args)))
    report = emulate(case.plan, case.tensors, Options(native=True))
    assert len(products) < 2 * report.mma_instructions if nan else len(products) == 2 * report.mma_instructions
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
