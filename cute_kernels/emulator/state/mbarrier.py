"""mbarrier objects of one cluster: arrivals, transaction bytes and phases (PTX ISA, "mbarrier").

A phase completes when its pending arrival count AND its transaction count are zero. The phase is kept as a full
integer, so that a parity wait that aliases two phases can be told apart in reports.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.errors import BarrierMisuse, EmulatorError, IllegalAccess, raising
from cute_kernels.emulator.facts import BarrierState
from cute_kernels.emulator.state.smem import OFFSET_MASK, RANK_SHIFT, ClusterMemory

if TYPE_CHECKING:
    from cute_kernels.emulator.ptx.program import Instruction

MAX_COUNT = CONSTANTS["MAX_COUNT"]  # PTX ISA: valid range of expected, pending and transaction counts
# Words of a barrier's row, which the core reads and writes as well.
_Barrier = STRUCTURES["Barrier"]
_NAMES = ("phase", "expected", "pending", "tx", "arriver", "point")
_PHASE, _EXPECTED, _PENDING, _TX, _ARRIVER, _POINT = (getattr(_Barrier, name).offset // 8 for name in _NAMES)
ROW_WORDS = ctypes.sizeof(_Barrier) // 8
ROWS = CONSTANTS["BARRIERS"]  # of a cluster that the core can reach; others work too


class MBarrier:
    """State of one barrier: a row of int64.

    Args:
        address: shared address.
        initialiser: who executed mbarrier.init.
        row: where the numbers are.
        labels: names of the warps by number.
        init_at: index of the instruction that initialised it; -1: not known.
    """

    __slots__ = ("address", "initialiser", "init_at", "_labels", "_row", "_who")

    def __init__(
        self, address: int, initialiser: str, row: memoryview, labels: Sequence[str], init_at: int = -1
    ) -> None:
        self.address, self.initialiser, self.init_at = address, initialiser, init_at
        self._row, self._labels, self._who = row, labels, ""

    def watch(self, point: int) -> None:
        """The race detector's words of this barrier are at this host address."""
        self._row[_POINT] = point

    @property
    def phase(self) -> int:
        """Number of completed phases."""
        return self._row[_PHASE]

    @phase.setter
    def phase(self, value: int) -> None:
        self._row[_PHASE] = value

    @property
    def expected(self) -> int:
        """Arrivals that each phase needs."""
        return self._row[_EXPECTED]

    @expected.setter
    def expected(self, value: int) -> None:
        self._row[_EXPECTED] = value

    @property
    def pending(self) -> int:
        """Arrivals that the current phase still needs."""
        return self._row[_PENDING]

    @pending.setter
    def pending(self, value: int) -> None:
        self._row[_PENDING] = value

    @property
    def tx(self) -> int:
        """Bytes that the current phase still waits for; transiently negative when bytes came before expect_tx."""
        return self._row[_TX]

    @tx.setter
    def tx(self, value: int) -> None:
        self._row[_TX] = value

    @property
    def last_arrival(self) -> str:
        """Who arrived last, for reports."""
        return self.arrival(self._row[_ARRIVER])

    def arrival(self, number: int) -> str:
        """Whom a number in the row names: the label of an arrival in the core plus one, 0: the latest in Python."""
        return self._labels[number - 1] if number else self._who

    @last_arrival.setter
    def last_arrival(self, who: str) -> None:
        self._row[_ARRIVER], self._who = 0, who


class PhaseObserver(Protocol):
    """Hears that a phase is about to complete (`cute_kernels.emulator.observe.races.tracker.RaceTracker`)."""

    def completed(self, address: int, phase: int) -> None: ...


