"""Races in tensor memory, and the streams of tcgen05 operations (PTX ISA, "tcgen05 memory consistency model").

Tensor memory is accessed by asynchronous operations alone. Those of one thread that go through the tensor core (mma,
cp, shift) are pipelined: they take effect in order. Everything else has to be waited for, tcgen05.ld and st by
tcgen05.wait, mma by tcgen05.commit and an mbarrier, and that has to be passed on to other threads.
"""

import ctypes
from collections.abc import Sequence

from cute_kernels.emulator.core.layout import STRUCTURES, words
from cute_kernels.emulator.errors import TensorMemoryRace
from cute_kernels.emulator.facts import Side
from cute_kernels.emulator.races.checks import RaceChecks
from cute_kernels.emulator.races.happens_before import Agent, Offset
from cute_kernels.emulator.races.operations import Operation, Place
from cute_kernels.emulator.races.shadow import LANE_BITS
from cute_kernels.emulator.races.sync_point import Row

_TEXT, _LOAD_IDENTITY = words("Agent")["text"], words("Agent")["load_identity"]
Stream = STRUCTURES["Stream"]


class TensorRaces:
    """The part of the race detector that knows tensor memory. ``tracker``: the detector."""

    def __init__(self, tracker: RaceChecks) -> None:
        self.tracker, self.epochs, self.planes = tracker, tracker.epochs, tracker.planes
        self._managed: dict[int, tuple[int, Side]] = {}  # by CTA: clock of the latest event of its allocations, and who
        self._streams: dict[tuple[Agent, int], ctypes.Structure] = {}  # of tcgen05 operations, by lanes

    def _stream(self) -> ctypes.Structure:
        agent, lane = self.tracker.agent, self.tracker.lane
        if (agent, lane) not in self._streams:
            self._streams[agent, lane] = Stream(self.tracker.columns.named(("tcgen05", agent.base, lane)))
        return self._streams[agent, lane]

    def operation(self, text: str) -> Operation:
        """A tcgen05.cp or shift of the entered lane."""
        stream, agent, lane = self._stream(), self.tracker.agent, self.tracker.lane
        if not stream.identity:
            stream.identity = self.epochs.new(stream.column, stream.commits + 1, text, 0, agent.executing())
        return Operation(stream.identity, stream.column, agent.clocks, agent.base, lane, address=agent.address)

    def note_exits(self) -> None:
        """Tells `exits` of MMAs by pairs of CTAs, which read the shared memory of both."""
        for (agent, _), stream in self._streams.items():
            if stream.paired:
                epoch = stream.paired >> LANE_BITS
                self.tracker.exits.operation(
                    agent.rank ^ 1, stream.column, int(self.epochs.clocks[epoch]), self.epochs.label(stream.paired),
                    place=self.epochs.place(stream.paired),
                )  # fmt: skip

    def stream(self) -> int:
        """Host address of the `Stream` of the entered lane."""
        return ctypes.addressof(self._stream())

    def load(self, agent: Agent, place: Place, index: int) -> None:
        """tcgen05.ld, the instruction of this index. Raises TensorMemoryRace when what it reads may not be written."""
        agent.new_load(index)
        self._by_warp(agent, Offset.TENSOR_LOAD, place, write=False)

    def store(self, agent: Agent, place: Place) -> None:
        """tcgen05.st. Raises TensorMemoryRace."""
        self._by_warp(agent, Offset.TENSOR_STORE, place, write=True)

    def _by_warp(self, agent: Agent, kind: Offset, place: Place, write: bool) -> None:
        word = _LOAD_IDENTITY + write
        identity = agent.words[word]
        if not identity:
            text, column, clock = agent.words[_TEXT] + 2 + write, agent.base + kind, agent.tensor_clock(kind)
            identity = agent.words[word] = self.epochs.new(column, clock, text, 0, agent.executing())
        operation = Operation(identity, agent.base + kind, agent.clocks, agent.base, -1, address=agent.address)
        self._access(agent.rank, place, operation, write, -1)

    def access(self, rank: int, place: Place, operation: Operation, write: bool) -> None:
        """An MMA reads or writes a place. Those of one thread are pipelined: they take effect in order."""
        self._access(rank, place, operation, write, operation.column)

    def _access(self, rank: int, place: Place, operation: Operation, write: bool, exempt: int) -> None:
        self.tracker.looking = operation
        self.tracker.unit.tensor(self.planes[rank], place, operation, write, exempt, Row.TENSOR)

    def allocate(self, parts: Sequence[tuple[Agent, int]], ncols: int) -> None:
        """tcgen05.alloc, by one warp or by one of each CTA of a pair, of columns from the second of each part on.

        For the detector it writes them, so that every access to them that is not ordered after it stands against the
        certificate. Of a pair, each warp knows that the other CTA has allocated, too.
        """
        events = [self.manage(agent, "tcgen05.alloc") for agent, _ in parts]
        for (agent, base), (column, clock) in zip(parts, events):
            label = f"tcgen05.alloc of {agent.label}"
            identity = self.epochs.new(column, clock, label, 0, agent.executing())
            operation = Operation(identity, column, agent.clocks, agent.base, -1, address=agent.address)
            self._access(agent.rank, (slice(base, base + ncols), slice(None)), operation, True, -1)
            for other, _ in parts:
                other.complete(column, clock, len(Row))

    def manage(self, agent: Agent, what: str) -> tuple[int, int]:
        """A warp changes what its CTA has allocated, or may allocate; returns column and clock of that event.

        Which columns an allocation gets, and whether it may be made, depends on all such events before it. One that
        another warp may do earlier or later stands against the certificate.
        """
        tracker, rank = self.tracker, agent.rank
        column = tracker.allocations.setdefault(rank, tracker.columns.named(("allocations", rank)))
        latest = self._managed.get(rank)
        clock = 1 if latest is None else latest[0] + 1
        if latest is not None and agent.clocks[Row.ORDER, column] < latest[0]:
            other = latest[1]
            error = TensorMemoryRace(
                f"{what} of {agent.label} is not ordered after {other.what} of {other.warp}: which columns an "
                f"allocation of CTA {rank} gets, and whether it may be made, depends on which of them comes first"
            )
            tracker.stands_against(error.know("allocation-order", other=other))
        steps = 0 if agent.warp is None else agent.warp.code.steps
        self._managed[rank] = clock, Side(what, (), agent.label, what=what, steps=steps)
        agent.complete(column, clock, len(Row))
        return column, clock

    def free(self, agent: Agent, column: int, ncols: int) -> None:
        """tcgen05.dealloc. Raises TensorMemoryRace when an access to the columns may not be over."""
        self.manage(agent, "tcgen05.dealloc")
        place = (slice(column, column + ncols), slice(None))
        operation = self.tracker.looking = Operation(0, -1, agent.clocks, agent.base, -1, address=agent.address)
        self.tracker.unit.tensor(self.planes[agent.rank], place, operation, True, -1, Row.ORDER, freed=True)
