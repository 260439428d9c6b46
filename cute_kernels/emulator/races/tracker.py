"""Race detector: checks every access to shared, tensor and global memory against what its agent knows of earlier ones.

`happens_before` has the clocks, `shadow` what was accessed last, ``core/conflicts.c`` the decisions, `races.checks` the
reports, `races.points` what passes order on, `races.tensor_memory` the part for tensor memory; this file says which
kind of order each pair of accesses needs (PTX ISA, "Memory consistency model" and "Proxies"):

====================  ==========================================  =====================================================
earlier access        later access                                what is needed
====================  ==========================================  =====================================================
write                 generic read or write                       causality order (release and acquire, scopes)
generic read          generic write                               causality order
asynchronous read     generic write                               the operation is complete, causality order
any                   asynchronous write (TMA load)               the earlier access is over; release and acquire
generic write         asynchronous read (TMA store, MMA operand)  causality order and fence.proxy.async
asynchronous write    asynchronous read                           causality order (the mbarrier was waited on)
====================  ==========================================  =====================================================

Accesses are checked and recorded when an operation is issued, so that a race is found whatever the schedule: nothing is
assumed about when asynchronous work takes effect. Strong operations (atomics, volatile, relaxed and stronger loads and
stores) do not race with each other, but for strong stores of two lanes of one warp by two instructions: see
``core/strong_stores.c``. What one lane stores and another lane of its warp loads or stores needs bar.warp.sync in
between; a store that follows a load by another lane of the same warp is not checked.
"""

import ctypes
from collections.abc import Callable

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.races import phases
from cute_kernels.emulator.races.happens_before import FULL, NEVER, WARP_COLUMNS, Agent, Offset
from cute_kernels.emulator.races.launch_accesses import MAP_BYTES
from cute_kernels.emulator.races.launch_shadow import LaunchShadow
from cute_kernels.emulator.races.memory_order import lane_vector, orders
from cute_kernels.emulator.races.operations import Operation
from cute_kernels.emulator.races.points import PointRaces
from cute_kernels.emulator.races.shadow import GENERIC, GRANULE, LANE_BITS, STRONG, Lanes, Offsets, Shadow
from cute_kernels.emulator.races.sync_point import Row, SyncPoint, join
from cute_kernels.emulator.races.tensor_memory import TensorRaces

_TOGETHER, _STRONG = CONSTANTS["LOG_TOGETHER"], CONSTANTS["LOG_STRONG"]
#: Of the kinds of entries of a log.
SPACES = {CONSTANTS[f"LOG_{space.upper()}_{how}"]: space for space in ("shared", "global") for how in ("READ", "WRITE")}


