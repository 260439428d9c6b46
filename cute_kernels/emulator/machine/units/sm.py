"""One CTA and one cluster: warps, barriers, memories and units."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import BarrierMisuse, EmulatorError, IllegalAccess
from cute_kernels.emulator.facts import Past, Side
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.state import access_faults, lane_faults, named_barriers
from cute_kernels.emulator.machine.state.async_engine import AsyncEngine, cluster_random
from cute_kernels.emulator.machine.state.events import Events
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.machine.state.mbarrier import MBarriers
from cute_kernels.emulator.machine.state.named_barriers import NamedBarriers
from cute_kernels.emulator.machine.state.register_pool import RegisterPool
from cute_kernels.emulator.machine.state.smem import ClusterMemory, SharedMemory
from cute_kernels.emulator.machine.state.tmem import COLUMNS, TensorMemory
from cute_kernels.emulator.machine.state.tmem_pairs import pair_operations
from cute_kernels.emulator.machine.state.warp import WarpState
from cute_kernels.emulator.machine.units.copies import bulk, cp_async
from cute_kernels.emulator.machine.units.matrix import tensor_core, wgmma
from cute_kernels.emulator.machine.units.matrix.arithmetic import Arithmetic
from cute_kernels.emulator.observe.counters import UnitCounters
from cute_kernels.emulator.observe.trace import ClusterTrace
from cute_kernels.emulator.options import Options
from cute_kernels.emulator.races import phases
from cute_kernels.emulator.races.happens_before import Agent
from cute_kernels.emulator.races.launch_shadow import LaunchShadow
from cute_kernels.emulator.races.meetings import Meeting
from cute_kernels.emulator.races.tracker import RaceTracker
from cute_kernels.emulator.steps import Step


class Warp(WarpState):
    """A warp, with the units that its instructions reach."""

    cta: Cta
    cluster: Cluster
    agent: Agent | None

    def stores_in_bulk(self, lane: int) -> None:
        """A lane issues a bulk store: from now on it has bulk groups."""
        columns = (0, 0) if self.agent is None else self.cluster.tracker.bulk_columns(self.agent, lane)
        thread = self.cluster.bulk.thread((self.cta.rank, self.index, lane), columns)
        self.code.stores_in_bulk(lane, ctypes.addressof(thread))


class ClusterBarrier:
    """barrier.cluster: every live thread of the cluster arrives once and then waits, phase by phase."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.generation = 0
        self.key = ("barrier.cluster",)
        self._lanes: dict[Warp, int] = {}  # lanes that arrived in this generation
        self._waiting: dict[Warp, tuple[int, int]] = {}  # lanes that may wait, and the generation of their arrival
        self.point = cluster.tracker.point() if cluster.tracker is not None else None

    def arrive(self, warp: Warp, mask: int, order: int) -> None:
        """Raises BarrierMisuse when a thread arrives twice without waiting in between."""
        lanes, generation = self._waiting.get(warp, (0, self.generation))
        if lanes & mask:
            message = f"{warp.label} arrives at the cluster barrier again without barrier.cluster.wait"
            raise BarrierMisuse(message).know("cluster-barrier")
        self._waiting[warp] = (lanes | mask, self.generation)
        self._lanes[warp] = self._lanes.get(warp, 0) | mask
        self.cluster.progress += 1
        if self.point is not None:
            warp.agent.release(self.point, mask, order)
        self.settle()

    def check_waits(self, warp: Warp, mask: int) -> int:
        """The generation of the arrival of these lanes; raises BarrierMisuse if they did not arrive."""
        lanes, generation = self._waiting.get(warp, (0, 0))
        if mask & ~lanes:
            message = f"{warp.label} executes barrier.cluster.wait without barrier.cluster.arrive"
            raise BarrierMisuse(message).know("cluster-barrier")
        return generation

    def leave(self, warp: Warp, mask: int, order: int) -> None:
        """Lanes of a warp saw the barrier complete."""
        if self.point is not None:
            warp.agent.acquire(self.point, order)
        lanes, generation = self._waiting[warp]
        self._waiting[warp] = (lanes & ~mask, generation)

    def settle(self) -> None:
        """Completes the phase when all lanes of all live warps arrived (exited threads count as arrived)."""
        if self._lanes and all(self._lanes.get(warp, 0) == warp.live for warp in self.cluster.warps):
            if self.point is not None:
                self.point.complete()
            self.generation += 1
            self._lanes.clear()
            self.cluster.events.completed(self.key)

    def missing(self) -> list[str]:
        """Labels of the warps that have not arrived."""
        return [w.label for w in self.cluster.warps if self._lanes.get(w, 0) != w.live]

    def describe(self) -> str:
        return f"the cluster barrier; not arrived: {', '.join(self.missing()) or 'nobody'}"


