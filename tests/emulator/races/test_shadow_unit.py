"""Shadow memory: any history of accesses against its definition, and what the core keeps of it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import GlobalMemory
from cute_kernels.emulator.errors import EmulatorError, SharedMemoryRace
from cute_kernels.emulator.machine.state.memory_tables import TENSOR_LOAD
from cute_kernels.emulator.races.happens_before import FULL, Offset
from cute_kernels.emulator.races.launch_shadow import LaunchShadow
from cute_kernels.emulator.races.shadow import LANE_BITS, Plane, zeros
from cute_kernels.emulator.races.shadow_unit import ShadowUnit
from cute_kernels.emulator.races.sync_point import PROXIES, Order, Row
from cute_kernels.emulator.races.tracker import RaceTracker
from tests.emulator.crew import (
    Crew,
    access_rows,
    bulk_store,
    bulk_waited,
    complete_tensor,
    converge,
    fence_proxy,
    fence_tensor,
    private_clocks,
    state,
)
from tests.emulator.definitions import races as definition
from tests.nightly import NIGHTLY, examples

BYTES, RANKS = 1024, [0, 0, 1]
GLOBAL = np.zeros(256 + 32, np.uint8)
ORIGIN = GLOBAL.ctypes.data + -GLOBAL.ctypes.data % 32


class History:
    """A detector with three warps of two CTAs."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.memory = GlobalMemory()
        self.memory.register(ORIGIN, 96, "first")
        self.memory.register(ORIGIN + 96, 64, "constants", writable=False)
        self.memory.register(ORIGIN + 160, 96, "second")
        self.launch = LaunchShadow(self.memory)
        self.enter_cluster()

    def enter_cluster(self) -> None:
        """The next cluster of the launch."""
        self.crew = Crew([BYTES, BYTES], RANKS, strict=self.strict, launch=self.launch)
        self.tracker, self.warps = self.crew.tracker, self.crew.warps
        self.points = [self.tracker.point() for _ in range(2)]
        self.groups = 0

    def shared(self, warp: int, rank: int, lanes: list[int], offsets: list[int], nbytes: int, write: bool) -> None:
        """A load or store of a warp, as the core logs it."""
        addresses = [rank << 24 | offset * nbytes for offset in offsets[: len(lanes)]]
        self.warps[warp].logger.access("shared", sorted(lanes), addresses, nbytes, write)

    def globally(self, warp: int, lanes: list[int], offsets: list[int], nbytes: int, write: bool) -> None:
        addresses = [ORIGIN + offset * nbytes % 256 for offset in offsets[: len(lanes)]]
        inside = [self.memory.region_index(address, nbytes) for address in addresses]
        if None not in inside and not (write and 1 in inside):
            self.warps[warp].logger.access("global", sorted(lanes), addresses, nbytes, write)

    def copy(self, warp: int, lane: int, rank: int, places: Any, nbytes: int, write: bool) -> None:
        """A read or write of a bulk operation by a lane; ``rank`` 2: of global memory."""
        self.tracker.enter(self.warps[warp].agent, lane)
        self.groups += 1
        read, written = bulk_store(self.tracker, self.groups, f"copy {self.groups}")
        places = np.array(places) if isinstance(places, list) else places
        if rank == 2:
            rows = ORIGIN + 160 + 16 * np.arange(2)
            access_rows(self.tracker, rows, nbytes, written if write else read, write)
        elif write:
            self.tracker.async_write(rank, places, nbytes, written)
        else:
            self.tracker.async_read(rank, places, nbytes, read)

    def copies_done(self, warp: int, lane: int, read: bool) -> None:
        bulk_waited(self.tracker, self.warps[warp].agent, lane, self.groups, read)

    def tensor(self, warp: int, what: str, column: int, columns: int, group: int, step: int) -> None:
        """tcgen05.ld, st or mma of a warp; ``log``: tcgen05.ld as the core logs it."""
        place = slice(column, column + columns), slice(group, group + 2, step)
        if what == "mma":
            self.tracker.enter(self.warps[warp].agent, 0)
            operation = self.tracker.tensor.operation(f"mma {warp}")
            self.tracker.tensor.access(self.warps[warp].agent.rank, place, operation, True)
        elif what == "ld":
            self.tracker.tensor.load(self.warps[warp].agent, place, column)
        elif what == "st":
            self.tracker.tensor.store(self.warps[warp].agent, place)
        else:
            address = 32 * (group // 2) << 16 | column
            self.warps[warp].logger.note(TENSOR_LOAD, FULL, columns, (address, 50 * column))

    def tensor_wait(self, warp: int, kind: int) -> None:
        complete_tensor(self.warps[warp].agent, kind)

    def tensor_fence(self, warp: int, before: int) -> None:
        agent = self.warps[warp].agent
        fence_tensor(agent, before)

    def loads_used(self, warp: int, column: int) -> None:
        self.warps[warp].agent.loads_used([column, 50 * column])

    def converge(self, warp: int, mask: int) -> None:
        converge(self.warps[warp].agent, mask)

    def fence_proxy(self, warp: int, mask: int, spaces: int) -> None:
        fence_proxy(self.warps[warp].agent, mask, [row for bit, row in enumerate(PROXIES) if spaces >> bit & 1])

    def fence(self, warp: int, mask: int, order: Order) -> None:
        self.warps[warp].agent.fence(mask, order)

    def release(self, warp: int, point: int, mask: int, order: Order) -> None:
        self.warps[warp].agent.release(self.points[point], mask, order)

    def acquire(self, warp: int, point: int, order: Order) -> None:
        self.points[point].complete()
        self.warps[warp].agent.acquire(self.points[point], order)

    # --- what has come of it ------------------------------------------------------------------------------------------

    def state(self) -> list[Any]:
        """Who accessed every place last, and what every warp knows."""
        return state(self.tracker)


WARP, LANE, RANK, WRITE = st.integers(0, 2), st.integers(0, 2), st.integers(0, 1), st.booleans()
MASK = st.sampled_from([FULL, FULL, 1, 7])
ORDER = st.sampled_from([Order.SYNC | Order.WIDE, Order.SYNC | Order.WIDE, Order.SYNC, Order.WIDE, Order.RELAXED])
# Lists are drawn at once: hypothesis takes longer for the numbers of a history than the detector for the history.
LANES = st.sampled_from([list(lanes) for count in range(1, 5) for lanes in permutations((0, 1, 2, 31), count)])
OFFSETS = st.sampled_from([list(offsets) for offsets in product(range(6), repeat=4)])
SIZE = st.sampled_from([16, 16, 32, 4, 8, 1])
COLUMN = st.integers(0, 3)
PLACES = st.one_of(
    st.integers(0, 4).map(lambda i: 16 * i),
    st.lists(st.integers(0, 7).map(lambda i: 16 * i), min_size=1, max_size=3),
    st.builds(lambda start, pitch, count: [start + pitch * i for i in range(count)],
              st.integers(0, 12).map(lambda i: 8 * i), st.sampled_from([0, 8, 16, 48]), st.integers(1, 3)),
)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("shared"), WARP, st.just(0), LANES, OFFSETS, SIZE, WRITE),
        st.tuples(st.just("shared"), st.just(2), st.just(1), LANES, OFFSETS, SIZE, WRITE),
        st.tuples(st.just("globally"), WARP, LANES, OFFSETS, SIZE, WRITE),
        st.tuples(st.just("copy"), WARP, LANE, st.integers(0, 2), PLACES, st.sampled_from([16, 16, 32, 8]), WRITE),
        st.tuples(st.just("copies_done"), WARP, LANE, WRITE),
        st.tuples(st.just("tensor"), WARP, st.sampled_from(["log", "log", "ld", "st", "mma"]), COLUMN,
                  st.integers(1, 3), st.sampled_from([0, 0, 2, 3]), st.sampled_from([1, 1, 2])),
        st.tuples(st.just("tensor_wait"), WARP, st.sampled_from([int(Offset.TENSOR_LOAD), int(Offset.TENSOR_STORE)])),
        st.tuples(st.just("tensor_fence"), WARP, st.integers(0, 1)),
        st.tuples(st.just("loads_used"), WARP, COLUMN),
        st.tuples(st.just("converge"), WARP, MASK),
        st.tuples(st.just("fence_proxy"), WARP, MASK, st.integers(1, 3)),
        st.tuples(st.just("fence"), WARP, MASK, ORDER),
        st.tuples(st.just("release"), WARP, RANK, MASK, ORDER),
        st.tuples(st.just("acquire"), WARP, RANK, ORDER),
        st.tuples(st.just("enter_cluster")),
    ),
    min_size=15, max_size=50,
)  # fmt: skip


