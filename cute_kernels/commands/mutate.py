"""``cute-kernels mutate SCRIPT ARGS...``: breaks the synchronisation of a program's kernels: what is not noticed?"""

import argparse
import dataclasses
import functools
import hashlib
import json
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from cute_kernels.commands import check, workers
from cute_kernels.commands import emulate as command
from cute_kernels.commands.kernel_options import count
from cute_kernels.common import files
from cute_kernels.common.progress import ProgressLine
from cute_kernels.common.words import counted
from cute_kernels.emulator import errors
from cute_kernels.emulator.checking import outcomes
from cute_kernels.emulator.checking.mutation import campaign
from cute_kernels.emulator.checking.mutation.campaign import Kernel
from cute_kernels.emulator.checking.mutation.judge import Verdict, verdict_on
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.programs.recorded import Recorder
from cute_kernels.emulator.reports.document import Outcome
from cute_kernels.emulator.reports.reporter import Reporter

if TYPE_CHECKING:
    from cute_kernels.explore.store import Lines

BELOW = 5
"""Exit status where the score is below ``--fail-under``."""

EXIT_STATUSES = command.exit_statuses(
    {
        0: "all mutants were judged",
        2: "arguments that cannot be used, a program without such a kernel",
        errors.FAULT: "an unchanged kernel is at fault",
        BELOW: "the score is below --fail-under",
    }
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = command.add_program_command(
        commands,
        "mutate",
        mutate,
        help="drop or weaken synchronisation of a program's kernels, and list what nothing notices",
        description="Runs a Python program once in the emulator. Then it drops or weakens every synchronising "
        "instruction in its kernels' PTX, one at a time, and runs the launches again under six schedules, from the "
        "memory that they found, until the emulator reports a fault or a result differs. Mutants that survive are "
        "printed with their PTX line and source line: the instruction is unnecessary, or the launches do not need it.",
        statuses=EXIT_STATUSES,
    )
    parser.add_argument(
        "--kernel", metavar="NAME", default="", help="only kernels whose name contains this (default: all)"
    )
    parser.add_argument(
        "--match", metavar="TEXT", default="", help="only mutants whose key (MUTATION OPCODE #NUMBER) contains this"
    )
    parser.add_argument("--every", type=count, default=1, metavar="K", help="only every K-th mutant (default: all)")
    workers.add_worker_arguments(parser)
    workers.add_store(parser, "verdict")
    parser.add_argument(
        "--launches",
        type=count,
        metavar="N",
        help="run each mutant in at most N launches of its kernel that differ in shape, parameters, number of executed "
        "instructions, or integers that parameters point to (default: all)",
    )
    parser.add_argument(
        "--fail-under", type=percentage, metavar="PERCENT", help=f"exit with {BELOW} if the score is below this"
    )
    parser.add_argument("--output", type=files.from_here, metavar="FILE", help="write score and all verdicts as JSON")


def percentage(text: str) -> float:
    """A number from 0 to 100, as argparse's ``type``."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a percentage from 0 to 100")
    return value


def mutate(options: argparse.Namespace) -> int:
    """Runs the program and mutants of its kernels; returns the exit status, see `EXIT_STATUSES`. Raises SystemExit: the
    program's own; OSError: no such program, or a file that cannot be written; ValueError: no kernel of that name, or
    no mutant of that key."""
    if options.output is not None:
        files.check_output(options.output)
    return check.reporting(options, "mutate", functools.partial(_mutate, workers.store_of(options)))


def _mutate(
    store: "Lines | None", options: argparse.Namespace, recorder: Recorder, how: dict[str, Any], reporter: Reporter,
    outcome: Outcome,
) -> int:
    kernels = [each for each in campaign.kernels(recorder.launches, options.launches) if options.kernel in each.name]
    if not kernels:
        names = ", ".join(dict.fromkeys(each.launch.kernel_name for each in recorder.launches))
        raise ValueError(f"--kernel {options.kernel!r}: no kernel has such a name; the program launched {names}")
    work = [(kernel, chosen(kernel, options)) for kernel in kernels]
    if not any(numbers for _, numbers in work):
        what = f"has {options.match!r} in its key" if options.match else "is there"
        raise ValueError(f"no mutant {what}: the kernels' PTX has no such synchronisation")
    start, verdicts = time.perf_counter(), []
    with workers.workers_of(options) as where:
        for kernel, numbers in work:
            try:
                found = judge(kernel, numbers, how, where, options.quiet, store and Kept(store, options, kernel))
            except EmulatorError as error:
                # Under one of six schedules, which need not be one that options of `emulate` describe.
                reporter.replay = lambda schedule: command.replay_words(options, schedule, "check")
                reporter.report(Schedule(), error, "the kernel is unchanged")
                return errors.exit_status(error)
            for line in outcomes.kernel_lines(kernel, found, options.quiet):
                files.show(line)
            reporter.diagnostics += [outcomes.survivor(kernel, each) for each in found if each.survived]
            verdicts += found
    score, seconds = campaign.score(verdicts), time.perf_counter() - start
    if not options.quiet:
        files.show(f"mutated: {counted(len(verdicts), 'mutant')} in {seconds:.1f} s, score {score:.1%}")
    outcome.summary = {
        "score": score,
        "mutants": len(verdicts),
        "killed": sum(each.killed for each in verdicts),
        "survived": sum(each.survived for each in verdicts),
        "refused": sum(each.refused for each in verdicts),
    }
    if options.output is not None:
        entries = [dataclasses.asdict(verdict) for verdict in verdicts]
        document = {"score": score, "mutants": entries}
        reporter.others.append((options.output, lambda: json.dumps(document, indent=1) + "\n"))
    return BELOW if options.fail_under is not None and 100 * score < options.fail_under else 0


def chosen(kernel: Kernel, options: argparse.Namespace) -> list[int]:
    """Numbers of the mutants that --match and --every leave."""
    matching = [number for number, mutant in enumerate(kernel.mutants) if options.match in mutant.key]
    return matching[:: options.every]


class Kept:
    """Verdicts on mutants of a kernel in a file."""

    def __init__(self, store: "Lines", options: argparse.Namespace, kernel: Kernel) -> None:
        self._store, self._kernel = store, kernel
        self._origin = {
            **workers.origin_of(options, command.run_words(options)), "launches": options.launches,
            "ptx": hashlib.sha256(kernel.ptx.encode()).hexdigest(), "kernel": kernel.name,
        }  # fmt: skip

    def found(self, number: int) -> Verdict | None:
        """The verdict on a mutant, where the file has it."""
        mutant = self._kernel.mutants[number]
        record = self._store.found({**self._origin, "mutant": mutant.key})
        if record is None:
            return None
        facts = {name: record[name] for name in ("killer", "schedule", "message")}
        return dataclasses.replace(verdict_on(self._kernel.name, self._kernel.ptx, mutant), **facts)

    def add(self, verdict: Verdict) -> None:
        """Appends a verdict."""
        self._store.verdict({**self._origin, "mutant": verdict.key}, verdict)


def judge(
    kernel: Kernel, numbers: list[int], how: dict[str, Any], where: dict[str, Any], quiet: bool,
    kept: Kept | None = None,
) -> list[Verdict]:
    """Verdicts on mutants of a kernel, those that are ``kept`` included; without ``quiet`` with a line that says how
    far it is."""
    counts: Counter[str] = Counter()
    known = {number: verdict for number in numbers if kept and (verdict := kept.found(number)) is not None}
    left = [number for number in numbers if number not in known]
    with ProgressLine(shown=not quiet) as line:
        line.show(f"the unchanged kernel {kernel.name}")

        def done(verdict: Verdict) -> None:
            if kept is not None:
                kept.add(verdict)
            counts["done"] += 1
            counts["survive"] += verdict.survived
            text = f"{counts['done']}/{len(left)} mutants, {counts['survive']} survive"
            line.show(text, counts["done"] / len(left))

        judged = iter(campaign.judge_mutants(kernel, left, how, done=done, **where))
        return [known.get(number) or next(judged) for number in numbers]
