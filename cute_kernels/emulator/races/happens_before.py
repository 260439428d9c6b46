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

import enum
from collections.abc import Iterable

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, word_count, words
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.machine.state.warp import WarpState
from cute_kernels.emulator.races.sync_point import (
    PROXIES,
    READ,
    Columns,
    Order,
    Row,
    SyncPoint,
    divided,
    widened,
)

LANES = CONSTANTS["LANES"]
FULL = (1 << LANES) - 1
NEVER = np.iinfo(np.int32).max  # the clock of what is not complete; nobody knows it


class Offset(enum.IntEnum):
    """Columns of a warp behind those of its 32 lanes."""

    READ = READ  # loads, by whichever lane alone
    LOADS = CONSTANTS["COLUMN_LOADS"]  # by several lanes at once
    TENSOR_LOAD = CONSTANTS["COLUMN_TENSOR_LOAD"]
    TENSOR_STORE = CONSTANTS["COLUMN_TENSOR_STORE"]
    INIT = CONSTANTS["COLUMN_INIT"]  # mbarrier.init


WARP_COLUMNS = CONSTANTS["WARP_COLUMNS"]
_AT = words("Agent")
_CHANGES = _AT["changes"]
_CLOCK, _LOAD_CLOCK, _FENCED_INITS, _FENCED_ORDER = (
    _AT[name] for name in ("clock", "load_clock", "fenced_inits", "fenced_order")
)
_TENSOR_IDENTITIES = slice(_AT["load_identity"], _AT["store_identity"] + 1)
_NO_IDENTITIES = memoryview(bytes(16)).cast("q")
#: Rows that a fence takes over from relaxed waits before it.
PENDING = (Row.ACQUIRED, Row.VISIBLE, *PROXIES)
#: Rows that an `Agent` of the core has, see there.
_PARTS = (
    ("clocks", len(Row)), ("scratch", len(Row)), ("fenced", len(Row)), ("pending", len(PENDING)), ("before", 1),
    ("incoming", 1),
)  # fmt: skip


