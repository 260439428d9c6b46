"""Events of a cluster, told to observers in their order: asynchronous work, and what warps wait for.

Whatever the core does it notes in a buffer (``core/events.h``), which is read when it is full, when a warp gives way,
and before anything happens in Python. So an event is told later than it happened; it has the numbers that change in
between. Nothing is noted where nobody observes.
"""

import ctypes
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.machine.state.async_engine import AsyncEngine, AsyncOp

_ROOM = 256  # events
_MOST_KNOWN = 4096  # operations
_Event, _Work, _PYTHON = STRUCTURES["Event"], STRUCTURES["Work"], CONSTANTS["WORK_PYTHON"]
_WORDS = ctypes.sizeof(_Event) // 8
#: Words of the record of an operation in an event.
_NUMBER, _WARP, _OPERANDS = (
    (_Event.values.offset + offset) // 8 for offset in (_Work.number.offset, _Work.warp.offset, ctypes.sizeof(_Work))
)
_ISSUED, _BEGINS, _ENDS, _FAILS, _PHASE, _NAMED, _WGMMAS, _PASSED, _MBARRIER = (
    CONSTANTS[f"EVENT_{name}"]
    for name in ("ISSUED", "BEGINS", "ENDS", "FAILS", "PHASE", "NAMED", "WGMMAS", "PASSED", "MBARRIER")
)


class Observer(Protocol):
    """Hears of what happens in a cluster."""

    def at(self, place: tuple[int, int] | None) -> None:
        """The place of what follows: how many instructions the running warp had executed (`WarpCode.steps`), and the
        index of that at which it was. None: it happens now.
        """

    def issued(self, number: int, op: AsyncOp) -> None:
        """An operation is issued; operations in flight have different numbers."""

    def begins(self, number: int) -> None:
        """The operation takes effect."""

    def ends(self, number: int, failed: bool) -> None:
        """The operation has taken effect, or has failed."""

    def completed(self, key: Hashable, count: int | None) -> None:
        """Waits with this `Wait.key` may be over: so many phases, generations or operations are complete; None: as
        many as are now.
        """

    def passed(self, address: int, state: int, parity: bool) -> None:
        """A wait for a state of an mbarrier succeeded, which was a parity or a phase."""

    def operated(self, operation: int, address: int, words: Sequence[int]) -> None:
        """An operation on an mbarrier (`mbarrier.OPERATIONS`), whose phase, expected and pending arrivals, bytes and
        latest arriver (as of `Barrier`) are these then.
        """


class Events:
    """The stream of one cluster. ``tables``: of the core; ``engine``: knows the operations."""

    def __init__(self, tables: ctypes.Structure, engine: AsyncEngine) -> None:
        self._tables, self._engine = tables, engine
        self._observers: list[Observer] = []
        self._records = np.zeros((0, _WORDS), np.int64)
        self._known: dict[tuple[int, ...], AsyncOp] = {}

    def observe(self, observer: Observer) -> None:
        """From now on it hears of what happens."""
        self._observers.append(observer)
        self._records = np.zeros((_ROOM, _WORDS), np.int64)
        self._tables.events, self._tables.event_room = self._records.ctypes.data, _ROOM
        self._engine.observed = True

    def completed(self, key: Hashable) -> None:
        """Python has completed something: tells of `Observer.completed`."""
        if self._observers:
            self.read()
            for observer in self._observers:
                observer.completed(key, None)

    def read(self) -> None:
        """Tells of what the core has noted."""
        used = self._tables.event_count
        if not used:
            return
        self._tables.event_count = 0
        records = self._records[:used].tolist()
        for observer in self._observers:
            self._tell(observer, records)
        for kind, _, _, number, *_ in records:
            if kind == _ENDS:
                self._engine.forget(number)

    def _tell(self, observer: Observer, records: list[list[int]]) -> None:
        before = -1, 0
        for index, record in enumerate(records):
            kind, place, steps, first = record[:4]
            if (place, steps) != before:
                before = place, steps
                observer.at((steps, place) if place >= 0 else None)
            if kind == _BEGINS:
                observer.begins(first)
            elif kind == _ENDS or kind == _FAILS:
                observer.ends(first, kind == _FAILS)
            elif kind == _ISSUED:
                observer.issued(record[_NUMBER], self._operation(index, record))
            elif kind == _PHASE:
                observer.completed(("mbarrier", first), record[4])
            elif kind == _PASSED:
                observer.passed(first, record[4], bool(record[5]))
            elif kind == _MBARRIER:
                observer.operated(first, record[4], record[5:10])
            else:
                observer.completed(("bar" if kind == _NAMED else "wgmma", first, record[4]), record[5])
        observer.at(None)

    def _operation(self, index: int, record: Sequence[int]) -> AsyncOp:
        """The operation of a record; a kernel issues those with one name again and again."""
        kind, number = record[3], record[_NUMBER]
        if kind == _PYTHON:
            return self._engine.operation(kind, number, 0)
        key = kind, record[_WARP], *record[_OPERANDS:]
        if key not in self._known:
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            address = self._records.ctypes.data + index * 8 * _WORDS + _Event.values.offset
            self._known[key] = self._engine.operation(kind, number, address)
        return self._known[key]
