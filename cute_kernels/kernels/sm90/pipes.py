"""Signals of SM90a: warpgroups release a stage to every CTA that loads into it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.kernels.pipes import Pipe, PipelineState


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
        """Consumer warpgroup: releases the stage to every CTA that multicasts into it.

        Args:
            state: the stage.
            thread: index in the warpgroup; thread i signals CTA ``first + i``.
            ctas: CTAs that share the stage.
            first: the first of them.
        """
        if thread < ctas:
            if cutlass.const_expr(ctas == 1):
                cute.arch.mbarrier_arrive(self.empty + state.index)
            else:
                cute.arch.mbarrier_arrive(self.empty + state.index, thread + first)
