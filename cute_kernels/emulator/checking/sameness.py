"""Whether two runs leave the same bits in device memory, launch by launch, and if not, where first."""

import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels.common import files
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.programs.capturing import capture
from cute_kernels.emulator.programs.program_run import run_program
from cute_kernels.emulator.reports.reporter import Reporter
from cute_kernels.emulator.reports.sources import short_name

OTHER_INPUTS = "not the same inputs, or memory that nobody has written"


@dataclass(frozen=True)
class LaunchMemory:
    """Device memory around one launch: uint8 per array, in the order in which the program allocated them."""

    name: str  # of the kernel
    # before, after: contents
    before: tuple[np.ndarray, ...]
    after: tuple[np.ndarray, ...]
    names: tuple[str, ...] = ()  # of the arrays, "" where they have none

    def title(self, array: int) -> str:
        """An array in words."""
        return (self.names[array] if array < len(self.names) else "") or f"array {array + 1}"


class MemoryLog:
    """Memory around all launches of a program: a recorder of `capture`."""

    def __init__(self) -> None:
        self.launches: list[LaunchMemory] = []
        self._memory = GlobalMemory()
        self._regions: list[tuple[int, int]] = []

    def take(
        self,
        launch: CapturedLaunch,
        regions: Iterable[tuple[int, int]],
        names: Mapping[int, str] | None = None,
        **_: Any,
    ) -> None:
        """Notes a launch that is about to run; ``names`` of regions by address."""
        self._regions = [each for each in regions if each[1]]
        self._memory.clear()
        for address, nbytes in self._regions:
            self._memory.register(address, nbytes)
        named = tuple((names or {}).get(address, "") for address, _ in self._regions)
        self.launches.append(LaunchMemory(short_name(launch.ptx, launch.kernel_name), self._now(), (), named))

    def ended(self, report: Any) -> None:
        """The launch is complete."""
        last = self.launches[-1]
        self.launches[-1] = dataclasses.replace(last, after=self._now())

    def _now(self) -> tuple[np.ndarray, ...]:
        return tuple(self._memory.view(*each).copy() for each in self._regions)


def memory_of_program(side: str, arch: str, failures: list[str]) -> list[LaunchMemory] | int:
    """Memory around the launches of a program, ``side`` of a command line, or the exit status of a kernel's fault.

    A program that fails by itself is added to ``failures``; its launches before that count. Raises ValueError: it
    launches nothing; OSError: there is no such program."""
    script, *arguments = shlex.split(side)
    files.check_program(script)
    log, reporter = MemoryLog(), Reporter()
    with capture(arch, recorder=log) as session:
        try:
            failed = lambda error, *notes: reporter.report(Schedule(), error, *notes)  # noqa: E731
            status = run_program(script, arguments, session, failed)
        except SystemExit as end:
            status = 0 if end.code in (None, 0) else 1
    if status not in (0, 1):
        return status
    if not log.launches:
        raise ValueError(f"{side} launched no kernel" + " before it failed" * status)
    failures += [side] * status
    return log.launches


@dataclass(frozen=True)
class Difference:
    """The first bytes that differ."""

    launch: int  # number of the launch behind which they do; of B ``other``, where that is another one
    other: int
    kernel: str
    array: str  # which, in words
    byte: int  # of it
    nbytes: int  # that are compared
    bytes_differ: int  # of the array
    # a, b: eight bytes from a multiple of eight on, or fewer at the end
    a: bytes
    b: bytes
    inputs: str = ""  # what differs before the launch already though no launch has written it, in words, or ""

    def __str__(self) -> str:
        other = f" of A and {self.other} of B" if self.other != self.launch else ""
        text = (
            f"launch {self.launch}{other} ({self.kernel}): {self.array} differs in {self.bytes_differ} of "
            f"{self.nbytes} bytes, first at byte {self.byte}; from byte {self.byte // 8 * 8} on A has "
            f"{self.a.hex(' ')}, B {self.b.hex(' ')}"
        )
        return f"{text}\n{OTHER_INPUTS}: {self.inputs}" if self.inputs else text


@dataclass(frozen=True)
class Answer:
    """Whether two runs leave the same bits."""

    launches: tuple[int, int]  # numbers of launches that are compared, of A and of B
    difference: Difference | None  # the first one
    inputs: str  # where there is none, inputs that differ, in words
    failed: tuple[str, ...]  # programs that failed by themselves, behind the launches that are compared

    @property
    def status(self) -> int:
        """Exit status of the command: 0 the same, 1 they differ, 2 not comparable."""
        return 1 if self.difference is not None else 2 if self.inputs else 0

    def lines(self) -> list[str]:
        """The answer for people."""
        a, b = self.launches
        lines = [f"{side} failed, after its launches: {a} of A and of B are compared" for side in self.failed]
        if self.difference is not None:
            return [*lines, f"different: {self.difference}"]
        how = f"{a} launches" if a == b else f"the last of {a} launches and of {b}"
        return [*lines, f"not comparable: {OTHER_INPUTS}: {self.inputs}" if self.inputs else f"same: {how}, bit by bit"]

    def facts(self) -> dict[str, Any]:
        """The answer for JSON."""
        first = dataclasses.asdict(self.difference) if self.difference is not None else None
        if first is not None:
            first |= {"a": self.difference.a.hex(), "b": self.difference.b.hex()}
        facts = {"same": self.status == 0, "launches": list(self.launches), "inputs": self.inputs}
        return {**facts, "failed": list(self.failed), "first_difference": first}


