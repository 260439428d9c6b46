"""Looks for a schedule under which a recorded launch fails, within a budget, and for the simplest such schedule."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cute_kernels.emulator import schedule as schedules
from cute_kernels.emulator.errors import EmulatorError, UnsupportedPTX
from cute_kernels.emulator.recorded import Outcome, RecordedLaunch, Replay, differences
from cute_kernels.emulator.schedule import Schedule

DIFFERENT_RESULT = "DifferentResult"
"""`Finding.kind` where no fault is reported, and memory differs from what the default schedule leaves."""


@dataclass(frozen=True)
class Finding:
    """A launch that fails under a schedule.

    Attributes:
        recorded, schedule: what fails, and when.
        kind: name of the class of the error, or `DIFFERENT_RESULT`.
        text: in what the result differs, or the emulator's message.
        error: what the emulator raised, or None for a result that differs.
    """

    recorded: RecordedLaunch
    schedule: Schedule
    kind: str
    text: str
    error: EmulatorError | None = None

    @property
    def refused(self) -> bool:
        """The emulator does not implement what the kernel does under this schedule."""
        return isinstance(self.error, UnsupportedPTX)


@dataclass(frozen=True)
class Budget:
    """When a search ends: after ``seconds``, or when ``seeds`` random schedules of every launch ran; None: never."""

    seconds: float | None = 60.0
    seeds: int | None = None


@dataclass
class Tally:
    """What a search has done: runs under systematic and under random schedules, and whether all systematic ones ran."""

    systematic: int = 0
    random: int = 0
    complete: bool = False

    @property
    def runs(self) -> int:
        """Of launches, all together."""
        return self.systematic + self.random


class _OutOfTime(Exception):
    """The budget is used up in the middle of a run."""


@dataclass
class Search:
    """The launches of one program under many schedules.

    Args:
        launches: as `Recorder` has them.
        budget: see `Budget`.
        options: fields of `Options` for every run, beside the schedule's.
        results_may_differ: from schedule to schedule; else that is a finding.
        progress: called before each run with the tally and the seconds since the search began.
    """

    launches: Sequence[RecordedLaunch]
    budget: Budget = field(default_factory=Budget)
    options: dict[str, Any] = field(default_factory=dict)
    results_may_differ: bool = False
    progress: Callable[[Tally, float], None] = lambda tally, seconds: None

    def __post_init__(self) -> None:
        self.tally = Tally()
        self._replays = [Replay(each) for each in self.launches]
        self._expected: list[Outcome | None] = [None] * len(self._replays)
        self._start = time.monotonic()
        self._limited = True

    def run(self) -> Finding | None:
        """The first failure, with the simplest schedule that was found for it; None if there is none.

        Systematic schedules of all launches come first, in turn, then random ones.
        """
        try:
            return self._reduced(self._first())
        except _OutOfTime:
            return None

    def _first(self) -> Finding | None:
        # The program itself has run under the default schedule; as a replay it says what memory is to hold.
        for number in range(len(self._replays)):
            if (finding := self._try(number, Schedule())) is not None:
                return finding
        plans = [
            schedules.systematic(each.ctas, each.warps, overlaps=each.previous is not None) for each in self.launches
        ]
        for turn in itertools.zip_longest(*plans):
            for number, schedule in enumerate(turn):
                if schedule is not None:
                    self.tally.systematic += 1
                    if (finding := self._try(number, schedule)) is not None:
                        return finding
        self.tally.complete = True
        for seed in self._seeds():
            for number, recorded in enumerate(self.launches):
                self.tally.random += 1
                schedule = schedules.drawn(seed, overlaps=recorded.previous is not None)
                if (finding := self._try(number, schedule)) is not None:
                    return finding
        return None

    def _seeds(self) -> Iterator[int]:
        if self.budget.seeds is None:
            return itertools.count(1)
        return iter(range(1, self.budget.seeds + 1))

    def _reduced(self, finding: Finding | None) -> Finding | None:
        """The same failure under the simplest schedule that shows it; a fault counts more than a different result."""
        if finding is None:
            return None
        number = next(n for n, each in enumerate(self.launches) if each is finding.recorded)
        self._limited = False  # what has been found is worth the time
        for schedule in finding.schedule.simpler():
            found = self._try(number, schedule)
            if found is not None and found.kind == finding.kind:
                return found
        return finding

    def _try(self, number: int, schedule: Schedule) -> Finding | None:
        self._check_time()
        self.progress(self.tally, time.monotonic() - self._start)
        recorded, replay = self.launches[number], self._replays[number]
        try:
            outcome = replay.run(
                schedule.options(**self.options),
                overlap=schedule.overlap,
                progress=lambda done, of: self._check_time(),
            )
        except EmulatorError as error:
            return Finding(recorded, schedule, type(error).__name__, error.message, error)
        expected = self._expected[number]
        if expected is None:
            self._expected[number] = outcome
        elif not self.results_may_differ and (text := differences(outcome, expected)):
            text = f"the result depends on the schedule: {text}"
            return Finding(recorded, schedule, DIFFERENT_RESULT, text)
        return None

    def _check_time(self) -> None:
        limit = self.budget.seconds
        if self._limited and limit is not None and time.monotonic() - self._start > limit:
            raise _OutOfTime
