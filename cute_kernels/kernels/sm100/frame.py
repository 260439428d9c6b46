"""What every SM100a kernel does around its roles: barriers, tensor memory, views of operands, and the common end."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from cute_kernels.kernels import ptx
from cute_kernels.kernels.graph import Graph
from cute_kernels.kernels.pipes import init_barriers
from cute_kernels.plan import Sm100GemmPlan, Sm100PatchEmbedPlan
from cute_kernels.plan.sm100_transposed import Sm100TransposedPlan

Sm100Plan = Sm100PatchEmbedPlan | Sm100GemmPlan | Sm100TransposedPlan


@cute.jit
def begin(
    plan: cutlass.Constexpr[Sm100Plan],
    graph: cutlass.Constexpr[Graph],
    warp: Int32,
    barriers: cute.Pointer,
    tmem_address: cute.Pointer,
    atoms: tuple[cute.CopyAtom, ...],
) -> None:
    """Initialises barriers and allocates tensor memory; afterwards every thread of the cluster sees both."""
    if warp == plan.load_warp:
        for atom in atoms:
            cpasync.prefetch_descriptor(atom)
        with cute.arch.elect_one():
            init_barriers(graph, barriers)
    if warp == plan.mma_warp:
        cute.arch.alloc_tmem(plan.tmem_columns, tmem_address, is_two_cta=plan.cta_group == 2)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=plan.cta_group == 2)
        ptx.tcgen05_fence_before_thread_sync()
    ptx.griddepcontrol()
    # Also the CTA's barrier: after it every thread sees initialised barriers and the tensor-memory address.
    _synchronise(plan)
    ptx.tcgen05_fence_after_thread_sync()


@cute.jit
def end(plan: cutlass.Constexpr[Sm100Plan], warp: Int32, accumulators: cute.Tensor) -> None:
    """Frees tensor memory once all CTAs of the cluster are done."""
    # No CTA may leave, or free tensor memory, while another still signals its barriers or reads its half.
    ptx.tcgen05_fence_before_thread_sync()
    _synchronise(plan)
    if warp == plan.mma_warp:
        ptx.tcgen05_fence_after_thread_sync()
        cute.arch.dealloc_tmem(accumulators.iterator, plan.tmem_columns, is_two_cta=plan.cta_group == 2)


@cute.jit
def _synchronise(plan: cutlass.Constexpr[Sm100Plan]) -> None:
    """All threads of the cluster."""
    if cutlass.const_expr(plan.ctas > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


def clusters_of_grid(plan: Sm100Plan) -> Int32:
    """Clusters in a one-dimensional grid."""
    grid = cute.arch.grid_dim()
    return grid[0] // plan.ctas


def tensor_memory(
    tiled_mma: cute.TiledMma, tile_mn: tuple[int, int], count: int, address: cute.Pointer, dtype: type = Float32
) -> cute.Tensor:
    """Tensor-memory view ``[.., accumulator]`` of this CTA's rows of ``count`` accumulators."""
    layout = tiled_mma.make_fragment_C(cute.append(tiled_mma.partition_shape_C(tile_mn), count)).layout
    return cute.make_tensor(cute.arch.retrieve_tmem_ptr(dtype, 16, address), layout)


def stage_tensor(pointer: cute.Pointer, layout: cute.ComposedLayout, dtype: type) -> cute.Tensor:
    """Operand stages in shared memory."""
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), layout.outer)