class Cta:
    """One CTA. ``rank``: rank in its cluster. ``coordinates``: %ctaid. ``in_cluster``: %cluster_ctaid."""

    def __init__(
        self, cluster: Cluster, rank: int, coordinates: tuple[int, int, int], in_cluster: tuple[int, int, int],
        smem: int,
    ) -> None:
        self.cluster, self.rank = cluster, rank
        self.coordinates, self.in_cluster = coordinates, in_cluster
        options = cluster.options
        uninitialised = options.looks_for("uninitialised")
        self.shared = SharedMemory(smem, rank, detect=options.detectors, uninitialised=uninitialised)
        self.tmem = TensorMemory(detect=uninitialised, own_lanes=options.looks_for("tensor_lanes"))
        self.shared_base = rank << 24
        self.warps: list[Warp] = []
        self.named = NamedBarriers(self)  # its named barriers
        self.registers: RegisterPool | None = None  # what its warps hold of them, or None where that is not known

    def spans(self) -> list[tuple[int, int]]:
        """(address, bytes) of what the core changes of its memory and named barriers."""
        return [*self.shared.spans(), self.named.span()]

    def live_threads(self) -> int:
        """Threads that have not exited, in whole warps."""
        return 32 * sum(1 for warp in self.warps if warp in self.cluster.running)

    def thread_exited(self) -> None:
        """Threads exited: barriers that wait for all live threads may be complete now."""
        self.cluster.progress += 1
        self.named.recount()
        self.cluster.barrier.settle()


class LaunchFacts(Protocol):
    """Facts that all clusters of a launch share (`machine.launch.launch.Launch`)."""

    # grid, block, cluster: CTAs of the grid, threads of a CTA, CTAs of a cluster
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    # shared_bytes, dynamic_smem: all bytes of shared memory per CTA, and those that are dynamic
    shared_bytes: int
    dynamic_smem: int
    gaps: tuple[tuple[int, int], ...]  # of shared memory, which belong to no array
    # params, symbols, memory: parameter block, addresses of variables, global memory
    params: bytes
    symbols: dict[str, int]
    memory: GlobalMemory
    options: Options  # schedule and detectors
    arithmetic: Arithmetic  # how tensor cores add
    races: LaunchShadow | None  # what the race detector knows of global memory, or None
    blocks: int  # basic blocks of the kernel
    instructions: Sequence[Instruction]  # of the kernel
    registers: int | None  # of a thread when the kernel begins, or None where that is not known
    reported: set[tuple[object, ...]]  # keys of reports after which execution went on: none is made again
    neighbours: int  # CTAs of the launch that a multiprocessor holds at once
    dependent: bool  # whether some CTAs may wait for others

    def take_cluster(self, request: Step) -> tuple[int, int, int] | None: ...


