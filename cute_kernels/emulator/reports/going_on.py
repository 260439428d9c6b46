"""Execution goes on after reports of detectors: ``--keep-going``, and reports that are left out, ``--suppress``."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from cute_kernels.common.files import complain
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.emulator.reports.document import Outcome
from cute_kernels.emulator.reports.kinds import KINDS
from cute_kernels.emulator.reports.model import Diagnostic, Place


@dataclass(frozen=True)
class Suppression:
    """Reports that are left out: of a kind, and if a file is given, those of which a side is in it, at the line.
    ``file``: end of a path, whole parts of it: ``kernels/add.py`` or ``add.py``; "" for all; ``line``: 0 for all
    lines."""

    kind: str
    file: str = ""
    line: int = 0

    @classmethod
    def of(cls, text: str) -> Suppression:
        """``KIND[:FILE[:LINE]]``. Raises ValueError: anything else, a kind that does not exist, or one after which
        execution cannot go on."""
        kind, _, rest = text.strip().partition(":")
        if kind not in KINDS or not KINDS[kind].detector:
            legal = ", ".join(name for name, each in KINDS.items() if each.detector)
            why = "execution cannot go on after it" if kind in KINDS else "there is no such kind"
            raise ValueError(f"suppression {text!r}: {kind!r}: {why}: must be one of {legal}")
        file, colon, line = rest.rpartition(":")
        if colon and line.isdecimal():
            return cls(kind, file, int(line))
        return cls(kind, rest)

    def __str__(self) -> str:
        return ":".join(filter(None, (self.kind, self.file, str(self.line) if self.line else "")))

    def matches(self, diagnostic: Diagnostic, found: str) -> bool:
        """Whether a report is one of them; ``found``: its kind before a cause was looked for, which counts as well."""
        if self.kind not in (diagnostic.kind, found):
            return False
        places = [diagnostic.place, *(place for each in diagnostic.related for place in each.places)]
        return not self.file or any(self._at(place) for place in places)

    def _at(self, place: Place) -> bool:
        if place.source is None:
            return False
        end = PurePath(self.file).parts
        return PurePath(place.source.path).parts[-len(end) :] == end and self.line in (0, place.source.line)


def read(path: Path) -> list[Suppression]:
    """Suppressions of a file: one a line, ``#`` begins a comment. Raises OSError: it cannot be read; ValueError: naming
    the line that is none."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if text := line.partition("#")[0].strip():
            try:
                found.append(Suppression.of(text))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return found


def _unheard(error: EmulatorError) -> None:
    """Nobody hears of it; a lambda could not be sent to other processes."""


@dataclass
class GoingOn:
    """`Options.going_on` of a command. ``keep_going``: go on after every report of a detector; else only after those
    that are suppressed. ``suppressions``: what is left out. ``report``: called with each distinct report: of another
    kind, at other lines, or of another kernel. ``suppressed``: how often a suppression left a report out."""

    keep_going: bool
    suppressions: Sequence[Suppression] = ()
    report: Callable[[EmulatorError], object] = _unheard
    suppressed: Counter[str] = field(default_factory=Counter)
    _seen: set[object] = field(default_factory=set)

    def known(self) -> GoingOn:
        """For further runs, in other processes too: goes on after what has been reported or is suppressed."""
        return GoingOn(False, self.suppressions, _seen=set(self._seen))

    def note_suppressed(self, outcome: Outcome) -> None:
        """Says what was left out, in the outcome and in a line."""
        if self.suppressed:
            outcome.suppressed = dict(self.suppressed)
            text = ", ".join(f"{count} by {name}" for name, count in self.suppressed.items())
            complain(f"suppressed reports: {text}")

    def __call__(self, error: EmulatorError) -> bool:
        """Whether execution goes on."""
        if error.kind not in KINDS or not KINDS[error.kind].detector:
            return False
        key = tuple(_identity(error))
        if key in self._seen:  # asked often: a race shows at every access
            return True
        report = diagnose(error) if self.suppressions else None
        suppression = next((each for each in self.suppressions if each.matches(report, error.kind)), None)
        if suppression is not None:
            self.suppressed[str(suppression)] += 1
        elif not self.keep_going:
            return False
        else:
            self.report(error)
        self._seen.add(key)
        return True


def _identity(error: EmulatorError) -> Iterator[object]:
    """Yields what tells reports apart: not the warp, the bytes or the time."""
    yield error.kind
    yield error.source or error.ptx_line
    yield zlib.crc32((error.ptx or "").encode())  # the same in all processes
    other = error.facts.other
    # Of an unrolled loop's instructions any may be the one.
    yield frozenset(each.source or each.line for each in other.instructions) if other is not None else None
    barrier = error.facts.barrier
    yield barrier.init.line if barrier is not None and barrier.init is not None else None


def all_of(texts: Iterable[Suppression], files: Iterable[Path]) -> list[Suppression]:
    """Suppressions of a command line and of its files. Raises OSError, ValueError: as `read`."""
    return [*texts, *(each for path in files for each in read(path))]