class MBarriers:
    """All live barriers of a cluster, keyed by shared address (rank included).

    Args:
        memory: where the barriers lie, or None.
        names: by offset in the shared memory of a CTA, for reports.

    Attributes:
        completions: number of phases completed so far by any barrier; a waiting warp has to look again only when it
            changed.
        labels: names of the cluster's warps by number, for reports of arrivals in the core.
        instructions: of the kernel, for reports.
        rows: int64 [ROWS, ROW_WORDS]: the barriers' numbers.
        slots: int16 [size / 8] per CTA: of a live barrier its row's number plus one, else 0; none without ``memory``.
    """

    def __init__(
        self,
        memory: ClusterMemory | None = None,
        names: Mapping[int, str] | None = None,
        observer: PhaseObserver | None = None,
    ) -> None:
        self._memory = memory
        self._names = names or {}
        self._observer = observer
        self._barriers: dict[int, MBarrier] = {}
        self.completions = 0
        self.labels: list[str] = []
        self.instructions: Sequence[Instruction] = ()
        self.rows = np.zeros((ROWS, ROW_WORDS), np.int64)
        self._words = memoryview(self.rows).cast("B").cast("q")
        self._free = list(range(ROWS - 1, -1, -1))
        self.slots = [np.zeros(-(-cta.size // 8), np.int16) for cta in memory.ctas] if memory is not None else []

    def __iter__(self) -> Iterator[MBarrier]:
        return iter(self._barriers.values())

    def __len__(self) -> int:
        return len(self._barriers)

    def init(self, address: int, count: int, who: str = "", at: int = -1) -> None:
        """mbarrier.init, the instruction of index ``at``: phase 0, ``count`` pending arrivals, no pending bytes.

        Raises:
            BarrierMisuse: count outside 1..2^20-1, or a live barrier there (PTX ISA: invalidate it first).
            IllegalAccess: address not 8-byte aligned or out of bounds.
        """
        if address % 8:
            raise IllegalAccess(f"mbarrier at {address:#x} is not 8-byte aligned")
        if not 1 <= count <= MAX_COUNT:
            raise BarrierMisuse(f"mbarrier.init with count {count}; legal are 1 to {MAX_COUNT}").know("barrier-count")
        if address in self._barriers:
            message = f"mbarrier.init over a live mbarrier: {self.describe(address)}"
            raise BarrierMisuse(message).know("barrier-initialised-twice", barrier=self.state(address))
        if self._memory is not None:
            rank, offset = self._memory.resolve(address)
            self._memory.ctas[rank].check_range(offset, 8, write=True)
            self._memory.ctas[rank].protect(offset)
        row = self._take_row(address)
        row[_PHASE], row[_EXPECTED], row[_PENDING], row[_TX], row[_ARRIVER], row[_POINT] = 0, count, count, 0, 0, 0
        self._barriers[address] = MBarrier(address, who, row, self.labels, at)

    def watch(self, address: int, point: int) -> None:
        """Says where the race detector keeps what it knows of a barrier: `SyncPoint.address`."""
        self._barriers[address].watch(point)

    def inval(self, address: int) -> None:
        """mbarrier.inval: the location may be used for anything again.

        Raises:
            BarrierMisuse: no live barrier there.
        """
        self._get(address, "mbarrier.inval")
        del self._barriers[address]
        if self._memory is not None:
            rank, offset = self._memory.resolve(address)
            slot = int(self.slots[rank][offset // 8])
            if slot:
                self.slots[rank][offset // 8] = 0
                self._free.append(slot - 1)
            self._memory.ctas[rank].unprotect(offset)

    def _take_row(self, address: int) -> memoryview:
        """A free row, entered in the slots of its CTA; one of its own when all are taken."""
        if self._memory is None or not self._free:
            return memoryview(np.zeros(ROW_WORDS, np.int64))
        number = self._free.pop()
        rank, offset = self._memory.resolve(address)
        self.slots[rank][offset // 8] = number + 1
        return self._words[ROW_WORDS * number : ROW_WORDS * (number + 1)]

    def arrive(self, address: int, count: int = 1, who: str = "") -> int:
        """Arrive-on with ``count`` arrivals. Returns the phase arrived on, the state token for `test_phase`.

        Raises:
            BarrierMisuse: no live barrier, or more arrivals than the phase still expects.
        """
        barrier = self._get(address, "mbarrier.arrive")
        phase = barrier.phase
        if not 1 <= count <= barrier.pending:
            raise BarrierMisuse(
                f"{count} arrival(s){f' by {who}' if who else ''} on an mbarrier whose phase expects {barrier.pending} "
                f"more: {self.describe(address)}"
            ).know("extra-arrivals", barrier=self.state(address))
        barrier.pending -= count
        barrier.last_arrival = who
        if barrier.pending == 0:
            self._settle(barrier)
        return phase

    def arrive_drop(self, address: int, count: int = 1, who: str = "") -> int:
        """Arrives like `arrive`, and every later phase expects ``count`` arrivals less."""
        barrier = self._get(address, "mbarrier.arrive_drop")
        if count > barrier.pending:
            self.arrive(address, count, who)
        barrier.expected -= count
        return self.arrive(address, count, who)

    def expect_arrivals(self, address: int, count: int) -> None:
        """The current phase waits for ``count`` more arrivals (cp.async.mbarrier.arrive without .noinc).

        Raises:
            BarrierMisuse: no live barrier, or more pending arrivals than a barrier can count.
        """
        barrier = self._get(address, "cp.async.mbarrier.arrive")
        barrier.pending += count
        if barrier.pending > MAX_COUNT:
            message = f"more than {MAX_COUNT} pending arrivals: {self.describe(address)}"
            raise BarrierMisuse(message).know("barrier-count", barrier=self.state(address))

    def expect_tx(self, address: int, nbytes: int) -> None:
        """The current phase waits for ``nbytes`` more bytes.

        Raises:
            BarrierMisuse: no live barrier, or a transaction count of 2^20 or more.
        """
        barrier = self._get(address, "expect_tx")
        self._add(barrier, nbytes, "expect_tx")

    def arrive_expect_tx(self, address: int, nbytes: int, who: str = "") -> int:
        """mbarrier.arrive.expect_tx: `expect_tx` and then one arrival (PTX ISA: in this order, as one operation)."""
        self.expect_tx(address, nbytes)
        return self.arrive(address, 1, who)

    def complete_tx(self, address: int, nbytes: int) -> None:
        """``nbytes`` bytes arrived. They may arrive before the expect_tx of the same phase.

        Raises:
            BarrierMisuse: no live barrier, or more bytes than a phase without pending arrivals expects.
        """
        barrier = self._get(address, "complete_tx")
        self._add(barrier, -nbytes, "complete_tx")
        if barrier.tx < 0 and barrier.pending == 0:
            raise BarrierMisuse(
                f"{-barrier.tx} bytes more arrived than expect_tx announced: {self.describe(address)}"
            ).know("extra-bytes", barrier=self.state(address))
        self._settle(barrier)

    def test_parity(self, address: int, parity: int) -> bool:
        """Whether the phase with this parity (0 or 1) has completed: the current phase has the other parity.

        Raises:
            BarrierMisuse: no live barrier, or another parity than 0 or 1.
        """
        if parity not in (0, 1):
            raise BarrierMisuse(f"parity {parity} of an mbarrier wait; legal are 0 and 1")
        return (self._get(address, "mbarrier.try_wait").phase & 1) != parity

    def test_phase(self, address: int, token: int) -> bool:
        """Whether the phase that `arrive` returned as a state token has completed."""
        return self._get(address, "mbarrier.test_wait").phase > token

    def check_finished(self, strict: bool = True, report: Callable[[EmulatorError], None] = raising) -> None:
        """At the end of the kernel, when nothing is in flight.

        A phase of which all arrivals have come and bytes have not is what a producer leaves that acquires a stage to
        see it free, as the tail of FlashAttention-4's loads does: it announces bytes that it does not load.

        Raises:
            BarrierMisuse: a phase that has begun is not complete: bytes and arrivals are missing, or (``strict``)
                either alone; or bytes have come that nobody announced.
        """
        for barrier in self:
            unsound = barrier.tx < 0 or (barrier.tx > 0 and barrier.pending > 0)
            if unsound or (strict and barrier.pending != barrier.expected):
                message = f"the kernel ends in the middle of a phase: {self.describe(barrier.address)}"
                state = self.state(barrier.address)
                error = BarrierMisuse(message).know("phase-at-exit", barrier=state)
                report(error.at(state.init) if state.init is not None else error)

    def phase(self, address: int) -> int:
        """Number of completed phases."""
        return self._get(address, "mbarrier").phase

    def name(self, address: int) -> str:
        """The name that was given to a barrier, or ""."""
        return self._names.get(address & OFFSET_MASK, "")

    def state(self, address: int) -> BarrierState:
        """State of a barrier, as far as it is known, for reports."""
        place = self.name(address), address >> RANK_SHIFT, address & OFFSET_MASK
        barrier = self._barriers.get(address)
        if barrier is None:
            return BarrierState(*place, live=False)
        init = self.instructions[barrier.init_at] if 0 <= barrier.init_at < len(self.instructions) else None
        numbers = barrier.phase, barrier.expected, barrier.pending, barrier.tx
        return BarrierState(*place, *numbers, True, init, barrier.initialiser, barrier.last_arrival)

    def states(self) -> tuple[BarrierState, ...]:
        """`state` of all."""
        return tuple(self.state(address) for address in self._barriers)

    def describe(self, address: int) -> str:
        """One line for reports: place, phase, pending arrivals and bytes, who initialised it."""
        barrier = self._barriers.get(address)
        if barrier is None:
            return f"{self._place(address)}: not initialised"
        return self._described(barrier, barrier.phase, barrier.pending, barrier.tx, barrier.last_arrival)

    def describe_as(self, address: int, phase: int, pending: int, tx: int, arriver: int) -> str:
        """`describe`, when these were the words that the core changes of a live barrier (``arriver``: of its row)."""
        barrier = self._barriers[address]
        return self._described(barrier, phase, pending, tx, barrier.arrival(arriver))

    def _described(self, barrier: MBarrier, phase: int, pending: int, tx: int, last_arrival: str) -> str:
        return (
            f"{self._place(barrier.address)}: phase {phase} (parity {phase & 1}) incomplete, {pending} of "
            f"{barrier.expected} arrivals pending, {tx} transaction bytes pending, initialised by "
            f"{barrier.initialiser or 'unknown'}, last arrival by {last_arrival or 'nobody'}"
        )

    def _place(self, address: int) -> str:
        rank, offset, name = address >> RANK_SHIFT, address & OFFSET_MASK, self.name(address)
        return f"mbarrier {f'{name} ' if name else ''}at shared offset {offset} ({offset:#x}) of CTA {rank}"

    def _get(self, address: int, operation: str) -> MBarrier:
        barrier = self._barriers.get(address)
        if barrier is None:
            message = f"{operation} on {self.describe(address)}"
            raise BarrierMisuse(message).know("uninitialised-barrier", barrier=self.state(address))
        if self._memory is not None:
            self._memory.ctas[address >> RANK_SHIFT].check_open()
        return barrier

    def _add(self, barrier: MBarrier, nbytes: int, operation: str) -> None:
        barrier.tx += nbytes
        if abs(barrier.tx) > MAX_COUNT:
            raise BarrierMisuse(
                f"{operation} of {abs(nbytes)} bytes takes the transaction count out of range: "
                f"{self.describe(barrier.address)}"
            ).know("barrier-count", barrier=self.state(barrier.address))

    def _settle(self, barrier: MBarrier) -> None:
        if barrier.pending == 0 and barrier.tx < 0:
            raise BarrierMisuse(
                f"{-barrier.tx} bytes more arrived than expect_tx announced: {self.describe(barrier.address)}"
            ).know("extra-bytes", barrier=self.state(barrier.address))
        if barrier.pending == 0 and barrier.tx == 0:
            if self._observer is not None:
                self._observer.completed(barrier.address, barrier.phase)
            barrier.phase += 1
            barrier.pending = barrier.expected
            self.completions += 1