def outcome(history: History, call: tuple[Any, ...]) -> str:
    try:
        getattr(history, call[0])(*call[1:])
    except EmulatorError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Defined(History):
    """What is accessed, as the definition has it; of tensor memory it has none."""

    def __init__(self, strict: bool) -> None:
        self.cluster, self.memory_of = -1, definition.History()
        super().__init__(strict)

    def enter_cluster(self) -> None:
        super().enter_cluster()
        self.cluster += 1
        before = self.memory_of
        self.memory_of = definition.History()  # shared memory is another one
        for place, event in before.writes.items():
            if place[0] == "global":
                self.memory_of.writes[place] = event
        for place, events in before.reads.items():
            if place[0] == "global":
                self.memory_of.reads[place] = events

    def _accesses(self, call: tuple[Any, ...]) -> list[tuple[int, list[tuple[str, int]]]] | None:
        """(lane, bytes) of every access of a call; None: it makes none that is defined here."""
        kind, warp, *rest = call if len(call) > 1 else (*call, 0)
        if kind == "shared":
            rank, lanes, offsets, nbytes, _ = rest
            starts = [("shared", rank << 24 | offset * nbytes) for offset in offsets[: len(lanes)]]
        elif kind == "globally":
            lanes, offsets, nbytes, write = rest
            starts = [("global", offset * nbytes % 256) for offset in offsets[: len(lanes)]]
            inside = [self.memory.region_index(ORIGIN + start, nbytes) for _, start in starts]
            if None in inside or write and 1 in inside:
                return None
            starts = [start if region != 1 else None for start, region in zip(starts, inside)]
        elif kind == "copy":
            lane, rank, places, nbytes, _ = rest
            if rank == 2:
                starts = [("global", 160 + 16 * i) for i in range(2)]
            else:
                starts = [("shared", rank << 24 | offset) for offset in np.atleast_1d(places).tolist()]
            lanes = [lane] * len(starts)
        else:
            return None
        lanes = lanes if kind == "copy" else sorted(lanes)
        return [
            (lane, [(start[0], start[1] + byte) for byte in range(nbytes)])
            for lane, start in zip(lanes, starts) if start is not None
        ]  # fmt: skip

    def _looker(self, call: tuple[Any, ...], lane: int) -> definition.Looker:
        kind, agent, write = call[0], self.warps[call[1]].agent, call[-1]
        clocks, base = agent.clocks, agent.base
        private = {column: clock for column, (own, clock) in private_clocks(agent) if own == lane}
        loads = {base + Offset.READ, base + Offset.LOADS}
        if kind != "copy":
            own = set() if lane < 0 else {base + lane}
            return definition.Looker(self.cluster, clocks[Row.VISIBLE], frozenset(own | loads), private)
        fence = clocks[Row.PROXY_GLOBAL if call[3] == 2 else Row.PROXY]
        if not write:
            return definition.Looker(self.cluster, clocks[Row.VISIBLE], frozenset({base + lane}), private, fence)
        return definition.Looker(self.cluster, clocks[Row.ACQUIRED], frozenset({base + lane} | loads), private)

    @staticmethod
    def _together(call: tuple[Any, ...], accesses: list[Any]) -> bool:
        """Whether several lanes store to one place, which is the warp's."""
        return call[0] != "copy" and call[-1] and len(accesses) > 1 and len({at[0] for _, at in accesses}) == 1

    def expected(self, call: tuple[Any, ...]) -> bool | None:
        """Whether it is a race; None: that is not defined here."""
        accesses = self._accesses(call)
        if accesses is None or self.strict and call[0] == "copy":
            return None
        together = self._together(call, accesses)
        return any(
            self.memory_of.races(self._looker(call, -1 if together else lane), places, call[-1])
            for lane, places in accesses
        )

    def note(self, call: tuple[Any, ...]) -> None:
        """It was made."""
        accesses = self._accesses(call)
        if accesses is None:
            return
        agent, write = self.warps[call[1]].agent, call[-1]
        base, together = agent.base, self._together(call, accesses)
        for lane, places in accesses:
            column, clock = base + lane, agent.clock
            private = base
            if call[0] == "copy":
                column = private = self.tracker.bulk_columns(agent, lane)[write]
                clock = self.groups
            elif together or not write:
                column = private = base + (Offset.LOADS if not write and len(accesses) > 1 else Offset.READ)
            self.memory_of.note(definition.Event(self.cluster, column, clock, private), places, write)


