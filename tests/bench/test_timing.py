"""Statistics and schedule of the timing protocol, on numbers worked out by hand or by NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.timing import Protocol, mean_power, shuffled_rounds, summarize


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30))
def test_summary_agrees_with_numpy(values: list[float]) -> None:
    summary = summarize(values)
    quartiles = np.quantile(values, [0.25, 0.5, 0.75])
    assert np.allclose([summary.low, summary.median, summary.high], quartiles, rtol=1e-9)
    assert (summary.minimum, summary.maximum, summary.count) == (min(values), max(values), len(values))


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_summary_refuses(values: list[float]) -> None:
    with pytest.raises(ValueError, match="nothing to summarize"):
        summarize(values)


def test_every_round_holds_every_run_once_in_an_order_of_its_own() -> None:
    names = [f"peer {i}" for i in range(6)]
    schedule = shuffled_rounds(names, ("burst", "sustained"), 8, seed=3)
    everything = {(name, mode) for name in names for mode in ("burst", "sustained")}
    assert len(schedule) == 8
    assert all(len(order) == 12 and set(order) == everything for order in schedule)
    assert len({tuple(order) for order in schedule}) == 8
    assert schedule == shuffled_rounds(names, ("burst", "sustained"), 8, seed=3)
    assert schedule != shuffled_rounds(names, ("burst", "sustained"), 8, seed=4)


def test_power_counts_whole_steps_of_the_energy_counter() -> None:
    # 500 W, read every 10 ms, of a counter that advances every 30 ms: readings before the first step hold stale joules.
    readings = [(0.01 * i, 100.0 + 15.0 * (i // 3)) for i in range(1, 60)]
    assert mean_power(readings) == pytest.approx(500.0)
    naive = (readings[-1][1] - readings[0][1]) / (readings[-1][0] - readings[0][0])
    assert naive != pytest.approx(500.0, rel=1e-3)


@pytest.mark.parametrize("readings", [[], [(0.0, 1.0)], [(0.0, 1.0), (0.01, 1.0)], [(0.0, 1.0), (0.01, 2.0)]])
def test_power_needs_two_steps(readings: list[tuple[float, float]]) -> None:
    assert mean_power(readings) is None


@pytest.mark.parametrize(
    "fields", [{"rounds": 0}, {"burst_launches": 0}, {"warmup_launches": 0}, {"sustained_s": 0.0}, {"burst_idle_s": -1}]
)
def test_protocol_refuses(fields: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Protocol(**fields)
