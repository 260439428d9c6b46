"""One warp: its identity, and what it waits for. Where its lanes have parted: ``core/divergence.c``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cute_kernels.emulator.errors import BarrierMisuse
from cute_kernels.emulator.facts import WarpName
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.state.events import Events
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.machine.state.mbarrier import MBarriers
from cute_kernels.emulator.machine.state.smem import ClusterMemory, SharedMemory
from cute_kernels.emulator.machine.state.tmem import TensorMemory

# --- what a warp has around it: as much of `units.sm` as its state and observers know -------------------------------


class CtaState(Protocol):
    """A CTA; attributes as of `units.sm.Cta`."""

    rank: int
    cluster: ClusterState
    shared: SharedMemory
    tmem: TensorMemory
    warps: Sequence[WarpState]

    def live_threads(self) -> int: ...
    def thread_exited(self) -> None: ...


class ClusterState(Protocol):
    """A cluster; attributes as of `units.sm.Cluster`."""

    index: int
    grid: tuple[int, int, int]
    shape: tuple[int, int, int]
    block: tuple[int, int, int]
    ctas: Sequence[CtaState]
    running: Collection[WarpState]
    progress: int
    memory: ClusterMemory
    gmem: GlobalMemory
    barriers: MBarriers
    events: Events

    def changes(self) -> tuple[int, int, int]: ...
    def instruction(self, index: int) -> Instruction | None: ...
    def place_of(self, warp: WarpState) -> Instruction | None: ...


class WarpCode(Protocol):
    """The execution of a warp (`bytecode.execution.WarpExecution`)."""

    standing: int  # the basic block that the warp is in, the end of the kernel included
    executing: int  # index of the instruction whose Python is running, or where the warp waits; -1: none
    steps: int  # instructions executed, up to the end of the block that it is in
    counted: bool  # the warp gave way behind the count of its block, none of which it has executed
    header: ctypes.Structure  # the core's `WarpHeader`

    def send(self, budget: int) -> None: ...
    def stand_at(self, place: int) -> None: ...
    def stores_in_bulk(self, lane: int, groups: int) -> None: ...
    def snapshot(self) -> Sequence[object]: ...


class PhasedBarrier(Protocol):
    """Barrier that `NamedWait` waits at; ``generation``: how often it has completed."""

    key: tuple[object, ...]

    @property
    def generation(self) -> int: ...
    def describe(self) -> str: ...


# --- what a warp can wait for ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Wait:
    """A condition on which a warp is descheduled."""

    kind: str  # names it in counts and traces
    ready: Callable[[], bool]  # whether it holds
    describe: Callable[[], str]  # what the warp does, in words
    key: Hashable = None  # what releases it; None: nothing in particular
    may_time_out: bool = False  # the instruction may also give up
    # whether it held when so much was complete: phases, generations or operations of its key
    ready_at: Callable[[int], bool] | None = None
    waits: Sequence[Wait] = ()  # those of the paths of a diverged warp, all of which are blocked


def until_progress(cluster: ClusterState, what: str, key: Hashable = None) -> Wait:
    """Polling: nothing to do until anything in the cluster changes."""
    seen = cluster.changes()
    return Wait("polling", lambda: cluster.changes() != seen, lambda: f"polls {what}", key, may_time_out=True)


class PhaseWait(Wait):
    """mbarrier.try_wait."""

    kind = "mbarrier"
    may_time_out = True

    def __init__(self, barriers: MBarriers, address: int, state: int, parity: bool) -> None:
        self.barriers, self.address, self.state, self.parity = barriers, address, state, parity
        self.phase = barriers.phase(address)
        self.key = ("mbarrier", address)

    def ready(self) -> bool:
        """Raises BarrierMisuse when the wait missed its phase: the next one, of the other parity, is complete too."""
        if self.parity and self.barriers.phase(self.address) > self.phase + 1:
            raise BarrierMisuse(
                f"a wait for phase {self.phase} has missed it: two phases have completed since it began, "
                f"{self.barriers.describe(self.address)}"
            ).know("phase-missed", barrier=self.barriers.state(self.address))
        return self.ready_at(self.barriers.phase(self.address))

    def ready_at(self, count: int) -> bool:
        return (count & 1) != self.state if self.parity else count > self.state

    def describe(self) -> str:
        what = f"parity {self.state}" if self.parity else f"the end of phase {self.state}"
        return f"waits for {what} of {self.barriers.describe(self.address)}"


class NamedWait(Wait):
    """bar.sync and, of a cluster's barrier, barrier.cluster.wait."""

    def __init__(self, barrier: PhasedBarrier, generation: int | None = None) -> None:
        self.barrier, self.key, self.kind = barrier, barrier.key, str(barrier.key[0])
        self.generation = barrier.generation if generation is None else generation

    def ready(self) -> bool:
        return self.barrier.generation != self.generation

    def ready_at(self, count: int) -> bool:
        return count > self.generation

    def describe(self) -> str:
        return f"waits at {self.barrier.describe()}"


class Knowledge(Protocol):
    """`observe.races.happens_before.Agent`."""

    label: str


class WarpState:
    """One warp of a CTA; `units.sm.Warp` knows the units around it.

    Attributes:
        index: warp index in its CTA (what selects its tensor-memory lanes).
        label: for reports, e.g. ``"cluster 5, CTA 1 warp 3 (epilogue)"``.
        live: lanes that exist (the last warp of a block may be partial) and have not exited.
        token: what a blocking instruction remembers between attempts.
        timed_out: the next try_wait gives up.
        agent: what the warp knows of the others, for the race detector; None without detectors.
    """

    def __init__(self, cta: CtaState, index: int, live: int, role: str, blocks: int) -> None:
        self.cta: CtaState = cta
        self.cluster: ClusterState = cta.cluster
        self.index, self.live, self.role = index, live, role
        self.number = 0  # warp index in its cluster
        self.track = role or f"warp {index}"  # its role, or ``"warp 3"`` without one: what counts are kept by
        self.counts: Sequence[int] = [0] * (blocks + 1)  # executions per basic block
        self.wait: Wait | None = None  # the condition on which it is descheduled, None while it can run
        self.code: WarpCode | None = None
        self.local: np.ndarray | None = None  # its local memory, uint8 [32 lanes, bytes], or None
        self.agent: Knowledge | None = None
        x, y, _ = cta.cluster.block
        threads = np.arange(32 * index, 32 * index + 32, dtype=np.uint32)
        self.tid_x, self.tid_y, self.tid_z = threads % x, threads // x % y, threads // (x * y)

    @property
    def label(self) -> str:
        several = self.cluster.grid != self.cluster.shape  # a CTA's number counts in its cluster
        return str(WarpName(self.cluster.index, self.cta.rank, self.index, self.role, several))

    def executing(self) -> int:
        """Index of the instruction that it is executing; -1: not known."""
        return -1 if self.code is None else self.code.executing

    @property
    def token(self) -> int:
        return self.code.header.token

    @token.setter
    def token(self, token: int) -> None:
        self.code.header.token = token

    @property
    def timed_out(self) -> bool:
        return self.code.header.timed_out

    @timed_out.setter
    def timed_out(self, value: bool) -> None:
        self.code.header.timed_out = value
