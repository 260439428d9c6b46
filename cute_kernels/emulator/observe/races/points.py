"""Synchronisation, for the race detector: mbarriers and other barriers, strong operations on memory pass order on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cute_kernels.emulator.errors import BarrierMisuse
from cute_kernels.emulator.facts import Side
from cute_kernels.emulator.observe.races.abroad import reaches_clusters
from cute_kernels.emulator.observe.races.checks import RaceChecks
from cute_kernels.emulator.observe.races.sync_point import Order, Row, SyncPoint

if TYPE_CHECKING:
    from cute_kernels.emulator.state.warp import Warp


class PointRaces(RaceChecks):
    """The part of the detector that knows synchronisation points."""

    # --- synchronisation ----------------------------------------------------------------------------------------------

    def point(self, ranks: int | None = None) -> SyncPoint:
        """A new synchronisation point, for a barrier of so many CTAs (None: of the cluster)."""
        return SyncPoint(self.columns, self.ranks if ranks is None else ranks)

    def initialise(self, warp: Warp, address: int) -> int:
        """mbarrier.init. Returns `SyncPoint.address`, for the core."""
        point = self.points.get(address)
        if point is None:
            point = self.points[address] = self.point()
            point.column = self._phases_of(address)
        point.initialised = warp.agent.initialise()
        point.follow(self.agents)
        return point.address

    def _phases_of(self, address: int) -> int:
        """The column that counts the phases of an mbarrier."""
        return self.columns.named(("phases", address))

    def check_initialised(self, address: int, what: str) -> None:
        """Raises BarrierMisuse when mbarrier.init is not ordered before what the entered warp does to the barrier."""
        point, agent = self.points.get(address), self.agent
        if point is None or point.initialised is None:
            return
        column, clock = point.initialised
        if agent.clocks[Row.VISIBLE, column] < clock:
            error = BarrierMisuse(
                f"{what} uses the mbarrier at shared offset {address & 0xFFFFFF} of CTA {address >> 24}, whose "
                f"mbarrier.init is not ordered before: {self._hint(agent.clocks, column, clock)}; a barrier, or "
                "fence.mbarrier_init before a relaxed one of the cluster, is needed"
            ).know("barrier-init-order", **self._barrier(address))
            self.report(error)

    def arrive(self, warp: Warp, groups: dict[int, int], order: Order) -> None:
        """Lanes (a mask per address) are about to arrive at mbarriers."""
        agent = self.agent = warp.agent
        for address, mask in groups.items():
            point = self.points.get(address)
            if point is None:
                continue
            self.check_initialised(address, f"an arrival of {agent.label}")
            if address >> 24 != agent.rank:
                point.arrived(agent)
            agent.release(point, mask, order)

    def wait(self, warp: Warp, address: int, order: Order, phase: int) -> None:
        """A wait on ``phase`` of an mbarrier succeeded."""
        agent = self.agent = warp.agent
        point = self.points.get(address)
        if point is not None:
            self.check_initialised(address, f"a wait of {agent.label}")
            agent.acquire(point, order)
            point.waited(agent, phase)

    def look(self, warp: Warp, address: int, phase: int, back: int) -> None:
        """A warp waits, by parity, for ``phase`` of an mbarrier, which completed ``back`` (0 or 1) phases after the one
        before it.

        Raises:
            BarrierMisuse: the warp may look before that one is complete, and take it for the one before.
        """
        point = self.points.get(address)
        if phase > 0 and point is not None and not point.knows(warp.agent, back):
            error = BarrierMisuse(
                f"{warp.label} waits for phase {phase} of the mbarrier at shared offset {address & 0xFFFFFF} of CTA "
                f"{address >> 24}, but nothing orders that after phase {phase - 1}: a wait that comes before it is "
                f"complete is one for {_phase_before(phase - 1)}, which has the same parity, and passes at once"
            ).know("phase-ambiguous", **self._barrier(address))
            self.report(error)

    def completed(self, address: int, phase: int) -> None:
        """``phase`` of an mbarrier completes.

        Raises:
            BarrierMisuse: a warp that waits for the phase before may not have seen it yet, and would wait for ever.
        """
        point = self.points.get(address)
        if point is None:
            return
        overtaken = point.overtaken(phase)
        if overtaken is not None:
            agent, place = overtaken
            flow = self.launch.flow
            wait = (flow.kernel.instructions[place],) if flow is not None and place >= 0 else ()
            late = "the barrier may run ahead of the wait by two phases, which have the same parity"
            if not phase:
                late = "a wait that comes later is one for phase 1, which has the same parity"
            error = BarrierMisuse(
                f"phase {phase} of the mbarrier at shared offset {address & 0xFFFFFF} of CTA {address >> 24} "
                f"completes, but nothing orders that after the wait of {agent.label} for {_phase_before(phase)}: {late}"
            ).know("phase-overrun", **self._barrier(address), other=Side("waits", wait, agent.label))
            self.report(error)
        point.complete(phase)

    def _barrier(self, address: int) -> dict[str, Any]:
        return {} if self.barriers is None else {"barrier": self.barriers.state(address)}

    # --- strong operations on memory ----------------------------------------------------------------------------------

    def strong(self, warp: Warp, mask: int, space: str, addresses: list[int], acquire: Any, release: Any) -> None:
        """Accesses that may synchronise; ``acquire`` and ``release`` are their `Order`, or None without that half."""
        agent = warp.agent
        for address in dict.fromkeys(addresses):
            key = (space, address)
            point = self.locations.get(key)
            if acquire is not None and point is not None:
                agent.acquire(point, acquire & ~Order.GRID)
            if space == "global" and reaches_clusters(acquire):
                self.abroad.read(agent, mask, address, bool(acquire & Order.SYNC))
            if space == "global" and reaches_clusters(release):
                self.abroad.write(agent, mask, address, bool(release & Order.SYNC))
            if release is None or not (release & Order.SYNC or agent.fenced):
                continue
            if point is None:
                point = self.locations[key] = self.point()
            agent.release(point, mask, release & ~Order.GRID)
            point.complete()

    def fence(self, warp: Warp, mask: int, order: int, kind: str) -> None:
        """A fence of memory by lanes; ``kind``: "sc", "acq_rel", "acquire" or "release"."""
        if reaches_clusters(order):
            self.abroad.fence(warp.agent, mask, kind != "release", kind != "acquire", kind == "sc")
        warp.agent.fence(mask, order & ~Order.GRID)


def _phase_before(phase: int) -> str:
    return f"phase {phase - 1}" if phase else "the phase before the first, which counts as complete"
