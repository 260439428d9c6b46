"""Races in tensor memory, and the streams of tcgen05 operations (PTX ISA, "tcgen05 memory consistency model").

Tensor memory is accessed by asynchronous operations alone. Those of one thread that go through the tensor core (mma,
cp, shift) are pipelined: they take effect in order. Everything else has to be waited for, tcgen05.ld and st by
tcgen05.wait, mma by tcgen05.commit and an mbarrier, and that has to be passed on to other threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from cute_kernels.emulator.core.layout import words
from cute_kernels.emulator.observe.races.checks import RaceChecks
from cute_kernels.emulator.observe.races.happens_before import Agent, Offset
from cute_kernels.emulator.observe.races.operations import Operation, PipelinedAccess, Place
from cute_kernels.emulator.observe.races.shadow import LANE_BITS
from cute_kernels.emulator.observe.races.sync_point import Row

_TEXT, _LOAD_IDENTITY = words("Agent")["text"], words("Agent")["load_identity"]

class Pipelined:
    """The accesses of a tcgen05 operation, which may be issued many times.

    Attributes:
        text: for reports.
        shared_ranks: CTAs whose shared memory it reads.
    """

    def __init__(self, text: str, accesses: Sequence[PipelinedAccess]) -> None:
        self.text, self.accesses = text, tuple(accesses)
        self.shared_ranks = frozenset(access.rank for access in self.accesses if access.starts is not None)
        self._list: tuple[np.ndarray, ...] | None = None

    def listed(self, tracker: RaceChecks) -> int:
        """Host address of `ShadowUnit.pipelined_list`, made once."""
        if self._list is None:
            self._list = tracker.unit.pipelined_list(tracker.shared, tracker.planes, self.accesses)
        return self._list[0].ctypes.data


class _Stream:
    """tcgen05 operations of one thread since its last commit, in a `Stream` of the core.

    Attributes:
        column: the stream's.
        commits: so far.
        identity: of the operations since, 0 for none yet.
        noted: CTAs whose exit must come after the operations of the identity ``noted_for``.
    """

    def __init__(self, column: int) -> None:
        block = np.array([column, 0, 0], np.int64)
        self._words, self.address = memoryview(block).cast("B").cast("q"), block.ctypes.data
        self.column = column
        self.noted: set[int] = set()
        self.noted_for = 0

    @property
    def commits(self) -> int:
        return self._words[1]

    @commits.setter
    def commits(self, count: int) -> None:
        self._words[1] = count

    @property
    def identity(self) -> int:
        return self._words[2]

    @identity.setter
    def identity(self, identity: int) -> None:
        self._words[2] = identity


class TensorRaces:
    """The part of the race detector that knows tensor memory.

    Args:
        tracker: the detector.
        read_shared: `RaceTracker.async_read`.
    """

    def __init__(self, tracker: RaceChecks, read_shared: Callable[[int, np.ndarray, int, Operation], None]) -> None:
        self.tracker, self.epochs, self.planes = tracker, tracker.epochs, tracker.planes
        self._read_shared = read_shared
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._issuers: list[ctypes.Structure] = []

    def _stream(self) -> _Stream:
        key = (self.tracker.agent.base, self.tracker.lane)
        if key not in self._streams:
            self._streams[key] = _Stream(self.tracker.columns.named(("tcgen05", *key)))
        return self._streams[key]

    def operation(self, text: str) -> Operation:
        """A tcgen05.mma, cp or shift of the entered lane."""
        stream = self._begun(text)
        agent = self.tracker.agent
        lane = self.tracker.lane
        return Operation(stream.identity, stream.column, agent.clocks, agent.base, lane, address=agent.address)

    def _begun(self, text: str) -> _Stream:
        """The stream of the entered lane, in which an operation is issued."""
        stream = self._stream()
        if not stream.identity:
            place = self.tracker.agent.executing()
            stream.identity = self.epochs.new(stream.column, stream.commits + 1, text, 0, place)
        if stream.noted_for != stream.identity:
            stream.noted_for = stream.identity
            stream.noted.clear()
        return stream

    def follow(self, issuer: ctypes.Structure, text: str) -> None:
        """The core tells of the MMAs of the entered lane from now on.

        Args:
            issuer: an `MmaIssuer`.
            text: what reports call them.
        """
        issuer.stream, issuer.text = self._stream().address, self.epochs.text(text)
        self._issuers.append(issuer)

    def note_exits(self) -> None:
        """Tells `exits` of the operations that the core has issued: a pair of CTAs reads the shared memory of both."""
        for issuer in self._issuers:
            group, who, _ = issuer.key
            if issuer.latest and group == 2:
                epoch = issuer.latest >> LANE_BITS
                self.tracker.exits.operation(
                    who & 0xFF ^ 1, int(self.epochs.columns[epoch]), int(self.epochs.clocks[epoch]),
                    self.epochs.label(issuer.latest), place=self.epochs.place(issuer.latest),
                )  # fmt: skip

    def issue(self, work: Pipelined) -> None:
        """A tcgen05.mma, cp or shift of the entered lane, with all its accesses.

        Raises:
            TensorMemoryRace, SharedMemoryRace, ProxyFenceMissing: an earlier access is not ordered before.
        """
        tracker, stream = self.tracker, self._begun(work.text)
        agent, unit, count = tracker.agent, tracker.unit, len(work.accesses)
        listed = work.listed(tracker)
        done = unit.pipelined(listed, count, agent, stream.identity, tracker.lane, stream.column)
        for rank in work.shared_ranks - stream.noted:
            stream.noted.add(rank)
            if rank != agent.rank:
                label = self.epochs.label(stream.identity)
                place = self.epochs.place(stream.identity)
                tracker.exits.operation(rank, stream.column, stream.commits + 1, label, place=place)
        if done == count:
            return
        operation = self.operation(work.text)
        for access in work.accesses[done:]:
            if access.starts is not None:
                self._read_shared(access.rank, access.starts, access.nbytes, operation)
            else:
                self.access(access.rank, access.place, operation, access.write)

    def stream(self) -> int:
        """Host address of the `Stream` of the entered lane."""
        return self._stream().address

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

    def _access(
        self, rank: int, place: Place, operation: Operation, write: bool, exempt: int
    ) -> None:
        self.tracker.looking = operation
        self.tracker.unit.tensor(self.planes[rank], place, operation, write, exempt, Row.TENSOR)

    def free(self, agent: Agent, column: int, ncols: int) -> None:
        """tcgen05.dealloc. Raises TensorMemoryRace when an access to the columns may not be over."""
        place = (slice(column, column + ncols), slice(None))
        operation = self.tracker.looking = Operation(0, -1, agent.clocks, agent.base, -1, address=agent.address)
        self.tracker.unit.tensor(self.planes[agent.rank], place, operation, True, -1, Row.ORDER, freed=True)
