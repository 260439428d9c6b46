"""Order that barriers pass on: kinds of order, columns of clocks, and synchronisation points (see `happens_before`)."""

import enum
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, word_count, words
from cute_kernels.emulator.core.library import library


class Row(enum.IntEnum):
    """Kinds of order: the rows of a matrix of clocks."""

    ORDER = CONSTANTS["ROW_ORDER"]
    ACQUIRED = CONSTANTS["ROW_ACQUIRED"]
    VISIBLE = CONSTANTS["ROW_VISIBLE"]
    PROXY = CONSTANTS["ROW_PROXY"]
    PROXY_GLOBAL = CONSTANTS["ROW_PROXY_GLOBAL"]
    TENSOR = CONSTANTS["ROW_TENSOR"]


class Order(enum.IntFlag):
    """Semantics of a synchronising instruction."""

    RELAXED = 0
    SYNC = CONSTANTS["ORDER_SYNC"]  # release of an arrival, acquire of a wait
    WIDE = CONSTANTS["ORDER_WIDE"]  # scope of the cluster or wider; without it the scope is the CTA
    GRID = 4  # scope of the GPU or the system: known to `abroad` alone


ROWS = len(Row)
#: By the number of a cluster, a visible row of it: int32 [columns]. Neither is changed once it is made.
Knowledge = dict[int, np.ndarray]
#: Rows that relaxed synchronisation at the scope of a CTA does not take to another.
SCOPED = (Row.VISIBLE, Row.TENSOR)
PROXIES = (Row.PROXY, Row.PROXY_GLOBAL)
#: Column of a warp, behind those of its 32 lanes, that counts loads by whichever lane.
READ = CONSTANTS["COLUMN_READ"]
_AT, _FOLLOWED = words("Point"), words("Followed")
_COMPLETED, _COLUMN, _INIT, _COPY, _STREAM_COUNT, _STREAM_ROOM, _STREAMS = (
    _AT[name] for name in ("completed", "column", "init_column", "copies", "stream_count", "stream_room", "streams")
)
_PHASE, _USED, _ANNOUNCED, _ANNOUNCED_PLACE, _ARRIVED, _ARRIVED_PHASE, _ARRIVED_PLACE, _STEPS, _COMMIT = (
    _FOLLOWED[name]
    for name in (
        "phase", "used", "announced", "announced_place", "arrived", "arrived_phase", "arrived_place", "arrived_steps",
        "commit_column",
    )
)
_FOLLOWED_WORDS = word_count("Followed")
_MOST_STREAMS = 64
_NOBODY = np.zeros((0, _FOLLOWED_WORDS), np.int64)


class Wide(Protocol):
    """An object with a matrix of clocks of all columns."""

    def widen(self, width: int) -> None: ...


class Numbered(Protocol):
    """A warp: its number in the cluster, -1 where none is known, and its first column."""

    number: int
    base: int


class Columns:
    """Hands out columns, and keeps every matrix of clocks wide enough."""

    def __init__(self, expected: int) -> None:
        self.width = max(64, expected)
        self.used = 0
        self._named: dict[Hashable, int] = {}
        self._owners: list[Wide] = []

    def take(self, count: int) -> int:
        """The first of ``count`` new columns."""
        first = self.used
        self.used += count
        if self.used > self.width:
            self.width = 2 * self.used
            for owner in self._owners:
                owner.widen(self.width)
        return first

    def named(self, key: Hashable) -> int:
        """The column of a stream, always the same for a key."""
        if key not in self._named:
            self._named[key] = self.take(1)
        return self._named[key]

    def matrix(self, owner: Wide, rows: int = ROWS) -> np.ndarray:
        """Clocks of all columns, int32 [rows, columns], for an object whose ``widen`` is called when there are more."""
        self._owners.append(owner)
        return np.zeros((rows, self.width), np.int32)


def widened(clocks: np.ndarray, width: int) -> np.ndarray:
    """A copy with zeros for new columns."""
    result = np.zeros((*clocks.shape[:-1], width), np.int32)
    result[..., : clocks.shape[-1]] = clocks
    return result


