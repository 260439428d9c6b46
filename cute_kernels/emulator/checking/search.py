"""Looks for a schedule under which a recorded launch fails, within a budget, and for the simplest such schedule.

First each place that stands against a certificate is tried: of two events whose order is open the one that came first
waits for the other.
"""

import dataclasses
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from cute_kernels.common import interrupts
from cute_kernels.common.executors import Workers
from cute_kernels.emulator.checking.orders import Orders
from cute_kernels.emulator.checking.reduction import FewestSteps, fewest_steps
from cute_kernels.emulator.errors import EmulatorError, UnsupportedPTX
from cute_kernels.emulator.machine.launch import schedule as schedules
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.programs.recorded import Outcome, RecordedLaunch, Replay, differences
from cute_kernels.emulator.races.certificate import PHASES
from cute_kernels.emulator.races.meetings import Meeting
from cute_kernels.emulator.steps import Step

DIFFERENT_RESULT = "DifferentResult"
"""`Finding.kind` where no fault is reported, and memory differs from what the default schedule leaves."""


@dataclass(frozen=True)
class Finding:
    """A launch that fails under a schedule."""

    # recorded, schedule: what fails, and when
    recorded: RecordedLaunch
    schedule: Schedule
    kind: str  # name of the class of the error, or `DIFFERENT_RESULT`
    text: str  # in what the result differs, or the emulator's message
    error: EmulatorError | None = None  # what the emulator raised, or None for a result that differs
    # the fewest steps that show it; None where the schedule draws nothing, or where they do not show it again
    fewest: FewestSteps | None = None
    order: str = ""  # of two events of a place, in words, which make it fail; "" where nothing is known of any

    @property
    def refused(self) -> bool:
        """The emulator does not implement what the kernel does under this schedule."""
        return isinstance(self.error, UnsupportedPTX)


@dataclass(frozen=True)
class Budget:
    """When a search ends: after ``seconds``, or when ``seeds`` random schedules of every launch ran; None: never.

    ``orders``: of places that are tried at most. Places and their orders have at most half of the time.
    """

    seconds: float | None = 60.0
    seeds: int | None = None
    orders: int = 100


@dataclass
class Tally:
    """Progress of a search."""

    places: int = 0  # runs in which two events of a place came in the other order
    orders: int = 0  # runs in which several came in another order
    known: int = 0  # how many such orders are known
    # systematic, random: runs under such schedules
    systematic: int = 0
    random: int = 0
    complete: bool = False  # all systematic ones ran
    certified: int = 0  # launches whose certificate stands for all schedules, so that none is tried
    kept: int = 0  # runs that were known, and not repeated

    @property
    def runs(self) -> int:
        """Number of launches of all runs together."""
        return self.places + self.orders + self.systematic + self.random


@dataclass(frozen=True)
class _Trial:
    """Result of one run: fields of `Finding` ("" and None if nothing was found), or no time was left for it.

    Where results may differ, one that does has a text, and no kind. ``meetings``: as the run's certificate has them.
    """

    kind: str = ""
    text: str = ""
    error: EmulatorError | None = None
    out_of_time: bool = False
    meetings: tuple[Meeting, ...] = ()


class _Trials:
    """The launches in one process."""

    def __init__(self, launches: Sequence[RecordedLaunch], options: dict[str, Any], results_may_differ: bool) -> None:
        self._options, self._results_may_differ = options, results_may_differ
        self._past = [PastPhases(options.get("going_on")) if _is_reported(each) else None for each in launches]
        self._replays = [Replay(each) for each in launches]
        self._expected: dict[int, Outcome] = {}  # what the default schedule leaves

    def run(
        self,
        number: int,
        schedule: Schedule,
        seconds: float | None,
        stepped: Callable[[Step, str], None] | None = None,
    ) -> _Trial:
        """One launch under a schedule, at most so long."""
        try:
            with interrupts.until(time.monotonic() + seconds if seconds is not None else math.inf):
                if number not in self._expected:  # the program itself has run under the default schedule
                    self._expected[number] = self._replay(number, Schedule())
                if schedule == Schedule():
                    return _Trial()
                outcome = self._replay(number, schedule, stepped)
        except interrupts.OutOfTime:
            return _Trial(out_of_time=True)
        except EmulatorError as error:
            return _Trial(type(error).__name__, error.message, error)
        text = differences(outcome, self._expected[number])
        kind = "" if self._results_may_differ else DIFFERENT_RESULT
        certificate = outcome.report.certificate if outcome.report is not None else None
        meetings = () if certificate is None else tuple(one for each in certificate.places for one in each.meetings)
        return _Trial(kind if text else "", text and f"the result depends on the schedule: {text}", meetings=meetings)

    def fewest_steps(self, number: int, schedule: Schedule, kind: str, seconds: float) -> FewestSteps | None:
        """Steps of a schedule under which a launch fails, reduced to those that show the same kind of failure."""
        return fewest_steps(
            schedule, lambda other, stepped: self.run(number, other, None, stepped).kind == kind, seconds
        )

    def _replay(
        self,
        number: int,
        schedule: Schedule,
        stepped: Callable[[Step, str], None] | None = None,
    ) -> Outcome:
        own = self._options | ({"going_on": self._past[number]} if self._past[number] is not None else {})
        options = schedule.options(stepped=stepped, **own)
        return self._replays[number].run(options, overlap=schedule.overlap)


