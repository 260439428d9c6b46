"""Schedules: which are tried, which are simpler than another, and seeds that starve each warp."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.machine.launch.schedule import Schedule, drawn, seeds_for_each_warp, systematic
from cute_kernels.emulator.machine.launch.scheduler import Scheduler
from cute_kernels.testing.ptx import module
from tests.emulator.ptx_launch import launch


@pytest.mark.parametrize(("ctas", "warps"), [(1, 2), (2, 3), (1, 8)])
def test_every_warp_is_starved_by_its_seed(ctas: int, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the scheduler draws it, of a launch that runs."""
    starved = []
    original = Scheduler.run

    def run(self: Scheduler) -> None:
        starved.append({(warp.cta.rank, warp.index) for warp in self.starved})
        original(self)

    monkeypatch.setattr(Scheduler, "run", run)
    for seed in seeds_for_each_warp(ctas, warps):
        options = Options(seed=seed, interleave="starve")
        shape = {"grid": (ctas, 1, 1), "block": (32 * warps, 1, 1), "cluster": (ctas, 1, 1)}
        launch(module("ret;", parameters=1), np.zeros(1, np.uint32), **shape, options=options)
    assert starved == [{(cta, index) for cta in range(ctas)} for index in range(warps)]


def test_simpler_schedules_have_fewer_departures() -> None:
    schedule = Schedule(9, "random", "starve", True, True)
    simpler = list(schedule.simpler())
    assert simpler[0] == Schedule() and schedule not in simpler and len(set(simpler)) == len(simpler)
    counts = [len(set(each.departures()) - {"seed"}) for each in simpler]
    assert counts == sorted(counts)
    assert Schedule(5, "random", "starve", True, True) in simpler and Schedule(9, "random") in simpler
    assert Schedule(overlap=True) in simpler and Schedule(1, overlap=True) not in simpler  # nothing is drawn there
    assert list(Schedule().simpler()) == []
    assert schedule.arguments() == [
        "--seed", "9", "--completion", "random", "--interleave", "starve", "--spurious-timeouts", "--overlap",
    ]  # fmt: skip


def test_schedules_are_drawn_anew_and_the_same_again() -> None:
    state = random.getstate()
    schedules = [drawn(number, overlaps=True) for number in range(1, 200)]
    assert schedules == [drawn(number, overlaps=True) for number in range(1, 200)] and random.getstate() == state
    assert len({dataclass_without_seed(each) for each in schedules}) == 3 * 2 * 2 * 2
    assert not any(drawn(number, overlaps=False).overlap for number in range(1, 200))
    assert {each.completion for each in systematic(1, 4, overlaps=False)} == {"eager", "lazy"}
    assert Schedule() not in systematic(2, 4, overlaps=True)


def dataclass_without_seed(schedule: Schedule) -> tuple:
    return schedule.completion, schedule.interleave, schedule.spurious_timeouts, schedule.overlap
