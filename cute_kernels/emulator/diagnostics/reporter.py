"""What a command does with the faults that it finds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from cute_kernels.emulator.diagnostics.diagnosis import diagnose
from cute_kernels.emulator.diagnostics.model import Diagnostic
from cute_kernels.emulator.diagnostics.text import render
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.schedule import Schedule


@dataclass
class Reporter:
    """Prints reports on stderr, and keeps them.

    Args:
        replay: words of the command that runs the program under a schedule.
        verbose: with all that is known.

    Attributes:
        diagnostics: what has been reported, in order.
    """

    replay: Callable[[Schedule], list[str]] = lambda schedule: []
    verbose: bool = False
    diagnostics: list[Diagnostic] = field(default_factory=list)

    def report(self, schedule: Schedule, error: EmulatorError, *notes: str) -> Diagnostic:
        """Makes a report of an error that was raised under a schedule, prints it with ``notes``, and keeps it."""
        error.facts.notes += notes
        found = diagnose(
            error, replay=self.replay(schedule), seed=schedule.seed, schedule=schedule.arguments()
        )
        self.show(found)
        return found

    def show(self, diagnostic: Diagnostic) -> None:
        """Prints a report and keeps it."""
        self.diagnostics.append(diagnostic)
        print(render(diagnostic, verbose=self.verbose, color=_colored()), file=sys.stderr, flush=True)


def _colored() -> bool:
    """Whether stderr is a terminal, and the user has nothing against colours (https://no-color.org)."""
    return sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
