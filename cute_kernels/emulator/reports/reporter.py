"""Reports of a command on the faults that it finds: printed, kept, and written to files in the end."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cute_kernels.common import files
from cute_kernels.emulator.errors import FAULT, EmulatorError
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.reports import sarif
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.emulator.reports.document import Outcome, document, dumps
from cute_kernels.emulator.reports.model import Diagnostic
from cute_kernels.emulator.reports.text import render


@dataclass
class Reporter:
    """Prints reports on stderr, keeps them, and writes them to files in the end. ``replay``: words of the command that
    runs the program under a schedule. ``verbose``: with all that is known. ``report_file``, ``sarif_file``: files to
    write, or None. ``diagnostics``: what has been reported, in order. ``others``: more files to write in the end, and
    what gives their texts."""

    replay: Callable[[Schedule], list[str]] = lambda schedule: []
    verbose: bool = False
    report_file: Path | None = None
    sarif_file: Path | None = None
    diagnostics: list[Diagnostic] = field(default_factory=list)
    others: list[tuple[Path, Callable[[], str]]] = field(default_factory=list)

    def report(
        self, schedule: Schedule, error: EmulatorError, *notes: str, steps: tuple[str, ...] = ()
    ) -> Diagnostic:
        """Makes a report of an error that was raised under a schedule, prints it with ``notes``, and keeps it."""
        error.facts.notes = [*dict.fromkeys((*error.facts.notes, *notes))]  # an error may be reported again
        found = diagnose(
            error, replay=self.replay(schedule), seed=schedule.seed, schedule=schedule.arguments()
        )
        found = dataclasses.replace(found, steps=steps)
        self.show(found)
        return found

    def show(self, diagnostic: Diagnostic) -> None:
        """Prints a report and keeps it."""
        self.diagnostics.append(diagnostic)
        files.complain(render(diagnostic, verbose=self.verbose, color=_colored()))

    @property
    def faults(self) -> bool:
        """Whether a kernel was found to be at fault."""
        return any(each.kind != "unsupported" and each.level == "error" for each in self.diagnostics)

    def check_files(self) -> None:
        """Refuses files that cannot be written, before any work is done; raises OSError for one that cannot."""
        for path in (self.report_file, self.sarif_file):
            if path is not None:
                files.check_output(path)

    @contextlib.contextmanager
    def writing(self, outcome: Outcome) -> Iterator[Outcome]:
        """The block is a command: it completes the outcome, which is written with all reports in the end. Raises
        SystemExit: the program's own, which counts as the status."""
        try:
            yield outcome
        except SystemExit as end:
            outcome.status = end.code if isinstance(end.code, int) else int(end.code is not None)
            raise
        except files.NotWritten as error:  # a fault that was found before it counts for more
            outcome.status = FAULT if self.faults else 2
            files.complain(f"cute-kernels: error: {error}")
        except BaseException as error:
            outcome.status = 2 if isinstance(error, (ValueError, OSError)) else 1
            raise
        finally:
            try:
                self.write_files(outcome)
            except OSError as error:
                if not outcome.status:
                    raise
                files.complain(f"cute-kernels: error: {error}")  # the status says what happened before

    def write_files(self, outcome: Outcome) -> None:
        """Writes the files that were asked for, of what has been kept; each, whatever becomes of the others. Raises
        OSError: naming those that could not be written."""
        outputs = [
            (self.report_file, lambda: dumps(document(outcome, self.diagnostics))),
            (self.sarif_file, lambda: dumps(sarif.log(outcome, self.diagnostics))),
            *self.others,
        ]
        failures = []
        for path, text in outputs:
            try:
                if path is not None:
                    files.write_text(path, text())
            except OSError as error:
                failures.append(str(error))
        if failures:
            raise OSError("; ".join(failures))


def _colored() -> bool:
    """Whether stderr is a terminal, and the user has nothing against colours (https://no-color.org)."""
    return sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
