"""Launches of a program with the memory that they found, to be run again: under other schedules, with other PTX.

A recorded launch is plain data, and may be sent to other processes. Its memory lies elsewhere then; addresses in its
parameters, and in device memory, are moved (`Relocation`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.errors import EmulatorError, attaching
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.machine.launch.run import Report
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.options import Options
from cute_kernels.emulator.programs.host import execute
from cute_kernels.emulator.races.certificate import Certificate

_ALIGNMENT = 1024  # bytes; more than the CUDA allocator promises
_SMALLEST_ADDRESS = 1 << 32  # of what is taken for an address in device memory
GUARD = 256 << 10  # bytes on each side of memory: 256 rows beyond the end of a matrix with 1 KiB per row

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Functions of torch that make device memory and launch nothing."""


def guarded(nbytes: int, alignment: int) -> np.ndarray:
    """Host memory that stands for device memory: zeros, uint8 [nbytes] at a multiple of ``alignment`` bytes.

    Nothing else is within `GUARD` bytes of it: an access is legal where some allocation is, and one beyond it must not
    be a legal access of the next. Pages of a guard are never touched, and take address space alone. What memory held
    before would make two runs of a program differ that reads what it never wrote.
    """
    raw = np.zeros(GUARD + alignment + nbytes + GUARD, np.uint8)
    skip = GUARD + -(raw.ctypes.data + GUARD) % alignment
    return raw[skip : skip + nbytes]


@dataclass(frozen=True)
class Relocation:
    """Ranges and where they lie elsewhere: (address here, address there, bytes)."""

    ranges: tuple[tuple[int, int, int], ...]

    def words(self, data: bytes, *, back: bool = False) -> bytes:
        """``data`` with every aligned 64-bit word that is an address inside (or at the end of) a range moved.

        For parameters, tensor maps (whose first word is an address) and, ``back``, whatever a kernel leaves. Not for
        other data from ranges below 2^32 (host arrays can lie there, in the heap of an executable that is not
        position-independent), where a 32-bit operand in a 64-bit slot looks like an address. Device memory lies above.
        """
        size = len(data) // 8 * 8
        words = np.frombuffer(data[:size], np.uint64).copy()
        moved = words.copy()
        for host, device, nbytes in self.ranges:
            source, target = (device, host) if back else (host, device)
            inside = (words >= np.uint64(source)) & (words <= np.uint64(source + nbytes))
            moved[inside] = words[inside] - np.uint64(source) + np.uint64(target)
        return moved.tobytes() + data[size:]


class StreamOrder:
    """Whether a program's launch comes directly behind the one before it, so that the two may overlap.

    Programmatic stream serialisation orders a launch against the kernel right before it in its stream. Where the
    program fills or copies device memory in between, that work is what it may overlap, and everything before is over.
    """

    def __init__(self) -> None:
        self._left: dict[tuple[int, int], bytes] | None = None
        self._other_work = False
        self._stream = 0

    def made(self, function: str) -> None:
        """A function of torch has made device memory."""
        self._other_work |= function not in _ALLOCATIONS

    def launched(self, regions: Iterable[tuple[int, int]], stream: int = 0) -> None:
        """A launch is over; (address, bytes) of all device memory, and the handle of its stream."""
        self._left, self._other_work, self._stream = _digests(regions), False, stream

    def directly_follows(self, regions: Iterable[tuple[int, int]], stream: int = 0) -> bool:
        """Whether a launch now would follow the last one in its stream with no other work on the device in between."""
        if self._left is None or self._other_work or stream != self._stream:
            return False
        return all(self._left.get(region, digest) == digest for region, digest in _digests(regions).items())


def _digests(regions: Iterable[tuple[int, int]]) -> dict[tuple[int, int], bytes]:
    memory = GlobalMemory()
    found = {}
    for address, nbytes in regions:
        memory.register(address, nbytes)
        found[address, nbytes] = hashlib.blake2b(memory.view(address, nbytes), digest_size=16).digest()
    return found


