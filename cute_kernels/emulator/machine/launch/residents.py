"""The clusters of a launch that are resident at once, and whose turn it is.

A cluster runs until it has ended or can only wait for another one: its warps look again and again at memory that does
not change. It then keeps its state, and the next one has its turn, or begins where the chip has room for it. So a
launch whose clusters wait for none runs them one after the other. `Options.interleave_clusters` draws other orders.

A cluster that waits has its turn again when what its warps look at has changed, or when no other one can run. A launch
hangs when all resident clusters have waited patiently since anything happened.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from cute_kernels.common.chips import chip_of
from cute_kernels.emulator.machine.launch.holds import Holds
from cute_kernels.emulator.machine.launch.launch import Launch
from cute_kernels.emulator.machine.launch.scheduler import Scheduler
from cute_kernels.emulator.machine.launch.slots import Slot, suits
from cute_kernels.emulator.machine.state.tmem import TensorMemory
from cute_kernels.emulator.machine.units.sm import Cluster
from cute_kernels.emulator.observe.counters import Counters, UnitCounters, merge
from cute_kernels.emulator.observe.trace import Timeline
from cute_kernels.emulator.races.meetings import Meeting
from cute_kernels.emulator.steps import TURNS

_RANDOM_TURN = 64  # turns of warps that a cluster has at most until another one is drawn
_LOOKS = 4_000  # strong loads after which a cluster gives way that does something besides
_MOST_AT_FIRST = 4  # clusters that are interleaved, as long as none of them waits for one that has not begun


@dataclass
class ClusterWork:
    """Work of clusters, counted."""

    executions: dict[str, list[int]] = field(default_factory=dict)  # of each basic block, per warp role
    # loaded, stored: bytes of tensor copies
    loaded: int = 0
    stored: int = 0
    mmas: int = 0  # executed
    columns: int = 0  # most tensor-memory columns allocated in one CTA
    meter: UnitCounters | None = None  # the work of the units, or None
    # that stand against a certificate, see `races.certificate`: kind, index of the instruction or -1, text
    places: set[tuple[str, int, str]] = field(default_factory=set)
    meetings: set[tuple[str, int, Meeting]] = field(default_factory=set)  # of them: kind, index, two events
    # instructions with strong accesses, and whether one met any that it does not commute with, in clusters so far
    strong: set[tuple[int, bool]] = field(default_factory=set)
    clusters: int = 0  # how many

    @staticmethod
    def of(cluster: Cluster, counters: Counters) -> ClusterWork:
        """Work of a cluster that has run; ``counters`` are empty."""
        counters.add(warp for cta in cluster.ctas for warp in cta.warps)
        meter, tables = None, cluster.barriers.tables
        if cluster.meter is not None:
            meter = UnitCounters()
            meter.merge(cluster.meter)
        return ClusterWork(
            executions=counters.executions, loaded=tables.loaded, stored=tables.stored,
            mmas=tables.mmas + tables.wgmmas,
            columns=max(cta.tmem.columns_used for cta in cluster.ctas), meter=meter, places=cluster.places,
            meetings=cluster.meetings,
            strong=set() if cluster.tracker is None else cluster.tracker.strong_accesses(), clusters=1,
        )

    def add(self, other: ClusterWork) -> None:
        """Adds the work of other clusters."""
        merge(self.executions, other.executions)
        if self.meter is not None:
            self.meter.merge(other.meter)
        self.columns = max(self.columns, other.columns)
        for name in ("loaded", "stored", "mmas", "clusters"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("places", "meetings", "strong"):
            getattr(self, name).update(getattr(other, name))


class Residents:
    """Executes the clusters of a launch that have not started. ``launch``: whose; ``timeline``: takes what happens, or
    None."""

    def __init__(self, launch: Launch, timeline: Timeline | None) -> None:
        self._launch, self._timeline = launch, timeline
        self._waits = bool(launch.execution.kernel.dependence)
        allocates = any(one.parts[:2] == ("tcgen05", "alloc") for one in launch.execution.kernel.instructions)
        #: Tensor memory of the CTAs of each multiprocessor, where they may wait for it.
        self._tensor: list[list[TensorMemory]] = []
        if self._waits and allocates:
            self._tensor = [[] for _ in range(chip_of(launch.target).sm_count)]
        self._running: list[Scheduler] = []  # in the order in which they began
        self._stuck: dict[Scheduler, None] = {}  # that wait, in the order in which they began to
        self._patient: set[Scheduler] = set()  # of them, that have done so patiently since anything happened
        self._tired: set[Scheduler] = set()  # that have had their turn
        self._order = launch.options.interleave_clusters
        self._rng = random.Random(f"clusters {launch.options.seed}")
        self._at_first = 1 if self._order == "in_turn" else min(self._rng.randint(2, _MOST_AT_FIRST), launch.capacity)
        self._victim = self._rng.randrange(self._at_first) if self._order == "starve" else -1
        self._starved: Scheduler | None = None
        self._begun = 0
        self._steps = deque(step for step in launch.options.steps if step.kind in TURNS)
        held = [step for step in launch.options.steps if step.kind == "h"]
        self._holds = Holds(held) if held else None
        self._slot = Slot(launch, self._scheduler) if suits(launch) else None

    def run(self) -> Iterator[ClusterWork]:
        """Work of the clusters, as they end. Raises EmulatorError: what a cluster or a detector reports, or a hang of
        the launch."""
        while self._launch.waiting or self._running:
            if self._slot is not None and self._slot.tries:
                yield from self._run_in_slot()
                if not self._running:
                    continue
            scheduler = self._next()
            before = scheduler.cluster.changes()
            self._let_run(scheduler)
            if scheduler.cluster.changes() != before:
                self._patient.clear()
            if not scheduler.cluster.running:
                self._running.remove(scheduler)
                for cta in scheduler.cluster.ctas:
                    cta.tmem.leave()
                yield ClusterWork.of(scheduler.cluster, Counters(self._launch.execution.flow))
            elif scheduler.stuck is None:
                self._tired.add(scheduler)
            else:
                self._stuck[scheduler] = None
                self._patient |= {scheduler} if scheduler.patient else set()

    def _run_in_slot(self) -> Iterator[ClusterWork]:
        """Runs clusters without Python; one that needs it is running then."""
        launch, slot = self._launch, self._slot
        done = slot.run()
        if done:
            launch.take(done)
            work = ClusterWork(clusters=done)
            for track, executions in zip(slot.tracks, slot.executions.tolist()):
                merge(work.executions, {track: executions})
            yield work
        if slot.scheduler is not None:
            launch.take()
            self._running.append(slot.scheduler)
            self._begun += 1

    def _let_run(self, scheduler: Scheduler) -> None:
        launch, looks = self._launch, scheduler.cluster.polls
        scheduler.helped = self._waits and (self._room() or len(self._running) > 1)
        scheduler.others = [other for other in self._running if other is not scheduler]
        scheduler.later, scheduler.most = len(launch.waiting), launch.capacity
        scheduler.pause, scheduler.steps = None, self._steps
        if scheduler.helped and self._order == "random" and not scheduler.patient:
            turns = iter(range(self._rng.randrange(1, _RANDOM_TURN)))
            scheduler.pause = lambda: next(turns, None) is None or scheduler.cluster.polls > looks + _LOOKS
        elif scheduler.helped and not scheduler.patient:
            scheduler.pause = lambda: scheduler.cluster.polls > looks + _LOOKS
        scheduler.run()

    def _room(self) -> bool:
        """Whether another cluster can begin."""
        return bool(self._launch.waiting) and len(self._running) < self._launch.capacity

    def _next(self) -> Scheduler:
        """The cluster that runs next; raises Hang when all wait."""
        if self._steps and (following := self._of_step()) is not None:
            return following
        while self._holds is not None and self._holds.freed:
            index = self._holds.freed.pop()
            for each in self._running:
                if each.cluster.index == index:
                    self._stuck.pop(each, None)
                    return each
        able = [each for each in self._running if each not in self._stuck]
        others = [each for each in able if each is not self._starved]
        ready = [each for each in others if each not in self._tired]
        if self._room() and (not ready or len(self._running) < self._at_first):
            return self._begin()
        if not ready:
            self._tired.clear()
            woken = (each for each in self._stuck if each.seen != each.cluster.looked_at())
            first = next(woken, self._starved if self._starved in able else None)
            ready = others if first is None else [first]
        if ready:
            chosen = self._rng.choice(ready) if self._order == "random" else ready[0]
            chosen.patient = False
        else:
            chosen = next((each for each in self._stuck if each not in self._patient), None)
            if chosen is None:
                # One that does not look at memory is nearer to the cause: others may look for what it would do.
                blocked = (each for each in self._running if each.stuck.args[1] == "hang")
                next(blocked, self._running[0]).hang()
            chosen.patient = True
        self._stuck.pop(chosen, None)
        return chosen

    def _of_step(self) -> Scheduler | None:
        """The cluster of the next step, after those before it have begun; None: no step is left."""
        while self._steps:
            index = self._steps[0].cluster
            while index in self._launch.waiting and self._room():
                self._begin()
            for each in self._running:
                if each.cluster.index == index:
                    self._stuck.pop(each, None)
                    return each
            self._steps.popleft()
        return None

    def _begin(self) -> Scheduler:
        launch = self._launch
        cluster = launch.make_cluster(launch.take())
        scheduler = self._scheduler(cluster)
        scheduler.holds = self._holds
        self._running.append(scheduler)
        for cta in cluster.ctas if self._tensor else ():
            cta.tmem.enter(min(self._tensor, key=len))
        self._begun += 1
        if self._begun - 1 == self._victim:
            self._starved = scheduler
            return self._next()
        return scheduler

    def _scheduler(self, cluster: Cluster) -> Scheduler:
        launch = self._launch
        return Scheduler(cluster, launch.execution, launch.options, self._timeline, len(launch.waiting))
