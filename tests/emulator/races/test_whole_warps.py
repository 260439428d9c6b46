"""Loads and stores of whole warps, which the core of the race detector decides for all lanes at once.

Where the history of one lane's place differs in whatever way, each lane has to be looked at by itself, as it is where
Python asks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import GlobalMemory, Options
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.races.happens_before import FULL, LANES
from cute_kernels.emulator.races.launch_shadow import LaunchShadow
from cute_kernels.emulator.races.sync_point import Order
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.crew import Crew
from tests.emulator.ptx_launch import launch
from tests.emulator.races.test_shadow_unit import History, outcome

ITEMS = 64  # places of each memory: twice as many as lanes
BYTES = 16 * ITEMS
_MEMORY = np.zeros(2 * BYTES + 64, np.uint8)
EVEN = _MEMORY.ctypes.data + -_MEMORY.ctypes.data % 32
ODD = EVEN + BYTES + 2  # a region whose begin is not aligned
ORDER = Order.SYNC | Order.WIDE
#: Which place each lane accesses.
PATTERNS = {
    "neighbours": list(range(LANES)),
    "swizzled": [lane ^ 5 for lane in range(LANES)],
    "apart": [2 * lane for lane in range(LANES)],
    "rotated": [(lane + 1) % LANES for lane in range(LANES)],
    "pairs": [lane // 2 for lane in range(LANES)],
    "one": [0] * LANES,
}


class WholeWarps(History):
    """A detector with three warps of two CTAs, all lanes of which access shared or global memory.

    Args:
        together: accesses are logged, and may be decided for all lanes at once; else lane by lane.
    """

    def __init__(self, together: bool) -> None:
        self.together, self.strict = together, False
        self.memory = GlobalMemory()
        self.memory.register(EVEN, BYTES, "even")
        self.memory.register(ODD, BYTES, "odd")
        self.launch = LaunchShadow(self.memory)
        self.enter_cluster()
        for space in ("shared", "even"):  # Python makes the memory for the core: planes and layers of readers
            for nbytes in (16, 1):
                for write in (False, True):
                    self.single(0, space, nbytes, write, 0, BYTES // nbytes - 1)
        self.converge(0, FULL)

    def enter_cluster(self) -> None:
        self.crew = Crew([BYTES, BYTES], [0, 0, 1], launch=self.launch)
        self.tracker, self.warps = self.crew.tracker, self.crew.warps
        self.points = [self.tracker.point() for _ in range(2)]
        self.groups = 0

    def _access(self, warp: int, space: str, lanes: list[int], places: list[int], nbytes: int, write: bool) -> None:
        base = {"shared": 0, "remote": 1 << 24, "even": EVEN, "odd": EVEN + BYTES + 16}[space]
        kind = "shared" if base <= 1 << 24 else "global"
        self._make(warp, kind, lanes, [base + place * nbytes for place in places], nbytes, write)

    def _make(self, warp: int, kind: str, lanes: list[int], addresses: list[int], nbytes: int, write: bool) -> None:
        if self.together:
            self.warps[warp].logger.access(kind, lanes, addresses, nbytes, write)
        else:
            given = np.array(lanes, np.int32), kind, np.array(addresses, np.int64), nbytes, write
            self.tracker.generic(self.warps[warp].agent, *given)

    def whole(
        self, warp: int, space: str, nbytes: int, write: bool, first: int = 0, pattern: str = "neighbours",
        missing: int = -1,
    ) -> None:  # fmt: skip
        """All lanes but one, or all."""
        lanes = [lane for lane in range(LANES) if lane != missing]
        places = [(PATTERNS[pattern][lane] + first) % ITEMS for lane in lanes]
        self._access(warp, space, lanes, places, nbytes, write)

    def halves(self, warp: int, spaces: tuple[str, str], write: bool) -> None:
        """4 bytes by each lane: half of the lanes in one memory, half in another."""
        bases = {"shared": 0, "remote": 1 << 24, "even": EVEN, "odd": EVEN + BYTES + 16}
        addresses = [bases[spaces[lane >= LANES // 2]] + 4 * lane for lane in range(LANES)]
        kind = "shared" if spaces[0] in ("shared", "remote") else "global"
        self._make(warp, kind, list(range(LANES)), addresses, 4, write)

    def single(self, warp: int, space: str, nbytes: int, write: bool, lane: int, place: int) -> None:
        self._access(warp, space, [lane], [place], nbytes, write)

    def synchronise(self, source: int, target: int, mask: int = FULL) -> None:
        """What lanes of a warp did is known to another one from now on."""
        self.release(source, 0, mask, ORDER)
        self.acquire(target, 0, ORDER)


def both(*calls: tuple[Any, ...]) -> str:
    """What the last call comes to, for all lanes and lane by lane; the calls before it are in order."""
    histories = WholeWarps(together=True), WholeWarps(together=False)
    ends = []
    for history in histories:
        for call in calls[:-1]:
            assert outcome(history, call) == ""
        ends.append(outcome(history, calls[-1]))
    assert ends[0] == ends[1]
    assert histories[0].state() == histories[1].state()
    return ends[0]


SPACES = ["shared", "even"]
SIZES = [1, 2, 4, 8, 16]
WARP, SIZE, WRITE = st.integers(0, 1), st.sampled_from([*SIZES, 16, 4]), st.booleans()
SPACE = st.sampled_from(SPACES * 4 + ["odd", "remote"])
MASK = st.sampled_from([FULL, FULL, FULL, 1, FULL - 1, FULL >> 1])
LANE = st.one_of(st.sampled_from([0, 1, LANES - 1]), st.integers(0, LANES - 1))
PATTERN = st.sampled_from([*["neighbours", "swizzled", "apart"] * 2, *PATTERNS])
PLACES = st.one_of(st.sampled_from([0, 512]), st.integers(0, ITEMS - 5).map(lambda i: 16 * i),
                   st.just([64 * i for i in range(8)]))  # fmt: skip
CALLS = st.lists(
    st.one_of(
        *[st.builds(lambda *call: ("whole", *call), WARP, SPACE, SIZE, WRITE,
                    st.sampled_from([0, 0, 0, 0, 1, 5, 31]), PATTERN, st.sampled_from([-1] * 7 + [0, 31]))] * 4,
        st.tuples(st.just("single"), WARP, SPACE, SIZE, WRITE, LANE, LANE),
        st.tuples(st.just("copy"), WARP, st.just(0), st.just(0), PLACES, st.sampled_from([16, 32, 512]), WRITE)
        .filter(lambda call: isinstance(call[4], list) or call[4] + call[5] <= BYTES),
        st.tuples(st.just("copies_done"), WARP, st.just(0), WRITE),
        st.tuples(st.just("converge"), WARP, MASK),
        st.tuples(st.just("fence_proxy"), WARP, MASK, st.just(3)),
        st.tuples(st.just("synchronise"), WARP, WARP, MASK),
        st.tuples(st.just("synchronise"), WARP, WARP, MASK),
        st.tuples(st.just("enter_cluster")),
    ),
    min_size=8, max_size=30,
)  # fmt: skip


@settings(deadline=None)
@given(CALLS)
@example([("whole", 0, "even", 4, False), ("whole", 1, "even", 4, False), ("enter_cluster",),
          ("whole", 0, "even", 4, False), ("whole", 0, "even", 4, True)])  # fmt: skip
@example([("whole", 0, "even", 16, True), ("enter_cluster",), ("whole", 0, "even", 16, False)])
@example([("whole", 0, "shared", 4, True), ("whole", 0, "shared", 16, True), ("whole", 0, "shared", 16, False)])
def test_same_reports_and_same_shadow_as_lane_by_lane(calls: list[tuple[Any, ...]]) -> None:
    """A race ends a program; here the next call goes on from what has been recorded."""
    fast, slow = WholeWarps(together=True), WholeWarps(together=False)
    for call in calls:
        assert outcome(fast, call) == outcome(slow, call)
    assert fast.state() == slow.state()


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("pattern", ["neighbours", "swizzled", "apart"])
def test_histories_that_are_alike_are_decided_at_once(space: str, nbytes: int, pattern: str) -> None:
    """Of the warp's own accesses, of another warp's that it knows, and of a copy's."""
    history = WholeWarps(together=True)
    history.whole(0, space, nbytes, True, 0, pattern)  # the first splits granules
    decided = library().accesses_together()
    for warp in (0, 1, 1, 0):
        for write in (True, True, False, False, True):
            history.whole(warp, space, nbytes, write, 0, pattern)
            decided += 1
            assert library().accesses_together() == decided
            history.converge(warp, FULL)
        history.synchronise(0, 1)
        history.synchronise(1, 0)
    if space == "shared":
        for count, write in enumerate((False, True, False)):
            history.converge(0, FULL)
            history.fence_proxy(0, FULL, 3)
            history.copy(0, 0, 0, 0, BYTES, write)
            history.copies_done(0, 0, False)
            history.converge(0, FULL)
            history.whole(0, space, nbytes, True, 0, pattern)
            assert library().accesses_together() == decided + 1 + count


