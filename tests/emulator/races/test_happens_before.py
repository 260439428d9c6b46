"""Vector clocks and shadow memory, against a model that keeps sets of events and the whole history."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cute_kernels.emulator.errors import ProxyFenceMissing, Race, SharedMemoryRace
from cute_kernels.emulator.races.happens_before import FULL, Offset
from cute_kernels.emulator.races.sync_point import Order
from tests.emulator.crew import Crew, converge, fence_proxy

CELLS = (1024, 1028, 1040, 1056)  # two of them in one granule
SYNC, WIDE = int(Order.SYNC), int(Order.WIDE)
RANKS = (0, 0, 1)

WARP, LANE, CELL = st.integers(0, 2), st.integers(0, 2), st.integers(0, 3)
ORDER = st.sampled_from([0, SYNC, WIDE, SYNC | WIDE])
MASK = st.sampled_from([FULL, 1, 2, 5])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["read", "write", "async read", "async write"]), WARP, LANE, CELL),
        st.tuples(st.just("release"), WARP, st.integers(0, 1), MASK, ORDER),
        st.tuples(st.just("acquire"), WARP, st.integers(0, 1), ORDER),
        st.tuples(st.just("fence"), WARP, MASK, st.sampled_from([SYNC, SYNC | WIDE])),
        st.tuples(st.sampled_from(["converge", "proxy"]), WARP, MASK),
    ),
    max_size=25,
)


class Warp:
    """What a warp knows, as sets of event numbers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.acquired: set[int] = set()
        self.visible: set[int] = set()
        self.proxy: set[int] = set()
        self.lanes: dict[int, set[int]] = defaultdict(set)
        self.reads: set[int] = set()
        self.fenced: tuple[set[int], set[int], set[int], int] | None = None
        self.pending: tuple[set[int], set[int], set[int]] = (set(), set(), set())

    def of(self, mask: int) -> set[int]:
        """Own events of the lanes of a mask; loads of any lane."""
        return self.reads.union(*(events for lane, events in self.lanes.items() if mask >> lane & 1))


class Model:
    """The order of events by definition: what a release passes on, and what an acquire takes over."""

    def __init__(self) -> None:
        self.warps = [Warp(rank) for rank in RANKS]
        #: visible: (rank, wide, events)
        self.points = [{"acquired": set(), "visible": [], "proxy": []} for _ in range(2)]
        self.history: dict[int, list[tuple[int, bool]]] = defaultdict(list)
        self.count = 0

    def access(self, warp: int, lane: int, cell: int, kind: str) -> str:
        """'race', 'fence' (missing) or ''."""
        me = self.warps[warp]
        known = (me.acquired if kind == "async write" else me.visible) | me.lanes[lane] | me.reads
        earlier = self.history[cell]
        if any(event not in known for event, wrote in earlier if wrote or kind.endswith("write")):
            return "race"
        if kind == "async write":
            earlier.clear()  # by an operation that all warps know to be complete
            return ""
        if kind == "async read":
            last = [event for event, wrote in earlier if wrote][-1:]
            return "fence" if any(event not in me.proxy for event in last) else ""
        self.count += 1
        earlier.append((self.count, kind == "write"))
        (me.lanes[lane] if kind == "write" else me.reads).add(self.count)
        return ""

    def release(self, warp: int, point: int, mask: int, order: int) -> None:
        me, here = self.warps[warp], self.points[point]
        if order & SYNC:
            here["acquired"] |= me.acquired | me.of(mask)
            here["visible"].append((me.rank, bool(order & WIDE), me.visible | me.of(mask)))
            here["proxy"].append(set(me.proxy))
        elif me.fenced is not None:
            acquired, visible, proxy, scope = me.fenced
            here["acquired"] |= acquired
            here["visible"].append((me.rank, bool(order & scope & WIDE), visible))
            here["proxy"].append(proxy)

    def acquire(self, warp: int, point: int, order: int) -> None:
        me, here = self.warps[warp], self.points[point]
        visible: set[int] = set()
        for rank, wide, events in here["visible"]:
            if rank == me.rank or (wide and order & WIDE):
                visible |= events
        proxy = set().union(*here["proxy"])
        obtained = set(here["acquired"]), visible, proxy
        if order & SYNC:
            self._learn(me, obtained)
        else:
            me.pending = tuple(old | new for old, new in zip(me.pending, obtained))

    @staticmethod
    def _learn(me: Warp, obtained: tuple[set[int], set[int], set[int]]) -> None:
        me.acquired |= obtained[0]
        me.visible |= obtained[1]
        me.proxy |= obtained[2]

    def fence(self, warp: int, mask: int, order: int) -> None:
        me = self.warps[warp]
        self._learn(me, me.pending)
        me.pending = set(), set(), set()
        me.fenced = me.acquired | me.of(mask), me.visible | me.of(mask), set(me.proxy), order

    def converge(self, warp: int, mask: int) -> None:
        me = self.warps[warp]
        me.visible |= me.of(mask)
        me.acquired |= me.of(mask)

    def fence_proxy(self, warp: int, mask: int) -> None:
        me = self.warps[warp]
        me.proxy |= me.visible | me.of(mask)


@given(EVENTS)
@example([("write", 0, 0, 0), ("proxy", 0, FULL), ("release", 0, 0, 1, SYNC), ("acquire", 1, 0, SYNC),
          ("async read", 1, 0, 0)])  # fmt: skip