@pytest.mark.parametrize("strict", [False, True])
@settings(max_examples=examples(200, 400), deadline=None)
@given(CALLS)
@example([("shared", 0, 0, [0], [0, 0, 0, 0], 4, True), ("shared", 0, 0, [1], [0, 0, 0, 0], 4, True)])
@example([("tensor", 0, "log", 1, 2, 0, 1), ("release", 0, 0, FULL, Order.SYNC), ("acquire", 1, 0, Order.SYNC),
          ("tensor", 1, "st", 1, 1, 0, 1)])  # fmt: skip
@example([("copy", 0, 1, 0, 0, 32, False), ("copies_done", 0, 1, True), ("converge", 0, 7),
          ("shared", 0, 0, [0, 1], [0, 1, 0, 0], 16, True)])  # fmt: skip
@example([("globally", 0, [0, 1], [0, 1, 0, 0], 4, True), ("enter_cluster",),
          ("globally", 1, [0], [1, 0, 0, 0], 4, False)])  # fmt: skip
@example([("globally", 1, [0], [0, 0, 0, 0], 16, False), ("globally", 0, [0, 1], [0, 1, 0, 0], 16, False),
          ("enter_cluster",), ("globally", 0, [0], [1, 0, 0, 0], 16, False),
          ("globally", 0, [0], [0, 0, 0, 0], 16, False)])  # fmt: skip
