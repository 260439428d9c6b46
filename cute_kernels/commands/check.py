"""``cute-kernels check SCRIPT ARGS...``: a program's launches under many schedules."""

import argparse
import functools
import hashlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cute_kernels.commands import emulate as command
from cute_kernels.commands import workers
from cute_kernels.common import files
from cute_kernels.common.progress import ProgressLine
from cute_kernels.emulator import errors
from cute_kernels.emulator.checking import outcomes
from cute_kernels.emulator.checking.mutation import campaign
from cute_kernels.emulator.checking.search import Budget, PastPhases, Search, Tally
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.options import Options
from cute_kernels.emulator.programs import program_run
from cute_kernels.emulator.programs.capturing import capture
from cute_kernels.emulator.programs.recorded import RecordedLaunch, Recorder
from cute_kernels.emulator.reports.document import Outcome
from cute_kernels.emulator.reports.reporter import Reporter

if TYPE_CHECKING:
    from cute_kernels.explore.store import Lines

EXIT_STATUSES = command.exit_statuses(
    {
        0: "every schedule that was tried is in order",
        2: "arguments that cannot be used, a program without launches",
        errors.FAULT: "a kernel is at fault under some schedule, or its result depends on the schedule",
    }
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = command.add_program_command(
        commands,
        "check",
        check,
        help="run a program's launches under many schedules",
        description="Runs a Python program once in the emulator, then each of its different launches again under many "
        "schedules, from the memory that it found: the two events of each place that stands against its certificate in "
        "the other order, then more orders of them; asynchronous work early, late and at random; random "
        "orders; launches that may overlap, checked against each other. A launch with a certificate is not run again: "
        "its one run stands for all schedules. A schedule that fails is reduced to the simplest one that fails, and "
        "printed as a command that repeats it.",
        statuses=EXIT_STATUSES,
    )
    parser.add_argument(
        "--seconds",
        type=seconds,
        metavar="S",
        help="time for schedules, after the program has run once (default: 60, or no limit with --seeds)",
    )
    parser.add_argument(
        "--seeds",
        type=seeds,
        metavar="N",
        help="random schedules per launch, after the systematic ones (default: until --seconds are over)",
    )
    command.add_going_on_arguments(parser)
    command.add_watch_argument(parser)
    parser.add_argument(
        "--results-may-differ",
        action="store_true",
        help="accept results that differ between schedules, e.g. by atomic additions of floating-point numbers, so "
        "that only reports count",
    )
    parser.add_argument(
        "--always-search",
        action="store_true",
        help="also try schedules of launches with a certificate; if one fails, the emulator has a bug",
    )
    workers.add_worker_arguments(parser)
    workers.add_store(parser, "run in order")


def seconds(text: str) -> float:
    """A positive number of seconds, as argparse's ``type``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def seeds(text: str) -> int:
    """A number of seeds, as argparse's ``type``."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of schedules, 0 or more")
    return int(text)


def check(options: argparse.Namespace) -> int:
    """Runs the program and its launches; returns the exit status, see `EXIT_STATUSES`. Raises SystemExit: the program's
    own; OSError: no such program; ValueError: the program launches nothing."""
    if options.store is not None and options.keep_going:
        raise ValueError("--store and --keep-going: a run that goes on after reports is not kept")
    past = PastPhases()
    return reporting(options, "check", functools.partial(_check, past=past, store=workers.store_of(options)), past)


Run = Callable[[argparse.Namespace, Recorder, dict[str, Any], Reporter, Outcome], int]
"""Takes the options, the program's launches, fields of `Options` for runs of them, and what it reports in."""


def reporting(options: argparse.Namespace, name: str, run: Run, past: PastPhases | None = None) -> int:
    """The command ``name``: runs the program once, has ``run`` do the rest, and writes the files of reports. Returns
    the exit status: that of the program if it failed, or what ``run`` returns. ``past``: goes on after some reports,
    which are for ``run``. Raises SystemExit, OSError, ValueError:
    as ``run``, and for workers or files that cannot be used, before it."""
    workers.check_workers(options)
    reporter = command.make_reporter(options)
    with reporter.writing(command.outcome_of(options, name)) as outcome:
        how = command.run_options(options)
        going = command.make_going_on(options, functools.partial(reporter.report, Schedule()))
        if past is not None:
            past.otherwise = going
        recorder = record(options, how | {"going_on": going if past is None else past}, reporter)
        if isinstance(recorder, int):
            outcome.status = recorder
            if past is not None and past.noted is not None:
                reporter.report(Schedule(), past.noted)
                outcome.status = errors.FAULT
        else:
            outcome.launches = outcomes.launches_of(recorder.launches)
            if going is not None:
                going.note_suppressed(outcome)
            how["going_on"] = going.known() if going is not None else None
            outcome.status = run(options, recorder, how, reporter, outcome)
    return outcome.status


def _check(
    options: argparse.Namespace, recorder: Recorder, how: dict[str, Any], reporter: Reporter, outcome: Outcome, *,
    past: PastPhases, store: "Lines | None",
) -> int:
    limit = options.seconds if options.seconds is not None else (60.0 if options.seeds is None else None)
    budget = Budget(limit, options.seeds)
    with ProgressLine(shown=not options.quiet) as line, workers.workers_of(options) as where:

        def progress(tally: Tally, elapsed: float) -> None:
            share = elapsed / limit if limit is not None else None
            line.show(f"{tally.runs} runs of {len(recorder.launches)} launches, {elapsed:.0f} s", share)

        if store is not None:
            kept = Kept(store, options, recorder)
            where = where | {"kept": kept.found, "keep": kept.add}
        search = Search(
            recorder.launches, budget, how, options.results_may_differ, progress, always=options.always_search,
            places_alone=past.noted is not None, **where,
        )
        finding = search.run()
    outcome.launches = outcomes.launches_of(search.launches)
    if not options.quiet:
        for each in search.launches:
            files.show(outcomes.certificate_of(each))
    clean = finding is None and past.noted is None
    if clean or not options.quiet:
        files.show(outcomes.summary(search.launches, recorder.total, search.tally, clean))
    tally = search.tally
    outcome.summary = {
        "launches": recorder.total,
        "different_launches": len(recorder.launches),
        "runs": tally.runs,
        "kept": tally.kept,
        "places": tally.places,
        "orders": tally.orders,
        "orders_known": tally.known,
        "systematic": tally.systematic,
        "random": tally.random,
        "all_systematic_ran": tally.complete,
        "certified": tally.certified,
        "untried": outcomes.untried(search.launches),
    }
    if past.noted is not None:
        reporter.report(Schedule(), past.noted, *outcomes.trials_of(past.noted, search.launches))
    if finding is None:
        return errors.FAULT if reporter.faults else 0
    outcomes.report(finding, reporter)
    return errors.REFUSED if finding.refused else errors.FAULT


class Kept:
    """Runs of a program's launches that are in order, in a file."""

    def __init__(self, store: "Lines", options: argparse.Namespace, recorder: Recorder) -> None:
        words = [*command.run_words(options), *["--results-may-differ"] * options.results_may_differ]
        self._store, self._origin = store, workers.origin_of(options, words)
        self._launches = [_digest(each) for each in recorder.launches]

    def found(self, number: int, schedule: Schedule) -> bool:
        """Whether the file has the run."""
        return self._store.found(self._about(number, schedule)) is not None

    def add(self, number: int, schedule: Schedule) -> None:
        """Appends a run."""
        self._store.append(self._about(number, schedule), {})

    def _about(self, number: int, schedule: Schedule) -> dict[str, Any]:
        return {**self._origin, "launch": number, "launched": self._launches[number], "run": schedule.arguments()}


def _digest(recorded: RecordedLaunch) -> str:
    """Digest of what a launch executes and found in memory, and of the launch before it where that may overlap it: a
    run says nothing of another input. `RecordedLaunch.digest` has addresses, which differ between processes."""
    launch = recorded.launch
    shape = launch.grid, launch.block, launch.cluster, launch.dynamic_smem, launch.programmatic, launch.cooperative
    before = recorded.previous and _digest(recorded.previous)
    facts = launch.ptx, launch.kernel_name, shape, campaign.parameters_of(recorded), before
    digest = hashlib.sha256(repr(facts).encode())
    for content in (*(values for _, values in recorded.variables), *(image.content for image in recorded.memory)):
        digest.update(content)
    return digest.hexdigest()


def record(options: argparse.Namespace, how: dict[str, Any], reporter: Reporter) -> Recorder | int:
    """Runs the program once under the default schedule; its launches, or the exit status if it failed. Raises
    SystemExit, OSError, ValueError: as `check`."""
    files.check_program(options.script)
    recorder = Recorder()
    with capture(options.arch, Options(**how), recorder=recorder, roles=dict(options.roles)) as session:
        failed = functools.partial(reporter.report, Schedule())
        if status := program_run.run_program(options.script, options.arguments, session, failed, options.traceback):
            return status
    if not recorder.launches:
        raise ValueError(f"{options.script} launched no kernel")
    return recorder
