"""The race detector of a cluster: what it knows, and what it says of an access that the core finds too early.

`races.tracker` and `races.points` have the accesses and the synchronisation that are checked with it.
"""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.errors import (
    EmulatorError,
    GlobalMemoryRace,
    ProxyFenceMissing,
    Race,
    SharedMemoryRace,
    TensorMemoryRace,
    raising,
)
from cute_kernels.emulator.facts import BarrierState, Memory, Side, WarpName
from cute_kernels.emulator.machine.state.mbarrier import MBarriers
from cute_kernels.emulator.machine.state.smem import OFFSET_MASK, RANK_SHIFT
from cute_kernels.emulator.machine.state.tmem import COLUMNS, LANE_GROUP, LANES
from cute_kernels.emulator.races.abroad import Abroad
from cute_kernels.emulator.races.conflict import Conflict, Part, array_at
from cute_kernels.emulator.races.earlier_accesses import place, suspects
from cute_kernels.emulator.races.exits import ExitChecks
from cute_kernels.emulator.races.happens_before import WARP_COLUMNS, Agent
from cute_kernels.emulator.races.launch_shadow import LaunchShadow
from cute_kernels.emulator.races.meetings import Meeting, Visits
from cute_kernels.emulator.races.operations import Operation
from cute_kernels.emulator.races.shadow import GRANULE, LANE_BITS, Plane, Shadow
from cute_kernels.emulator.races.shadow_unit import ShadowUnit
from cute_kernels.emulator.races.sync_point import Columns, Row, SyncPoint

LogEntry, Access = STRUCTURES["LogEntry"], STRUCTURES["Access"]
#: Of a warp, by the number of their label.
GENERIC_KINDS = ("load", "store", "tcgen05.ld", "tcgen05.st")
_WEAK = "the synchronisation between them is relaxed, or its scope does not include both"


