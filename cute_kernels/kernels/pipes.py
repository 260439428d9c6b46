"""Device side of `cute_kernels.kernels.graph`: the mbarriers of each edge, and how a role waits and signals.

Phases follow one convention: a ring starts empty, so a producer begins with parity 1 (the phase before the first, which
counts as complete) and a consumer with parity 0.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.kernels import ptx
from cute_kernels.kernels.graph import Edge, Graph, Signal

LEADER_CTA = 0
PAIR_MASK = 0b11


class Pipe:
    """One edge of the graph inside a kernel: ``stages`` full and ``stages`` empty mbarriers."""

    def __init__(self, edge: Edge, full: cute.Pointer, empty: cute.Pointer) -> None:
        self.edge = edge
        self.full = full
        self.empty = empty

    def producer_state(self) -> pipeline.PipelineState:
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.edge.stages)

    def consumer_state(self) -> pipeline.PipelineState:
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.edge.stages)

    def wait_empty(self, state: pipeline.PipelineState) -> None:
        """Producer: waits until the stage may be overwritten."""
        _wait(self.empty + state.index, state.phase, self.edge.empty)

    def wait_full(self, state: pipeline.PipelineState) -> None:
        """Consumer: waits until the stage holds data."""
        _wait(self.full + state.index, state.phase, self.edge.full)

    def full_barrier(self, state: pipeline.PipelineState) -> cute.Pointer:
        """Barrier that TMA completes on."""
        return self.full + state.index

    def announce_bytes(self, state: pipeline.PipelineState) -> None:
        """Producer of a TMA edge, leader CTA, one thread: the one arrival of the phase, with the pair's byte count."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.full + state.index, self.edge.tx_bytes)

    def commit_full(self, state: pipeline.PipelineState) -> None:
        """tcgen05 producer, one thread: full in both CTAs once every MMA issued so far has completed."""
        tcgen05.commit(self.full + state.index, PAIR_MASK, tcgen05.CtaGroup.TWO)

    def commit_empty(self, state: pipeline.PipelineState) -> None:
        """tcgen05 consumer, one thread: empty in both CTAs once every MMA issued so far has read its operands."""
        tcgen05.commit(self.empty + state.index, PAIR_MASK, tcgen05.CtaGroup.TWO)

    def arrive_empty_at_leader(self, state: pipeline.PipelineState) -> None:
        """Consumer warp, one lane: releases the stage to the leader CTA, which alone waits for it."""
        # Relaxed: what is handed over is tensor memory, which tcgen05.fence orders on both sides; no ordinary memory
        # access needs ordering here. A release at cluster scope would compile to MEMBAR.ALL.GPU in every warp and tile.
        cute.arch.mbarrier_arrive(self.empty + state.index, LEADER_CTA, relaxed=True, scope=nvvm.MemScopeKind.CLUSTER)


def _wait(barrier: cute.Pointer, parity: cutlass.Int32, signal: Signal) -> None:
    if signal is Signal.WARP_ARRIVE:
        ptx.mbarrier_try_wait_relaxed_cluster(barrier, parity)
    else:
        cute.arch.mbarrier_wait(barrier, parity)


def make_pipes(graph: Graph, barriers: cute.Pointer) -> dict[str, Pipe]:
    """Pipes by edge name over the barrier slots that start at ``barriers`` (8 bytes each, shared memory)."""
    arrays = {b.name: barriers + b.slot for b in graph.barriers()}
    return {e.name: Pipe(e, arrays[f"{e.name}_full"], arrays[f"{e.name}_empty"]) for e in graph.edges}


def init_barriers(graph: Graph, barriers: cute.Pointer) -> None:
    """Initialises every barrier of this CTA; one thread runs this, before the cluster synchronises."""
    for barrier in graph.barriers():
        for stage in range(barrier.stages):
            cute.arch.mbarrier_init(barriers + barrier.slot + stage, barrier.arrivals)
    cute.arch.mbarrier_init_fence()
