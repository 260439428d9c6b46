"""Happens-before: what every warp knows of the events of all others, as vector clocks (Lamport 1978; FastTrack, 2009).

An event has a column and a clock. Columns are threads (32 per warp), a few classes of events of a warp that are ordered
apart (`Offset`), and streams of asynchronous operations that complete in order: the copies that signal one mbarrier
(the clock counts its phases), the tcgen05 operations of one thread (commits), the bulk groups of one thread, the wgmmas
of one warpgroup. A warp knows an event when the clock it has for the column is not smaller.

PTX has more than one kind of order, so a warp keeps one row of clocks per kind (`Row`):

* ``ORDER``: the event is over. Every synchronisation passes it on, a relaxed one too.
* ``ACQUIRED``: passed on by release and acquire whatever their scopes. It is enough between asynchronous operations,
  and between a read and an asynchronous write: kernels release stages to other CTAs at the default scope, the CTA's.
* ``VISIBLE``: causality order of the memory model: passed on by release and acquire whose scopes include both sides. A
  fence turns relaxed operations after or before it into releases or acquires.
* ``PROXY``: written through the generic proxy, and since fenced (fence.proxy.async) by the writer or by a thread that
  the write is visible to. Such a fence may be limited to a state space: this row is about shared memory,
* ``PROXY_GLOBAL`` about global memory.
* ``TENSOR``: tcgen05 operations that are complete (tcgen05.wait, tcgen05.commit) and passed on. Relaxed synchronisation
  passes on what comes before tcgen05.fence::before_thread_sync, to threads in its scope, and what it obtains counts
  from tcgen05.fence::after_thread_sync on. Release and acquire do without these fences and at any scope, as NVIDIA's
  own kernels do, unless the agent is `Agent.strict`.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, word_count, words
from cute_kernels.emulator.sync_point import PROXIES, READ, Columns, Order, Row, SyncPoint, join, widened

if TYPE_CHECKING:
    from cute_kernels.emulator.warp import Warp

LANES = CONSTANTS["LANES"]
FULL = (1 << LANES) - 1
NEVER = np.iinfo(np.int32).max  # the clock of what is not complete; nobody knows it


class Offset(enum.IntEnum):
    """Columns of a warp behind those of its 32 lanes."""

    READ = READ  # loads, by whichever lane
    TENSOR_LOAD = CONSTANTS["COLUMN_TENSOR_LOAD"]
    TENSOR_STORE = CONSTANTS["COLUMN_TENSOR_STORE"]
    INIT = CONSTANTS["COLUMN_INIT"]  # mbarrier.init


WARP_COLUMNS = CONSTANTS["WARP_COLUMNS"]
_AT = words("Agent")
_CLOCK, _LOAD_CLOCK, _STORING, _SOME_PENDING, _BULK, _FENCED_INITS = (
    _AT[name] for name in ("clock", "load_clock", "storing", "some_pending", "bulk", "fenced_inits")
)
_IDENTITIES = slice(_AT["read_identity"], _AT["store_identity"] + 1)
_TENSOR_IDENTITIES = slice(_AT["load_identity"], _AT["store_identity"] + 1)
_NO_IDENTITIES = memoryview(bytes(32)).cast("q")
#: Rows that a fence takes over from relaxed waits before it.
PENDING = (Row.ACQUIRED, Row.VISIBLE, *PROXIES)


class Private:
    """By column, a lane and the clock that this lane alone knows, in memory that the core reads and writes too.

    Attributes:
        address: host address of a `Private` of the core: the number of entries, then column, lane and clock of each.
    """

    def __init__(self) -> None:
        block = np.zeros(word_count("Private"), np.int64)
        self._words = memoryview(block).cast("B").cast("q")
        self.address = block.ctypes.data

    def __len__(self) -> int:
        return self._words[0]

    def items(self) -> list[tuple[int, tuple[int, int]]]:
        """(column, (lane, clock)) of every entry."""
        words = self._words
        return [(words[i], (words[i + 1], words[i + 2])) for i in range(1, 1 + 3 * words[0], 3)]

    def learn(self, column: int, lane: int, clock: int) -> None:
        """The lane, the only one that has this column, knows this clock from now on."""
        words = self._words
        for i in range(1, 1 + 3 * words[0], 3):
            if words[i] == column:
                break
        else:
            i = 1 + 3 * words[0]
            words[0] += 1
        words[i], words[i + 1], words[i + 2] = column, lane, clock

    def forget(self, mask: int) -> None:
        """Takes out what lanes ``mask`` know."""
        kept = [entry for entry in self.items() if not mask >> entry[1][0] & 1]
        self._words[0] = 0
        for column, (lane, clock) in kept:
            self.learn(column, lane, clock)


class Agent:
    """What one warp knows, and its own clock.

    Attributes:
        rank: CTA of the warp.
        base: first of its columns.
        clock: of its accesses now; it advances whenever something is passed on, so that later accesses are told apart.
        clocks: int32 [rows, columns]. In the columns of its own lanes: what every lane knows of the others.
        address: host address of ``clocks``.
        words: an `Agent` of the core, which it reads and writes too, as int64; it is at host address ``block_address``.
        private: what single lanes know, until the lanes synchronise.
        label: for reports.
        warp: the warp, None where there are clocks alone.
        strict: tcgen05.fence is asked for beside release and acquire too, and tcgen05.wait::ld of loads whose values
            have been used.
    """

    def __init__(
        self, columns: Columns, rank: int, live: int, label: str, strict: bool = False, text: int = 0, number: int = -1
    ) -> None:
        self.number = number
        self.rank, self.live, self.label, self.strict = rank, live, label, strict
        self.warp: Warp | None = None
        self.private = Private()
        self.base = columns.take(WARP_COLUMNS)
        self.clocks = columns.matrix(self)
        self.loads = np.zeros(64, np.int32)  # tcgen05.ld by its index in the kernel: clock of the latest
        block = np.zeros(word_count("Agent"), np.int64)
        self.words, self.block_address = memoryview(block).cast("B").cast("q"), block.ctypes.data
        values = {
            "base": self.base, "live": live, "rank": rank, "clock": 1, "load_clock": 1, "store_clock": 1, "text": text,
            "single": self.private.address, "number": number, "strict": strict,
        }  # fmt: skip
        for name, value in values.items():
            self.words[_AT[name]] = value
        self.before = np.zeros(columns.width, np.int32)  # the tensor row at the last tcgen05.fence::before_thread_sync
        self.incoming = np.zeros(columns.width, np.int32)  # obtained by relaxed waits, no after_thread_sync yet
        self.fenced: tuple[np.ndarray, Order] | None = None  # clocks at the last fence, and its scope
        #: Obtained by relaxed waits, for a fence to acquire: int32 [`PENDING`, columns].
        self.pending = np.zeros((len(PENDING), columns.width), np.int32)
        self._scratch = np.zeros_like(self.clocks)
        self.inits = 0
        #: Of the accesses that have no word of their own: clock and identity.
        self.identities: dict[Hashable, tuple[int, int]] = {}
        self._locate()

    def _locate(self) -> None:
        self.address = self.clocks.ctypes.data
        values = {
            "clocks": self.address, "width": self.clocks.shape[1], "loads": self.loads.ctypes.data,
            "load_count": len(self.loads), "before": self.before.ctypes.data, "incoming": self.incoming.ctypes.data,
            "pending": self.pending.ctypes.data, "scratch": self._scratch.ctypes.data,
            "fenced": 0 if self.fenced is None else self.fenced[0].ctypes.data,
            "fenced_order": 0 if self.fenced is None else int(self.fenced[1]),
        }  # fmt: skip
        for name, value in values.items():
            self.words[_AT[name]] = value

    def widen(self, width: int) -> None:
        self.clocks, self.before = widened(self.clocks, width), widened(self.before, width)
        self.incoming, self.pending = widened(self.incoming, width), widened(self.pending, width)
        self._scratch = np.zeros_like(self.clocks)
        if self.fenced is not None:
            self.fenced = widened(self.fenced[0], width), self.fenced[1]
        self._locate()

    @property
    def clock(self) -> int:
        return self.words[_CLOCK]

    def tensor_clock(self, kind: int) -> int:
        """The clock of its loads (`Offset.TENSOR_LOAD`) or stores of tensor memory now."""
        return self.words[_LOAD_CLOCK + kind - Offset.TENSOR_LOAD]

    def executing(self) -> int:
        """Index of the instruction that the warp is executing; -1: not known."""
        return -1 if self.warp is None or self.warp.code is None else self.warp.code.executing

    def advance(self) -> None:
        """What is accessed from now on is not covered by what was passed on so far."""
        self.words[_CLOCK] += 1
        self.words[_IDENTITIES] = _NO_IDENTITIES

    def snapshot(self, mask: int) -> np.ndarray:
        """What lanes ``mask`` pass on now: all that the warp knows, and their own accesses."""
        clocks = self.clocks.copy()
        self._cover(clocks[: Row.PROXY], mask)
        self._share(clocks[: Row.TENSOR], mask)
        return clocks

    def order(self, mask: int) -> np.ndarray:
        """The order row of a `snapshot`, int32 [columns]."""
        clocks = self.clocks[Row.ORDER].copy()
        self._cover(clocks, mask)
        self._share(clocks, mask)
        return clocks

    def _share(self, rows: np.ndarray, mask: int) -> None:
        """Adds what single lanes of ``mask`` know to clocks that are passed on."""
        for column, (lane, clock) in self.private.items():
            if mask >> lane & 1:
                rows[..., column] = np.maximum(rows[..., column], clock)

    def _cover(self, rows: np.ndarray, mask: int) -> None:
        base = self.base
        if mask & self.live == self.live:
            rows[..., base : base + LANES] = self.clock
        else:
            for lane in range(LANES):
                if mask >> lane & 1:
                    rows[..., base + lane] = self.clock
        rows[..., base + Offset.READ] = self.clock

    def release(self, point: SyncPoint, mask: int, order: Order) -> None:
        """Lanes ``mask`` arrive: passes on what the order allows."""
        if order & Order.SYNC:
            clocks = self.snapshot(mask)
            if self.strict:
                clocks[Row.TENSOR] = self.before
            point.gather(clocks, self.rank, order)
        else:
            clocks = np.zeros_like(self.clocks)
            clocks[Row.ORDER] = self.clocks[Row.ORDER]
            self._cover(clocks[Row.ORDER], mask)
            self._share(clocks[Row.ORDER], mask)
            clocks[Row.TENSOR] = self.before
            if self.fenced is None or self.fenced[1] & Order.WIDE or not order & Order.WIDE:
                self._add_fenced(clocks)
                point.gather(clocks, self.rank, order)
            else:
                # The fence reaches the CTA only, what tcgen05.fence orders as far as the arrival does.
                point.gather(clocks, self.rank, order)
                clocks = np.zeros_like(clocks)
                self._add_fenced(clocks)
                point.gather(clocks, self.rank, order & self.fenced[1])
            # fence.mbarrier_init.release.cluster makes initialised mbarriers visible through a relaxed arrival.
            column = self.base + Offset.INIT
            fenced_inits = self.words[_FENCED_INITS]
            point.gathered[Row.VISIBLE, column] = max(point.gathered[Row.VISIBLE, column], fenced_inits)
        self.advance()

    def _add_fenced(self, clocks: np.ndarray) -> None:
        """Relaxed operations after a fence pass on what was known before it."""
        if self.fenced is not None:
            for row in PENDING:
                join(clocks[row], self.fenced[0][row])

    def acquire(self, point: SyncPoint, order: Order) -> None:
        """A wait on the completed phase: takes over what the order allows."""
        if point.acquired(self, order):
            return
        clocks, available = self.clocks, point.available
        if order & Order.SYNC and point.ranks == 1 and not self.strict:
            join(clocks, available)
            return
        join(clocks[Row.ORDER], available[Row.ORDER])
        if order & Order.SYNC:
            join(clocks[Row.ACQUIRED], available[Row.ACQUIRED])
            join(clocks[Row.VISIBLE], point.scoped(Row.VISIBLE, self.rank, order))
            for row in PROXIES:
                join(clocks[row], available[row])
            # Release and acquire pass tensor memory on at any scope: as `scoped` for the widest.
            join(self.incoming if self.strict else clocks[Row.TENSOR], point.scoped(Row.TENSOR, self.rank, Order.WIDE))
        else:
            join(self.incoming, point.scoped(Row.TENSOR, self.rank, order))
            self.words[_SOME_PENDING] = 1
            join(self.pending[0], available[Row.ACQUIRED])
            join(self.pending[1], point.scoped(Row.VISIBLE, self.rank, order))
            for obtained, row in zip(self.pending[2:], PROXIES):
                join(obtained, available[row])

    # --- fences and synchronisation inside the warp -------------------------------------------------------------------

    def converge(self, mask: int) -> None:
        """bar.warp.sync and stronger: the lanes know each other's accesses."""
        base = self.base
        columns = slice(base, base + LANES)
        if mask & self.live == self.live:
            self.clocks[: Row.PROXY, columns] = self.clock
        else:
            self._cover(self.clocks[: Row.PROXY], mask)
        if self.private:
            self._share(self.clocks[: Row.TENSOR], mask)
            self.private.forget(mask)
        self.advance()

    def fence(self, mask: int, order: Order) -> None:
        """fence.acq_rel or stronger."""
        if self.words[_SOME_PENDING]:
            for row, obtained in zip(PENDING, self.pending):
                join(self.clocks[row], obtained)
            self.pending[:] = 0
            self.words[_SOME_PENDING] = 0
        self.fenced = self.snapshot(mask), order
        self._locate()
        self.advance()

    def fence_proxy(self, mask: int, rows: Iterable[Row] = PROXIES) -> None:
        """fence.proxy.async: covers what lanes ``mask`` wrote, and what is visible to them, in the rows' memories."""
        for row in rows:
            join(self.clocks[row], self.clocks[Row.VISIBLE])
            self._cover(self.clocks[row], mask)
        self.advance()

    def initialise(self) -> tuple[int, int]:
        """mbarrier.init: (column, clock) of the event."""
        self.inits += 1
        column = self.base + Offset.INIT
        self.clocks[: Row.PROXY, column] = self.inits
        return column, self.inits

    def fence_init(self) -> None:
        """fence.mbarrier_init."""
        self.words[_FENCED_INITS] = self.inits

    def complete_tensor(self, kind: int) -> None:
        """tcgen05.wait::ld or ::st: the warp's loads or stores of tensor memory so far are complete."""
        clock = self.tensor_clock(kind)
        self.complete(self.base + kind, clock)
        self.clocks[Row.TENSOR, self.base + kind] = clock
        self._next_tensor_clock(kind)

    def new_load(self, index: int) -> None:
        """A tcgen05.ld, which is told apart from those before."""
        self._next_tensor_clock(Offset.TENSOR_LOAD)
        if index >= len(self.loads):
            self.loads = widened(self.loads, 2 * index)
            self._locate()
        self.loads[index] = self.tensor_clock(Offset.TENSOR_LOAD)

    def stores(self, lane: int, groups: int) -> None:
        """A lane issues bulk stores; host address of what is kept of its groups (`BulkGroups.address`)."""
        self.words[_STORING] |= 1 << lane
        self.words[_BULK + lane] = groups

    def _next_tensor_clock(self, kind: int) -> None:
        self.words[_LOAD_CLOCK + kind - Offset.TENSOR_LOAD] += 1
        self.words[_TENSOR_IDENTITIES] = _NO_IDENTITIES[:2]

    def loads_used(self, indices: Iterable[int]) -> None:
        """The values of these tcgen05.ld are used: the latest of each, and what came before, is complete.

        Strictly, tcgen05.wait::ld alone completes a load.
        """
        if self.strict:
            return
        clock = max((int(self.loads[index]) for index in indices if index < len(self.loads)), default=0)
        self.complete(self.base + Offset.TENSOR_LOAD, clock, len(Row))

    def complete(self, column: int, clock: int, end: int = Row.TENSOR) -> None:
        """The warp waited for operations of a stream of its own: known in the rows before ``end``."""
        part = self.clocks[:end, column]
        np.maximum(part, clock, out=part)

    def complete_in_lane(self, lane: int, column: int, clock: int) -> None:
        """One lane waited for operations of a stream of its own: the others know when they synchronise with it."""
        if self.live == 1 << lane:
            self.complete(column, clock)
        else:
            self.private.learn(column, lane, clock)

    def fence_before(self) -> None:
        """tcgen05.fence::before_thread_sync."""
        np.copyto(self.before, self.clocks[Row.TENSOR])

    def fence_after(self) -> None:
        """tcgen05.fence::after_thread_sync."""
        join(self.clocks[Row.TENSOR], self.incoming)
