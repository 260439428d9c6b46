"""The race detector of a cluster: what it knows, how it decides whether an access comes too early, what it says then.

`races.tracker` and `races.points` have the accesses and the synchronisation that are checked with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_kernels.emulator.errors import (
    EmulatorError,
    GlobalMemoryRace,
    ProxyFenceMissing,
    Race,
    SharedMemoryRace,
    raising,
)
from cute_kernels.emulator.facts import Memory, Side, WarpName
from cute_kernels.emulator.observe.races.abroad import Abroad
from cute_kernels.emulator.observe.races.conflict import Conflict
from cute_kernels.emulator.observe.races.earlier_accesses import place, suspects
from cute_kernels.emulator.observe.races.exits import ExitChecks
from cute_kernels.emulator.observe.races.happens_before import WARP_COLUMNS, Agent
from cute_kernels.emulator.observe.races.launch_shadow import LaunchShadow
from cute_kernels.emulator.observe.races.shadow import LANE_BITS, Part, Shadow, View, unordered
from cute_kernels.emulator.observe.races.shadow_unit import ShadowUnit
from cute_kernels.emulator.observe.races.sync_point import Columns, Row, SyncPoint
from cute_kernels.emulator.observe.races.tensor_memory import Operation, TensorRaces

if TYPE_CHECKING:
    from cute_kernels.emulator.state.mbarrier import MBarriers
    from cute_kernels.emulator.state.warp import Warp

_WEAK = "the synchronisation between them is relaxed, or its scope does not include both"


class RaceChecks:
    """State of the detector of one cluster.

    Args:
        sizes: bytes of shared memory per CTA, in order of rank.
        launch: what is shared with the other clusters of the launch.
        warps: number of warps of the cluster (a hint of how many columns will be needed).
        strict: see `Options.strict`.
    """

    def __init__(
        self,
        sizes: list[int],
        launch: LaunchShadow,
        warps: int = 1,
        strict: bool = False,
    ) -> None:
        self.strict = strict
        self.launch, self.epochs = launch, launch.epochs
        self.ranks = len(sizes)
        self.columns = Columns(warps * (WARP_COLUMNS + 3) + 64)
        self.shared = [Shadow(size, by_bytes=True) for size in sizes]
        self.tensor = TensorRaces(self)
        self.unit = ShadowUnit()  # the core's part of the detector, which is asked first
        for plane in (*(shadow.coarse for shadow in self.shared), *self.tensor.planes):
            plane.add_layer()  # of shared and tensor memory almost every place is read
        self.points: dict[int, SyncPoint] = {}
        self.locations: dict[tuple[str, int], SyncPoint] = {}
        launch.clusters += 1
        self.cluster = self.epochs.cluster = launch.clusters
        self.abroad = Abroad(self.columns, launch, self.cluster)
        self._serials: dict[int, int] = {}
        self.exits = ExitChecks(self.columns, self.ranks, strict)
        self._predecessor = self.columns.named("the launch before")
        self.agents: list[Agent] = []
        self._begun: set[tuple[int, int]] = set()  # warps, by their columns, and CTAs that they know to have begun
        self.agent: Agent | None = None
        self.barriers: MBarriers | None = None  # for reports
        self.report: Callable[[EmulatorError], None] = raising
        self.lane = 0

    # --- warps --------------------------------------------------------------------------------------------------------

    def make_agent(self, rank: int, live: int, label: str) -> Agent:
        """The agent of a warp."""
        kinds = ("load", "store", "tcgen05.ld", "tcgen05.st")
        text = self.epochs.text(*(f"{kind} of {label}" for kind in kinds))
        flow, number = self.launch.flow, len(self.agents)
        instructions = 64 if flow is None else len(flow.kernel.instructions)
        self.agents.append(Agent(self.columns, rank, live, label, self.strict, text, number, instructions))
        return self.agents[-1]

    def enter(self, warp: Warp, lane: int = 0) -> None:
        """The operations that follow are issued by this lane."""
        self.agent, self.lane = warp.agent, lane

    def predecessor_done(self, agent: Agent) -> None:
        """griddepcontrol.wait: the launch before is over, and what it wrote is visible."""
        agent.complete(self._predecessor, 1)

    def enter_cluster(self) -> None:
        """The cluster runs: accesses that follow are its own."""
        self.epochs.cluster = self.cluster

    # --- decisions ----------------------------------------------------------------------------------------------------

    def _known_abroad(self, before: np.ndarray, late: np.ndarray, known: np.ndarray) -> bool:
        """Takes out of ``late`` the accesses of the launch before, if it is known to be over, and those of other
        clusters that were released to this one. True if none is left.
        """
        if known[self._predecessor]:
            late &= before >> LANE_BITS >= self.launch.first
        abroad = self.abroad.known(known) if late.any() else {}
        for identity in np.unique(before[late]).tolist() if abroad else ():
            number = identity >> LANE_BITS
            row = abroad.get(int(self.epochs.clusters[number]))
            column = int(self.epochs.columns[number]) + self.epochs.lane(identity)
            if row is not None and column < len(row) and self.epochs.clocks[number] <= row[column]:
                late &= before != identity
        return not late.any()

    # --- reports ------------------------------------------------------------------------------------------------------

    def _check(
        self, part: Part, before: np.ndarray, view: View, rank: int, who: Agent | Operation, verb: str, earlier: str
    ) -> None:
        late = self._late(before, view, who)
        if late is None:
            return
        index = int(np.argmax(late))
        identity = int(before[index])
        number = identity >> LANE_BITS
        name = who.label if isinstance(who, Agent) else self.epochs.label(who.identity)
        column = int(self.epochs.columns[number]) + self.epochs.lane(identity)
        hint = "it belongs to another cluster"
        if number < self.launch.first:
            hint = "no griddepcontrol.wait is executed before, so that the launches may overlap"
        elif not self.epochs.foreign(number, view.cluster):
            hint = self._hint(who.clocks, column, int(self.epochs.clocks[number]))
        if isinstance(who, Agent):
            name = f"a {'store' if verb == 'writes' else 'load'} of {name}"
        kind: type[Race] = GlobalMemoryRace if rank < 0 else SharedMemoryRace
        where = self._where(part, late & (before == identity), rank)
        other = self.side(identity, earlier, "global" if rank < 0 else "shared", part.unit)
        fault = Conflict(self.epochs, self.launch.first, self.agents, who, view, verb, hint == _WEAK)
        error = kind(
            f"{name} {verb} {where}, which the {other.what} {earlier} before{place(other.instructions)}, and nothing "
            f"orders the two: {hint}"
        ).know(**fault.facts(before, late, number, other), memory=self._memory(part, late, before, number, rank))
        self.report(error)

    def side(self, identity: int, verb: str, space: str, unit: int = 1) -> Side:
        """An earlier access: where in the program it was made, see `earlier_accesses.suspects`, and by whom."""
        found = suspects(self.epochs, self.launch.flow, identity, verb == "wrote", space, unit)
        label = self.epochs.label(identity)
        name = WarpName.of(label)
        return Side(verb, tuple(found), str(name) if name is not None else "", what=label)

    def _late(self, before: np.ndarray, view: View, who: Agent | Operation) -> np.ndarray | None:
        """Which of the accesses ``before`` are not ordered before one of ``who``: boolean array, None when all are."""
        late = unordered(self.epochs, before, view)
        if late is None or (view.cluster and self._known_abroad(before, late, view.known)):
            return None
        if who.private:
            # What the looking lane itself has waited for.
            numbers = before >> LANE_BITS
            for column, (lane, clock) in who.private.items():
                known = (self.epochs.columns[numbers] == column) & (self.epochs.clocks[numbers] <= clock)
                late &= ~(known & (view.lanes == lane) & ~self.epochs.foreign(numbers, view.cluster))
        return late if late.any() else None

    def _check_unwritten(self, part: Part, before: np.ndarray, agent: Agent) -> None:
        """A load of global memory: ld.global.nc is for memory that nobody writes while the kernel runs."""
        late = before >> LANE_BITS >= self.launch.first
        if not late.any() or agent.executing() not in self.launch.non_coherent:
            return
        identity = int(before[int(np.argmax(late))])
        other, number = self.side(identity, "wrote", "global", part.unit), identity >> LANE_BITS
        error = GlobalMemoryRace(
            f"a non-coherent load of {agent.label} reads {self._where(part, late & (before == identity), -1)}, which "
            f"the {other.what} wrote before{place(other.instructions)}: "
            "ld.global.nc may return what was there before, whatever orders the two, since it is for memory that is "
            "not written while the kernel runs"
        ).know(
            "non-coherent-load",
            side=Side("reads", (), agent.label),
            other=other,
            memory=self._memory(part, late, before, number, -1),
        )
        self.report(error)

    def _missing_fence(
        self, part: Part, before: np.ndarray, late: np.ndarray, rank: int, operation: Operation, verb: str = "reads",
        earlier: str = "wrote",
    ) -> None:  # fmt: skip
        identity = int(before[int(np.argmax(late))])
        other = self.side(identity, earlier, "global" if rank < 0 else "shared", part.unit)
        fault = Conflict(self.epochs, self.launch.first, self.agents, operation, None, verb)
        number = identity >> LANE_BITS
        error = ProxyFenceMissing(
            f"{self.epochs.label(operation.identity)} {verb} {self._where(part, late & (before == identity), rank)}, "
            f"which the {other.what} {earlier} through the generic proxy{place(other.instructions)}, with "
            "no fence.proxy.async since"
        ).know(
            "proxy-fence" if verb == "reads" else "proxy-reuse",
            side=fault.side(None),
            other=fault.earlier(before, late, number, other),
            memory=self._memory(part, late, before, number, rank),
        )
        self.report(error)

    def _memory(self, part: Part, late: np.ndarray, before: np.ndarray, number: int, rank: int) -> Memory:
        """Memory of all lanes of the earlier access, like `_where`."""
        start, nbytes = self._range(part, late & (before >> LANE_BITS == number))
        if rank >= 0:
            return Memory("shared", start, nbytes, rank)
        name, byte, _ = self.launch.array(part.plane, start)
        return Memory("global", byte, nbytes, name=name)

    def _where(self, part: Part, chosen: np.ndarray, rank: int) -> str:
        """The first range of bytes among the chosen places of a part."""
        start, nbytes = self._range(part, chosen)
        where = f"the {nbytes} byte{'s' if nbytes > 1 else ''} at"
        place = self.launch.place(part.plane, start) if rank < 0 else f"shared offset {start} of CTA {rank}"
        return f"{where} {place}"

    def _range(self, part: Part, chosen: np.ndarray) -> tuple[int, int]:
        """Offset and number of bytes of it."""
        numbers = np.flatnonzero(chosen)
        places = numbers + part.where.start if isinstance(part.where, slice) else np.unique(part.where[numbers])
        gaps = np.flatnonzero(np.diff(places) != 1)
        count = int(gaps[0]) + 1 if len(gaps) else len(places)
        return int(places[0]) * part.unit, count * part.unit

    def _told(self, identity: int) -> dict[str, Any]:
        """Label and place of an operation, as `ExitChecks` tells them."""
        return {"what": self.epochs.label(identity), "place": self.epochs.place(identity)}

    def _hint(self, clocks: np.ndarray, column: int, clock: int) -> str:
        """Why an event is not known well enough."""
        if clocks[Row.ORDER, column] < clock:
            return "no synchronisation leads from one to the other"
        return _WEAK
