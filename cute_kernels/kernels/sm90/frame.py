"""What every SM90a kernel does before its roles: descriptors, barriers, and the wait for the kernel before."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean
from cutlass.cute.nvgpu import cpasync

from cute_kernels.kernels import ptx
from cute_kernels.kernels.graph import Graph
from cute_kernels.kernels.pipes import init_barriers


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
