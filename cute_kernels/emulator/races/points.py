"""Synchronisation, for the race detector: mbarriers and other barriers, strong operations on memory pass order on."""

import ctypes

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import BarrierMisuse
from cute_kernels.emulator.isa.ptx.waits import commutes
from cute_kernels.emulator.races import phases
from cute_kernels.emulator.races.abroad import reaches_clusters
from cute_kernels.emulator.races.checks import RaceChecks
from cute_kernels.emulator.races.happens_before import FULL, Agent, Offset
from cute_kernels.emulator.races.meetings import Visit, Visits
from cute_kernels.emulator.races.memory_order import Strength
from cute_kernels.emulator.races.sync_point import Order, Row, SyncPoint

#: What uses an mbarrier; all others are arrivals.
_VERBS = {
    CONSTANTS["TRY_WAIT"]: "a wait",
    CONSTANTS["TEST_WAIT"]: "a wait",
    CONSTANTS["EXPECT_ARRIVALS"]: "cp.async.mbarrier.arrive",
    CONSTANTS["TENSOR_COMMIT"]: "tcgen05.commit",
}


class PointRaces(RaceChecks):
    """The part of the detector that knows synchronisation points."""

    # --- synchronisation ----------------------------------------------------------------------------------------------

    def point(self, ranks: int | None = None) -> SyncPoint:
        """A new synchronisation point, for a barrier of so many CTAs (None: of the cluster)."""
        return SyncPoint(self.columns, self.ranks if ranks is None else ranks)

    def initialise(self, agent: Agent, address: int) -> int:
        """mbarrier.init. Returns `SyncPoint.address`, for the core."""
        point = self.points.get(address)
        if point is None:
            point = self.points[address] = self.point()
            point.column = self.columns.named(("phases", address))
        column, clock = point.invalidated or (agent.base, 0)
        if agent.order(FULL)[column] < clock:
            self.stands_against(phases.invalidated_before(self, address, agent))
        point.initialised = agent.initialise()
        point.follow(self.agents)
        return point.address

    def invalidate(self, agent: Agent, address: int) -> None:
        """mbarrier.inval is about to end what lies there."""
        point = self.points.get(address)
        if point is None:
            return
        column = library().point_in_use(point.address, agent.block_address)
        if column >= 0:
            self.stands_against(phases.invalidated_in_use(self, address, agent, column))
        point.invalidated = agent.base + Offset.READ, agent.clock
        agent.advance()

    def named_point(self) -> SyncPoint:
        """A new synchronisation point, for a named barrier."""
        point = self.point(1)
        point.follow(self.agents)
        return point

    def check_initialised(self, address: int, what: str) -> None:
        """Raises BarrierMisuse when mbarrier.init is not ordered before what the entered warp does to the barrier."""
        point = self.points.get(address)
        if point is None or point.initialised is None:
            return
        column, clock = point.initialised
        if self.agent.clocks[Row.VISIBLE, column] < clock:
            self.report(self.before_init(address, what, self.agent, column, clock))

    def before_init(self, address: int, what: str, agent: Agent, column: int, clock: int) -> BarrierMisuse:
        """Error of ``what`` uses an mbarrier whose mbarrier.init, a column and a clock, is not ordered before."""
        return BarrierMisuse(
            f"{what} uses the mbarrier at {phases.place_of(address)}, whose mbarrier.init is not ordered before: "
            f"{self._hint(agent.clocks, column, clock)}; a barrier, or fence.mbarrier_init before a relaxed one of the "
            "cluster, is needed"
        ).know("barrier-init-order", **self.barrier_facts(address))

    def fault(self, what: int, fault: ctypes.Structure, agent: Agent | None) -> BarrierMisuse | None:
        """A fault of order (`Fault`) that the core has found at an mbarrier; None: it is none of order."""
        address = fault.address
        if what == CONSTANTS["INIT_ORDER"]:
            verb = _VERBS.get(fault.operation, "an arrival")
            return self.before_init(address, f"{verb} of {agent.label}", agent, fault.column, fault.clock)
        return phases.fault(self, what, fault, agent)

    # --- strong operations on memory ----------------------------------------------------------------------------------

    def strong(
        self, agent: Agent, mask: int, space: str, addresses: list[int], nbytes: int, strength: Strength
    ) -> None:
        """Accesses that may synchronise; ``acquire`` and ``release`` are their `Order`, or None without that half."""
        acquire, release = strength
        self._meet(agent, space, addresses, nbytes, release is not None)
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

    def _meet(self, agent: Agent, space: str, addresses: list[int], nbytes: int, writes: bool) -> None:
        """Notes where strong accesses meet those of other warps."""
        if agent.warp is None:
            return
        place, event = agent.executing(), (agent.warp.cluster.index, agent.number, agent.warp.code.steps)
        does = commutes(self.launch.flow, place) if place >= 0 and self.launch.flow is not None else ""
        visit = Visit(event, place, agent.label, writes, agent.base + Offset.READ, agent.clock, does)
        memory = self.launch if space == "global" else self
        visits = memory.visits = memory.visits or Visits()

        def is_ordered(earlier: Visit) -> bool:
            return earlier.event[0] == event[0] and bool(agent.order(FULL)[earlier.column] >= earlier.clock)

        for address in dict.fromkeys(addresses):
            visits.classify(address, nbytes, visit)
            for meeting in visits.note(address, visit, is_ordered, lambda at=address: self._name(space, at)):
                self.met("draw", place, meeting)

    def strong_accesses(self) -> frozenset[tuple[int, bool]]:
        """Instructions with strong accesses, of the launch so far or in shared memory, and `Visits.apart` of each."""
        known = (visits for visits in (self.visits, self.launch.visits) if visits is not None)
        return frozenset(item for visits in known for item in visits.apart.items())

    def _name(self, space: str, address: int) -> str:
        if space == "shared":
            return phases.place_of(address)
        found = next((each for each in self.launch.memory.regions() if each.start <= address < each.end), None)
        return "global memory" if found is None else f"byte {address - found.start} of {found.name or 'a global array'}"

    def fence(self, agent: Agent, mask: int, order: int, kind: str) -> None:
        """A fence of memory by lanes; ``kind``: "sc", "acq_rel", "acquire" or "release"."""
        if reaches_clusters(order):
            self.abroad.fence(agent, mask, kind != "release", kind != "acquire", kind == "sc")
        agent.fence(mask, order & ~Order.GRID)
