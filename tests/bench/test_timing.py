"""Statistics and schedule of the timing protocol, on numbers worked out by hand or by NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import timing
from bench.timing import Protocol, Samples, mean_power, shuffled_rounds, summarize


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
    assert schedule != shuffled_rounds(names, ("burst", "sustained"), 8, seed=3, case="1024")


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
    "fields",
    [{"rounds": 0}, {"burst_launches": 0}, {"warmup_launches": 0}, {"sustained_s": 0.0}, {"burst_idle_s": -1},
     {"settle_s": -0.1}, {"settle_s": math.nan}],
)  # fmt: skip
def test_protocol_refuses(fields: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Protocol(**fields)


class FakeDevice:
    """A clock that launches advance by a millisecond each, in place of the device, its sampler and the host's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.log = 0.0, []
        monkeypatch.setattr(timing, "elapsed_ms", self.elapsed_ms)
        monkeypatch.setattr(timing, "covering_spin_ms", lambda launch, launches, slots: 0.5)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)

    def elapsed_ms(self, launch, launches: int, slots: int, *, spin_ms: float = 0.0) -> float:
        self.now += 1e-3 * launches
        self.log.append((launch, launches, spin_ms))
        return 1.0

    def during(self, work):
        return work(), Samples([1000.0], [500.0], [])


def test_a_sustained_run_is_settled_by_its_own_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    protocol = Protocol(rounds=1, warmup_launches=1, sustained_s=0.2, settle_s=0.3)
    runs = timing.measure({"a": "a", "b": "b"}, protocol, device, 1, ["sustained"])
    assert [run.launches for run in runs["a"]] == [200]
    timed = device.log[4:]
    assert sorted(timed) == [(name, count, 0.0) for name in "ab" for count in (200, 300)]
    assert [launch for launch, *_ in timed[::2]] == [launch for launch, *_ in timed[1::2]]
    assert [count for _, count, _ in timed] == [300, 200] * 2


@pytest.mark.parametrize(("deadline", "rounds"), [(0.0, 1), (2.4, 2), (2.6, 2), (3.1, 3), (math.inf, 9)])
def test_no_round_is_begun_that_would_end_after_the_deadline(monkeypatch, deadline: float, rounds: int) -> None:
    """A round is two runs of half a second; the first one is timed whatever the deadline."""
    device = FakeDevice(monkeypatch)
    protocol = Protocol(rounds=9, warmup_launches=1, sustained_s=0.5)
    runs = timing.measure({"a": "a", "b": "b"}, protocol, device, 1, ["sustained"], deadline=deadline)
    assert [len(found) for found in runs.values()] == [rounds, rounds]
