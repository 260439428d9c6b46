"""Beginning of every SM90a kernel, before its roles: descriptors, barriers, and the wait for the kernel before."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from cute_kernels.kernels import ptx
from cute_kernels.kernels.graph import Graph
from cute_kernels.kernels.pipes import Pipe, PipelineState, init_barriers


@cute.jit
def begin(
    graph: cutlass.Constexpr[Graph], is_load_warp: Boolean, barriers: cute.Pointer, atoms: tuple[cute.CopyAtom, ...]
) -> None:
    """Initialises barriers; afterwards every thread of the cluster sees them, and global memory may be touched."""
    if is_load_warp:
        for atom in atoms:
            cpasync.prefetch_descriptor(atom)
        with cute.arch.elect_one():
            init_barriers(graph, barriers)
    if cutlass.const_expr(graph.ctas > 1):
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
