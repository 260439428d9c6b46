"""One warp: its identity, and what it waits for. Where its lanes have parted: ``core/divergence.c``."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Hashable, Sequence
from typing import Protocol

import numpy as np

from cute_kernels.emulator.errors import BarrierMisuse
from cute_kernels.emulator.facts import WarpName
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.state.events import Events
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.machine.state.mbarrier import MBarriers
from cute_kernels.emulator.machine.state.register_pool import RegisterPool
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
    held_at: str
    excused: Collection[WarpState]
    memory: ClusterMemory
    gmem: GlobalMemory
    barriers: MBarriers
    events: Events

    def changes(self) -> tuple[int, int, int]: ...
    def instruction(self, index: int) -> Instruction | None: ...
    def place_of(self, warp: WarpState) -> Instruction | None: ...


class WarpCode(Protocol):
    """The execution of a warp (`bytecode.execution.WarpExecution`).

    Attributes:
        standing: the basic block that the warp is in, the end of the kernel included.
        executing: index of the instruction whose Python is running, or where the warp waits; -1: none.
        steps: instructions executed, up to the end of the block that it is in.
        counted: the warp gave way behind the count of its block, none of which it has executed.
        header: the core's `WarpHeader`.
    """

    standing: int
    executing: int
    steps: int
    counted: bool
    header: ctypes.Structure

    def send(self, budget: int) -> None: ...
    def stand_at(self, place: int) -> None: ...
    def stores_in_bulk(self, lane: int, groups: int) -> None: ...
    def snapshot(self) -> Sequence[object]: ...


class PhasedBarrier(Protocol):
    """Barrier that `NamedWait` waits at; ``generation``: how often it has completed."""

    key: Hashable

    @property
    def generation(self) -> int: ...
    def describe(self) -> str: ...


class LaneCopies(Protocol):
    """cp.async of a cluster: those that are not complete."""

    def pending(self, warp: WarpState, lanes: int, newest: int) -> int | None: ...
    def text(self, address: int) -> str: ...


# --- what a warp can wait for ---------------------------------------------------------------------------------------


class Wait:
    """A condition on which a warp is descheduled.

    ``kind`` names it in counts and traces, ``key`` what releases it (None: nothing in particular); ``may_time_out``:
    the instruction may also give up.
    """

    kind = ""
    key: Hashable = None
    may_time_out = False

    def ready(self) -> bool:
        raise NotImplementedError

    def ready_at(self, count: int) -> bool:
        """Whether it was when so much was complete: phases of its barrier."""
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError


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


class ProgressWait(Wait):
    """Polling: nothing to do until anything in the cluster changes."""

    kind = "polling"
    may_time_out = True

    def __init__(self, cluster: ClusterState, what: str, detail: str) -> None:
        self.cluster, self.what, self.detail = cluster, what, detail
        self.seen = cluster.changes()

    def ready(self) -> bool:
        return self.cluster.changes() != self.seen

    def describe(self) -> str:
        return f"polls ({self.what}) {self.detail}".rstrip()


class NamedWait(Wait):
    """bar.sync."""

    kind = "bar"

    def __init__(self, barrier: PhasedBarrier) -> None:
        self.barrier, self.generation = barrier, barrier.generation
        self.key = barrier.key

    def ready(self) -> bool:
        return self.barrier.generation != self.generation

    def ready_at(self, count: int) -> bool:
        return count > self.generation

    def describe(self) -> str:
        return f"waits at {self.barrier.describe()}"


class ClusterWait(NamedWait):
    """barrier.cluster.wait."""

    kind = "barrier.cluster"


class BulkGroups(Protocol):
    """Bulk groups of the threads of a cluster (`units.copies.bulk`)."""

    def wait_satisfied(self, thread: tuple[int, int, int], count: int, read: bool) -> bool: ...


class BulkWait(Wait):
    """cp.async.bulk.wait_group."""

    kind = "bulk_group"

    def __init__(self, groups: BulkGroups, thread: tuple[int, int, int], count: int, read: bool) -> None:
        self.groups, self.thread, self.count, self.read = groups, thread, count, read
        self.key = ("bulk_group", thread)

    def ready(self) -> bool:
        return self.groups.wait_satisfied(self.thread, self.count, self.read)

    def describe(self) -> str:
        what = "reads" if self.read else "writes"
        return f"waits for the {what} of all but {self.count} bulk groups of lane {self.thread[2]}"


class CopyWait(Wait):
    """cp.async.wait_group, wait_all (``newest`` EVERY_COPY)."""

    kind = "cp.async"

    def __init__(self, copies: LaneCopies, warp: WarpState, lanes: int, newest: int) -> None:
        self.copies, self.warp, self.lanes, self.newest = copies, warp, lanes, newest
        self.key = ("cp.async", warp)

    def ready(self) -> bool:
        return not self.copies.pending(self.warp, self.lanes, self.newest)

    def describe(self) -> str:
        copy = self.copies.pending(self.warp, self.lanes, self.newest)
        newest = max(self.newest, 0)
        return f"waits for all but the {newest} newest of its cp.async groups, first {copy and self.copies.text(copy)}"


class AllocationWait(Wait):
    """tcgen05.alloc."""

    kind = "tcgen05.alloc"

    def __init__(self, tmem: TensorMemory, columns: int) -> None:
        self.tmem, self.columns = tmem, columns

    def ready(self) -> bool:
        return self.tmem.has_room(self.columns)

    def describe(self) -> str:
        others = self.tmem.held_by_others
        shared = f"; other CTAs of the multiprocessor hold {others} of its 512" if others else ""
        return f"waits for {self.columns} free TMEM columns; allocated: {self.tmem.allocations}{shared}"


class RegisterWait(Wait):
    """setmaxnreg.inc."""

    kind = "setmaxnreg"

    def __init__(self, registers: RegisterPool, warp: int, count: int) -> None:
        self.registers, self.warp, self.count = registers, warp, count

    def ready(self) -> bool:
        return self.registers.has_room(self.warp, self.count)

    def describe(self) -> str:
        return f"waits at setmaxnreg.inc for {self.registers.describe(self.warp, self.count)}"


class GridWait(Wait):
    """griddepcontrol, where another launch has to go on first."""

    kind = "griddepcontrol"

    def __init__(self, warp: WarpState, what: str) -> None:
        self.warp, self.what = warp, what

    def ready(self) -> bool:
        return not self.warp.held_at(self.what)

    def describe(self) -> str:
        return f"waits for another launch at griddepcontrol.{self.what}"


class AnyWait(Wait):
    """All paths of a diverged warp are blocked."""

    kind = "diverged"
    may_time_out = True

    def __init__(self, waits: list[Wait]) -> None:
        self.waits = waits

    def ready(self) -> bool:
        return any(wait.ready() for wait in self.waits)

    def describe(self) -> str:
        return "is diverged: " + "; ".join(wait.describe() for wait in self.waits)


class Knowledge(Protocol):
    """`observe.races.happens_before.Agent`."""

    label: str


class WarpState:
    """One warp of a CTA; `units.sm.Warp` knows the units around it.

    Attributes:
        index: warp index in its CTA (what selects its tensor-memory lanes).
        number: warp index in its cluster.
        label: for reports, e.g. ``"cluster 5, CTA 1 warp 3 (epilogue)"``.
        track: its role, or ``"warp 3"`` without one: what counts are kept by.
        live: lanes that exist (the last warp of a block may be partial) and have not exited.
        wait: the condition on which it is descheduled, None while it can run.
        token: what a blocking instruction remembers between attempts.
        timed_out: the next try_wait gives up.
        agent: what the warp knows of the others, for the race detector; None without detectors.
        counts: executions per basic block.
        local: its local memory, uint8 [32 lanes, bytes], or None.
    """

    def __init__(self, cta: CtaState, index: int, live: int, role: str, blocks: int) -> None:
        self.cta: CtaState = cta
        self.cluster: ClusterState = cta.cluster
        self.index, self.live, self.role = index, live, role
        self.number = 0
        several = cta.cluster.grid != cta.cluster.shape  # a CTA's number counts in its cluster
        self.label = str(WarpName(cta.cluster.index, cta.rank, index, role, several))
        self.track = role or f"warp {index}"
        self.counts: Sequence[int] = [0] * (blocks + 1)
        self.wait: Wait | None = None
        self.code: WarpCode | None = None
        self.local: np.ndarray | None = None
        self.agent: Knowledge | None = None
        x, y, _ = cta.cluster.block
        threads = np.arange(32 * index, 32 * index + 32, dtype=np.uint32)
        self.tid_x, self.tid_y, self.tid_z = threads % x, threads // x % y, threads // (x * y)

    def executing(self) -> int:
        """Index of the instruction that it is executing; -1: not known."""
        return -1 if self.code is None else self.code.executing

    def held_at(self, what: str) -> bool:
        """Whether it has to wait for another launch at this griddepcontrol."""
        return self.cluster.held_at == what and self not in self.cluster.excused

    def waits_for_launch(self) -> bool:
        """Whether it, or a part of its lanes, waits for another launch."""
        return any(isinstance(wait, GridWait) for wait in (self.wait, *getattr(self.wait, "waits", ())))

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
