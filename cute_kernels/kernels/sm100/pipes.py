"""Signals of SM100a: tcgen05.commit to the CTAs of pairs, or to the one CTA, and arrivals at the leader."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.dsl import nvvm
from cute_kernels.kernels import ptx
from cute_kernels.kernels.graph import Edge
from cute_kernels.kernels.pipes import Pipe, PipelineState
from cute_kernels.kernels.sm100.cluster import ClusterPlace


class Sm100Pipe(Pipe):
    def __init__(self, edge: Edge, full: cute.Pointer, empty: cute.Pointer | None, place: ClusterPlace) -> None:
        super().__init__(edge, full, empty)
        self.place = place

    def commit_full(self, state: PipelineState, part: int = 0) -> None:
        """tcgen05 producer, one thread: full in both CTAs once every MMA issued so far has completed."""
        self._commit(self.full + self.slot(state, part), self.place.pair_mask)

    def commit_empty(self, state: PipelineState) -> None:
        """tcgen05 consumer, one thread: empty, as far as this pair is concerned, in all CTAs that load for it, once
        every MMA issued so far has read its operands."""
        self._commit(self.empty + state.index, self.place.load_mask)

    def _commit(self, barrier: cute.Pointer, mask: Int32 | int) -> None:
        if self.place.cta_group == 1:
            tcgen05.commit(barrier)
        else:
            tcgen05.commit(barrier, mask, tcgen05.CtaGroup.TWO)

    def arrive_full_at_leader(self, state: PipelineState) -> None:
        """Producer warp, one lane: what it wrote to tensor memory is there for the MMAs that the leader issues."""
        self._arrive(self.full + self.slot(state))

    def arrive_empty_at_leader(self, state: PipelineState, part: int = 0) -> None:
        """Consumer warp, one lane: releases a part of the stage to the leader CTA, which alone waits for it."""
        self._arrive(self.empty + self.slot(state, part))

    def _arrive(self, barrier: cute.Pointer) -> None:
        # Relaxed: what is handed over is tensor memory, which tcgen05.fence orders on both sides; no ordinary memory
        # access needs ordering here. A release at cluster scope would compile to MEMBAR.ALL.GPU in every warp and tile.
        cute.arch.mbarrier_arrive(barrier, self.place.leader, relaxed=True, scope=nvvm.MemScopeKind.CLUSTER)


@cute.jit
def release_accumulator(pipe: Sm100Pipe, state: PipelineState, part: int = 0) -> None:
    """Epilogue warp: hands the accumulator back once its last column is in registers, before the stores end."""
    ptx.tcgen05_fence_before_thread_sync()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        pipe.arrive_empty_at_leader(state, part)
