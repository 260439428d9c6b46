"""Device side of `cute_kernels.kernels.graph`: the mbarriers of each edge, how a role waits and signals.

Phases follow one convention: a ring starts empty, so a producer begins with parity 1 (the phase before the first,
which counts as complete) and a consumer with parity 0. Signals of CTA pairs are in ``sm100/cta_pair.py``.
"""

from collections.abc import Callable
from typing import TypeVar

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from cute_kernels.kernels import ptx
from cute_kernels.kernels.graph import Edge, Graph, Signal
from cute_kernels.plan import Plan

PipelineState = pipeline.PipelineState


# --- the mbarriers of an edge ----------------------------------------------------------------------------------------

class Pipe:
    """One edge of the graph inside a kernel: ``stages`` full mbarriers, as many empty ones unless it is filled once."""

    def __init__(self, edge: Edge, full: cute.Pointer, empty: cute.Pointer | None) -> None:
        self.edge = edge
        self.full = full
        self.empty = empty

    def producer_state(self) -> PipelineState:
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.edge.stages)

    def consumer_state(self) -> PipelineState:
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.edge.stages)

    def wait_empty(self, state: PipelineState, part: int = 0) -> None:
        """Producer: waits until a part of the stage may be overwritten."""
        self.wait_empty_phase(self.empty + self.slot(state, part), state.phase)

    def wait_full(self, state: PipelineState, part: int = 0) -> None:
        """Consumer: waits until a part of the stage holds data."""
        self.wait_full_phase(self.full + self.slot(state, part), state.phase)

    def wait_empty_phase(self, barrier: cute.Pointer, parity: cutlass.Int32) -> None:
        """Waits like `wait_empty`, where each stage counts its own phases."""
        _wait(barrier, parity, self.edge.empty)

    def wait_full_phase(self, barrier: cute.Pointer, parity: cutlass.Int32) -> None:
        """Waits like `wait_full`, where each stage counts its own phases."""
        _wait(barrier, parity, self.edge.full)

    def slot(self, state: PipelineState, part: int = 0) -> cutlass.Int32:
        """Index of a part of the stage, in the edge's barriers as in its buffers."""
        return state.index if self.edge.parts == 1 else state.index * self.edge.parts + part

    @cute.jit
    def drain(self, state: PipelineState) -> None:
        """Producer, at the end: waits until every stage is free.

        A CTA must outlive the signals that free its stages: they arrive on barriers in its shared memory.
        """
        for _ in cutlass.range_constexpr(self.edge.stages):
            self.wait_empty(state)
            state.advance()

    def full_barrier(self, state: PipelineState) -> cute.Pointer:
        """Barrier that TMA completes on."""
        return self.full + state.index

    @cute.jit
    def acquire(self, state: PipelineState, announces: bool | cutlass.Boolean = True) -> cute.Pointer:
        """Producer of a TMA edge: waits until a stage is free, and announces its bytes unless another CTA does. Returns
        the barrier on which they complete."""
        self.wait_empty(state)
        if announces:
            with cute.arch.elect_one():
                self.announce_bytes(state)
        return self.full_barrier(state)

    def announce_bytes(self, state: PipelineState) -> None:
        """Producer of a TMA edge, one thread: the one arrival of the phase, with its byte count."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.full + state.index, self.edge.tx_bytes)


def _wait(barrier: cute.Pointer, parity: cutlass.Int32, signal: Signal) -> None:
    if signal is Signal.WARP_ARRIVE:
        ptx.mbarrier_try_wait_relaxed_cluster(barrier, parity)
    elif signal is Signal.REMOTE_STORES:
        ptx.mbarrier_try_wait_acquire_cluster(barrier, parity)
    else:
        cute.arch.mbarrier_wait(barrier, parity)


AnyPipe = TypeVar("AnyPipe", bound=Pipe)


def allocate(
    plan: Plan, graph: Graph, kind: Callable[[Edge, cute.Pointer, cute.Pointer | None], AnyPipe]
) -> tuple[cute.Pointer, list[cute.Pointer], dict[str, AnyPipe]]:
    """Dynamic shared memory of a CTA: barriers, where each further region of the plan begins, and pipes by name."""
    storage = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=plan.swizzle_period)
    barriers = cute.recast_ptr(storage, dtype=cutlass.Int64)
    return barriers, [storage + region.offset for region in plan.smem[1:]], make_pipes(graph, barriers, kind)


def warp_and_rank(plan: Plan) -> tuple[cutlass.Int32, cutlass.Int32]:
    """Warp of a thread in its CTA, and rank of the CTA in its cluster."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if plan.ctas > 1 else cutlass.Int32(0)
    return warp, rank


