"""Findings of searches and campaigns of mutants, as reports and as lines for people."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cute_kernels.common.words import counted
from cute_kernels.emulator.checking.mutation.campaign import Kernel
from cute_kernels.emulator.checking.mutation.judge import Verdict, source_of
from cute_kernels.emulator.checking.search import Finding, Tally
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.programs.recorded import RecordedLaunch
from cute_kernels.emulator.reports import kinds
from cute_kernels.emulator.reports.diagnosis import place_of_line
from cute_kernels.emulator.reports.document import launch_facts
from cute_kernels.emulator.reports.model import Diagnostic
from cute_kernels.emulator.reports.reporter import Reporter
from cute_kernels.emulator.reports.sources import short_name, text_of_line


def launches_of(launches: Iterable[RecordedLaunch]) -> list[dict[str, Any]]:
    """Facts of launches."""
    return [
        launch_facts(
            each.number, short_name(each.launch.ptx, each.launch.kernel_name), each.launch,
            certificate=each.certificate,
        )
        for each in launches
    ]


def certificate_of(recorded: RecordedLaunch) -> str:
    """The certificate of a launch, or the places against it, in lines."""
    launch = recorded.launch
    title = f"launch {recorded.number} {short_name(launch.ptx, launch.kernel_name)}: "
    if recorded.certificate is None:
        return f"{title}no certificate; it ran without detectors"
    first, *lines = recorded.certificate.lines()
    return "\n  ".join([title + first, *lines])


def trials_of(error: EmulatorError, launches: Iterable[RecordedLaunch]) -> list[str]:
    """Outcomes of trials of the places that an error is about, in lines."""
    certificate = next(each.certificate for each in launches if each.number == error.launch_number)
    lines = [line for place in certificate.places if place.kind == error.kind for line in place.trials()]
    return list(dict.fromkeys(lines))


def untried(launches: Iterable[RecordedLaunch]) -> dict[str, int]:
    """How many places of launches were not tried, by reason."""
    return dict(sum((each.certificate.untried for each in launches if each.certificate is not None), Counter()))


def summary(launches: Sequence[RecordedLaunch], total: int, tally: Tally, clean: bool) -> str:
    """Summary of what was run, in one line; ``total``: launches with those that are equal to another one."""
    count = len(launches)
    same = f" ({total} in all; equal ones once)" if total != count else ""
    text = f"checked: {counted(count, 'launch', 'launches')}{same}"
    if tally.certified:
        text += f", {tally.certified} certified by {'its run' if tally.certified == 1 else 'one run each'}"
    if tally.runs or tally.certified < count:
        text += f", {counted(tally.runs, 'run')} beside the default schedule: "
        text += f"{tally.places} of places, " if tally.places else ""
        text += f"{tally.orders} of {tally.known} other orders of them, " if tally.known else ""
        text += f"{tally.systematic} systematic, {tally.random} random"
    if reasons := untried(launches):
        listed = "; ".join(f"{number}: {reason}" for reason, number in reasons.items())
        text += f"; {counted(sum(reasons.values()), 'place')} not tried ({listed})"
    text += f"; {counted(tally.kept, 'run')} taken from --store" if tally.kept else ""
    if not clean:
        return text
    return text + ("; clean" if tally.complete else "; clean, but not all systematic schedules fitted into --seconds")


def report(finding: Finding, reporter: Reporter) -> None:
    """Prints and keeps what was found."""
    schedule, steps = finding.schedule, ()
    if finding.fewest is not None:
        options = shlex.join(finding.fewest.schedule.arguments())
        steps = (f"in turn but for these ({options})", *finding.fewest.lines)
    order = (f"in this order: {finding.order}",) if finding.order else ()
    if finding.error is not None:
        reporter.report(schedule, finding.error, *order, steps=steps)
        return
    name, kind = finding.recorded.launch.kernel_name, kinds.kind("different-result")
    ptx = finding.recorded.launch.ptx
    reporter.show(
        Diagnostic(
            kind.name,
            finding.kind,
            finding.text,
            finding.text,
            help=kind.help,
            kernel=short_name(ptx, name),
            kernel_name=name,
            launch=finding.recorded.number,
            replay=tuple(reporter.replay(schedule)),
            seed=schedule.seed,
            schedule=tuple(schedule.arguments()),
            steps=steps,
            notes=(*order, "the replay runs the program under this schedule, and fails if it compares its result"),
        )
    )


def survivor(kernel: Kernel, verdict: Verdict) -> Diagnostic:
    """Report of a mutant that nobody noticed."""
    kind = kinds.kind("surviving-mutant")
    sentence = f"nothing notices {verdict.mutation}: {verdict.original}"
    return Diagnostic(
        kind.name,
        "",
        sentence,
        sentence,
        "warning",
        place_of_line(kernel.ptx, verdict.line, verdict.original),
        help=kind.help,
        kernel=short_name(kernel.ptx, kernel.name),
        kernel_name=kernel.name,
    )


def kernel_lines(kernel: Kernel, verdicts: list[Verdict], quiet: bool) -> Iterator[str]:
    """Lines that say what noticed the mutants of a kernel, and which survive; with ``quiet`` these alone."""
    if not quiet:
        yield f"kernel {short_name(kernel.ptx, kernel.name)}"
        killers = Counter(verdict.killer for verdict in verdicts if verdict.killed)
        by = ", ".join(f"{name} {count}" for name, count in killers.most_common())
        yield f"  {counted(len(verdicts), 'mutant')}, {sum(killers.values())} killed" + (f": {by}" if by else "")
        refused = sum(verdict.refused for verdict in verdicts)
        if refused:
            yield f"  {refused} with PTX that the emulator does not know, which count neither way"
    for verdict in verdicts:
        if verdict.survived:
            yield f"  survives: {verdict.mutation}: PTX line {verdict.line}: {verdict.original}"
            if (source := source_of(kernel.ptx, verdict.line)) is not None:
                yield f"    {verdict.place}: {text_of_line(*source).strip()}"