def test_granules_that_are_kept_by_bytes_are_decided_at_once_too() -> None:
    history = WholeWarps(together=True)
    for first in (0, LANES):
        history.whole(0, "shared", 8, True, first)
    history.converge(0, FULL)
    history.whole(0, "shared", 16, True)  # of which lane n meets what two lanes wrote
    history.whole(0, "shared", 16, False)
    before = library().accesses_together()
    for write in (True, False, True):
        history.whole(0, "shared", 16, write)
    assert library().accesses_together() == before + 3


def test_a_loop_of_a_store_and_a_load_is_decided_at_once() -> None:
    """Both accesses of each round of a kernel, but those that Python makes the memory for."""
    rounds, out = 500, aligned(np.zeros(LANES, np.uint32))
    text = module(
        "mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r1, 4; add.s64 %d1, %d1, %d2;"
        f"mov.u32 %r2, 0; NEXT: st.global.u32 [%d1], %r2; ld.global.u32 %r3, [%d1]; add.s32 %r2, %r2, 1;"
        f"setp.lt.s32 %p1, %r2, {rounds}; @%p1 bra NEXT; ret;"
    )
    before = library().accesses_together()
    launch(text, out, 0, options=Options())
    assert (out == rounds - 1).all()
    assert 2 * rounds - 4 <= library().accesses_together() - before <= 2 * rounds