@example([("write", 0, 1, 0), ("release", 0, 0, 1, SYNC), ("acquire", 1, 0, SYNC), ("read", 1, 0, 0)])
@example([("write", 0, 0, 0), ("release", 0, 0, FULL, SYNC), ("acquire", 2, 0, SYNC | WIDE), ("write", 2, 0, 0)])
@example([("read", 0, 0, 0), ("release", 0, 0, FULL, SYNC), ("acquire", 2, 0, SYNC), ("async write", 2, 0, 0)])
@example([("read", 0, 0, 0), ("release", 0, 0, FULL, WIDE), ("acquire", 2, 0, SYNC), ("async write", 2, 0, 0)])
@example([("read", 0, 0, 0), ("release", 0, 0, FULL, SYNC), ("acquire", 1, 0, WIDE), ("fence", 1, FULL, SYNC),
          ("async write", 1, 0, 0)])  # fmt: skip
def test_reports_exactly_what_the_definition_says(events: list[tuple]):
    """Accesses and synchronisation inside a warp as the core logs and works them off."""
    crew, model = Crew([4096, 4096], list(RANKS)), Model()
    tracker = crew.tracker
    points = [tracker.point() for _ in range(2)]
    for kind, warp, *rest in events:
        agent = crew[warp].agent
        if kind in ("read", "write", "async read", "async write"):
            lane, cell = rest
            expected = model.access(warp, lane, cell, kind)
            got = ""
            try:
                if kind.startswith("async"):
                    tracker.enter(crew[warp].agent, lane)
                    operation = tracker.operation(tracker.columns.named(kind), 0, kind)
                    access = tracker.async_read if kind == "async read" else tracker.async_write
                    access(0, CELLS[cell], 4, operation)
                else:
                    crew.access(warp, lane, CELLS[cell], 4, write=kind == "write")
            except Race:
                got = "race"
            except ProxyFenceMissing:
                got = "fence"
            assert got == expected
            if got:
                return
        elif kind == "release":
            point, mask, order = rest
            model.release(warp, point, mask, order)
            agent.release(points[point], mask, order)
            points[point].complete()
        elif kind == "acquire":
            model.acquire(warp, *rest)
            agent.acquire(points[rest[0]], rest[1])
        elif kind == "fence":
            model.fence(warp, *rest)
            agent.fence(*rest)
        elif kind == "converge":
            model.converge(warp, *rest)
            converge(agent, *rest)
        else:
            model.fence_proxy(warp, *rest)
            fence_proxy(agent, *rest)


BYTES = st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from([1, 2, 4, 8, 16, 32]), st.integers(0, 63))


@given(st.lists(BYTES, max_size=30))
def test_accesses_conflict_exactly_where_bytes_overlap(accesses: list[tuple[int, bool, int, int]]):
    """Warps that never synchronise: two of them race at the first byte that both accessed, one of them by a store.

    Sizes are mixed, so that granules are split while some of their history is known.
    """
    crew = Crew([4096], [0, 0, 0])
    readers: dict[int, set[int]] = defaultdict(set)
    writers: dict[int, set[int]] = defaultdict(set)
    for warp, write, nbytes, item in accesses:
        start = 1024 + nbytes * (item % (64 // min(nbytes, 16)))
        places = range(start, start + nbytes)
        others = [b for b in places if (writers[b] | (readers[b] if write else set())) - {warp}]
        if others:
            with pytest.raises(SharedMemoryRace) as error:
                crew.access(warp, 0, start, nbytes, write=write)
            kinds = {"store" if writers[b] - {warp} else "load" for b in others}
            assert any(f"of CTA 0, which the {kind} of warp" in str(error.value) for kind in kinds)
            return
        crew.access(warp, 0, start, nbytes, write=write)
        for b in places:
            (writers if write else readers)[b].add(warp)


def test_columns_grow():
    """More streams than were expected: clocks made before keep their meaning."""
    crew = Crew([4096], [0, 0])
    tracker, point = crew.tracker, crew.tracker.point()
    crew.touch(0, np.array([1024]), 4, write=True)
    crew[0].agent.release(point, FULL, SYNC)
    before = tracker.columns.width
    last = [tracker.columns.named(("stream", i)) for i in range(3 * before)][-1]
    crew[0].agent.complete(last, 7)
    crew[0].agent.release(point, FULL, SYNC)
    point.complete()
    crew[1].agent.acquire(point, SYNC)
    assert tracker.columns.width > before and crew[1].agent.clocks[0, last] == 7
    crew.touch(1, np.array([1024]), 4, write=True)
    with pytest.raises(SharedMemoryRace, match="a store of warp 0 writes .* which the store of warp 1 wrote"):
        crew.touch(0, np.array([1024]), 4, write=True)


def test_more_readers_than_layers_are_all_remembered():
    """Every one of many unordered readers must be waited for."""
    crew = Crew([4096], [0] * 6)
    for reader in range(5):
        crew.touch(reader, np.array([1024]), 16, write=False)
    point = crew.tracker.point()
    for reader in range(4):
        crew[reader].agent.release(point, FULL, SYNC)
    point.complete()
    crew[5].agent.acquire(point, SYNC)
    with pytest.raises(SharedMemoryRace, match="the load of warp 4 read"):
        crew.touch(5, np.array([1024]), 16, write=True)
    crew[4].agent.release(point, FULL, SYNC)
    point.complete()
    crew[5].agent.acquire(point, SYNC)
    crew.touch(5, np.array([1024]), 16, write=True)


def test_the_latest_of_several_loads_whose_values_are_used_is_complete() -> None:
    """And with it those before it, of tensor memory."""
    agent = Crew([2048], [0]).warps[0].agent
    for index in (3, 4):
        agent.new_load(index)
    agent.loads_used([3, 4])
    assert agent.clocks[0, agent.base + Offset.TENSOR_LOAD] == agent.loads[4] > agent.loads[3]