@dataclass(frozen=True)
class MemoryImage:
    """Device memory: the address of its first byte, and its bytes as uint8 ``[n]``. ``name``: of the parameter that it
    is, or ""; ``shape``: of the tensor, row by row, and bytes of an element; () and 0 where that is not known."""

    address: int
    content: np.ndarray
    name: str = ""
    shape: tuple[tuple[int, ...], int] = ((), 0)

    @property
    def span(self) -> tuple[int, int]:
        """Address of the first byte, and the one behind the last."""
        return self.address, self.address + self.content.nbytes


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch as a program made it."""

    number: int  # which launch of the program it is, from 1 on
    launch: CapturedLaunch  # shape, parameters and PTX
    memory: tuple[MemoryImage, ...]  # all device memory before the launch
    # the launch before it, where this one may begin before that one is over (programmatic stream serialisation, and no
    # other work on the device in between), else None
    previous: RecordedLaunch | None = None
    roles: tuple[str, ...] = ()  # names of warps, () where none are given
    # name and bytes of the module's .global variables before the launch; () before its first one
    variables: tuple[tuple[str, np.ndarray], ...] = ()
    warp_instructions: int = 0  # how many it executed in the program; 0 where it did not end
    barriers: tuple[tuple[int, str], ...] = ()  # of mbarriers, as of `Options`
    # what its run in the program says of all other schedules; None where it did not end, or ran without detectors
    certificate: Certificate | None = None

    @property
    def kernel(self) -> tuple[str, str]:
        """PTX and name of the entry."""
        return self.launch.ptx, self.launch.kernel_name

    @property
    def ctas(self) -> int:
        """Number of CTAs of a cluster."""
        x, y, z = self.launch.cluster
        return x * y * z

    @property
    def warps(self) -> int:
        """Number of warps of a CTA."""
        x, y, z = self.launch.block
        return -(-x * y * z // 32)

    @functools.cached_property
    def meets(self) -> bool:
        """Whether its clusters may see what others do while both run."""
        launch = self.launch
        several = math.prod(launch.grid) > math.prod(launch.cluster)
        return several and bool(parse(launch.ptx).kernels[launch.kernel_name].dependence)

    def digest(self) -> bytes:
        """Equal for launches that do the same, behind launches that do the same where they may overlap those."""
        found = hashlib.blake2b(digest_size=16)
        facts = dataclasses.astuple(dataclasses.replace(self.launch, ptx=""))
        found.update(repr((facts, self.previous and self.previous.digest())).encode())
        found.update(self.launch.ptx.encode())
        for _, content in self.variables:
            found.update(content)
        for image in self.memory:
            found.update(image.address.to_bytes(8, "little"))
            found.update(image.content)
        return found.digest()


class Recorder:
    """Collects the launches of a program (`capture`); equal ones, as a benchmark makes them, once. ``launches``: those
    that are different, in order; ``total``: how many the program has made."""

    def __init__(self) -> None:
        self.launches: list[RecordedLaunch] = []
        self.total = 0
        self._known: set[bytes] = set()
        self._last: RecordedLaunch | None = None

    def take(
        self,
        launch: CapturedLaunch,
        regions: Iterable[tuple[int, int]],
        *,
        overlaps: bool,
        options: Options | None = None,
        variables: Mapping[str, np.ndarray] | None = None,
        names: Mapping[int, str] | None = None,
        shapes: Callable[[int], tuple[tuple[int, ...], int]] = lambda address: ((), 0),
    ) -> None:
        """Notes a launch that is about to run.

        Args:
            launch: the launch.
            regions: (address, bytes) of all device memory, in the order in which the program allocated it.
            overlaps: whether it may begin before the launch before it is over. Where memory of that launch was freed
                and is part of something else now, it is recorded as if it may not.
            options: with names of warps and mbarriers.
            variables: of the module, with their values.
            names: of regions that have one, by address.
            shapes: of a region, by address, as of `MemoryImage`.
        """
        self.total += 1
        before = {image.address: image for image in self._last.memory} if self._last is not None else {}
        memory = GlobalMemory()
        images = []
        for address, nbytes in regions:
            memory.register(address, nbytes)
            content, old = memory.view(address, nbytes), before.get(address)
            same = old is not None and np.array_equal(old.content, content)
            content = old.content if same else content.copy()
            images.append(MemoryImage(address, content, (names or {}).get(address, ""), shapes(address)))
        previous = None
        if overlaps and self._last is not None and _disjoint(image.span for image in (*before.values(), *images)):
            previous = dataclasses.replace(self._last, previous=None)
        held = tuple((name, cells.copy()) for name, cells in (variables or {}).items())
        named = {"roles": options.roles, "barriers": options.barriers} if options is not None else {}
        self._last = RecordedLaunch(self.total, launch, tuple(images), previous, variables=held, **named)
        digest = self._last.digest()
        if digest not in self._known:
            self._known.add(digest)
            self.launches.append(self._last)

    def ended(self, report: Report) -> None:
        """Notes what the launch that was taken last has executed."""
        ran = {"warp_instructions": report.warp_instructions, "certificate": report.certificate}
        last, self._last = self._last, dataclasses.replace(self._last, **ran)
        if self.launches[-1] is last:
            self.launches[-1] = self._last


@dataclass(frozen=True)
class Outcome:
    """Outcome of a replay: the emulator's report, and the device memory afterwards, as in `RecordedLaunch.memory`."""

    report: Report
    memory: tuple[np.ndarray, ...]


