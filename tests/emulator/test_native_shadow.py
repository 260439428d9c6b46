"""The race detector with its fast path in machine code against the same detector without it, on random histories."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from cute_kernels.emulator import GlobalMemory, native_shadow
from cute_kernels.emulator.errors import EmulatorError, SharedMemoryRace
from cute_kernels.emulator.happens_before import FULL, Order
from cute_kernels.emulator.launch_shadow import LaunchShadow
from cute_kernels.emulator.native_memory import LOG, LOG_ENTRY
from cute_kernels.emulator.native_shadow import ShadowUnit, shadow_unit, shadow_unit_if_worth_it
from cute_kernels.emulator.sanitizer import RaceTracker
from cute_kernels.emulator.shadow import Plane, Rows, Shadow, zeros

BYTES, WARPS = 1024, 3


class History:
    """One detector with three warps of two CTAs; the same calls on two of them must have the same effects."""

    def __init__(self, native: bool) -> None:
        self.tracker = RaceTracker([BYTES, BYTES], LaunchShadow(GlobalMemory()), WARPS, native)
        self.warps = [
            SimpleNamespace(agent=self.tracker.make_agent(index // 2, FULL, f"warp {index}")) for index in range(WARPS)
        ]
        self.points = [self.tracker.point() for _ in range(2)]
        self.operations: list[tuple[int, int]] = []
        self.groups = 0

    def generic(self, warp: int, lanes: list[int], offsets: list[int], nbytes: int, write: bool) -> None:
        """A load or store of a warp, as machine code logs it."""
        log = np.zeros((1, LOG_ENTRY), np.uint8)
        mask = sum(1 << lane for lane in lanes)
        rank = self.warps[warp].agent.rank
        log[0, :16].view(np.uint32)[:3] = LOG["shared", write], mask, nbytes
        addresses = log[0, 16:].view(np.int64)
        addresses[lanes] = [rank << 24 | offset for offset in offsets]
        if self.tracker.observe(self.warps[warp], log, 0) == 0:
            self.tracker.generic(self.warps[warp], np.array(lanes, np.int32), "shared", addresses[lanes], nbytes, write)

    def copy(
        self, warp: int, lane: int, rank: int, offsets: int | np.ndarray | Rows, nbytes: int, write: bool
    ) -> None:
        """A read or write of a bulk operation by a lane."""
        self.tracker.enter(self.warps[warp], lane)
        self.groups += 1
        read, written = self.tracker.bulk(self.groups, f"copy {self.groups}")
        if write:
            self.tracker.async_write(rank, offsets, nbytes, written)
        else:
            self.tracker.async_read(rank, offsets, nbytes, read)

    def copies_done(self, warp: int, lane: int, read: bool) -> None:
        self.tracker.bulk_waited(self.warps[warp].agent, lane, self.groups, read)

    def tensor(self, warp: int, place: tuple[slice, slice], what: str) -> None:
        """tcgen05.ld, st or mma of a warp."""
        if what == "mma":
            self.tracker.enter(self.warps[warp], 0)
            operation = self.tracker.tensor.operation(f"mma {warp}")
            self.tracker.tensor.access(self.warps[warp].agent.rank, place, operation, True)
            return
        if what == "ld":
            self.tracker.tensor.load(self.warps[warp], place, 0)
        else:
            self.tracker.tensor.store(self.warps[warp], place)

    def tensor_done(self, warp: int) -> None:
        for kind in list(self.warps[warp].agent.tensor_clocks):
            self.warps[warp].agent.complete_tensor(kind)

    def fence(self, warp: int) -> None:
        self.warps[warp].agent.fence_proxy(FULL)

    def converge(self, warp: int) -> None:
        self.warps[warp].agent.converge(FULL)

    def release(self, warp: int, point: int, mask: int, order: Order) -> None:
        self.warps[warp].agent.release(self.points[point], mask, order)

    def acquire(self, warp: int, point: int, order: Order) -> None:
        self.points[point].complete()
        self.warps[warp].agent.acquire(self.points[point], order)

    def planes(self) -> list[Plane]:
        shadows = [*self.tracker.shared, *self.tracker.launch.regions.values()]
        fine = [shadow.fine for shadow in shadows if shadow.fine is not None]
        return [*(shadow.coarse for shadow in shadows), *fine, *self.tracker.tensor.planes]

    def state(self) -> list[tuple[list[str], list[list[str]]]]:
        """Who accessed every place last, in words: the numbers of epochs may differ."""
        label = self.tracker.epochs.label
        return [
            ([label(i) + str(i & 31) for i in plane.writes.flat], [[label(i) for i in x.flat] for x in plane.reads])
            for plane in self.planes()
        ]


def random_call(rng: random.Random) -> Callable[[History], None]:
    """A random access or synchronisation; mostly whole granules of a few places, so that histories meet."""
    warp, kind = rng.randrange(WARPS), rng.randrange(12)
    nbytes = rng.choice((16, 16, 32, 4))
    if kind < 4:
        lanes = sorted(rng.sample(range(32), rng.choice((1, 2, 4))))
        offsets = [16 * rng.randrange(8) + (nbytes if nbytes < 16 else 0) for _ in lanes]
        offsets = offsets if rng.random() < 0.8 else [offsets[0]] * len(lanes)
        write = rng.random() < 0.5
        return lambda h: h.generic(warp, lanes, offsets, nbytes, write)
    if kind < 6:
        lane, rank, write = rng.randrange(2), rng.randrange(2), rng.random() < 0.4
        where = 16 * rng.randrange(6)
        many = np.array([16 * rng.randrange(8) for _ in range(3)])
        rows = Rows(where, rng.choice((0, 8, 16, 48)), rng.randrange(1, 4))
        places, length = rng.choice(((where, 16 * rng.randrange(1, 4)), (many, 16), (rows, rng.choice((8, 16, 32)))))
        return lambda h: h.copy(warp, lane, rank, places, length, write)
    if kind == 6:
        first, group = rng.randrange(4), rng.randrange(6)
        place = slice(first, first + rng.randrange(1, 4)), slice(group, group + 2, rng.choice((1, 1, 2)))
        what = rng.choice(("ld", "ld", "st", "mma"))
        return lambda h: h.tensor(warp, place, what)
    point, mask = rng.randrange(2), rng.choice((FULL, FULL, 3))
    order = rng.choice((Order.SYNC | Order.WIDE, Order.SYNC | Order.WIDE, Order.SYNC, Order.RELAXED))
    lane, read = rng.randrange(2), rng.random() < 0.5
    return (
        lambda h: h.release(warp, point, mask, order), lambda h: h.acquire(warp, point, order),
        lambda h: h.fence(warp), lambda h: (h.converge(warp), h.tensor_done(warp)),
        lambda h: h.copies_done(warp, lane, read),
    )[kind - 7]  # fmt: skip


def outcome(call: Callable[[History], None], history: History) -> str:
    try:
        call(history)
    except EmulatorError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("seed", range(20))
def test_same_reports_and_same_shadow(seed: int) -> None:
    """A race ends a program; here the next access goes on from what has been recorded."""
    rng = random.Random(seed)
    fast, slow = History(native=True), History(native=False)
    for step in range(120):
        call = random_call(rng)
        assert outcome(call, fast) == outcome(call, slow)
        if step % 6 == 5:
            assert fast.state() == slow.state()


def test_races_are_among_the_histories() -> None:
    """The comparison above means something: the random histories contain every kind of race and much that is sound."""
    found: Counter[str] = Counter()
    for seed in range(20):
        rng, history = random.Random(seed), History(native=True)
        for _ in range(120):
            found[outcome(random_call(rng), history).split(":")[0]] += 1
    assert {"", "SharedMemoryRace", "ProxyFenceMissing", "TensorMemoryRace"} <= found.keys()
    assert found[""] > 1000


def test_most_accesses_need_no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code decides what it is made for: reads and writes in order, of whole granules."""
    decided: Counter[tuple[str, bool]] = Counter()

    def count(name: str) -> None:
        original = getattr(ShadowUnit, name)

        def counted(*args: object) -> bool:
            result = original(*args)
            decided[name, result] += 1
            return result

        monkeypatch.setattr(ShadowUnit, name, counted)

    for name in ("async_read", "async_write", "tensor"):
        count(name)
    history = History(native=True)
    for index in range(20):
        history.copy(0, 0, 0, 0, 64, write=True)
        history.copies_done(0, 0, read=False)
        history.converge(0)
        history.fence(0)
        history.copy(0, 0, 0, np.arange(0, 64, 16), 16, write=False)
        history.copies_done(0, 0, read=True)
        history.converge(0)
        history.tensor(0, (slice(0, 4), slice(0, 8)), "st")
        history.tensor_done(0)
        history.tensor(0, (slice(index % 4, 4), slice(0, 2)), "ld")
        history.tensor_done(0)
    assert decided["async_write", True] == 20 and decided["async_read", True] == 19  # the first makes a layer
    assert decided["tensor", True] >= 39