LANES_OF_INTEREST = [0, 1, 17, LANES - 1]
OWN_STORE = ("whole", 0, "even", 4, True)
KNOWN = ("synchronise", 0, 1)


@pytest.mark.parametrize("lane", LANES_OF_INTEREST)
@pytest.mark.parametrize("write", [True, False])
def test_what_another_warp_stored_for_one_lane(lane: int, write: bool) -> None:
    """In one byte, the last of a lane's; the other 127 have a history that is in order."""
    stray = ("single", 1, "even", 1, True, 0, 4 * lane + 3)
    assert "which the store of warp 1 wrote before" in both(OWN_STORE, KNOWN, stray, ("whole", 0, "even", 4, write))


@pytest.mark.parametrize("lane", LANES_OF_INTEREST)
@pytest.mark.parametrize("when", ["alone", "before", "after"])
def test_what_another_warp_read_for_one_lane(lane: int, when: str) -> None:
    """Alone, before the whole warp reads, which must not hide it, and after that, in a second layer of readers."""
    load = [("whole", 0, "even", 4, False)]
    stray = [("single", 1, "even", 1, False, 0, 4 * lane + 3)]
    loads = {"alone": stray, "before": stray + load, "after": load + stray}[when]
    assert "which the load of warp 1 read before" in both(OWN_STORE, KNOWN, *loads, OWN_STORE)


@pytest.mark.parametrize("first", ["load", "store"])
def test_readers_of_a_second_layer_are_looked_at(first: str) -> None:
    """A whole warp in each layer, of which the writer knows one or the other."""
    loads = [("whole", 0, "even", 4, False), ("whole", 1, "even", 4, False)]
    if first == "store":
        loads.reverse()
    assert "which the load of warp 1 read before" in both(OWN_STORE, KNOWN, *loads, OWN_STORE)
    assert both(OWN_STORE, KNOWN, *loads, ("synchronise", 1, 0), OWN_STORE) == ""


@pytest.mark.parametrize("lane", LANES_OF_INTEREST)
@pytest.mark.parametrize("write", [True, False])
def test_a_store_of_which_one_lane_is_not_known(lane: int, write: bool) -> None:
    access = ("whole", 1, "even", 4, write)
    known = ("synchronise", 0, 1, FULL & ~(1 << lane))
    assert "which the store of warp 0 wrote before" in both(OWN_STORE, known, access)
    assert both(OWN_STORE, KNOWN, access) == ""


@pytest.mark.parametrize("lane", LANES_OF_INTEREST)
def test_one_store_of_a_lane_that_all_lanes_meet(lane: int) -> None:
    """One identity everywhere: of a lane of the warp, which is in order for that lane alone."""
    stores = [("single", 0, "even", 16, True, lane, place) for place in range(LANES)]
    load = ("whole", 0, "even", 16, False)
    assert "which the store of warp 0 wrote before" in both(*stores, load)
    assert both(*stores, ("converge", 0, FULL), load) == ""


@pytest.mark.parametrize("nbytes", [4, 16])
def test_stores_whose_lanes_are_shifted(nbytes: int) -> None:
    """Identities follow each other over two stores of the warp, and lane n meets lane n + 5."""
    store, next_store = ("whole", 0, "even", nbytes, True), ("whole", 0, "even", nbytes, True, LANES)
    load = ("whole", 0, "even", nbytes, False, 5)
    assert "which the store of warp 0 wrote before" in both(store, ("converge", 0, 1), next_store, load)