@example([("globally", 0, [0], [12, 0, 0, 0], 16, False), ("copy", 0, 0, 2, 0, 16, False), ("enter_cluster",),
          ("globally", 0, [0], [12, 0, 0, 0], 16, False), ("copy", 0, 0, 2, 0, 16, False)])  # fmt: skip
@example([("globally", 0, [0], [0, 0, 0, 0], 4, False), ("globally", 0, [0], [0, 0, 0, 0], 16, False),
          *[("enter_cluster",), ("globally", 0, [0], [0, 0, 0, 0], 16, False)] * 2])  # fmt: skip
def test_any_history_as_defined(strict: bool, calls: list[tuple[Any, ...]]) -> None:
    """A race of shared or global memory is found where there is one, and ends the history."""
    history = Defined(strict)
    for call in calls:
        expected = history.expected(call)
        found = outcome(history, call)
        if expected is not None:
            assert bool(found) == expected, found
        if found:
            return
        history.note(call)


def test_races_are_among_the_histories() -> None:
    """The comparison above means something: the random histories contain kinds of races and much that is sound.

    One in a hundred has a missing fence of proxies: by day that is left to histories that are written down.
    """
    found: Counter[str] = Counter()

    @settings(max_examples=examples(300, 2000), derandomize=True, database=None)
    @given(CALLS)
    def count(calls: list[tuple[Any, ...]]) -> None:
        history = History()
        found.update(outcome(history, call).split(":")[0] for call in calls)

    count()
    rare = {"ProxyFenceMissing"} if NIGHTLY else set()
    assert {"", "SharedMemoryRace", "GlobalMemoryRace", "TensorMemoryRace"} | rare <= found.keys()
    assert found[""] > 300


def questions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which the core adds what it asks Python for from now on."""
    asked: list[int] = []
    original = ShadowUnit._asked

    def counted(unit: ShadowUnit, what: int, conflict: int) -> int:
        asked.append(what)
        return original(unit, what, conflict)

    monkeypatch.setattr(ShadowUnit, "_asked", counted)
    return asked


def test_what_is_in_order_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python makes room for the first accesses of a kind, and has to be asked for nothing after that."""
    asked = questions(monkeypatch)
    history = History()
    for repeat in range(20):
        for nbytes in (4, 16):
            history.shared(0, 0, [0, 1, 2, 3], [0, 1, 2, 3], nbytes, write=True)
            history.shared(0, 0, [0, 1, 2, 3], [0, 1, 2, 3], nbytes, write=False)
            history.globally(0, [0, 1, 2, 3], [0, 1, 2, 3], nbytes, write=True)
            history.converge(0, FULL)
            history.globally(0, [0, 1, 2, 3], [0, 1, 2, 3], nbytes, write=False)
            history.globally(0, [0, 1], [6, 7], 16, write=False)  # read-only memory
        history.copies_done(0, 3, read=True)  # what one lane knows
        history.converge(0, FULL)
        history.fence_proxy(0, FULL, 3)
        history.copy(0, 0, 0, 512, 64, write=True)
        history.copies_done(0, 0, read=False)
        history.converge(0, FULL)
        history.copy(0, 0, 0, list(range(512, 576, 16)), 16, write=False)
        history.copies_done(0, 0, read=True)
        history.converge(0, FULL)
        history.tensor(0, "st", 0, 4, 0, 1)
        history.tensor_wait(0, Offset.TENSOR_STORE)
        history.tensor(0, "log", 0, 3, 0, 1)
        history.tensor_wait(0, Offset.TENSOR_LOAD)
        history.tensor_fence(0, repeat % 2)
        if repeat == 0:
            assert asked
            asked.clear()
    assert not asked


