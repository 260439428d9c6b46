"""Signals of SM100a: tcgen05.commit to both CTAs of a pair, and arrivals at the leader."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.kernels import ptx
from cute_kernels.kernels.pipes import Pipe, PipelineState

LEADER_CTA = 0
PAIR_MASK = 0b11


class Sm100Pipe(Pipe):
    def commit_full(self, state: PipelineState) -> None:
        """tcgen05 producer, one thread: full in both CTAs once every MMA issued so far has completed."""
        tcgen05.commit(self.full + state.index, PAIR_MASK, tcgen05.CtaGroup.TWO)

    def commit_empty(self, state: PipelineState) -> None:
        """tcgen05 consumer, one thread: empty in both CTAs once every MMA issued so far has read its operands."""
        tcgen05.commit(self.empty + state.index, PAIR_MASK, tcgen05.CtaGroup.TWO)

    def arrive_empty_at_leader(self, state: PipelineState) -> None:
        """Consumer warp, one lane: releases the stage to the leader CTA, which alone waits for it."""
        # Relaxed: what is handed over is tensor memory, which tcgen05.fence orders on both sides; no ordinary memory
        # access needs ordering here. A release at cluster scope would compile to MEMBAR.ALL.GPU in every warp and tile.
        cute.arch.mbarrier_arrive(self.empty + state.index, LEADER_CTA, relaxed=True, scope=nvvm.MemScopeKind.CLUSTER)


@cute.jit
def release_accumulator(pipe: Sm100Pipe, state: PipelineState) -> None:
    """Epilogue warp: hands the accumulator back once its last column is in registers (F19), before the stores end."""
    ptx.tcgen05_fence_before_thread_sync()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        pipe.arrive_empty_at_leader(state)