class RaceChecks:
    """State of the detector of one cluster. ``sizes``: bytes of shared memory per CTA, in order of rank. ``launch``:
    what is shared with the other clusters of the launch. ``warps``: number of warps of the cluster (a hint of how many
    columns will be needed). ``strict``: see `Options.strict`."""

    def __init__(self, sizes: list[int], launch: LaunchShadow, warps: int = 1, strict: bool = False) -> None:
        self.strict = strict
        self.launch, self.epochs = launch, launch.epochs
        self.ranks = len(sizes)
        self.columns = Columns(warps * (WARP_COLUMNS + 3) + 64)
        self.shared = [Shadow(size, by_bytes=True) for size in sizes]
        self.planes = [Plane((COLUMNS, LANES // LANE_GROUP)) for _ in range(self.ranks)]  # of tensor memory
        self.all_shared = np.array([shadow.address for shadow in self.shared], np.int64)
        self.unit = ShadowUnit(self.epochs, self._found, self._asked)
        self.looking: Agent | Operation | None = None  # who makes the access that the core looks at
        self.stand: Callable[[ctypes.Structure], None] | None = None  # where it was made: an entry of the log
        self.kept = b""  # what it stores, if memory has it already
        for plane in (*(shadow.coarse for shadow in self.shared), *self.planes):
            plane.expect_reads()  # of shared and tensor memory almost every place is
        self.points: dict[int, SyncPoint] = {}
        self.visits: Visits | None = None  # of shared memory
        self.locations: dict[tuple[str, int], SyncPoint] = {}
        launch.clusters += 1
        self.cluster = self.epochs.cluster = launch.clusters
        launch.track_all()
        self.abroad = Abroad(self.columns, launch, self.cluster)
        self._serials: dict[int, int] = {}
        self.allocations: dict[int, int] = {}  # by CTA: the column that counts changes of what it has allocated
        self.exits = ExitChecks(self.columns, self.ranks, strict)
        self._predecessor = self.columns.named("the launch before")
        self.agents: list[Agent] = []
        self._contexts: dict[Agent, ctypes.Structure] = {}
        self._begun: set[tuple[int, int]] = set()  # warps, by their columns, and CTAs that they know to have begun
        self.agent: Agent | None = None
        self.barriers: MBarriers | None = None  # for reports
        self.report: Callable[[EmulatorError], None] = raising
        self.stands_against: Callable[[EmulatorError], None] = raising
        self.met: Callable[[str, int, Meeting], None] = lambda kind, place, meeting: None  # see `Cluster.meetings`
        self.arrive: Callable[[], None] = lambda: None  # says that the running warp is where the core is
        self.executing: Callable[[], int] = lambda: -1  # index of the instruction that is executed
        self.reported: set[tuple[object, ...]] = set()  # reports after which execution went on
        self.lane = 0

    # --- warps --------------------------------------------------------------------------------------------------------

    def make_agent(self, rank: int, live: int, label: str) -> Agent:
        """The agent of a warp."""
        text = self.epochs.text(*(f"{kind} of {label}" for kind in GENERIC_KINDS))
        flow, number = self.launch.flow, len(self.agents)
        instructions = 64 if flow is None else len(flow.kernel.instructions)
        self.agents.append(Agent(self.columns, rank, live, label, self.strict, text, number, instructions))
        return self.agents[-1]

    def enter(self, agent: Agent, lane: int = 0) -> None:
        """The operations that follow are issued by this lane."""
        self.agent, self.lane = agent, lane

    def predecessor_done(self, agent: Agent) -> None:
        """griddepcontrol.wait: the launch before is over, and what it wrote is visible."""
        agent.complete(self._predecessor, 1)

    def spans(self) -> list[tuple[int, int]]:
        """(address, bytes) of what the core changes, but for clocks and what shadows of shared memory hold."""
        return [span for each in (*self.shared, *self.agents) for span in each.spans()]

    def become(self, number: int, labels: Sequence[str]) -> None:
        """Makes it the detector of another cluster, of this number and with warps of these labels."""
        self.cluster = self.abroad.cluster = number
        for agent, label in zip(self.agents, labels, strict=True):
            agent.label = label

    def enter_cluster(self) -> None:
        """The cluster runs: accesses that follow are its own."""
        self.epochs.cluster = self.cluster

    def barrier_facts(self, address: int) -> dict[str, BarrierState]:
        """The mbarrier of a fault."""
        return {} if self.barriers is None else {"barrier": self.barriers.state(address)}

    # --- what the core asks -------------------------------------------------------------------------------------------

    def _found(self, address: int) -> Shadow | Plane:
        """The shadow, or the plane of tensor memory, that is there."""
        known = (*self.shared, *self.planes, *self.launch.regions.values())
        return next(one for one in known if one.address == address)

    def _asked(self, what: int, conflict: ctypes.Structure) -> None:
        """The core has come upon something: a strong access, one of another CTA or cluster, one that may be late."""
        self._stand_at_entry(conflict)
        if what == CONSTANTS["RACE_STRONG"]:
            self.ordered(LogEntry.from_address(conflict.entry))
            return
        access = Access.from_address(conflict.access)
        if access.issuer:
            self._look_as_operation(access)
        if what == CONSTANTS["RACE_ELSEWHERE"]:
            self.elsewhere(conflict)
        elif what == CONSTANTS["RACE_ABROAD"]:
            known = array_at(conflict.known, access.width, np.int32)
            conflict.answer = self._is_known_abroad(conflict.identity, known)
        elif access.grain != GRANULE and self._is_allocation(conflict.identity):
            self._report_late(what, conflict, access)  # what one warp knows of it, another need not
        elif (report := self._identity(what, conflict, access)) not in self.reported:
            self._report_late(what, conflict, access)
            self.reported.add(report)

    def _stand_at_entry(self, conflict: ctypes.Structure) -> None:
        """Reports name the instruction of the entry of the log, if the access is of one."""
        self.kept = b""
        if conflict.entry and self.stand is not None:
            entry = LogEntry.from_address(conflict.entry)
            self.kept = bytes(entry.value[: entry.kept])
            self.stand(entry)

    def _look_as_operation(self, access: ctypes.Structure) -> None:
        """The access is of an asynchronous operation: it knows what the warp knows that issued it."""
        self.arrive()
        self.agent = next(agent for agent in self.agents if agent.block_address == access.issuer)
        column, clocks = int(self.epochs.columns[access.identity >> LANE_BITS]), self.agent.clocks
        if access.own < 0:  # of several warps
            visible = access.known - clocks.strides[0] * Row.VISIBLE
            clocks = array_at(visible, clocks.size, np.int32).reshape(clocks.shape).copy()
        self.looking = Operation(access.identity, column, clocks, access.own, access.lane)

    def _identity(self, what: int, conflict: ctypes.Structure, access: ctypes.Structure) -> tuple[object, ...]:
        """Key of a report: the fault, and the instructions of both accesses."""
        number, wrote, verb = conflict.identity >> LANE_BITS, bool(conflict.wrote), _verb(access)
        weak = access.grain == GRANULE and self._why_late(conflict.identity, access.cluster) == _WEAK
        fault = Conflict(self.epochs, self.launch.first, self.agents, self.looking, verb, None, access.cluster, weak)
        earlier = int(self.epochs.places[number]), int(self.epochs.generic[number]), wrote, conflict.unit
        return what, access.grain, access.cluster, fault.kind(number, wrote=wrote), verb, self.executing(), earlier

    def _is_known_abroad(self, identity: int, known: np.ndarray) -> bool:
        """Whether it is of the launch before, known to be over, or of another cluster, released to this one."""
        number = identity >> LANE_BITS
        if known[self._predecessor] and number < self.launch.first:
            return True
        row = self.abroad.known(known).get(int(self.epochs.clusters[number]))
        column = int(self.epochs.columns[number]) + self.epochs.lane(identity)
        return row is not None and column < len(row) and bool(self.epochs.clocks[number] <= row[column])

    # --- reports ------------------------------------------------------------------------------------------------------

    def _report_late(self, what: int, conflict: ctypes.Structure, access: ctypes.Structure) -> None:
        earlier = "wrote" if conflict.wrote else "read"
        if access.grain != GRANULE:
            rank = [plane.address for plane in self.planes].index(access.shadow)
            self._late_in_tensor(rank, Part.of(conflict, access, None), _verb(access), earlier)
            return
        part = Part.of(conflict, access, self._found(access.shadow))
        shadows = [shadow.address for shadow in self.shared]
        rank = shadows.index(access.shadow) if access.shadow in shadows else -1
        if what == CONSTANTS["RACE_UNWRITTEN"]:
            self._not_coherent(part, conflict.identity)
        elif what == CONSTANTS["RACE_UNFENCED"]:
            self._missing_fence(part, conflict.identity, rank, _verb(access), earlier)
        else:
            self._late(part, conflict.identity, access.cluster, rank, _verb(access), earlier)

    def _late(self, part: Part, identity: int, cluster: int, rank: int, verb: str, earlier: str) -> None:
        before, late, who, number = part.before, part.late, self.looking, identity >> LANE_BITS
        name = who.label if isinstance(who, Agent) else self.epochs.label(who.identity)
        hint = self._why_late(identity, cluster)
        if isinstance(who, Agent):
            name = f"a {'store' if verb == 'writes' else 'load'} of {name}"
        kind: type[Race] = GlobalMemoryRace if rank < 0 else SharedMemoryRace
        where = self._where(part, late & (before == identity), rank)
        other = self.side(identity, earlier, "global" if rank < 0 else "shared", part.unit)
        fault = Conflict(self.epochs, self.launch.first, self.agents, who, verb, part.lanes, cluster, hint == _WEAK)
        error = kind(
            f"{name} {verb} {where}, which the {other.what} {earlier} before{place(other.instructions)}, and nothing "
            f"orders the two: {hint}"
        ).know(**fault.facts(before, late, number, other), memory=self._memory(part, number, rank))
        if self.kept and (verb, earlier) == ("writes", "wrote"):
            value = int.from_bytes(self.kept, "little")
            error.know("", f"both write the same value, {value:#x} in the first place: it is a race all the same")
        self.report(error)

    def side(self, identity: int, verb: str, space: str, unit: int = 1) -> Side:
        """An earlier access: where in the program it was made, see `earlier_accesses.suspects`, and by whom."""
        found = suspects(self.epochs, self.launch.flow, identity, verb == "wrote", space, unit)
        label = self.epochs.label(identity)
        name = WarpName.of(label)
        number = identity >> LANE_BITS
        column, clock = int(self.epochs.columns[number]), int(self.epochs.clocks[number])
        owner = next((agent for agent in self.agents if name is not None and agent.label == str(name)), None)
        waited = owner is not None and column < owner.clocks.shape[1] and bool(owner.clocks[0, column] >= clock)
        signals = next((address for address, point in self.points.items() if point.column == column), None)
        place = (signals >> RANK_SHIFT, signals & OFFSET_MASK) if signals is not None else None
        return Side(verb, tuple(found), str(name) if name is not None else "", what=label, signals=place, waited=waited)

    def _not_coherent(self, part: Part, identity: int) -> None:
        before, late, agent = part.before, part.late, self.looking
        other, number = self.side(identity, "wrote", "global", part.unit), identity >> LANE_BITS
        error = GlobalMemoryRace(
            f"a non-coherent load of {agent.label} reads {self._where(part, late & (before == identity), -1)}, which "
            f"the {other.what} wrote before{place(other.instructions)}: "
            "ld.global.nc may return what was there before, whatever orders the two, since it is for memory that is "
            "not written while the kernel runs"
        ).know(
            "non-coherent-load", side=Side("reads", (), agent.label), other=other,
            memory=self._memory(part, number, -1),
        )
        self.report(error)

    def _missing_fence(self, part: Part, identity: int, rank: int, verb: str, earlier: str) -> None:
        before, late, operation = part.before, part.late, self.looking
        other = self.side(identity, earlier, "global" if rank < 0 else "shared", part.unit)
        fault = Conflict(self.epochs, self.launch.first, self.agents, operation, verb)
        number = identity >> LANE_BITS
        error = ProxyFenceMissing(
            f"{self.epochs.label(operation.identity)} {verb} {self._where(part, late & (before == identity), rank)}, "
            f"which the {other.what} {earlier} through the generic proxy{place(other.instructions)}, with "
            "no fence.proxy.async since"
        ).know(
            "proxy-fence" if verb == "reads" else "proxy-reuse", side=fault.side(None),
            other=fault.earlier(before, late, number, other), memory=self._memory(part, number, rank),
        )
        self.report(error)

    def _late_in_tensor(self, rank: int, part: Part, verb: str, earlier: str) -> None:
        operation = self.looking
        verb = verb if operation.identity else "frees"
        late = [int(index) for index in np.flatnonzero(part.late)]
        index = next((each for each in late if not self._is_allocation(int(part.before[each]))), -1)
        if index < 0:
            self._before_allocations(part, late, rank, verb)
            return
        column, group = divmod(int(part.places[index]), LANES // LANE_GROUP)
        identity = int(part.before[index])
        what = self.epochs.label(operation.identity) if operation.identity else "tcgen05.dealloc"
        other = self.side(identity, earlier, "tensor")
        error = TensorMemoryRace(
            f"{what} {verb} TMEM column {column}, lanes from {LANE_GROUP * group} on, of CTA {rank}, which the "
            f"{other.what} {earlier}{place(other.instructions)}: it is not known to be complete. What is missing "
            "may be tcgen05.wait::ld, tcgen05.wait::st or tcgen05.commit, a barrier, or tcgen05.fence around a relaxed "
            "one"
        )
        memory = Memory("tensor", column, 1, rank, lane=LANE_GROUP * group)
        error.know(side=Side(verb, what=what), other=other, memory=memory)
        self.report(error)

    def _is_allocation(self, identity: int) -> bool:
        """Whether an earlier access is the allocation of tensor memory, which is none that could race."""
        return int(self.epochs.columns[identity >> LANE_BITS]) in self.allocations.values()

    def _before_allocations(self, part: Part, late: list[int], rank: int, verb: str) -> None:
        """An access to tensor memory that is not known to come after the allocation of its columns, or of some."""
        order, who = self.looking.clocks[Row.ORDER], self.looking
        for index in late:
            identity, column = int(part.before[index]), int(part.places[index]) // (LANES // LANE_GROUP)
            number = identity >> LANE_BITS
            if order[self.epochs.columns[number]] >= self.epochs.clocks[number]:
                continue
            other = Side("allocates", what=self.epochs.label(identity))
            error = TensorMemoryRace(
                f"{self.epochs.label(who.identity)} {verb} TMEM column {column} of CTA {rank}, but nothing orders that "
                f"after the {other.what}"
            )
            memory = Memory("tensor", column, 1, rank)
            self.stands_against(error.know("allocation-order", other=other, memory=memory))
            return

    def _memory(self, part: Part, number: int, rank: int) -> Memory:
        """Memory of all lanes of the earlier access, like `_where`."""
        start, nbytes = self._range(part, part.late & (part.before >> LANE_BITS == number))
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
        places = np.unique(part.places[chosen])
        gaps = np.flatnonzero(np.diff(places) != 1)
        count = int(gaps[0]) + 1 if len(gaps) else len(places)
        return int(places[0]) * part.unit, count * part.unit

    def _told(self, identity: int) -> dict[str, object]:
        """Label and place of an operation, as `ExitChecks` tells them."""
        return {"what": self.epochs.label(identity), "place": self.epochs.place(identity)}

    def _why_late(self, identity: int, cluster: int) -> str:
        number = identity >> LANE_BITS
        if number < self.launch.first:
            return "no griddepcontrol.wait is executed before, so that the launches may overlap"
        if self.epochs.foreign(number, cluster):
            return "it belongs to another cluster"
        column = int(self.epochs.columns[number]) + self.epochs.lane(identity)
        return self._hint(self.looking.clocks, column, int(self.epochs.clocks[number]))

    def _hint(self, clocks: np.ndarray, column: int, clock: int) -> str:
        """Why an event is not known well enough."""
        if clocks[Row.ORDER, column] < clock:
            return "no synchronisation leads from one to the other"
        return _WEAK


def _verb(access: ctypes.Structure) -> str:
    return "writes" if access.write else "reads"
