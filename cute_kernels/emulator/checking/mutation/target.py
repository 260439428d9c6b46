"""Target of mutations: a PTX text that can be run, and the schedules under which mutants are."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cute_kernels.emulator import Options
from cute_kernels.emulator.programs.recorded import Outcome as Replayed
from cute_kernels.emulator.programs.recorded import RecordedLaunch, Replay, differences


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run."""

    warp_instructions: int  # executed
    difference: str  # in words how the result differs from the expected one, "" if it does not
    certified: bool = False  # no other schedule gives another result


class Target(Protocol):
    """A kernel and inputs for it."""

    @property
    def ptx(self) -> str:
        """The text that is mutated."""

    def run(self, ptx: str, options: Options, repeat: int = 1) -> Outcome:
        """Executes a mutant of the text on fresh memory, ``repeat`` launches of it that may overlap. Raises
        EmulatorError: whatever the emulator reports."""


class RecordedTarget:
    """A kernel of any program, with launches that the program made. Results are judged by those of the unchanged text.
    ``launches``: of one kernel, at least one."""

    def __init__(self, launches: Sequence[RecordedLaunch]) -> None:
        self.ptx, _ = launches[0].kernel
        self._replays = [Replay(each) for each in launches]
        self._expected: dict[tuple[int, Options, bool], Replayed] = {}

    def run(self, ptx: str, options: Options, repeat: int = 1) -> Outcome:
        """Runs all launches: each from the memory that it found, and if ``repeat`` is not 1 behind the
        launch that it may overlap, or behind itself."""
        overlap, instructions, difference, certified = repeat > 1, 0, "", repeat == 1
        for number, replay in enumerate(self._replays):
            outcome = replay.run(options, ptx=ptx, overlap=overlap)
            instructions += outcome.report.warp_instructions
            certificate = outcome.report.certificate
            certified = certified and certificate is not None and certificate.given
            if ptx != self.ptx:
                difference = difference or differences(outcome, self._unchanged(number, options, overlap))
            if difference:
                break
        return Outcome(instructions, difference, certified)

    def _unchanged(self, number: int, options: Options, overlap: bool) -> Replayed:
        """Memory that the unchanged text leaves under a schedule."""
        free = dataclasses.replace(options, max_warp_instructions=None)
        key = (number, free, overlap)
        if key not in self._expected:
            self._expected[key] = self._replays[number].run(free, overlap=overlap)
        return self._expected[key]


SCHEDULES = {
    "eager": Options(),
    "lazy": Options(completion="lazy"),
    "lazy, random warps": Options(seed=1, completion="lazy", interleave="random"),
    "random": Options(
        seed=2, completion="random", interleave="random", spurious_try_wait_failures=True
    ),
    "starve": Options(seed=4, interleave="starve"),
    "lazy, starve": Options(seed=5, completion="lazy", interleave="starve"),
}
"""In the order in which they are tried: what a cheap one finds needs no other."""
