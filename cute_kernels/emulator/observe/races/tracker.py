"""Race detector: checks every access to shared, tensor and global memory against what its agent knows of earlier ones.

`happens_before` has the clocks, `shadow` what was accessed last, `races.checks` the decisions and reports,
`races.points` what passes order on, `races.tensor_memory` the part for tensor memory; this file says which kind of
order each pair of accesses needs (PTX ISA, "Memory consistency model" and "Proxies"):

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
`RaceTracker._strong_stores`. What one lane stores and another lane of its warp loads or stores needs bar.warp.sync in
between; a store that follows a load by another lane of the same warp is not checked.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_kernels.emulator.core.layout import words
from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.observe.races.happens_before import FULL, NEVER, WARP_COLUMNS, Agent, Offset
from cute_kernels.emulator.observe.races.launch_accesses import MAP_BYTES
from cute_kernels.emulator.observe.races.points import PointRaces
from cute_kernels.emulator.observe.races.shadow import (
    GENERIC,
    GRANULE,
    LANE_BITS,
    STRONG,
    Part,
    Plane,
    Rows,
    Shadow,
    View,
)
from cute_kernels.emulator.observe.races.sync_point import Row, join, widened
from cute_kernels.emulator.observe.races.tensor_memory import Operation

if TYPE_CHECKING:
    from cute_kernels.emulator.ptx.program import Instruction
    from cute_kernels.emulator.state.warp import Warp

_TEXT, _READ_IDENTITY, _LOADS_IDENTITY = (words("Agent")[n] for n in ("text", "read_identity", "loads_identity"))


@dataclass
class JointOperation:
    """An operation that several warps issue and each of them waits for; ``serial`` is its clock."""

    operation: Operation
    serial: int

    def observe(self, agent: Agent) -> None:
        """A warp waited for it: so all of them have issued it."""
        join(agent.clocks, self.operation.clocks)
        agent.complete(self.operation.column, self.serial)


class RaceTracker(PointRaces):
    """The detector of one cluster; arguments as of `RaceChecks`."""

    # --- generic accesses ---------------------------------------------------------------------------------------------

    def generic(
        self, warp: Warp, lanes: Any, space: str, addresses: np.ndarray, nbytes: int, write: bool, strong: bool = False
    ) -> None:
        """Loads (stores) of ``nbytes`` at each of ``addresses`` through the generic proxy.

        Args:
            warp: who.
            lanes: lane per address; -1: all of them.
            space: ``"shared"`` or ``"global"``.
            addresses: int64 [n].
            nbytes: bytes of each access.
            write: store.
            strong: volatile, relaxed or stronger.

        Raises:
            SharedMemoryRace, GlobalMemoryRace: an earlier access is not ordered before.
        """
        agent = warp.agent
        if space == "global":
            for shadow, offsets, chosen in self._regions(addresses, nbytes, write):
                some = lanes if chosen is None or isinstance(lanes, int) else lanes[chosen]
                self._generic(agent, some, shadow, offsets, nbytes, write, strong, -1)
            return
        ranks = addresses >> 24
        offsets = addresses & 0xFFFFFF
        first = int(ranks[0])
        if (ranks == first).all():
            self._generic(agent, lanes, self.shared[first], offsets, nbytes, write, strong, first)
            return
        for rank in np.unique(ranks).tolist():
            chosen = ranks == rank
            some = lanes if isinstance(lanes, int) else lanes[chosen]
            self._generic(agent, some, self.shared[rank], offsets[chosen], nbytes, write, strong, rank)

    def _generic(
        self, agent: Agent, lanes: Any, shadow: Shadow, offsets: np.ndarray, nbytes: int, write: bool, strong: bool,
        rank: int, identity: int | None = None,
    ) -> None:  # fmt: skip
        # Lanes that write one place together write the same value in every sound program: the warp's, not a lane's.
        floor = self.floor if rank < 0 else 0
        known = agent.clocks[Row.VISIBLE]
        own_reads = agent.base + Offset.READ
        shared_place = write and isinstance(lanes, np.ndarray) and len(offsets) > 1 and (offsets == offsets[0]).all()
        if shared_place:
            lanes = -1
        lanes_of = identity is None
        by_lanes = not write and (lanes == -1 if isinstance(lanes, int) else len(lanes) > 1)
        if by_lanes:
            agent.load_together(FULL if isinstance(lanes, int) else sum(1 << lane for lane in lanes.tolist()))
        column = agent.base + (Offset.LOADS if by_lanes else Offset.READ if not write or shared_place else 0)
        identity = self._identity(agent, column, write, strong, shared_place) if lanes_of else identity
        for part in shadow.parts(offsets, nbytes):
            some = lanes if isinstance(lanes, int) or part.items is None else lanes[part.items]
            view = View(known, agent.base, some, own_reads, floor, strong)
            plane, where = part.plane, part.where
            self._check(part, plane.writes[where], view, rank, agent, "writes" if write else "reads", "wrote")
            if rank < 0 and not write and self.launch.non_coherent:
                self._check_unwritten(part, plane.writes[where], agent)
            if write:
                for layer in plane.readers():
                    self._check(part, layer[where], view, rank, agent, "writes", "read")
                if strong:
                    stores = self._strong_stores(agent, plane, where)
                    if stores is not None:
                        self._check(part, stores, replace(view, strong=False), rank, agent, "writes", "wrote")
                lane = 0 if not lanes_of else max(some, 0) if isinstance(some, int) else some
                plane.set_write(where, identity + lane)
            else:
                plane.add_read(where, identity, self.epochs, None if floor else known, column, floor)
        if rank >= 0 and rank != agent.rank:
            self._check_begun(agent, rank)
            columns = [own_reads] if not write else {agent.base + max(n, 0) for n in np.atleast_1d(lanes).tolist()}
            for column in columns:
                self.exits.access(
                    rank, column, agent.clock, f"an access by {agent.label}", place=agent.executing()
                )

    def _check_begun(self, agent: Agent, rank: int) -> None:
        """A CTA's shared memory exists for others when it is known to have begun (CUDA Programming Guide, "Distributed
        Shared Memory"). Whatever reached the warp from a warp there says so, relaxed or not.

        Raises:
            IllegalAccess: nothing that a warp of the CTA did is ordered before.
        """
        if (agent.base, rank) in self._begun:
            return
        self._begun.add((agent.base, rank))
        order = agent.clocks[Row.ORDER]
        warps = (other.base for other in self.agents if other.rank == rank)
        if not any(order[base : base + WARP_COLUMNS].any() for base in warps):
            message = f"{agent.label} accesses the shared memory of CTA {rank}, which may not have begun yet"
            self.report(IllegalAccess(message).know("cta-not-begun"))

    def _strong_stores(self, agent: Agent, plane: Plane, where: Any) -> np.ndarray | None:
        """The writes that strong stores of the same warp made by another instruction than the one it executes, 0 at
        other places; None: there are none.

        Two strong stores are no data race, but which of them comes last is open, unless the place was read strongly in
        between: coherence then orders the later one behind what was read. Atomics are meant to meet.
        """
        here, epochs = agent.executing(), self.epochs
        if not self._is_store(here):
            return None
        before = plane.writes[where]
        numbers = before >> LANE_BITS
        chosen = (epochs.columns[numbers] == agent.base) & (epochs.generic[numbers] == STRONG)
        chosen &= (numbers >= self.floor) & (epochs.places[numbers] != here)
        if not chosen.any():
            return None
        stores = [place for place in np.unique(epochs.places[numbers[chosen]]).tolist() if self._is_store(place)]
        chosen &= np.isin(epochs.places[numbers], stores)
        for layer in plane.reads:
            readers = layer[where] >> LANE_BITS
            own = np.isin(epochs.columns[readers], agent.base + np.array([Offset.READ, Offset.LOADS]))
            chosen &= ~(own & (epochs.generic[readers] == STRONG) & (readers > 0))
        return np.where(chosen, before, 0) if chosen.any() else None

    def _identity(self, agent: Agent, column: int, write: bool, strong: bool, whole: bool) -> int:
        text, clock = agent.words[_TEXT] + write, agent.clock
        if not strong and not whole:
            word = _LOADS_IDENTITY if column == agent.base + Offset.LOADS else _READ_IDENTITY + write
            identity = agent.words[word]
            if not identity:
                identity = self.epochs.new(column, clock, text, GENERIC, agent.executing())
                agent.words[word] = identity
            return identity
        place = agent.executing()
        key = (column, write, strong, whole, place if write and strong else -1)  # see `_strong_stores`
        known = agent.identities.get(key)
        if known is None or known[0] != clock:
            kind = STRONG if strong else GENERIC
            known = agent.identities[key] = clock, self.epochs.new(column, clock, text, kind, place)
        return known[1]

    def _regions(self, addresses: np.ndarray, nbytes: int, write: bool) -> list[tuple[Shadow, np.ndarray, Any]]:
        """(shadow, offsets, chosen items or None for all) of global addresses; memory that is only read has none."""
        memory = self.launch.memory
        low, high = int(addresses.min()), int(addresses.max()) + nbytes
        index = memory.region_index(low, high - low)
        if index is not None:
            return self._region(index, addresses, None)
        found = []
        indices = np.array([memory.region_index(address, nbytes) for address in addresses.tolist()], float)
        for index in np.unique(indices[~np.isnan(indices)]).tolist():
            chosen = indices == index
            found += self._region(int(index), addresses[chosen], chosen)
        return found

    def _region(self, index: int, addresses: np.ndarray, chosen: Any) -> list[tuple[Shadow, np.ndarray, Any]]:
        found = self.launch.shadow(index)
        return [] if found is None else [(found[0], addresses - found[1], chosen)]

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

    def async_read(self, rank: int, offsets: Any, nbytes: int, operation: Operation) -> None:
        """The operation reads shared memory: one range (int offset), or ``nbytes`` at each of an array of offsets.

        Raises:
            SharedMemoryRace: what it reads was written, and that is not ordered before.
            ProxyFenceMissing: it is ordered, but was written through the generic proxy and not fenced since.
        """
        self._async_read(self.shared[rank], offsets, nbytes, operation, rank)
        if self.agent is not None and rank != self.agent.rank:
            clock = int(self.epochs.clocks[operation.identity >> LANE_BITS])
            self.exits.operation(rank, operation.column, clock, **self._told(operation.identity))

    def async_write(self, rank: int, offsets: Any, nbytes: int, operation: Operation) -> None:
        """The operation writes shared memory.

        Raises:
            SharedMemoryRace: an earlier access is not over.
        """
        self._async_write(self.shared[rank], offsets, nbytes, operation, rank)

    def global_rows(
        self, rows: np.ndarray | Rows | None, nbytes: int, operation: Operation, write: bool
    ) -> None:
        """The operation reads or writes ``nbytes`` at each global address of ``rows`` (None: nothing).

        Raises:
            GlobalMemoryRace, ProxyFenceMissing: as for shared memory.
        """
        if rows is None:
            return
        access = self._async_write if write else self._async_read
        if isinstance(rows, Rows):
            index = self.launch.memory.region_index(rows.start, (rows.count - 1) * rows.pitch + nbytes)
            if index is not None:
                found = self.launch.shadow(index)
                if found is not None:
                    shadow, origin = found
                    access(shadow, Rows(rows.start - origin, rows.pitch, rows.count), nbytes, operation, -1)
                return
            rows = rows.offsets()
        for shadow, offsets, _ in self._regions(rows.reshape(-1), nbytes, write):
            access(shadow, offsets, nbytes, operation, -1)

    def _async_read(self, shadow: Shadow, offsets: Any, nbytes: int, operation: Operation, rank: int) -> None:
        floor, unit = self.floor if rank < 0 else 0, self.unit
        fence = Row.PROXY_GLOBAL if rank < 0 else Row.PROXY
        if unit.async_read(self.epochs, shadow, offsets, nbytes, operation, fence, floor):
            return
        view = View(operation.clocks[Row.VISIBLE], operation.own, operation.lane, floor=floor)
        fenced = View(operation.clocks[fence], lanes=operation.lane, floor=floor)
        for part in shadow.parts(offsets, nbytes):
            before = part.plane.writes[part.where]
            self._check(part, before, view, rank, operation, "reads", "wrote")
            late = self._late(before, fenced, operation)
            if late is not None:
                self._missing_fence(part, before, late, rank, operation)
            part.plane.add_read(part.where, operation.identity, self.epochs, None, operation.column, floor)

    def _async_write(self, shadow: Shadow, offsets: Any, nbytes: int, operation: Operation, rank: int) -> None:
        floor, unit = self.floor if rank < 0 else 0, self.unit
        fence = Row.PROXY if self.strict and rank >= 0 and not operation.generic else None
        if unit.async_write(self.epochs, shadow, offsets, nbytes, operation, fence, floor):
            return
        view = View(operation.clocks[Row.ACQUIRED], operation.own, operation.lane, -1, floor, operation.reduces)
        if operation.own >= 0:
            view.exempt = operation.own + Offset.READ
        for part in shadow.parts(offsets, nbytes):
            plane, where = part.plane, part.where
            # Who read a stage came after the copy that filled it, and says more than that one.
            for layer in plane.readers():
                self._check(part, layer[where], view, rank, operation, "writes", "read")
            self._check(part, plane.writes[where], view, rank, operation, "writes", "wrote")
            if fence is not None:
                self._check_fenced(part, operation, rank)
            plane.set_write(where, operation.identity)

    def _check_fenced(self, part: Part, operation: Operation, rank: int) -> None:
        """Strictly, what was accessed through the generic proxy is fenced before an operation writes there."""
        plane, where = part.plane, part.where
        fenced = View(operation.clocks[Row.PROXY], lanes=operation.lane)
        for before, verb in ((plane.writes[where], "wrote"), *((layer[where], "read") for layer in plane.reads)):
            generic = np.where(self.epochs.generic[before >> LANE_BITS] > 0, before, 0)
            late = self._late(generic, fenced, operation)
            if late is not None:
                self._missing_fence(part, generic, late, rank, operation, "writes", verb)

    # --- tensor maps in global memory ---------------------------------------------------------------------------------

    def load_reads_map(self, address: int, signal: int, text: str) -> tuple[int, int]:
        """A load by the entered lane reads a tensor map: column and clock of that read, see `Operation.map_read`.

        It is over when the load is. Strictly, that says nothing of loads before it that signal other mbarriers;
        CUTLASS's grouped GEMMs wait for the last load of a group alone before they change its maps.
        """
        key = "map reads", self.agent.base, self.lane, signal & 0xFFFFFF if self.strict else -1
        column = self.columns.named(key)
        clock = self._serials[column] = self._serials.get(column, 0) + 1
        self._map_read(address, column, clock, text)
        return column, clock

    def store_reads_map(self, address: int, group: int, text: str) -> None:
        """A store in a bulk group does, until it has read its source (PTX ISA, cp.async.bulk.wait_group.read)."""
        self._map_read(address, self.bulk_columns(self.agent, self.lane)[0], group, text)

    def _map_read(self, address: int, column: int, clock: int, text: str) -> None:
        # Neither source nor target of the copy: an access of its own kind. What was written there before is made known
        # by fence.proxy.tensormap, which is not followed.
        identity = self.epochs.new(column, clock, text, GENERIC, self.agent.executing())
        granules = address + np.arange(0, MAP_BYTES, GRANULE, dtype=np.int64)
        for shadow, offsets, _ in self._regions(granules, GRANULE, False):
            for part in shadow.parts(offsets, GRANULE):
                part.plane.add_read(part.where, identity, self.epochs, None, column, self.floor)

    # --- copies that signal an mbarrier -------------------------------------------------------------------------------

    def copy(self, signal: int, text: str, reduces: bool = False, generic: bool = False) -> Operation:
        """A copy whose completion the mbarrier at ``signal`` tells; it is complete at `complete_copy`."""
        self.check_initialised(signal, text)
        operation = self.operation(self._phases_of(signal), NEVER, text, reduces)
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
        join(point.gathered[Row.ORDER], operation.order)
        if operation.map_read is not None:
            column, clock = operation.map_read
            gathered = point.gathered[: Row.TENSOR, column]
            np.maximum(gathered, clock, out=gathered)
            point.add_stream(column)
        apart = rank ^ signal >> 24
        if apart < 2:
            point.copied(bool(apart), operation.identity)
        else:
            self.exits.operation(rank, operation.column, point.completed + 1, **self._told(operation.identity))

    def check_exits(self) -> None:
        """At the end of the cluster: `ExitChecks.check`, with what has been kept beside it until now."""
        for address, point in self.points.items():
            for pair, phase, identity in point.copies():
                self.exits.operation(address >> 24 ^ pair, point.column, phase, **self._told(identity))
            for agent, clock, phase, place in point.arrivals():
                what, signal = f"an arrival by {agent.label}", (point.column, phase)
                self.exits.access(address >> 24, agent.base + Offset.READ, clock, what, signal, place)
            self.note_commits(address)
        self.tensor.note_exits()
        self.exits.check(self.report, self._instruction)

    def note_commits(self, address: int) -> None:
        """Takes what is kept of commits that have arrived at an mbarrier."""
        point = self.points[address]
        for agent, column, clock, phase, place in point.take_commits():
            what, signal = f"tcgen05.commit by {agent.label}", (point.column, phase)
            self.exits.operation(address >> 24, column, clock, what, signal, place)

    def _instruction(self, place: int) -> Instruction | None:
        return self.launch.flow.kernel.instructions[place] if place >= 0 and self.launch.flow is not None else None

    def _is_store(self, place: int) -> bool:
        instruction = self._instruction(place)
        return instruction is not None and instruction.parts[0] == "st"

    # --- bulk groups and wgmma ----------------------------------------------------------------------------------------

    def bulk(self, group: int, text: str, reduces: bool = False) -> tuple[Operation, Operation]:
        """The reads and the writes of a bulk store of the entered lane in its ``group``-th group."""
        reads, writes = self.bulk_columns(self.agent, self.lane)
        return self.operation(reads, group, text), self.operation(writes, group, text, reduces)

    def bulk_columns(self, agent: Agent, lane: int) -> tuple[int, int]:
        """The streams of a lane's bulk groups: reads, writes."""
        return tuple(self.columns.named((what, agent.base, lane)) for what in ("bulk reads", "bulk writes"))

    def name_copies(self, agent: Agent) -> tuple[int, int]:
        """cp.async of a warp: their column, whose clocks count them, and the number of what reports call them."""
        return self.columns.named(("cp.async", agent.base)), self.epochs.text(f"cp.async of {agent.label}")

    def copies_by_lanes(self, warp: Warp, lanes: np.ndarray, targets: np.ndarray, nbytes: int, identity: int) -> None:
        """cp.async of a warp: writes through the generic proxy, until it is waited for."""
        agent, offsets = warp.agent, targets & 0xFFFFFF
        self._generic(agent, lanes, self.shared[agent.rank], offsets, nbytes, True, False, agent.rank, identity)

    def bulk_waited(self, agent: Agent, lane: int, groups: int, read: bool) -> None:
        """A lane waited until its first ``groups`` bulk groups are complete, or (``read``) have read their sources."""
        for column in self.bulk_columns(agent, lane)[: 1 if read else 2]:
            agent.complete_in_lane(lane, column, groups)

    def joint(self, key: Hashable, text: str) -> JointOperation:
        """The next operation of a pipe that several warps issue together."""
        column = self.columns.named(key)
        serial = self._serials[column] = self._serials.get(column, 0) + 1
        clocks = np.zeros((len(Row), self.columns.width), np.int32)
        identity = self.epochs.new(column, serial, text, 0, self.agent.executing())
        return JointOperation(Operation(identity, column, clocks, -1, -1), serial)

    def note_joint(self, column: int, serial: int) -> None:
        """The core has issued so many operations of such a pipe."""
        self._serials[column] = serial

    def join_in(self, joint: JointOperation) -> None:
        """The entered warp issues it."""
        clocks = self.agent.snapshot(FULL)
        if joint.operation.clocks.shape != clocks.shape:
            joint.operation.clocks = widened(joint.operation.clocks, clocks.shape[1])
        join(joint.operation.clocks, clocks)
        self.agent.advance()