def this_cluster(plan: Plan) -> tuple[cutlass.Int32, cutlass.Int32]:
    """Number of a CTA's cluster in a one-dimensional grid, and clusters of the grid."""
    return cute.arch.block_idx()[0] // plan.ctas, cute.arch.grid_dim()[0] // plan.ctas


def make_pipes(
    graph: Graph, barriers: cute.Pointer, kind: Callable[[Edge, cute.Pointer, cute.Pointer | None], AnyPipe]
) -> dict[str, AnyPipe]:
    """Pipes by edge name over the barrier slots that start at ``barriers`` (8 bytes each, shared memory)."""
    arrays = {b.name: barriers + b.slot for b in graph.barriers()}
    return {e.name: kind(e, arrays[f"{e.name}_full"], arrays.get(f"{e.name}_empty")) for e in graph.edges}


def init_barriers(graph: Graph, barriers: cute.Pointer) -> None:
    """Initialises every barrier of this CTA; one thread runs this, before the cluster synchronises."""
    for barrier in graph.barriers():
        for stage in range(barrier.stages):
            cute.arch.mbarrier_init(barriers + barrier.slot + stage, barrier.arrivals)
    cute.arch.mbarrier_init_fence()


@cute.jit
def begin(
    graph: cutlass.Constexpr[Graph], is_load_warp: Boolean, barriers: cute.Pointer, atoms: tuple[cute.CopyAtom, ...],
    relaxed: cutlass.Constexpr[bool] = False
) -> None:
    """Begins a kernel: initialises barriers; afterwards the cluster sees them, and global memory may be touched.

    With ``relaxed`` a cluster sees of what its threads wrote before the barriers alone, which have a fence of their
    own: that of all writes takes 900 clocks.
    """
    if is_load_warp:
        for atom in atoms:
            cpasync.prefetch_descriptor(atom)
        with cute.arch.elect_one():
            init_barriers(graph, barriers)
    if cutlass.const_expr(graph.ctas > 1):
        if cutlass.const_expr(relaxed):
            cute.arch.cluster_arrive_relaxed()
        else:
            cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
    ptx.griddepcontrol()


# --- signals of SM90a: warpgroups release a stage to every CTA that loads into it ------------------------------------

class Sm90Pipe(Pipe):
    @cute.jit
    def arrive_written(self, state: PipelineState, lane: Int32) -> None:
        """Producer warp: its writes to the stage are done and ordered before the async proxy, by every lane."""
        if lane == 0:
            cute.arch.mbarrier_arrive(self.full + state.index)

    @cute.jit
    def arrive_empty(
        self, state: PipelineState, thread: Int32, ctas: cutlass.Constexpr[int], first: int | Int32 = 0
    ) -> None:
        """Consumer warpgroup: releases the stage to ``ctas`` CTAs that load into it, thread i to CTA ``first + i``."""
        if thread < ctas:
            if cutlass.const_expr(ctas == 1):
                cute.arch.mbarrier_arrive(self.empty + state.index)
            else:
                cute.arch.mbarrier_arrive(self.empty + state.index, thread + first)