def compared(
    a: Sequence[LaunchMemory], b: Sequence[LaunchMemory], *, prefix: bool = False, failed: Sequence[str] = ()
) -> Answer:
    """Compares two runs as `first_difference` does; with programs that ``failed`` as far as both went."""
    if failed:
        both = min(len(a), len(b))
        a, b = a[:both], b[:both]
    difference = first_difference(a, b, prefix=prefix)
    inputs = different_inputs(a, b) if difference is None else difference.inputs
    return Answer((len(a), len(b)), difference, inputs, tuple(failed))


def first_difference(
    a: Sequence[LaunchMemory], b: Sequence[LaunchMemory], *, prefix: bool = False
) -> Difference | None:
    """Where two runs differ first, in what their launches write.

    Runs of as many launches are compared launch by launch, others by what their last ones leave. ``a``, ``b``: each at
    least one launch; ``prefix``: arrays of different sizes are compared as far as the smaller one goes: a batch of
    which the other one has the first rows. Raises ValueError: another number of arrays, or arrays of other sizes
    without ``prefix``."""
    pairs = list(zip(range(len(a)), range(len(b)))) if len(a) == len(b) else [(len(a) - 1, len(b) - 1)]
    written: dict[int, np.ndarray] = {}
    for first, second in pairs:
        one, other = a[first], b[second]
        sizes = _sizes(one, other, prefix)
        found = None
        for array, nbytes in enumerate(sizes):
            start = (a[0], b[0]) if len(pairs) < max(len(a), len(b)) else (one, other)
            changed = _changed(start[0], one, array, nbytes) | _changed(start[1], other, array, nbytes)
            differs = np.flatnonzero(changed & (one.after[array][:nbytes] != other.after[array][:nbytes]))
            if len(differs) and found is None:
                found = array, differs
            if written.get(array, changed).shape == changed.shape:
                written[array] = written.get(array, np.zeros(nbytes, bool)) | changed
        if found is None:
            continue
        array, differs = found
        byte = int(differs[0])
        words = slice(byte // 8 * 8, min(byte // 8 * 8 + 8, sizes[array]))
        return Difference(
            first + 1, second + 1, one.name, one.title(array), byte, sizes[array], len(differs),
            one.after[array][words].tobytes(), other.after[array][words].tobytes(), _inputs(one, other, sizes, written),
        )  # fmt: skip
    return None


def different_inputs(a: Sequence[LaunchMemory], b: Sequence[LaunchMemory]) -> str:
    """Inputs that differ between two runs without a `first_difference`, in words, or "".

    Equal answers to different questions say nothing, and a launch that works in place may leave both as they were.
    """
    for one, other in zip(a, b) if len(a) == len(b) else [(a[0], b[0])]:
        sizes = [min(len(x), len(y)) for x, y in zip(one.before, other.before)]
        if found := _inputs(one, other, sizes, {}):
            return found
    return ""


def _sizes(one: LaunchMemory, other: LaunchMemory, prefix: bool) -> list[int]:
    """Bytes of each array that are compared."""
    if len(one.after) != len(other.after):
        raise ValueError(f"A has {len(one.after)} arrays on the device and B {len(other.after)}")
    sizes = [(len(x), len(y)) for x, y in zip(one.after, other.after)]
    for array, (x, y) in enumerate(sizes):
        if x != y and not prefix:
            raise ValueError(
                f"{one.title(array)} has {x} bytes in A and {y} in B; --prefix compares the first {min(x, y)}"
            )
    return [min(each) for each in sizes]


def _changed(start: LaunchMemory, launch: LaunchMemory, array: int, nbytes: int) -> np.ndarray:
    """Bytes that have other values now; all of an array that was not there at the start."""
    if array >= len(start.before) or len(start.before[array]) != len(launch.after[array]):
        return np.ones(nbytes, bool)
    return start.before[array][:nbytes] != launch.after[array][:nbytes]


def _inputs(one: LaunchMemory, other: LaunchMemory, sizes: Sequence[int], written: Mapping[int, np.ndarray]) -> str:
    found = []
    for array, nbytes in enumerate(sizes):
        if array < min(len(one.before), len(other.before)):
            differs = one.before[array][:nbytes] != other.before[array][:nbytes]
            differs &= ~written.get(array, np.zeros(nbytes, bool))
            if differs.any():
                found.append(f"{one.title(array)} from byte {int(differs.argmax())} on")
    return ", ".join(found)
