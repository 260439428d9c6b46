"""Warps without a program, for tests that drive units and the race detector directly."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.machine.bytecode.execution import WarpLog
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.machine.state.mbarrier import Tables
from cute_kernels.emulator.machine.state.memory_tables import LOG, LOG_ENTRY
from cute_kernels.emulator.machine.state.smem import ClusterMemory
from cute_kernels.emulator.races.happens_before import FULL, Agent, Offset
from cute_kernels.emulator.races.launch_shadow import LaunchShadow
from cute_kernels.emulator.races.shadow import GRANULE, LANE_BITS, Plane, Shadow
from cute_kernels.emulator.races.sync_point import PROXIES, Order, Row, SyncPoint
from cute_kernels.emulator.races.tensor_memory import Operation
from cute_kernels.emulator.races.tracker import RaceTracker


def _plane(tracker: RaceTracker, plane: Plane) -> list[tuple[str, list[str], str]]:
    """By place: who wrote last, who has read since and who of an earlier cluster, in words and with the cluster.

    The numbers of epochs may differ.
    """
    label, clusters = tracker.epochs.label, tracker.epochs.clusters

    def name(identity: int) -> str:
        return f"{label(identity)} of cluster {clusters[identity >> LANE_BITS]}"

    @functools.cache  # most places were accessed alike
    def words(write: int, kept: int, *reads: int) -> tuple[str, list[str], str]:
        return name(write) + str(write & 31), sorted(name(reader) for reader in reads if reader), name(kept)

    foreign = np.zeros_like(plane.writes) if plane.foreign is None else plane.foreign
    return list(map(words, *(layer.reshape(-1).tolist() for layer in (plane.writes, foreign, *plane.reads))))


def _shadow(tracker: RaceTracker, shadow: Shadow) -> list[tuple[str, list[str], str]]:
    """By byte: the core may keep granules whole which NumPy splits."""
    coarse = _plane(tracker, shadow.coarse)
    result = [place for place in coarse for _ in range(GRANULE)]
    if shadow.fine is not None:
        fine = _plane(tracker, shadow.fine)
        for granule in np.flatnonzero(shadow.split_granules()).tolist():
            result[GRANULE * granule : GRANULE * (granule + 1)] = fine[GRANULE * granule : GRANULE * (granule + 1)]
    return result


def private_clocks(agent: Agent) -> list[tuple[int, tuple[int, int]]]:
    """(column, (lane, clock)) of what single lanes know."""
    core = STRUCTURES["Private"].from_address(agent.private)
    return [(each.column, (each.lane, each.clock)) for each in core.entries[: core.count]]


def streams(point: SyncPoint) -> list[int]:
    """Columns of asynchronous operations that arrived."""
    core = STRUCTURES["Point"].from_address(point.address)
    return sorted((ctypes.c_int64 * core.stream_count).from_address(core.streams)) if core.stream_count else []


def state(tracker: RaceTracker) -> list[Any]:
    """What a race detector has recorded, in words and numbers that do not depend on who recorded it: who accessed every
    place last, what every warp knows, and what every barrier passes on.
    """
    knowledge = [
        (a.clocks.tolist(), a.before.tolist(), a.incoming.tolist(), sorted(private_clocks(a)), a.clock,
         a.tensor_clock(Offset.TENSOR_LOAD), a.tensor_clock(Offset.TENSOR_STORE), a.loads.tolist(), a.pending.tolist())
        for a in tracker.agents
    ]  # fmt: skip
    points = [
        (address, p.gathered.tolist(), p.available.tolist(), p.inside.tolist(), p.inside_available.tolist(),
         p.completed, streams(p), p.initialised,
         [(pair, phase, tracker.epochs.label(identity)) for pair, phase, identity in p.copies()],
         [(warp, clock, phase) for warp, clock, phase, _ in p.arrivals()])
        for address, p in sorted(tracker.points.items())
    ]  # fmt: skip
    shadows = [_shadow(tracker, shadow) for shadow in (*tracker.shared, *tracker.launch.regions.values())]
    return [*shadows, *(_plane(tracker, plane) for plane in tracker.tensor.planes), knowledge, points]


class Logger:
    """Reports to the race detector what the core of a warp logs, an entry at a time."""

    def __init__(self, tracker: RaceTracker, agent: Agent) -> None:
        self.agent, self.header = agent, Tables()
        self.entry = np.zeros((1, LOG_ENTRY), np.uint8)
        self._log = WarpLog(SimpleNamespace(agent=agent, cluster=SimpleNamespace(tracker=tracker, units=None)), self)

    def take_log(self) -> np.ndarray:
        self.header.log_used = 0
        return self.entry

    def note(self, kind: int, mask: int, argument: int = 0, payload: np.ndarray | tuple[int, ...] = ()) -> None:
        """One entry: bits of `LOG` or `EVENT`, and the words behind its head."""
        self.entry[:] = 0
        self.entry[0, :12].view(np.uint32)[:] = kind, mask, argument
        self.entry[0, 16:].view(np.int64)[: len(payload)] = payload
        self.header.log_used = 1
        self._log.enter()
        self._log.report()

    def access(self, space: str, lanes: list[int], addresses: list[int], nbytes: int, write: bool) -> None:
        """A load or store of ``nbytes`` by each of the lanes."""
        payload = np.zeros(32, np.int64)
        payload[lanes] = addresses
        self.note(LOG[space, write], sum(1 << lane for lane in lanes), nbytes, payload)


class Crew:
    """A race detector and warps that it knows: ``crew[i]``, the first entered.

    What the core of a warp would log is given to ``crew[i].logger``.

    Args:
        sizes: bytes of shared memory per CTA.
        ranks: CTA of each warp.
        gmem: global memory of the launch.
        strict: as `Options.strict`.
        launch: what the cluster shares with those before it; by default it is the first.
        begun: whether a barrier of the cluster tells every warp that the others' CTAs have begun.
    """

    def __init__(
        self, sizes: list[int], ranks: list[int], gmem: GlobalMemory | None = None, strict: bool = False,
        launch: LaunchShadow | None = None, begun: bool = True,
    ) -> None:  # fmt: skip
        launch = launch or LaunchShadow(gmem or GlobalMemory())
        self.tracker = RaceTracker(sizes, launch, len(ranks), strict)
        agents = [self.tracker.make_agent(rank, FULL, f"warp {i}") for i, rank in enumerate(ranks)]
        self.warps = [SimpleNamespace(agent=agent, logger=Logger(self.tracker, agent)) for agent in agents]
        if begun and len(sizes) > 1:
            self._begin(agents)
        self.tracker.enter(self.warps[0].agent)

    def _begin(self, agents: list[Agent]) -> None:
        """A relaxed barrier of the cluster: every CTA is known to have begun."""
        barrier = self.tracker.point()
        for agent in agents:
            agent.release(barrier, FULL, Order.WIDE)
        barrier.complete()
        for agent in agents:
            agent.acquire(barrier, Order.WIDE)

    def __getitem__(self, index: int) -> SimpleNamespace:
        return self.warps[index]

    def store(self, index: int, memory: ClusterMemory, addresses: np.ndarray, values: np.ndarray) -> None:
        """st.shared by the first lanes of a warp, one address each."""
        for address, row in zip(addresses.tolist(), values):
            memory.view(address, len(row), write=True)[:] = row
        self.touch(index, addresses, values.shape[1], write=True)

    def touch(self, index: int, addresses: np.ndarray, nbytes: int, *, write: bool) -> None:
        """A load or store as the race detector sees it."""
        lanes = np.arange(len(addresses), dtype=np.int32)
        self.tracker.generic(self.warps[index].agent, lanes, "shared", addresses.astype(np.int64), nbytes, write)

    def access(self, index: int, lane: int, address: int, nbytes: int, *, write: bool) -> None:
        """A load or store of shared memory by one lane, as the core logs it."""
        self.warps[index].logger.access("shared", [lane], [address], nbytes, write)


# --- bulk stores, as the detector sees them: what `core/bulk_races.c` does ------------------------------------------


def bulk_store(tracker: RaceTracker, group: int, text: str) -> tuple[Operation, Operation]:
    """The reads and the writes of a bulk store of the entered lane in a group."""
    reads, writes = tracker.bulk_columns(tracker.agent, tracker.lane)
    return tracker.operation(reads, group, text), tracker.operation(writes, group, text)


def access_rows(tracker: RaceTracker, addresses: np.ndarray, nbytes: int, operation: Operation, write: bool) -> None:
    """It reads or writes ``nbytes`` at each of some addresses of one region of global memory."""
    low, high = int(addresses.min()), int(addresses.max()) + nbytes
    shadow, origin = tracker.launch.shadow(tracker.launch.memory.region_index(low, high - low))
    tracker.looking, tracker.stand = operation, None
    access, fence = tracker.unit.async_read, Row.PROXY_GLOBAL
    if write:
        access, fence = tracker.unit.async_write, None
    access(shadow, addresses - origin, nbytes, operation, fence, tracker.cluster)


# --- mbarriers, as the detector sees them: what `core/mbarriers.c` does beside the state of the barrier ---------------


def arrive_at(tracker: RaceTracker, warp: Any, lanes: dict[int, int], order: int) -> None:
    """Lanes, a mask for each address, are about to arrive."""
    tracker.agent = warp.agent
    for address, mask in lanes.items():
        point = tracker.points[address]
        tracker.check_initialised(address, f"an arrival of {warp.agent.label}")
        if address >> 24 != warp.agent.rank:
            library().point_arrived(point.address, warp.agent.block_address, warp.agent.executing(), 0)
        warp.agent.release(point, mask, order)


def commit_at(tracker: RaceTracker, warp: Any, lane: int, address: int) -> None:
    """tcgen05.commit by a lane, which arrives at once."""
    agent = warp.agent
    tracker.enter(warp.agent, lane)
    stream = STRUCTURES["Stream"].from_address(tracker.tensor.stream())
    tracker.check_initialised(address, f"tcgen05.commit of {agent.label}")
    clocks = np.zeros_like(agent.clocks)
    library().stream_commit(agent.block_address, ctypes.addressof(stream), lane, clocks.ctypes.data)
    point = tracker.points[address]
    point.add_stream(stream.column)
    order = Order.SYNC | Order.WIDE
    library().point_gather(point.address, clocks.ctypes.data, clocks.shape[1], agent.rank, order)


def bulk_waited(tracker: RaceTracker, agent: Agent, lane: int, groups: int, read: bool) -> None:
    """A lane waited until its first bulk groups are complete, or have read their sources."""
    for column in tracker.bulk_columns(agent, lane)[: 1 if read else 2]:
        library().agent_complete_in_lane(agent.block_address, lane, column, groups)


def converge(agent: Agent, mask: int) -> None:
    """bar.warp.sync by lanes."""
    library().agent_converge(agent.block_address, mask)


def fence_proxy(agent: Agent, mask: int, rows: Iterable[Row] = PROXIES) -> None:
    """fence.proxy.async by lanes, of the rows' memories."""
    library().agent_fence_proxy(agent.block_address, mask, sum(1 << PROXIES.index(row) for row in rows))


def complete_tensor(agent: Agent, kind: int) -> None:
    """tcgen05.wait::ld or ::st."""
    library().agent_complete_tensor(agent.block_address, kind)


def fence_tensor(agent: Agent, before: bool) -> None:
    """tcgen05.fence::before_thread_sync or ::after_thread_sync."""
    library().agent_fence_tensor(agent.block_address, before)


def wait_for(tracker: RaceTracker, warp: Any, address: int, order: int, phase: int) -> None:
    """A wait for a phase has succeeded."""
    tracker.agent = warp.agent
    point = tracker.points[address]
    tracker.check_initialised(address, f"a wait of {warp.agent.label}")
    warp.agent.acquire(point, order)
    library().point_waited(point.address, warp.agent.block_address, phase, warp.agent.executing(), 0)


def complete_phase(tracker: RaceTracker, address: int, phase: int) -> None:
    """A phase completes."""
    point = tracker.points[address]
    late = library().point_overtaken(point.address, phase, None)
    if late >= 0:
        fault = STRUCTURES["BarrierFault"](operation=CONSTANTS["ARRIVE"], address=address, warp=late, place=-1)
        tracker.report(tracker.fault(CONSTANTS["PHASE_OVERRUN"], fault, None))
    point.complete(phase)