@pytest.mark.parametrize("by_bytes", [0, 1, LANES - 1])
def test_granules_of_which_one_is_kept_by_bytes(by_bytes: int) -> None:
    """Its history is in the other plane; the others have none there. And the other way round."""
    stray = ("single", 1, "even", 1, True, 0, 16 * by_bytes)
    found = both(("whole", 0, "even", 16, True), KNOWN, stray, ("whole", 0, "even", 16, True))
    assert "which the store of warp 1 wrote before" in found
    others = [("single", 0, "even", 1, True, lane, 16 * lane) for lane in range(LANES) if lane != by_bytes]
    stray = ("single", 1, "even", 16, True, 0, by_bytes)
    found = both(("whole", 0, "even", 16, True), *others, KNOWN, stray, ("whole", 0, "even", 16, True))
    assert "which the store of warp 1 wrote before" in found


def test_pieces_of_granules_that_are_whole() -> None:
    """4 bytes of every lane where granules are kept that another warp wrote."""
    found = both(("whole", 1, "even", 16, True), ("whole", 0, "even", 4, True))
    assert "which the store of warp 1 wrote before" in found


@pytest.mark.parametrize("nbytes", [4, 8, 16])
@pytest.mark.parametrize("write", [True, False])
def test_a_region_whose_begin_is_not_aligned(nbytes: int, write: bool) -> None:
    """Its shadow begins at an aligned address before it, so that an aligned access is inside one granule there too."""
    store, access = ("whole", 1, "odd", nbytes, True), ("whole", 0, "odd", nbytes, write)
    elsewhere = ("single", 1, "odd", 1, True, 0, 900)  # Python makes the memory
    assert both(elsewhere, store, ("synchronise", 1, 0), access) == ""
    assert "which the store of warp 1 wrote before" in both(elsewhere, store, access)


@pytest.mark.parametrize("write", [True, False])
def test_memory_of_another_cta(write: bool) -> None:
    """It has a shadow of its own."""
    remote = ("whole", 0, "remote", 4, write)
    assert both(("whole", 0, "shared", 4, True), ("whole", 0, "shared", 4, write), remote) == ""
    found = both(("whole", 2, "remote", 4, True), ("whole", 0, "shared", 4, write), remote)
    assert "which the store of warp 2 wrote before" in found


@pytest.mark.parametrize("spaces", [("shared", "remote"), ("remote", "shared"), ("even", "odd"), ("odd", "even")])
@pytest.mark.parametrize("write", [True, False])
def test_lanes_that_access_two_memories(spaces: tuple[str, str], write: bool) -> None:
    """Two CTAs, or two regions of global memory: each lane in its own."""
    other = 2 if "remote" in spaces else 1
    halves, whole = ("halves", 0, spaces, write), [("whole", 0, space, 4, True) for space in spaces]
    assert both(*whole, *whole, halves, halves) == ""
    whole = [("whole", 0, space, 4, True) for space in spaces[:1]]
    stray = [("single", other, spaces[1], 4, True, 0, LANES - 1)]
    found = both(*whole, *whole, *stray, *stray, halves)
    assert f"which the store of warp {other} wrote before" in found


@pytest.mark.parametrize("nbytes", [4, 16])
@pytest.mark.parametrize("lanes", [FULL, 1])
def test_all_lanes_that_store_to_one_place(nbytes: int, lanes: int) -> None:
    """The warp's own affair: no lane wrote it, and so each lane reads it in order when the warp has met."""
    store, load = (("whole", 0, "even", nbytes, write, 0, "one") for write in (True, False))
    found = both(store, store, ("converge", 0, lanes), load)
    assert found == ""


@pytest.mark.parametrize("nbytes", [4, 16])
@pytest.mark.parametrize("write", [True, False])
def test_stores_of_earlier_clusters(nbytes: int, write: bool) -> None:
    store, access = ("whole", 0, "even", nbytes, True), ("whole", 0, "even", nbytes, write)
    found = both(store, ("whole", 0, "even", nbytes, False), store, ("enter_cluster",), access)
    assert "it belongs to another cluster" in found


@pytest.mark.parametrize("nbytes", [4, 16])
def test_loads_of_earlier_clusters_are_kept(nbytes: int) -> None:
    """The reads of a warp have the same column in every cluster; a later one hides none of an earlier one."""
    load, store = ("whole", 0, "even", nbytes, False), ("whole", 0, "even", nbytes, True)
    found = both(load, load, ("enter_cluster",), load, load, store)
    assert "which the load of warp 0 read before" in found and "another cluster" in found