class Replay:
    """A recorded launch with memory of this process. ``recorded``: the launch."""

    def __init__(self, recorded: RecordedLaunch) -> None:
        self.recorded = recorded
        early = {image.address: image for image in recorded.previous.memory} if recorded.previous is not None else {}
        here = {image.address for image in recorded.memory}
        gone = [image for address, image in early.items() if address not in here]  # freed between the two launches
        everything = [*recorded.memory, *gone]
        self._buffers = [guarded(image.content.nbytes, _ALIGNMENT) for image in everything]
        places = zip(everything, self._buffers)
        ranges = ((image.address, buffer.ctypes.data, buffer.nbytes) for image, buffer in places)
        # In order, so that an address where one ends and another begins is taken for the beginning.
        self._moved = Relocation(tuple(sorted(ranges)))
        self._contents = [self._move(image.content) for image in recorded.memory]
        # What the launch before it finds; memory that is new since then has its content from before this launch.
        self._early = [self._move(early.get(image.address, image).content) for image in everything]

    def run(
        self,
        options: Options,
        *,
        ptx: str | None = None,
        overlap: bool = False,
    ) -> Outcome:
        """Runs the launch from the memory that it found.

        Args:
            options: schedule and detectors; steps are those of this launch, not of one that it overlaps.
            ptx: another text for the kernel.
            overlap: behind the launch that it may overlap, or, where the program has none, behind itself; accesses
                that griddepcontrol.wait does not order race.

        Raises:
            EmulatorError: what the emulator reports, with the launch and its number in the program.
        """
        recorded, memory = self.recorded, GlobalMemory()
        previous = (recorded.previous or recorded) if overlap else None
        contents = self._early if overlap and recorded.previous is not None else self._contents
        names = itertools.chain((image.name for image in recorded.memory), itertools.repeat(""))
        for buffer, content, name in zip(self._buffers, contents, names):
            buffer[:] = content
            memory.register_tensor(buffer, name or "a tensor on the device")
        for each in (previous, recorded):
            if each is None:
                continue
            launch, own = self._here(each, ptx), {} if each is recorded else {"steps": (), "stepped": None}
            text = launch.ptx
            memory.modules[text] = {name: aligned(self._move(content)) for name, content in each.variables}
            try:
                going_on = attaching(options.going_on, each.launch, each.number, text)
                own |= {"roles": each.roles or options.roles, "barriers": each.barriers or options.barriers}
                how = dataclasses.replace(options, going_on=going_on, **own)
                programmatic = launch.programmatic and each is recorded and overlap
                report = execute(launch, memory, how, programmatic=programmatic)
            except EmulatorError as error:
                error.attach(text, each.launch, each.number)
                raise
        return Outcome(report, tuple(buffer.copy() for buffer, _ in zip(self._buffers, recorded.memory)))

    def addresses(self) -> dict[str, tuple[int, int]]:
        """Address and bytes of each allocation with a name, in this process."""
        named = zip(self.recorded.memory, self._buffers)
        return {image.name: (buffer.ctypes.data, buffer.nbytes) for image, buffer in named if image.name}

    def _here(self, each: RecordedLaunch, ptx: str | None) -> CapturedLaunch:
        """The launch with addresses of this process; of the recorded kernel with another text, if there is one."""
        text = ptx if ptx is not None and each.kernel == self.recorded.kernel else each.launch.ptx
        params = tuple(self._moved.words(value) for value in each.launch.params)
        return dataclasses.replace(each.launch, params=params, ptx=text)

    def _move(self, content: np.ndarray) -> np.ndarray:
        ranges = tuple(each for each in self._moved.ranges if each[0] >= _SMALLEST_ADDRESS)
        return np.frombuffer(Relocation(ranges).words(content.tobytes()), np.uint8)


def aligned(content: np.ndarray) -> np.ndarray:
    """A copy that begins where any variable may."""
    store = guarded(len(content), _ALIGNMENT)
    store[:] = content
    return store


def _disjoint(spans: Iterable[tuple[int, int]]) -> bool:
    """Whether no two of the different (first address, end) overlap."""
    ordered = sorted(set(spans))
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))


def differences(outcome: Outcome, expected: Outcome) -> str:
    """Where device memory differs from what another replay left, in words; "" if nowhere."""
    for number, (found, wanted) in enumerate(zip(outcome.memory, expected.memory, strict=True), start=1):
        places = np.flatnonzero(found != wanted)
        if len(places):
            first = int(places[0])
            count = sum(int((a != b).sum()) for a, b in zip(outcome.memory, expected.memory))
            return (
                f"{count} bytes of device memory differ; the first is byte {first} of the {len(found)} bytes of "
                f"allocation {number}: {found[first]:#04x} instead of {wanted[first]:#04x}"
            )
    return ""