def _is_certified(recorded: RecordedLaunch) -> bool:
    return recorded.certificate is not None and recorded.certificate.given


def _is_reported(recorded: RecordedLaunch) -> bool:
    """Whether every run of it ends with a report of a place; trials are of what that leads to."""
    return recorded.certificate is not None and any(each.kind in PHASES for each in recorded.certificate.places)


@dataclass
class PastPhases:
    """`Options.going_on` that goes on after places of phases, the first of which it keeps in ``noted``; ``otherwise``:
    of all other reports."""

    otherwise: Callable[[EmulatorError], bool] | None = None
    noted: EmulatorError | None = None

    def __call__(self, error: EmulatorError) -> bool:
        if self.otherwise is not None and self.otherwise(error):
            return True
        if error.kind in PHASES:
            self.noted = self.noted or error
        return error.kind in PHASES


#: "", or the attribute of `Tally` that counts such runs; number of the launch.
_Planned = tuple[str, int, Schedule, Meeting | None]
_KEPT = ("systematic", "random")
_DEEPEST = 20  # holds of an order
_SHARE = 0.5  # of the time, for places and their orders


@dataclass
class Search:
    """The launches of one program under many schedules.

    What is found does not depend on the executor, but for how far the time reaches: schedules are judged in their
    order."""

    launches: list[RecordedLaunch]  # as `Recorder` has them; `run` replaces those whose places it has tried
    budget: Budget = field(default_factory=Budget)  # see `Budget`
    options: dict[str, Any] = field(default_factory=dict)  # fields of `Options` for every run, beside the schedule's
    results_may_differ: bool = False  # from schedule to schedule; else that is a finding
    # called before each run with the tally and the seconds since the search began
    progress: Callable[[Tally, float], None] = lambda tally, seconds: None
    # executor, jobs: where runs are executed, as for `Workers`
    executor: Executor | Callable[[], Executor] | None = None
    jobs: int = 1
    reduction: float = 30.0  # seconds that steps of a failing schedule are reduced for
    always: bool = False  # launches with a certificate are searched like all others
    places_alone: bool = False  # nothing else is tried than places
    # whether a launch is known to be in order under a systematic or random schedule, and what is told of one that is
    kept: Callable[[int, Schedule], bool] = lambda number, schedule: False
    keep: Callable[[int, Schedule], None] = lambda number, schedule: None

    def __post_init__(self) -> None:
        self._timely = True
        self._searched = [n for n, each in enumerate(self.launches) if self.always or not _is_certified(each)]
        self._orders = {number: Orders() for number in self._searched}
        self.tally = Tally(certified=len(self.launches) - len(self._searched))
        self._start = time.monotonic()

    def run(self) -> Finding | None:
        """The first failure, with the simplest schedule that was found for it; None if there is none.

        All places come first, then other orders of them, systematic schedules of all launches, in turn, random ones.
        """
        state = (tuple(self.launches), self.options, self.results_may_differ)
        with Workers(_Trials, state, self.executor, self.jobs) as workers:
            finding = self._first(workers)
            if finding is None:
                return None
            return self._with_steps(self._reduced(finding, workers), workers)

    def _first(self, workers: Workers) -> Finding | None:
        found = self._tried(workers, self._places(), _SHARE)
        for _ in range(_DEEPEST):
            level = [(number, steps) for number, each in self._orders.items() for steps in each.take()]
            if found is not None or not level:
                break
            room = max(self.budget.orders - self.tally.orders, 0)
            plan = (("orders", number, Schedule(steps=steps), None) for number, steps in level[:room])
            found = self._tried(workers, plan, _SHARE)
        self._say_why("the search ended before" if self._timely else "no time was left")
        self.tally.known = sum(each.known for each in self._orders.values())
        if found is None and not self.places_alone:
            self._timely = True
            found = self._tried(workers, self._others())
            self.tally.complete |= self._timely
        return found

    def _tried(self, workers: Workers, plan: Iterable[_Planned], share: float = 1) -> Finding | None:
        """The first of these schedules that fails; of places all are tried. ``share``: of the time, until they end."""
        drawn: deque[_Planned] = deque()
        found = None

        def items() -> Iterator[tuple[int, Schedule, float | None]]:
            for planned in plan:
                left = self._seconds_left(share if planned[0] else 1)  # all need what the default schedule leaves
                if left <= 0:
                    self._timely = False
                    return
                if planned[0] in _KEPT and self.kept(*planned[1:3]):
                    self.tally.kept += 1
                    continue
                drawn.append(planned)
                self.progress(self.tally, time.monotonic() - self._start)
                yield *planned[1:3], None if left == math.inf else left

        for trial in workers.each(_Trials.run, items()):
            phase, number, schedule, meeting = drawn.popleft()
            self.tally.complete |= phase == "random"
            if trial.out_of_time:
                self._timely = False
                return found
            if meeting is not None:
                self._note(number, meeting, trial)
            if phase:
                setattr(self.tally, phase, getattr(self.tally, phase) + 1)
            if phase in _KEPT and not trial.kind:
                self.keep(number, schedule)
            if phase in ("places", "orders") and schedule.steps:
                self._orders[number].learn(schedule.steps, trial.meetings)
            if trial.kind and found is None:
                order = self._orders[number].text(schedule.steps) if phase == "orders" else ""
                order = meeting.words if meeting is not None else order
                found = Finding(self.launches[number], schedule, trial.kind, trial.text, trial.error, order=order)
                if meeting is None:
                    return found
        return found

    def _note(self, number: int, meeting: Meeting, trial: _Trial) -> None:
        """Notes whether two events in the other order are shown to matter."""
        recorded = self.launches[number]
        shown = trial.text if trial.error is None else trial.error.kind
        self.launches[number] = dataclasses.replace(
            recorded, certificate=recorded.certificate.with_trial(meeting, shown)
        )

    def _say_why(self, why: str) -> None:
        """Places that were not tried say why, those that no meeting is known of for another reason."""
        for number in self._searched:
            recorded = self.launches[number]
            if recorded.certificate is not None:
                certificate = recorded.certificate.without_trials(why)
                self.launches[number] = dataclasses.replace(recorded, certificate=certificate)

    def _places(self) -> Iterator[_Planned]:
        for number in self._searched:
            yield "", number, Schedule(), None
        for number in self._searched:
            certificate, orders = self.launches[number].certificate, self._orders[number]
            places = certificate.places if certificate is not None else ()
            for meeting in orders.places(place.meetings for place in places):
                late = "eager" if meeting.steps else "lazy"
                yield "places", number, Schedule(completion=late, steps=meeting.steps), meeting

    def _others(self) -> Iterator[_Planned]:
        plans = [self._systematic(number, each) for number, each in enumerate(self.launches)]
        for turn in itertools.zip_longest(*plans):
            for number, schedule in enumerate(turn):
                if schedule is not None:
                    yield "systematic", number, schedule, None
        seeds = itertools.count(1) if self.budget.seeds is None else range(1, self.budget.seeds + 1)
        for seed in seeds if self._searched else ():
            for number in self._searched:
                recorded = self.launches[number]
                schedule = schedules.drawn(seed, overlaps=recorded.previous is not None, meets=recorded.meets)
                yield "random", number, schedule, None

    def _systematic(self, number: int, recorded: RecordedLaunch) -> list[Schedule]:
        """Systematic schedules of a launch: with a certificate, which is of the launch alone, that of the overlap.

        Starving a warp brings about nothing that trials of places do not: where these are known, it is left to chance.
        """
        overlaps, certificate = recorded.previous is not None, recorded.certificate
        if number not in self._searched:
            return [Schedule(overlap=True)] if overlaps else []
        warps = recorded.warps if certificate is None or certificate.given else 0
        return schedules.systematic(recorded.ctas, warps, overlaps=overlaps, meets=recorded.meets)

    def _reduced(self, finding: Finding, workers: Workers) -> Finding:
        """Finds the simplest schedule that shows the same failure, whatever time that takes."""
        number = self._number(finding)
        simpler = list(finding.schedule.simpler())
        trials = workers.each(_Trials.run, ((number, schedule, None) for schedule in simpler))
        for schedule, trial in zip(simpler, trials):
            if trial.kind == finding.kind:
                found = {"schedule": schedule, "text": trial.text, "error": trial.error}
                return dataclasses.replace(finding, **found)
        return finding

    def _with_steps(self, finding: Finding, workers: Workers) -> Finding:
        """Finds the fewest steps that show the same failure."""
        schedule = finding.schedule
        held = any(step.kind == "h" for step in schedule.steps)
        if finding.refused or not (schedule.draws or held):
            return finding
        item = (self._number(finding), schedule, finding.kind, self.reduction)
        (fewest,) = workers.each(_Trials.fewest_steps, [item])
        return dataclasses.replace(finding, fewest=fewest)

    def _number(self, finding: Finding) -> int:
        return next(n for n, each in enumerate(self.launches) if each.number == finding.recorded.number)

    def _seconds_left(self, share: float) -> float:
        limit = self.budget.seconds
        return math.inf if limit is None else share * limit - (time.monotonic() - self._start)