class RaceTracker(PointRaces):
    """The detector of one cluster; arguments as of `RaceChecks`."""

    def __init__(self, sizes: list[int], launch: LaunchShadow, warps: int = 1, strict: bool = False) -> None:
        super().__init__(sizes, launch, warps, strict)
        self.tensor = TensorRaces(self)
        self._in_time: dict[tuple[SyncPoint, int], tuple[int, int]] = {}  # `_phase_lacking`: phase, clock of an issue

    # --- generic accesses ---------------------------------------------------------------------------------------------

    def generic(
        self, agent: Agent, lanes: Lanes, space: str, addresses: np.ndarray, nbytes: int, write: bool,
        strong: bool = False, identity: int = 0,
    ) -> None:  # fmt: skip
        """Loads or (``write``) stores of ``nbytes`` at each of int64 ``addresses`` in ``"shared"`` or ``"global"``
        memory through the generic proxy, by a lane per address or -1, all of them. ``strong``: volatile, relaxed or
        stronger; ``identity``: of an epoch of their own, 0: without. Raises SharedMemoryRace, GlobalMemoryRace: an
        earlier access is not ordered before."""
        self.launch.track_all()
        self.looking, self.stand = agent, None
        kind = space, nbytes, write, strong
        self.unit.generic(self.context(agent), lanes, addresses, kind, identity, agent.executing())

    def context(self, agent: Agent) -> ctypes.Structure:
        """The `Context` that the core knows a warp by."""
        if agent not in self._contexts:
            self._contexts[agent] = STRUCTURES["Context"](
                agent.block_address, self.epochs.address, self.shared[agent.rank].address,
                self.planes[agent.rank].address, self.launch.block.ctypes.data, self.cluster,
                self.all_shared.ctypes.data, self.unit.callback_address,
            )  # fmt: skip
        return self._contexts[agent]

    def observe(self, agent: Agent, log: np.ndarray, first: int, stand: Callable[[ctypes.Structure], None]) -> int:
        """`ShadowUnit.observe` of a warp; ``stand`` is told which entry an error is of."""
        self.looking, self.stand = agent, stand
        return self.unit.observe(self.context(agent), log, first)

    def ordered(self, entry: ctypes.Structure) -> None:
        """A strong access of the log of the warp that is looked at may pass order on."""
        mask, space = entry.mask & FULL, SPACES[entry.kind & ~(_TOGETHER | _STRONG)]
        lanes = lane_vector(mask)[: 1 if entry.kind & _TOGETHER else None]
        nbytes, addresses = entry.argument & 255, [entry.addresses[lane] for lane in lanes]
        self.strong(self.looking, mask, space, addresses, nbytes, orders(entry.argument))

    def elsewhere(self, conflict: ctypes.Structure) -> None:
        """Lanes access the shared memory of another CTA."""
        agent, rank = self.looking, conflict.identity
        self._check_begun(agent, rank)
        columns = {agent.base + Offset.READ}
        if conflict.wrote:
            lanes = [0]
            if conflict.lanes:
                lanes = (ctypes.c_int64 * conflict.count).from_address(conflict.lanes)
            columns = {agent.base + lane for lane in lanes}
        for column in columns:
            self.exits.access(rank, column, agent.clock, f"an access by {agent.label}", place=agent.executing())

    def _check_begun(self, agent: Agent, rank: int) -> None:
        """Reports a CTA that is not known to have begun (CUDA Programming Guide, "Distributed Shared Memory")."""
        if (agent.base, rank) in self._begun:
            return
        self._begun.add((agent.base, rank))
        order = agent.clocks[Row.ORDER]  # whatever reached the warp from a warp there says so, relaxed or not
        warps = (other.base for other in self.agents if other.rank == rank)
        if not any(order[base : base + WARP_COLUMNS].any() for base in warps):
            message = f"{agent.label} accesses the shared memory of CTA {rank}, which may not have begun yet"
            self.report(IllegalAccess(message).know("cta-not-begun"))

    def _regions(self, addresses: np.ndarray, nbytes: int) -> list[tuple[Shadow, np.ndarray]]:
        """Shadows and the offsets there of global addresses; memory that is only read has none."""
        memory = self.launch.memory
        low, high = int(addresses.min()), int(addresses.max()) + nbytes
        index = memory.region_index(low, high - low)
        if index is not None:
            return self._region(index, addresses)
        indices = np.array([memory.region_index(address, nbytes) for address in addresses.tolist()], float)
        each = np.unique(indices[~np.isnan(indices)]).tolist()
        return [found for index in each for found in self._region(int(index), addresses[indices == index])]

    def _region(self, index: int, addresses: np.ndarray) -> list[tuple[Shadow, np.ndarray]]:
        found = self.launch.shadow(index)
        return [] if found is None else [(found[0], addresses - found[1])]

    # --- asynchronous accesses ----------------------------------------------------------------------------------------

    def operation(self, column: int, clock: int, text: str, reduces: bool = False) -> Operation:
        """An operation issued by the entered lane, of a stream and with its clock there.

        Reductions do not race with each other: each of their updates is one relaxed operation.
        """
        agent, kind = self.agent, STRONG if reduces else 0
        identity = self.epochs.new(column, clock, text, kind, agent.executing())
        return Operation(
            identity, column, agent.clocks, agent.base, self.lane, reduces, address=agent.address, private=agent.private
        )

    def async_read(self, rank: int, offsets: Offsets, nbytes: int, operation: Operation) -> None:
        """The operation reads shared memory: one range (int offset), or ``nbytes`` at each of an array of offsets.
        Raises SharedMemoryRace: what it reads was written, and that is not ordered before; ProxyFenceMissing: it is
        ordered, but was written through the generic proxy and not fenced since."""
        self.looking, self.stand = operation, None
        self.unit.async_read(self.shared[rank], offsets, nbytes, operation, Row.PROXY, 0)
        if self.agent is not None and rank != self.agent.rank:
            self.reads_elsewhere(rank, operation.identity)

    def async_write(self, rank: int, offsets: Offsets, nbytes: int, operation: Operation) -> None:
        """The operation writes shared memory. Raises SharedMemoryRace: an earlier access is not over."""
        fence = Row.PROXY if self.strict and not operation.generic else None
        self.looking, self.stand = operation, None
        self.unit.async_write(self.shared[rank], offsets, nbytes, operation, fence, 0)

    # --- tensor maps in global memory ---------------------------------------------------------------------------------

    def load_reads_map(self, agent: Agent, copy: ctypes.Structure, text: str) -> tuple[int, int]:
        """A load (`BulkCopy`) reads a tensor map: column and clock of that read.

        It is over when the load is. Strictly, that says nothing of loads before it that signal other mbarriers;
        CUTLASS's grouped GEMMs wait for the last load of a group alone before they change its maps.
        """
        key = "map reads", agent.base, copy.lane, copy.signal & 0xFFFFFF if self.strict else -1
        column = self.columns.named(key)
        clock = self._serials[column] = self._serials.get(column, 0) + 1
        self._map_read(copy, column, clock, text)
        return column, clock

    def store_reads_map(self, copy: ctypes.Structure, text: str) -> None:
        """A store in a bulk group does, until it has read its source (PTX ISA, cp.async.bulk.wait_group.read)."""
        self._map_read(copy, int(self.epochs.columns[copy.identity >> LANE_BITS]), copy.group, text)

    def reads_elsewhere(self, rank: int, identity: int) -> None:
        """A copy reads the shared memory of another CTA."""
        number = identity >> LANE_BITS
        column, clock = int(self.epochs.columns[number]), int(self.epochs.clocks[number])
        self.exits.operation(rank, column, clock, **self._told(identity))

    def _map_read(self, copy: ctypes.Structure, column: int, clock: int, text: str) -> None:
        # Neither source nor target of the copy: an access of its own kind. What was written there before is made known
        # by fence.proxy.tensormap, which is not followed.
        identity = self.epochs.new(column, clock, text, GENERIC, copy.work.place)
        granules = copy.other + np.arange(0, MAP_BYTES, GRANULE, dtype=np.int64)
        for shadow, offsets in self._regions(granules, GRANULE):
            self.unit.note(shadow, offsets, GRANULE, identity, False, column, self.cluster)

    # --- copies that signal an mbarrier -------------------------------------------------------------------------------

    def copy(self, signal: int, text: str, reduces: bool = False, generic: bool = False) -> Operation:
        """A copy whose completion the mbarrier at ``signal`` tells; it is complete at `complete_copy`."""
        self.check_initialised(signal, text)
        operation = self.operation(self.columns.named(("phases", signal)), NEVER, text, reduces)
        operation.generic = generic
        operation.order = self.agent.order(1 << self.lane)
        self.agent.advance()
        return operation

    def complete_copy(self, operation: Operation, signal: int, rank: int) -> None:
        """The copy into a CTA is done, and is about to signal."""
        point = self.points.get(signal)
        if point is None:
            return
        number = operation.identity >> LANE_BITS
        self.epochs.clocks[number] = point.completed + 1
        column = self._phase_lacking(point, operation)
        if column >= 0:
            contribution = CONSTANTS["COMPLETE_TX"], self.epochs.label(operation.identity), column
            name = f"the mbarrier at {phases.place_of(signal)}"
            self.stands_against(phases.early(self, point, name, contribution, signal))
        join(point.gathered[Row.ORDER], operation.order)
        apart = rank ^ signal >> 24
        if apart < 2:
            point.copied(bool(apart), operation.identity)
        else:
            self.exits.operation(rank, operation.column, point.completed + 1, **self._told(operation.identity))

    def _phase_lacking(self, point: SyncPoint, operation: Operation) -> int:
        """Column of the phase before that a copy does not know, or -1: asked once of what a warp issues in one phase.

        A warp forgets nothing: what it issued later knows the phase, too.
        """
        issued, completed = operation.order.item(operation.own + Offset.READ), point.completed
        phase, since = self._in_time.get((point, operation.own), (0, 0))
        if phase == completed and issued >= since:
            return -1
        column = library().point_lacks(point.address, operation.order.ctypes.data, len(operation.order))
        if column < 0:
            self._in_time[point, operation.own] = completed, issued
        return column

    def check_exits(self) -> None:
        """At the end of the cluster: `ExitChecks.check`, with what has been kept beside it until now."""
        for address, point in self.points.items():
            for pair, phase, identity in point.copies():
                self.exits.operation(address >> 24 ^ pair, point.column, phase, **self._told(identity))
            for warp, clock, phase, place in point.arrivals():
                agent, signal = self.agents[warp], (point.column, phase)
                what = f"an arrival by {agent.label}"
                self.exits.access(address >> 24, agent.base + Offset.READ, clock, what, signal, place)
            self.note_commits(address)
            announced = point.announced()
            if announced is not None and self.barriers is not None and self.barriers.all_arrived(address):
                self.stands_against(phases.announced_late(self, address, *announced))
        self.tensor.note_exits()
        self.exits.check(self.report, self._instruction)

    def note_commits(self, address: int) -> None:
        """Takes what is kept of commits that have arrived at an mbarrier."""
        point = self.points[address]
        for warp, column, clock, phase, place in point.take_commits():
            what, signal = f"tcgen05.commit by {self.agents[warp].label}", (point.column, phase)
            self.exits.operation(address >> 24, column, clock, what, signal, place)

    def _instruction(self, place: int) -> Instruction | None:
        return self.launch.flow.kernel.instructions[place] if place >= 0 and self.launch.flow is not None else None

    # --- bulk groups --------------------------------------------------------------------------------------------------

    def bulk_columns(self, agent: Agent, lane: int) -> tuple[int, int]:
        """The streams of a lane's bulk groups: reads, writes."""
        return tuple(self.columns.named((what, agent.base, lane)) for what in ("bulk reads", "bulk writes"))

    def name_copies(self, agent: Agent) -> tuple[int, int]:
        """cp.async of a warp: their column, whose clocks count them, and the number of what reports call them."""
        return self.columns.named(("cp.async", agent.base)), self.epochs.text(f"cp.async of {agent.label}")
