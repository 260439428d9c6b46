"""Asynchronous copies of single threads from global to shared memory: cp.async, its groups and its mbarrier arrivals.

A copy happens at any time between its issue and the wait for it, as the completion policy says; the copies of the lanes
of one instruction happen together, different instructions in any order. It writes through the generic proxy.

Where copies are complete when they are issued, the core does what is legal (``core/lane_copies.c``). Both count the
copies and groups of a warp in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.core.layout import word_count, words
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.observe.races.memory_order import lane_vector
from cute_kernels.emulator.observe.races.shadow import GENERIC
from cute_kernels.emulator.observe.races.sync_point import Row
from cute_kernels.emulator.state.async_engine import AsyncEngine, AsyncOp, Issued
from cute_kernels.emulator.state.gmem import GlobalMemory
from cute_kernels.emulator.state.mbarrier import MBarriers
from cute_kernels.emulator.state.smem import OFFSET_MASK, RANK_SHIFT, ClusterMemory

if TYPE_CHECKING:
    from cute_kernels.emulator.state.warp import Warp


_ISSUED, _COLUMN, _TEXT = (words("LaneCopies")[name] for name in ("issued", "column", "text"))


@dataclass(eq=False)
class Copy:
    """The copies of one instruction.

    Attributes:
        lanes: mask of the lanes that copy.
        describe: for reports.
        done: the bytes are in shared memory.
        then: to call when they are.
    """

    lanes: int
    describe: str
    done: bool = False
    then: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class _Group:
    """A commit: the lanes that executed it and what they had issued before."""

    lanes: int
    copies: list[Copy]

    def pending(self, lanes: int) -> Copy | None:
        """The first incomplete copy of any of these lanes."""
        return next((copy for copy in self.copies if not copy.done and copy.lanes & self.lanes & lanes), None)


class _Warp:
    """Copies of a warp that are not complete when they are issued: not committed ones with the lanes that have not
    committed them, and committed groups.

    ``words`` is a `LaneCopies` of the core, at host ``address``: copies issued so far, now and at each commit.
    """

    def __init__(self) -> None:
        block = np.zeros(word_count("LaneCopies"), np.int64)
        self.words, self.address = memoryview(block).cast("B").cast("q"), block.ctypes.data
        self.open: list[tuple[int, Copy]] = []
        self.groups: list[_Group] = []


class CopyUnit:
    """The copies of one cluster.

    Args:
        gmem, shared: the memories.
        barriers: for cp.async.mbarrier.arrive.
        engine: decides when a copy happens.
    """

    def __init__(
        self, gmem: GlobalMemory, shared: ClusterMemory, barriers: MBarriers, engine: AsyncEngine
    ) -> None:
        self.gmem, self.shared, self.barriers, self.engine = gmem, shared, barriers, engine
        self._warps: dict[Warp, _Warp] = {}
        self._serial = 0

    def _of(self, warp: Warp) -> _Warp:
        if warp not in self._warps:
            state = self._warps[warp] = _Warp()
            if warp.agent is not None:
                state.words[_COLUMN], state.words[_TEXT] = warp.cluster.tracker.name_copies(warp.agent)
        return self._warps[warp]

    def address(self, warp: Warp) -> int:
        """Host address of the `LaneCopies` of a warp."""
        return self._of(warp).address

    def copy(
        self, warp: Warp, lanes: int, targets: np.ndarray, sources: np.ndarray, nbytes: int, counts: np.ndarray
    ) -> None:
        """cp.async by the lanes of a warp.

        Args:
            warp: who issues.
            lanes: mask of the executing lanes; the arrays have one item for each of them.
            targets: shared addresses.
            sources: global addresses.
            nbytes: 4, 8 or 16, written to shared memory.
            counts: bytes read from global memory, the rest is zero.
        """
        text = f"cp.async of {nbytes} bytes by {bin(lanes).count('1')} lanes of {warp.label}"
        copy = Copy(lanes, text)
        state = self._of(warp)
        state.open.append((lanes, copy))
        state.words[_ISSUED] += 1
        if warp.agent is not None:
            self._watch(warp, lanes, targets, sources[counts > 0], nbytes, state.words)

        def run() -> None:
            self.shared.store(targets, self._read(sources, nbytes, counts))
            copy.done = True
            for action in copy.then:
                action()

        self._submit(run, text, f"copy {nbytes} B per lane", ("cp.async", warp))

    def _watch(
        self, warp: Warp, lanes: int, targets: np.ndarray, sources: np.ndarray, nbytes: int, counts: memoryview
    ) -> None:
        tracker, mine = warp.cluster.tracker, warp.cta.shared
        inside = (targets >> RANK_SHIFT == mine.cta_rank) & ((targets & OFFSET_MASK) + nbytes <= mine.size)
        for target in targets[~inside].tolist():
            rank, offset = self.shared.resolve(target)
            self.shared.ctas[rank].check_bounds(offset, nbytes)
        identity = tracker.epochs.new(counts[_COLUMN], counts[_ISSUED], counts[_TEXT], GENERIC, warp.agent.executing())
        tracker.copies_by_lanes(warp, lane_vector(lanes), targets, nbytes, identity)
        if len(sources):
            tracker.generic(warp, -1, "global", sources, nbytes, False)

    def waited(self, warp: Warp, newest: int, every: bool) -> None:
        """The warp waited for all but the ``newest`` groups, or for all copies (``every``)."""
        state = self._warps.get(warp)
        if warp.agent is None or state is None:
            return
        done = library().copies_before(state.address, newest, every)
        warp.agent.complete(state.words[_COLUMN], done, Row.PROXY)

    def _submit(
        self, run: Callable[[], None], text: str, name: str, signals: Hashable = None, issued: Issued | None = None
    ) -> None:
        self._serial += 1
        self.engine.submit(AsyncOp(("cp.async", self._serial), run, text, name=name, signals=signals, issued=issued))

    def _read(self, sources: np.ndarray, nbytes: int, counts: np.ndarray) -> np.ndarray:
        whole = counts == nbytes
        if whole.all():
            return self.gmem.load(sources, nbytes)
        data = np.zeros((len(sources), nbytes), np.uint8)
        if whole.any():
            data[whole] = self.gmem.load(sources[whole], nbytes)
        for i in np.flatnonzero(~whole & (counts > 0)):
            data[i, : counts[i]] = self.gmem.view(int(sources[i]), int(counts[i]))
        return data

    def commit(self, warp: Warp, lanes: int) -> None:
        """cp.async.commit_group (an empty group is legal)."""
        state = self._of(warp)
        state.groups.append(_Group(lanes, [copy for mine, copy in state.open if mine & lanes]))
        state.open = [(mine & ~lanes, copy) for mine, copy in state.open if mine & ~lanes]
        library().copies_commit(state.address)

    def outstanding(self, warp: Warp, lanes: int, newest: int) -> Copy | None:
        """An incomplete copy in all but the ``newest`` groups of each lane, or None."""
        state = self._warps.get(warp)
        groups = state.groups if state is not None else []
        while groups and not groups[0].pending(groups[0].lanes):  # complete: nobody waits for it any more
            del groups[0]
        if len(groups) <= newest:
            return None
        behind = [lanes] + [0] * newest  # entry n: lanes that have n later groups, or more
        for group in reversed(groups):
            mine = group.lanes & lanes
            copy = group.pending(behind[newest])
            if copy is not None:
                return copy
            for n in range(newest, 0, -1):
                behind[n] |= behind[n - 1] & mine
        return None

    def uncommitted(self, warp: Warp, lanes: int) -> Copy | None:
        """An incomplete copy that is in no group yet, or None (wait_all covers these too)."""
        state = self._warps.get(warp)
        copies = state.open if state is not None else []
        return next((copy for mine, copy in copies if mine & lanes and not copy.done), None)

    def arrive(self, warp: Warp, lane: int, barrier: int, counted: bool) -> None:
        """cp.async.mbarrier.arrive: one arrival once all earlier copies of the lane are complete.

        Args:
            warp, lane: the thread.
            barrier: shared address.
            counted: the barrier's count expects the arrival (.noinc); otherwise the phase first expects one more.
        """
        if not counted:
            self.barriers.expect_arrivals(barrier, 1)
        state = self._of(warp)
        bit = 1 << lane
        earlier = {copy for mine, copy in state.open if mine & bit and not copy.done}
        for group in state.groups:
            earlier.update(copy for copy in group.copies if group.lanes & copy.lanes & bit and not copy.done)
        text = f"cp.async.mbarrier.arrive by {warp.label} lane {lane}"
        left, issued = len(earlier), self.engine.issuer()
        released = None
        if warp.agent is not None:
            column, copies = state.words[_COLUMN], state.words[_ISSUED]
            released = warp.cluster.tracker.copies_arrive(warp, lane, barrier, column, copies)

        def arrive() -> None:
            if released is not None:
                released()
            self.barriers.arrive(barrier, 1, text)

        def one_done() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._submit(arrive, text, "arrive", issued=issued)

        if not left:
            self._submit(arrive, text, "arrive")
        for copy in earlier:
            copy.then.append(one_done)