@pytest.mark.parametrize("nbytes", [16, 4])
def test_each_lane_looks_for_itself(nbytes: int) -> None:
    """The same earlier store is in order for the lane that made it, and a race for its neighbour."""
    history = History()
    history.shared(0, 0, [0], [0], nbytes, write=True)
    history.shared(0, 0, [0], [1], nbytes, write=True)
    history.shared(0, 0, [0], [0], nbytes, write=True)
    with pytest.raises(SharedMemoryRace):
        history.shared(0, 0, [0, 1], [0, 1], nbytes, write=True)


@pytest.mark.parametrize("nbytes", [16, 4])
def test_accesses_of_earlier_clusters_are_not_known(nbytes: int) -> None:
    """Columns and clocks of two clusters are the same numbers: what a warp knows says nothing of earlier clusters."""
    history = History()
    for write in (True, False, True, False):
        history.globally(0, [0], [0], nbytes, write)
        history.globally(0, [0], [1], nbytes, False)
    history.globally(0, [0], [0], nbytes, True)
    history.enter_cluster()
    for agent in (warp.agent for warp in history.warps):
        agent.clocks[:] = 1 << 20
    assert outcome(history, ("globally", 0, [0], [0], nbytes, False)).startswith("GlobalMemoryRace")
    assert outcome(history, ("globally", 0, [0], [0], nbytes, True)).startswith("GlobalMemoryRace")
    assert outcome(history, ("globally", 0, [0], [1], nbytes, True)).startswith("GlobalMemoryRace")


