"""The search for a schedule that fails: in which order, and which one is reported."""

from __future__ import annotations

import contextlib
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
from tests.commands.test_check import EXITS
from tests.emulator.checking.planted import planted


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