def test_short_launches_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_shadow, "_seen", 0)
    assert shadow_unit_if_worth_it(None) is None
    assert shadow_unit_if_worth_it(False) is None
    monkeypatch.setattr(native_shadow, "_seen", 1 << 20)
    assert shadow_unit_if_worth_it(None) is shadow_unit()


@pytest.mark.parametrize("native", [True, False])
def test_each_lane_looks_for_itself(native: bool) -> None:
    """The same earlier store is in order for the lane that made it, and a race for its neighbour."""
    history = History(native)
    history.generic(0, [0], [0], 16, write=True)
    history.generic(0, [0], [16], 16, write=True)
    history.generic(0, [0], [0], 16, write=True)
    with pytest.raises(SharedMemoryRace):
        history.generic(0, [0, 1], [0, 16], 16, write=True)


def test_rows_are_the_offsets_that_they_stand_for() -> None:
    for rows, nbytes in ((Rows(32, 48, 3), 16), (Rows(4, 24, 2), 8), (Rows(64, 0, 1), 32)):
        ours, theirs = Shadow(BYTES), Shadow(BYTES)
        offsets = np.array([rows.start + i * rows.pitch for i in range(rows.count)])
        for shadow, where in ((ours, rows), (theirs, offsets)):
            for part in shadow.parts(where, nbytes):
                part.plane.set_write(part.where, 32)
        assert (ours.coarse.writes == theirs.coarse.writes).all()
        assert (ours.fine is None) == (theirs.fine is None)
        assert ours.fine is None or (ours.fine.writes == theirs.fine.writes).all()


@pytest.mark.parametrize("shape", [7, (3, 5), 1 << 20, (1 << 10, 1 << 9)])
def test_memory_of_shadows_is_zero_and_writable(shape: int | tuple[int, ...]) -> None:
    array = zeros(shape)
    assert array.dtype == np.int32 and array.shape == np.zeros(shape).shape and not array.any()
    array[...] = 3
    assert (array == 3).all() and not zeros(shape).any()