class Agent:
    """Knowledge of one warp, and its own clock.

    Attributes:
        rank: CTA of the warp.
        clock: of its accesses now; it advances whenever something is passed on, so that later accesses are told apart.
        clocks: int32 [rows, columns]. In the columns of its own lanes: what every lane knows of the others.
        address: host address of ``clocks``.
        words: an `Agent` of the core, which it reads and writes too, as int64; it is at host address ``block_address``.
        private: host address of a `Private` of the core: what single lanes know, until the lanes synchronise.
        loads: of every tcgen05.ld, by its index in the kernel, the clock of the latest.
        before: the tensor row at the last tcgen05.fence::before_thread_sync.
        incoming: likewise, what relaxed waits obtained since there was an after_thread_sync.
        pending: obtained by relaxed waits, for a fence to acquire: int32 [`PENDING`, columns].
        label: for reports.
        strict: tcgen05.fence is asked for beside release and acquire too, and tcgen05.wait::ld of loads whose values
            have been used.
    """

    def __init__(
        self, columns: Columns, rank: int, live: int, label: str, strict: bool = False, text: int = 0, number: int = -1,
        instructions: int = 64,
    ) -> None:  # fmt: skip
        self.number = number
        self.rank, self.live, self.label, self.strict = rank, live, label, strict
        self.warp: WarpState | None = None  # the warp, None where there are clocks alone
        self._private = np.zeros(word_count("Private"), np.int64)
        self.private = self._private.ctypes.data
        self.base = columns.take(WARP_COLUMNS)  # first of its columns
        self._matrix = columns.matrix(self, sum(rows for _, rows in _PARTS))
        self.loads = np.zeros(instructions, np.int32)  # tcgen05.ld by its index in the kernel: clock of the latest
        block = np.zeros(word_count("Agent"), np.int64)
        self.words, self.block_address = memoryview(block).cast("B").cast("q"), block.ctypes.data
        values = {
            "base": self.base, "live": live, "rank": rank, "clock": 1, "load_clock": 1, "store_clock": 1, "text": text,
            "single": self.private, "number": number, "strict": strict,
            "changes": 1,
        }  # fmt: skip
        for name, value in values.items():
            self.words[_AT[name]] = value
        self.words[_FENCED_ORDER] = -1
        self.inits = 0
        self._locate()

    def _locate(self) -> None:
        words = self.words
        self.clocks, self._scratch, _, self.pending, before, incoming = divided(self._matrix, words, _PARTS, _AT)
        self.before, self.incoming = before[0], incoming[0]
        self.address = words[_AT["clocks"]]
        words[_AT["width"]] = self._matrix.shape[1]
        words[_AT["loads"]], words[_AT["load_count"]] = self.loads.ctypes.data, len(self.loads)

    @property
    def clock_bytes(self) -> int:
        """Bytes of all its clocks, from ``address`` on."""
        return self._matrix.nbytes

    def spans(self) -> list[tuple[int, int]]:
        """(address, bytes) of what the core changes but for clocks."""
        return [(self.block_address, self.words.nbytes), (self.private, self._private.nbytes)]

    def widen(self, width: int) -> None:
        self._matrix = widened(self._matrix, width)
        self._locate()

    @property
    def clock(self) -> int:
        return self.words[_CLOCK]

    def tensor_clock(self, kind: int) -> int:
        """The clock of its loads (`Offset.TENSOR_LOAD`) or stores of tensor memory now."""
        return self.words[_LOAD_CLOCK + kind - Offset.TENSOR_LOAD]

    def executing(self) -> int:
        """Index of the instruction that the warp is executing; -1: not known."""
        return -1 if self.warp is None else self.warp.executing()

    @property
    def fenced(self) -> bool:
        """Whether there has been a fence."""
        return self.words[_FENCED_ORDER] >= 0

    def changed(self) -> None:
        """To be called after clocks were changed."""
        self.words[_CHANGES] += 1

    def advance(self) -> None:
        """Begins a new clock: what is accessed from now on is not covered by what was passed on so far."""
        library().agent_advance(self.block_address)

    def snapshot(self, mask: int) -> np.ndarray:
        """Knowledge that lanes ``mask`` pass on now: all that the warp knows, and their own accesses."""
        library().agent_snapshot(self.block_address, mask)
        return self._scratch.copy()

    def order(self, mask: int) -> np.ndarray:
        """The order row of a `snapshot`, int32 [columns]."""
        library().agent_order(self.block_address, mask)
        return self._scratch[Row.ORDER].copy()

    def release(self, point: SyncPoint, mask: int, order: Order) -> None:
        """Lanes ``mask`` arrive: passes on what the order allows."""
        library().agent_release(self.block_address, point.address, mask, order)

    def acquire(self, point: SyncPoint, order: Order) -> None:
        """A wait on the completed phase: takes over what the order allows."""
        if not point.acquired(self, order):
            library().agent_acquire(self.block_address, point.address, order)

    # --- fences and synchronisation inside the warp -------------------------------------------------------------------

    def fence(self, mask: int, order: Order) -> None:
        """fence.acq_rel or stronger."""
        library().agent_fence(self.block_address, mask, order)

    def initialise(self) -> tuple[int, int]:
        """mbarrier.init: (column, clock) of the event."""
        self.inits += 1
        column = self.base + Offset.INIT
        self.clocks[: Row.PROXY, column] = self.inits
        self.words[_CHANGES] += 1
        return column, self.inits

    def fence_init(self) -> None:
        """fence.mbarrier_init."""
        self.words[_FENCED_INITS] = self.inits

    def new_load(self, index: int) -> None:
        """A tcgen05.ld, which is told apart from those before."""
        self.words[_LOAD_CLOCK] += 1
        self.words[_TENSOR_IDENTITIES] = _NO_IDENTITIES
        if index >= len(self.loads):
            self.loads = widened(self.loads, 2 * index)
            self._locate()
        self.loads[index] = self.tensor_clock(Offset.TENSOR_LOAD)

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
        self.words[_CHANGES] += 1