def read_second_region(history: History, how: str, nbytes: int) -> None:
    """Two places, by the same warp or lane in every cluster."""
    if how == "load":
        history.globally(0, [0, 1], [160 // nbytes, 160 // nbytes + 1], nbytes, False)
    else:
        history.copy(0, 1, 2, None, nbytes, False)


@pytest.mark.parametrize("nbytes", [16, 8])
@pytest.mark.parametrize("how", ["load", "copy"])
@pytest.mark.parametrize("writer", ["store", "copy"])
def test_reads_of_later_clusters_hide_none_of_earlier_ones(nbytes: int, how: str, writer: str) -> None:
    """The reads of a warp have the same column in every cluster, and what it knows is about its own cluster."""
    history = History()
    for cluster in range(3):
        read_second_region(history, how, nbytes)
        if cluster < 2:
            history.enter_cluster()
    history.copies_done(0, 1, read=False)
    store, copy = ("globally", 0, [1], [160 // nbytes], nbytes, True), ("copy", 0, 1, 2, None, nbytes, True)
    found = outcome(history, store if writer == "store" else copy)
    reader = "load of warp 0" if how == "load" else "copy 1"
    assert re.match(f"GlobalMemoryRace: .* writes .* which the {reader} read before.*another cluster", found)


@pytest.mark.parametrize("how", ["load", "copy"])
def test_many_clusters_that_read_the_same_need_no_more_layers(how: str) -> None:
    history = History()
    for _ in range(10):
        read_second_region(history, how, 16)
        history.enter_cluster()
    plane = history.launch.regions[ORIGIN + 160, 96].coarse
    kept, latest = plane.foreign[:2], plane.reads[0][:2]
    assert len(plane.reads) == 1 and not plane.foreign[2:].any()
    clusters = history.launch.epochs.clusters
    assert (clusters[kept >> LANE_BITS] == 1).all() and (clusters[latest >> LANE_BITS] == 10).all()


@pytest.mark.parametrize("nbytes", [16, 4])
def test_a_write_that_is_in_order_ends_the_reads_of_earlier_clusters(nbytes: int) -> None:
    """They were released to this cluster; the next cluster races with the write, and no more with them."""
    history = History()
    flag, order = [ORIGIN + 64], Order.SYNC | Order.WIDE | Order.GRID
    for cluster in range(3):
        if cluster:
            history.enter_cluster()
            history.tracker.strong(history.warps[0].agent, FULL, "global", flag, 4, (order, None))
        history.globally(0, [0], [0], nbytes, False)
        if cluster < 2:
            history.tracker.strong(history.warps[0].agent, FULL, "global", flag, 4, (None, order))
    shadow = history.launch.regions[ORIGIN, 96]
    plane = shadow.coarse if nbytes == 16 else shadow.fine
    assert plane.foreign[0]
    assert outcome(history, ("globally", 0, [0], [0], nbytes, True)) == ""
    assert not plane.foreign.any()
    assert outcome(history, ("globally", 0, [0], [0], nbytes, True)) == ""


class Accesses:
    """All accesses to global memory there were, by byte: what clusters without synchronisation may do, in full."""

    def __init__(self) -> None:
        self.cluster = 0
        self.reads: dict[int, set[Any]] = defaultdict(set)
        self.writes: dict[int, set[Any]] = defaultdict(set)

    def races(self, by: Any, lane: int, places: range, write: bool) -> bool:
        """Whether an access does with any before. Loads of a warp are in order with each of its lanes, stores of a lane
        with that lane, and a copy that nobody waits for with nothing; ``by`` is the warp, or "copy".
        """
        found = any(writer != (self.cluster, by, lane) for byte in places for writer in self.writes[byte])
        return found or (write and any(r != (self.cluster, by) for byte in places for r in self.reads[byte]))

    def note(self, by: Any, lane: int, places: range, write: bool) -> None:
        for byte in places:
            (self.writes if write else self.reads)[byte].add((self.cluster, by, lane) if write else (self.cluster, by))


#: Warp, neighbours, first and bytes of each, all in the first or all in the second region.
PIECES = SIZE.flatmap(
    lambda nbytes: st.tuples(
        WARP, st.integers(1, 3), st.sampled_from([0, 1, 160 // nbytes, 160 // nbytes + 1]), st.just(nbytes)
    )
).filter(lambda piece: piece[2] * piece[3] + piece[1] * piece[3] <= (96 if piece[2] < 2 else 256))
UNSYNCHRONISED = st.lists(
    st.one_of(
        *[PIECES.map(lambda piece: ("load", *piece))] * 3,
        PIECES.map(lambda piece: ("store", piece[0], 1, *piece[2:])),
        st.tuples(st.just("copy"), WARP, st.just(2), st.just(0), st.sampled_from([16, 32, 8])),
        st.tuples(st.just("enter_cluster")),
        st.tuples(st.just("enter_cluster")),
    ),
    min_size=6, max_size=24,
)  # fmt: skip


@settings(max_examples=examples(150, 300), deadline=None)
@given(UNSYNCHRONISED)
@example([("load", 0, 1, 0, 16), ("load", 1, 1, 1, 16), ("enter_cluster",), ("load", 0, 2, 0, 16),
          ("store", 0, 1, 0, 16)])  # fmt: skip
@example([("load", 1, 1, 20, 4), ("load", 0, 1, 0, 16), ("enter_cluster",), ("load", 0, 1, 0, 16),
          ("store", 0, 1, 0, 4)])  # fmt: skip
@example([("load", 0, 1, 20, 4), ("load", 0, 1, 0, 16), ("enter_cluster",), ("load", 0, 1, 20, 4),
          ("load", 0, 1, 0, 16), ("store", 0, 1, 0, 4)])  # fmt: skip
def test_global_memory_against_a_list_of_all_accesses(calls: list[tuple[Any, ...]]) -> None:
    """Without synchronisation, a race is reported exactly where two accesses conflict, however long ago one was.

    A race ends the history; a read that would be one is left out, so that more histories come to a write.
    """
    history, model = History(), Accesses()
    for kind, *arguments in calls:
        if kind == "enter_cluster":
            history.enter_cluster()
            model.cluster += 1
            continue
        warp, items, first, nbytes = arguments
        write, by = kind == "store", "copy" if kind == "copy" else warp
        if kind == "copy":
            call = ("copy", warp, 0, 2, None, nbytes, False)
            pieces = [(0, range(start, start + nbytes)) for start in (160, 176)]
        else:
            call = ("globally", warp, list(range(items)), list(range(first, first + items)), nbytes, write)
            pieces = [(i, range((first + i) * nbytes, (first + i + 1) * nbytes)) for i in range(items)]
        race = any(model.races(by, lane, places, write) for lane, places in pieces)
        if race and not write:
            continue
        assert (outcome(history, call) != "") == race
        if race:
            return
        for lane, places in pieces:
            model.note(by, lane, places, write)


def test_readers_of_global_memory_do_not_replace_each_other() -> None:
    """What a warp knows has no say in which readers of global memory are kept: other clusters may have to see them."""
    history = History()
    for warp in (0, 1, 0, 1):
        history.globally(warp, [0], [0], 16, False)
        history.release(warp, 0, FULL, Order.SYNC | Order.WIDE)
        history.acquire(1 - warp, 0, Order.SYNC | Order.WIDE)
    shadow, *_ = history.launch.regions.values()
    assert len({int(layer[0]) for layer in shadow.coarse.reads} - {0}) == 2


@pytest.mark.parametrize("split", [0, 1, 2])
def test_a_split_granule_between_whole_ones_is_looked_at_by_bytes(split: int) -> None:
    """A copy over three granules of which one was written in pieces, by a warp that the copy is not ordered after."""
    history = History()
    history.shared(0, 0, [0], [0], 4, write=True)  # from now on there is a plane by bytes
    history.converge(0, FULL)
    history.shared(1, 0, [0], [4 * (4 + split)], 4, write=True)
    assert outcome(history, ("copy", 0, 0, 0, 64, 48, True)).startswith("SharedMemoryRace")


def test_epochs_are_made_beyond_the_first_arrays() -> None:
    """Arrays of epochs grow while the core knows their addresses."""
    history = History()
    for _ in range(1500):
        history.shared(0, 0, [0], [0], 4, write=True)
        history.converge(0, FULL)
    assert len(history.tracker.epochs) > 1500
    assert outcome(history, ("shared", 1, 0, [0], [0], 4, True)).startswith("SharedMemoryRace")


@pytest.mark.parametrize("shape", [7, (3, 5), 1 << 20, (1 << 10, 1 << 9)])
def test_memory_of_shadows_is_zero_and_writable(shape: int | tuple[int, ...]) -> None:
    array = zeros(shape)
    assert array.dtype == np.int32 and array.shape == np.zeros(shape).shape and not array.any()
    array[...] = 3
    assert (array == 3).all() and not zeros(shape).any()


def test_a_launch_that_follows_knows_no_machine_code() -> None:
    """Regions are found again where the shadows of one launch are those of the next."""
    history = History()
    history.globally(0, [0], [0], 4, write=True)
    history.globally(0, [0], [0], 4, write=True)
    history.launch = history.launch.successor()
    history.enter_cluster()
    assert isinstance(history.tracker, RaceTracker)
    assert outcome(history, ("globally", 0, [0], [0], 4, True)).startswith("GlobalMemoryRace")


@pytest.mark.parametrize("nbytes", [4, 16])
def test_readers_that_know_nothing_of_each_other_need_no_python(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core adds a layer for the second one, and splits a granule; a write by either races with the other's read."""
    asked = questions(monkeypatch)
    history = History()
    history.shared(0, 0, [0], [5], nbytes, False)
    history.shared(1, 0, [0], [5], nbytes, False)
    assert not asked
    shadow = history.tracker.shared[0]
    plane, place = (shadow.fine, 5 * nbytes) if nbytes < 16 else (shadow.coarse, 5)
    assert len(plane.reads) == 2 and len({int(layer[place]) for layer in plane.reads} - {0}) == 2
    with pytest.raises(SharedMemoryRace, match="which the load of .* read"):
        history.shared(0, 0, [0], [5], nbytes, True)


def test_layers_beyond_those_that_there_is_room_for() -> None:
    """Python makes more of them, and those that there are keep what they hold."""
    plane = Plane(8)
    for number in range(1, 40):
        plane.expect_reads(number)
        plane.reads[-1][number % 8] = number
    assert len(plane.reads) == 39 and plane.block[2] == 39
    assert [int(layer[number % 8]) for number, layer in enumerate(plane.reads, 1)] == list(range(1, 40))
    assert sum(int(layer.sum()) for layer in plane.reads) == sum(range(1, 40))