class Cluster:
    """The CTAs that run together, their memories and units.

    Attributes:
        index: linear cluster index; ``coordinates``: %clusterid.
        progress: counts effects, so that polling warps know whether looking again is worth it.
        polls: counts strong loads, and atomics that change nothing (`look`).
        meter: counts the work of the units, or None (`Options.counters`).
        pair_operations: of every pair of CTAs, by name of the operation on tensor memory.
    """

    def __init__(self, index: int, coordinates: tuple[int, int, int], launch: LaunchFacts) -> None:
        options = launch.options
        self._launch, self._requests = launch, itertools.count()
        self.index, self.coordinates = index, coordinates
        self.grid, self.block, self.shape = launch.grid, launch.block, launch.cluster
        self.params, self.symbols, self.gmem, self.options = launch.params, launch.symbols, launch.memory, options
        self.arithmetic = launch.arithmetic  # how tensor cores add
        self.rng, asynchronous = cluster_random(options.seed, index)
        self.executing: Warp | None = None  # the warp that is running now, None in between
        self._instructions, self._reported = launch.instructions, launch.reported
        self._against: set[tuple[str, int, int]] = set()
        self._early: list[EmulatorError] = []  # of these, phases: reported at the end unless another fault shows
        self.places: set[tuple[str, int, str]] = set()  # against a certificate, see `ClusterWork`
        self.meetings: set[tuple[str, int, Meeting]] = set()  # of them
        self.progress = self.polls = self.async_stores = 0
        self.dynamic_smem = launch.dynamic_smem
        self._tries = defaultdict(itertools.count)  # of each warp: try_waits that could succeed, where some do not
        self.meter = UnitCounters() if options.counters else None
        self.trace: ClusterTrace | None = None  # records what happens, or None (`Options.trace`)
        self.running: dict[Warp, None] = {}  # warps that have not exited
        self.ctas = self._make_ctas(launch)
        memories = [cta.tmem for cta in self.ctas]
        self.memory = ClusterMemory([cta.shared for cta in self.ctas])
        self.barriers = MBarriers(self.memory, dict(options.barriers), launch.instructions, self._ask)
        self.tracker = self._make_tracker(launch)  # the race detector, or None
        for cta in self.ctas:
            self.barriers.cta(cta.rank).named = cta.named.address
        self.engine = AsyncEngine(options.completion, asynchronous, self._place, self.barriers.address)
        self.engine.where, self.engine.reraise = self._issued, self.barriers.reraise
        self.barriers.tables.work = self.engine.address
        if options.stepped is not None:
            self.engine.stepped = lambda queue, words: options.stepped(Step(index, "a", queue), words)
        self.events = Events(self.barriers.tables, self.engine)  # what happens, for observers
        self.engine.noted = self.barriers.noted = self.events.read
        self.copies, self.bulk, self.wgmma = cp_async.CopyUnit(self), bulk.BulkUnit(self), wgmma.WgmmaUnit(self)
        self.tensor_core = tensor_core.TensorCore(
            self.memory, memories, self.barriers, self.engine, self.tracker, self.arithmetic
        )
        self.pair_operations = [pair_operations(memories) for _ in memories[::2]]
        self.barrier = ClusterBarrier(self)
        for cta in self.ctas:
            self._make_warps(cta, launch)
        self.running = dict.fromkeys(warp for cta in self.ctas for warp in cta.warps)
        self.tensor_core.threads_of(len(self.running))
        for cta in self.ctas:
            cta.named.recount()

    def _make_ctas(self, launch: LaunchFacts) -> list[Cta]:
        (x, y, z), found = self.shape, []
        for rank in range(x * y * z):
            inside = rank % x, rank // x % y, rank // (x * y)
            place = tuple(c * s + i for c, s, i in zip(self.coordinates, self.shape, inside))
            cta = Cta(self, rank, place, inside, launch.shared_bytes)
            cta.shared.report = cta.tmem.report = self.report
            cta.shared.exclude(launch.gaps)
            found.append(cta)
        return found

    def _make_tracker(self, launch: LaunchFacts) -> RaceTracker | None:
        if launch.races is None:
            return None
        warps = -(-math.prod(self.block) // 32) * len(self.ctas)
        tracker = RaceTracker([launch.shared_bytes] * len(self.ctas), launch.races, warps, self.options.strict)
        tracker.barriers, tracker.report, tracker.arrive = self.barriers, self.report, self._stand
        tracker.executing, tracker.reported = self._index, launch.reported
        tracker.stands_against, tracker.met = self.stands_against, self.meets
        return tracker

    def _make_warps(self, cta: Cta, launch: LaunchFacts) -> None:
        threads, roles = math.prod(self.block), self.options.roles
        for index, first in enumerate(range(0, threads, 32)):
            role = roles[index] if index < len(roles) else ""
            warp = Warp(cta, index, (1 << min(32, threads - first)) - 1, role, launch.blocks)
            warp.number = len(self.barriers.labels)
            self.barriers.labels.append(label := warp.label)
            cta.warps.append(warp)
            if self.tracker is not None:
                warp.agent = self.tracker.make_agent(cta.rank, warp.live, label)
                warp.agent.warp = warp
        if launch.registers is not None:
            cta.registers = RegisterPool(launch.registers, len(cta.warps))

    def become(self, index: int, coordinates: tuple[int, int, int], number: int) -> None:
        """In its place, of one CTA, another one has begun, of which Python has seen nothing yet. ``index``,
        ``coordinates``: its own. ``number``: of the race detector."""
        (cta,) = self.ctas
        self.index, self.coordinates, cta.coordinates = index, coordinates, coordinates
        self.rng, self.engine.rng = cluster_random(self.options.seed, index)
        self.barriers.labels[:] = (warp.label for warp in cta.warps)
        if self.tracker is not None:
            self.tracker.become(number, self.barriers.labels)

    @property
    def warps(self) -> list[Warp]:
        """Warps that have not exited."""
        return list(self.running)

    def look(self, mask: int, addresses: np.ndarray, nbytes: int) -> None:
        """Lanes look at what others may change: ``nbytes`` at each of uint64 [32]."""
        library().warp_looks(self.barriers.address, addresses.astype(np.int64).ctypes.data, mask, nbytes)

    def looked_at(self) -> dict[tuple[int, int], bytes]:
        """Memory where warps have looked since anything happened, by address and bytes; columns that others hold."""
        tables = self.barriers.tables
        looks = tables.looks[: min(tables.look_count, len(tables.looks))]
        places = dict.fromkeys((look.address, look.nbytes) for look in looks)
        known = (place for place in places if self.gmem.region_index(*place) is not None)
        held = {(~cta.rank, 0): cta.tmem.held_by_others.to_bytes(4, "little") for cta in self.ctas}
        return {place: bytes(self.gmem.view(*place)) for place in known} | held

    def changes(self) -> tuple[int, int, int]:
        """Differs whenever something happened that a waiting warp could observe."""
        return self.progress, self.barriers.completions, self.engine.executed

    def may_wait_for_columns(self, memory: TensorMemory) -> bool:
        """For the certificate: whether CTAs that share a multiprocessor may wait for each other's tensor memory.

        None waits for ever if all that each ever holds has room at once, or if whoever holds some waits for nobody.
        """
        neighbours = self._launch.neighbours
        if neighbours < 2:
            return False
        return len(memory.allocations) > 1 or (self._launch.dependent and memory.columns_used * neighbours > COLUMNS)

    def _index(self) -> int:
        """Index of the instruction that is executed now, -1 if that is not known."""
        return -1 if self.executing is None else self.executing.executing()

    def _place(self) -> tuple[Instruction, str] | None:
        """The instruction that is executed now, and the label of its warp; None: it is not known."""
        warp = self.executing
        instruction = self.place_of(warp) if warp is not None else None
        return (instruction, warp.label) if instruction is not None else None

    def _issued(self, place: int, warp: int) -> tuple[Instruction, str] | None:
        """`AsyncEngine.where`."""
        return (self._instructions[place], self.barriers.labels[warp]) if place >= 0 else None

    def place_of(self, warp: Warp) -> Instruction | None:
        """The instruction that a warp executes, None if that is not known."""
        return self.instruction(warp.executing())

    def instruction(self, index: int) -> Instruction | None:
        """An instruction of the kernel, None for -1."""
        return self._instructions[index] if index >= 0 else None

    def report(self, error: EmulatorError) -> None:
        """A detector has found something: raises it, unless `Options.going_on` says to go on."""
        going_on = self.options.going_on
        if going_on is None:
            raise error
        place = self._place() or self.engine.running_issued
        if place is not None:
            error.at(*place)
        self.tell_past(error)
        if not going_on(error):
            raise error
        index = -1 if self.executing is None else self.executing.executing()
        if error not in self._early:  # of these there are places
            self.places.add(("reported", index, f"{error.kind} was reported, and execution went on"))

    def stands_against(self, error: EmulatorError, relied_on: bool = False) -> None:
        """A fault that another schedule may show stands against the certificate, the first of a pair of instructions.

        Phases of a barrier that order does not keep apart are reported at the end, unless kernels in use rely on it:
        if this run shows what they lead to, that says more of where. In which order warps allocate may not matter.
        """
        place = self._place()
        index = -1 if place is None else place[0].index
        other = error.facts.other
        pair = error.kind, index, other.instructions[0].index if other is not None and other.instructions else -1
        if pair not in self._against:
            self._against.add(pair)
            self.places.add((error.kind, index, error.message))
            self._meets_other(error.kind, index, error.facts.other)
            if not relied_on and isinstance(error, BarrierMisuse):
                if not self._early:
                    self.tell_past(error)
                self._early.append(error if place is None else error.at(*place))

    def meets(self, kind: str, place: int, meeting: Meeting) -> None:
        """Two events stand against the certificate at an instruction; see `races.meetings`."""
        self.meetings.add((kind, place, meeting))

    def _meets_other(self, kind: str, place: int, other: Side | None) -> None:
        """An event that happens now may also come before the latest one of another warp."""
        warp, warps = self.executing, (each for cta in self.ctas for each in cta.warps)
        them = next((each for each in warps if other is not None and each.label == other.warp), None)
        if warp is None:
            return
        second = self.index, warp.number, warp.code.steps
        if other is None and kind in ("arrival-early", "bytes-early"):
            self.meets(kind, place, Meeting((), second, f"{warp.label} before asynchronous work"))
        elif them not in (None, warp) and other.steps:
            first = self.index, them.number, other.steps
            self.meets(kind, place, Meeting(first, second, f"{warp.label} before {other.warp} {other.verb}"))

    def tell_past(self, error: EmulatorError) -> None:
        """Adds to an error what has happened to mbarriers, and which phases order had not kept apart before."""
        if error in self._early:
            return  # it has what was known at the time
        if self._early:
            error.know(early=(self._early[0].kind, self._early[0].message))
        past = self.past()
        # Others of an array tell which of them the error's barrier is.
        error.know(past=past, barriers=past.barriers if error.facts.barrier is not None else ())

    def past(self) -> Past:
        """Operations on barriers before a fault."""
        doubles = tuple(each for cta in self.ctas for each in cta.named.double_arrivals())
        return dataclasses.replace(self.barriers.past(), doubles=doubles)

    def report_once(self, what: Hashable, error: Callable[[], EmulatorError]) -> None:
        """Reports what is wrong with the running instruction, once in a launch: repeats are not even put into words."""
        key = what, self._index()
        if key not in self._reported:
            self.report(error())
        self._reported.add(key)

    def _stand(self) -> None:
        """The warp that runs is at the instruction at which the core is."""
        place = self.barriers.tables.place
        if self.executing is not None and place >= 0:
            self.executing.code.stand_at(place)

    def _ask(self, what: int) -> bool:
        """`MBarriers.ask`: the unit that the question is for answers it, or raises what is wrong."""
        warp, fault = self.executing, self.barriers.tables.fault
        if what == CONSTANTS["TAKE_EVENTS"]:
            self.events.read()
            return True
        self._stand()
        if what == CONSTANTS["BY_CHANCE"]:
            return self._try_succeeds(warp)
        if what in cp_async.ASKED:
            self.copies.answer(what, fault.copy, warp)
        elif what in bulk.ASKED:
            self.bulk.answer(what, fault.bulk, warp)
        elif what in wgmma.FAULTS:
            self.wgmma.answer(what, fault, warp)
        elif what in tensor_core.ASKED:
            self.tensor_core.answer(what, fault, warp)
        elif what == CONSTANTS["MAKE_ROOM"]:
            self._make_room(warp.cta.named, fault.named.number)
        elif what in access_faults.REPORTS:
            self.report_once(what, lambda: access_faults.fault(what, fault.access, self.memory, self.gmem, warp))
        elif what != CONSTANTS["TAKE_LOGS"]:
            found = self._fault(what, fault, warp)
            if phases.stands_against(what):
                self.stands_against(found, phases.relied_on(self.tracker, what, fault.barrier.place))
            else:
                self.report(found)
        return True

    def _fault(self, what: int, fault: ctypes.Structure, warp: Warp | None) -> EmulatorError:
        """Error of what the core has found wrong: of a detector's faults it is returned, all others are raised."""
        if what == CONSTANTS["RACE_RAISED"]:
            self.tracker.unit.reraise()
        if what in named_barriers.FAULTS:
            raise warp.cta.named.fault(what, fault.named, warp)
        if what == CONSTANTS["UNKNOWN_MMA"]:
            a, _, accumulator = self.place_of(warp).parts[-3:]
            self.arithmetic.sums("mma", a, accumulator)  # raises
        if what in lane_faults.FAULTS:
            raise lane_faults.fault(what, fault.lanes, warp)
        if what in access_faults.FAULTS:
            raise access_faults.fault(what, fault.access, self.memory, self.gmem, warp)
        agent = None if warp is None else warp.agent
        found = None if self.tracker is None else self.tracker.fault(what, fault.barrier, agent)
        if found is None:
            raise self.barriers.fault(what)
        return found

    def _make_room(self, named: NamedBarriers, number: int) -> None:
        """The core asks for it, for a named barrier."""
        named.make_room(number, None if self.tracker is None else self.tracker.named_point)

    def _try_succeeds(self, warp: Warp) -> bool:
        """Whether a try_wait whose phase is complete does not report a timeout nevertheless."""
        options, step = self.options, Step(self.index, "t", warp.number, next(self._tries[warp.number]))
        fails = step in options.steps if options.steps else self.rng.random() < 0.25
        if fails and options.stepped is not None:
            line = getattr(self.place_of(warp), "line", "?")
            options.stepped(step, f"{warp.label}: a try_wait at PTX line {line} of a complete phase reports a timeout")
        return not fails

    def take_cluster(self) -> tuple[int, int, int] | None:
        """The %ctaid of the first CTA of a cluster that has not started and never will, None if the answer is none."""
        return self._launch.take_cluster(Step(self.index, "c", next(self._requests)))

    def exit(self, warp: Warp) -> None:
        del self.running[warp]
        if self.tracker is not None:
            self.tracker.exits.exit(warp.agent)
        warp.cta.thread_exited()
        if self.running and not warp.cta.live_threads():
            warp.cta.shared.close()
            self.barriers.cta(warp.cta.rank).exited = True

    def finish(self) -> None:
        """All warps have exited: asynchronous work completes, and what was left undone is reported. Raises
        IllegalAccess: tensor memory still allocated, or a CTA exited while its shared memory was in use; BarrierMisuse:
        a wgmma that only some warps of a warpgroup issued; an mbarrier in the middle of a phase, with bytes and
        arrivals outstanding or (`Options.strict`) either alone."""
        unobserved = list(self.bulk.unobserved())
        self.engine.drain()
        self.wgmma.check_finished()
        if self.options.looks_for("exits"):
            for cta in self.ctas:
                cta.tmem.check_released(self._instructions)
            for thread, text, place in unobserved:
                error = IllegalAccess(
                    f"CTA {thread[0]} exits while its shared memory may still be read: {text} (warp {thread[1]} lane "
                    f"{thread[2]} never waited for it)"
                )
                what = text.split(" of ")[0]
                error.know("exit-in-use", sentence=f"a CTA exits while a {what} may still read its shared memory")
                warp = self.ctas[thread[0]].warps[thread[1]].label
                self.report(error.at(self._instructions[place] if place >= 0 else None, warp))
        if self.tracker is not None:
            self.tracker.check_exits()
        if self.options.looks_for("exits"):
            self.barriers.check_finished(self.options.strict, self.report)
        for early in self._early:
            self.report(early)