def divided(
    clocks: np.ndarray, words: memoryview, parts: Sequence[tuple[str, int]], at: dict[str, int]
) -> list[np.ndarray]:
    """Parts of int32 [rows, columns], by name and number of rows; their addresses become words of these names."""
    row, address, found = 0, clocks.ctypes.data, []
    for name, rows in parts:
        found.append(clocks[row : row + rows])
        words[at[name]] = address + row * clocks.strides[0]
        row += rows
    return found


def join(target: np.ndarray, source: np.ndarray) -> None:
    """``target`` learns what ``source`` knows (which may have been made when there were fewer columns)."""
    if target.shape == source.shape:
        np.maximum(target, source, out=target)
    else:
        part = target[..., : source.shape[-1]]
        np.maximum(part, source, out=part)


class SyncPoint:
    """Knowledge that one barrier passes on: gathered while its phase is incomplete, available when it is complete.

    Attributes:
        gathered, available: int32 [rows, columns]. The visible row holds what was released at cluster scope.
        inside, inside_available: int32 [CTAs, `SCOPED`, columns]: what the threads of each CTA passed on at any scope;
            with one CTA there is no distinction, and none is kept.
        address: host address of a `Point` of the core, which it reads and writes too.
    """

    def __init__(self, columns: Columns, ranks: int) -> None:
        block = np.zeros(word_count("Point"), np.int64)
        self._words, self.address = memoryview(block).cast("B").cast("q"), block.ctypes.data
        self.ranks = ranks
        self._scoped = (ranks if ranks > 1 else 0) * len(SCOPED)
        self._clocks = columns.matrix(self, 2 * ROWS + 2 * self._scoped + 1)
        self._used = np.zeros(ranks, np.int64)
        self._streams = np.zeros(_MOST_STREAMS, np.int64)
        self._rows = _NOBODY
        self._seen: dict[tuple[Numbered, int], int] = {}  # of those that are not followed
        self._words[_COLUMN] = -1
        self.invalidated: tuple[int, int] | None = None  # column and clock of the latest mbarrier.inval
        self._words[_AT["ranks"]], self._words[_AT["used"]] = ranks, self._used.ctypes.data
        self._words[_STREAMS], self._words[_STREAM_ROOM] = self._streams.ctypes.data, _MOST_STREAMS
        self._locate()

    def _locate(self) -> None:
        words, width = self._words, self._clocks.shape[1]
        scoped = self._scoped // len(SCOPED), len(SCOPED), width
        self.gathered, self.available, inside, inside_available, _ = divided(
            self._clocks, words, (("gathered", ROWS), ("available", ROWS), ("inside", self._scoped),
                                  ("inside_available", self._scoped), ("earlier", 1)), _AT,
        )  # fmt: skip
        self.inside, self.inside_available = inside.reshape(scoped), inside_available.reshape(scoped)
        words[_AT["width"]] = width

    def spans(self) -> list[tuple[int, int]]:
        """(address, bytes) of what the core changes."""
        arrays = self._clocks, self._used, self._streams, self._rows
        return [(self.address, self._words.nbytes), *((each.ctypes.data, each.nbytes) for each in arrays)]

    def widen(self, width: int) -> None:
        self._clocks = widened(self._clocks, width)
        self._locate()

    @property
    def completed(self) -> int:
        """Phases so far; the clock of the point's own column, if it has one."""
        return self._words[_COMPLETED]

    @property
    def column(self) -> int | None:
        """Column that counts the phases of copies that signal the barrier; None for a barrier without phases."""
        column = self._words[_COLUMN]
        return None if column < 0 else column

    @column.setter
    def column(self, column: int) -> None:
        self._words[_COLUMN] = column

    @property
    def initialised(self) -> tuple[int, int] | None:
        """Column and clock of the mbarrier.init."""
        column, clock = self._words[_INIT : _INIT + 2]
        return (column, clock) if clock else None

    @initialised.setter
    def initialised(self, event: tuple[int, int]) -> None:
        self._words[_INIT], self._words[_INIT + 1] = event

    # --- what it passes on --------------------------------------------------------------------------------------------

    def complete(self, phase: int = 0) -> None:
        """The phase is complete: what was gathered is available."""
        library().point_complete(self.address, phase)

    def add_stream(self, column: int) -> None:
        """An asynchronous operation of this stream arrives."""
        count = self._words[_STREAM_COUNT]
        if column in self._streams[:count]:
            return
        if count == len(self._streams):
            self._streams = np.concatenate([self._streams, np.zeros_like(self._streams)])
            self._words[_STREAMS], self._words[_STREAM_ROOM] = self._streams.ctypes.data, len(self._streams)
        self._streams[count] = column
        self._words[_STREAM_COUNT] = count + 1

    # --- who waited, copied, arrived ----------------------------------------------------------------------------------

    def follow(self, agents: Sequence[Numbered]) -> None:
        """From now on it is known what these warps, numbered in this order, do with the barrier."""
        if len(self._rows) != len(agents):
            self._rows = np.full((len(agents), _FOLLOWED_WORDS), -1, np.int64)
            self._rows[:, _ARRIVED] = 0
            self._bases = np.fromiter((agent.base for agent in agents), np.int64, len(agents))
            for name, value in {
                "warps": len(agents), "followed": self._rows.ctypes.data, "bases": self._bases.ctypes.data,
            }.items():  # fmt: skip
                self._words[_AT[name]] = value
        self._rows[:, _PHASE] = CONSTANTS["NO_PHASE"]
        self._rows[:, _USED] = self._rows[:, _ANNOUNCED] = self._words[_AT["announcements"]] = 0

    def acquired(self, agent: Numbered, order: int) -> bool:
        """Whether a warp that is not followed has acquired this phase in this order before; it has from now on."""
        if 0 <= agent.number < len(self._rows):
            return False
        known, self._seen[agent, order] = self._seen.get((agent, order)), self.completed
        return known == self.completed

    def arrivals(self) -> Iterator[tuple[int, int, int, int]]:
        """Warp, clock, phase and index of the instruction of the latest arrivals from other CTAs."""
        for warp, row in enumerate(self._rows):
            if row[_ARRIVED]:
                yield warp, int(row[_ARRIVED]), int(row[_ARRIVED_PHASE]), int(row[_ARRIVED_PLACE])

    def arrival_of(self, warp: int) -> tuple[int, int]:
        """Index of the instruction of the latest arrival by a warp that is known, or -1, and `Side.steps`."""
        return tuple(map(int, self._rows[warp, [_ARRIVED_PLACE, _STEPS]])) if warp < len(self._rows) else (-1, 0)

    def announced(self) -> tuple[int, int] | None:
        """Warp, and index of the instruction, of an expect_tx that no arrival of the phase knows; None: none."""
        if not self._words[_AT["announcements"]]:
            return None
        warp = int(np.flatnonzero(self._rows[:, _ANNOUNCED])[0])
        return warp, int(self._rows[warp, _ANNOUNCED_PLACE])

    def take_commits(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Warp, stream, clock, phase and index of the instruction of the latest commits, which are forgotten."""
        for warp, row in enumerate(self._rows):
            if row[_COMMIT] >= 0:
                yield warp, *row[_COMMIT:].tolist()
                row[_COMMIT] = -1

    def copied(self, pair: bool, identity: int) -> None:
        """A copy to the barrier's CTA, or to the other one of its ``pair``, is about to signal."""
        library().point_copied(self.address, pair, identity)

    def copies(self) -> list[tuple[bool, int, int]]:
        """Whether it was to the other CTA of the pair, phase and identity of the latest copies."""
        words = self._words
        pairs = ((pair, words[_COPY + 2 * pair], words[_COPY + 2 * pair + 1]) for pair in (False, True))
        return [copy for copy in pairs if copy[1]]
