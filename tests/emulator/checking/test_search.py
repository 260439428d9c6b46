"""The search for a schedule that fails: in which order, and which one is reported."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.checking import search
from cute_kernels.emulator.checking.search import Budget, Search
from cute_kernels.emulator.errors import Hang, UnsupportedPTX
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.programs import capture
from cute_kernels.emulator.programs.program_run import run_program
from cute_kernels.emulator.programs.recorded import Recorder
from cute_kernels.testing.ptx import module
from tests.commands.test_check import EXITS
from tests.emulator.checking.planted import planted
from tests.emulator.checking.test_places import ONE, recorded


def test_random_schedules_are_tried_and_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what fails, the simplest schedule is reported, with the smallest seed that does."""
    recorder = Recorder()
    with capture("sm_90a", Options(), recorder=recorder) as session:
        assert run_program(EXITS, ["normal"], session, pytest.fail) == 0
    tried: list[Schedule] = []

    def run(self: object, options: Options, *, overlap: bool) -> object:
        if options.completion == "random" and options.interleave == "starve" and options.seed % 4 == 3:
            raise Hang("it hangs")
        if options.interleave == "starve" and options.seed > 3:
            raise UnsupportedPTX("of another kind")  # which a reduction must not end in
        tried.append(options)
        return search.Outcome(None, ())

    monkeypatch.setattr(search.Replay, "run", run)
    monkeypatch.setattr(search.schedules, "systematic", lambda *_, **__: [Schedule(completion="lazy")])
    monkeypatch.setattr(
        search.schedules, "drawn", lambda seed, overlaps, meets: Schedule(10 + seed, "random", "starve", True)
        if seed == 5 else Schedule(seed, "random", "random"),
    )  # fmt: skip
    found = Search(recorder.launches, Budget(None, 9), always=True)
    finding = found.run()
    assert finding is not None and (finding.kind, finding.refused) == ("Hang", False)
    assert finding.schedule == Schedule(3, "random", "starve")
    assert (found.tally.systematic, found.tally.random, found.tally.complete) == (1, 5, True)
    assert "launch 1" not in finding.text and "it hangs" in finding.text


def test_threads_find_the_same(tmp_path: Path) -> None:
    """The first schedule in order that fails, and the simplest of its kind, whatever ends first."""
    recorder = Recorder()
    with capture("sm_90a", Options(), recorder=recorder) as session:
        assert run_program(str(planted("one try to wait", tmp_path)), [], session, pytest.fail) == 0
    findings = []
    for workers in (None, 3):
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(workers)) if workers else None
            search = Search(recorder.launches, Budget(None, 3), executor=pool)
            found = search.run()
        findings.append((found.recorded.number, found.schedule, found.kind, found.text, search.tally))
    assert findings[0] == findings[1]


TICKETS = f"{ONE} atom.relaxed.gpu.global.inc.u32 %r8, [%d0+1024], 9; END: ret;"


def test_a_run_is_left_when_the_time_is_over() -> None:
    """In the middle of its only cluster, whose default schedule takes much longer."""
    hold = "mov.u32 %r22, 4000000000; HOLD: sub.u32 %r22, %r22, 1; setp.ne.u32 %p3, %r22, 0; @%p3 bra HOLD;"
    recorder, _ = recorded(TICKETS, 1, 64)
    end = time.monotonic() + 120
    text = module(TICKETS.replace("END:", f"{hold} END:"), parameters=1)
    long = dataclasses.replace(recorder.launches[0].launch, ptx=text)
    slow = Search([dataclasses.replace(recorder.launches[0], launch=long)], Budget(0.2), {"max_idle_blocks": None})
    assert slow.run() is None and slow.tally.runs == 0 and not slow.tally.complete
    assert time.monotonic() < end, "a run of it takes minutes"


def test_places_and_their_orders_have_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run takes 4 seconds of 40: that of the default schedule, and then as many of places as are left of 20."""
    recorder, _ = recorded(TICKETS, 1, 160)
    clock, run, limits = [0.0], search._Trials.run, []

    def timed(self: object, number: int, schedule: Schedule, seconds: float, *rest: object) -> object:
        limits.append((bool(schedule.steps), clock[0], seconds))
        clock[0] += 4
        return run(self, number, schedule, None, *rest)

    monkeypatch.setattr(search._Trials, "run", timed)
    monkeypatch.setattr(search, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    found = Search(recorder.launches, Budget(40), results_may_differ=True)
    assert found.run() is None and found.tally.places + found.tally.orders == 4 and found.tally.orders > 0
    assert limits[0] == (False, 0, 40)
    assert [each for each in limits if each[0]] == [(True, 4 * n, 20 - 4 * n) for n in range(1, 5)]
    assert limits[5] == (False, 20, 20), "other schedules have the rest"
