"""Common parts of the dense GEMM's kernels on every architecture: host entry, views of its tensors, rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.kernels.epilogue import activate
from cute_kernels.kernels.graph import Graph
from cute_kernels.kernels.host import ELEMENT_TYPES, launch_clusters
from cute_kernels.kernels.staging import staging_layout
from cute_kernels.kernels.tma import Tma, store_tma
from cute_kernels.plan import GemmPlan
from cute_kernels.plan.base import ITEMSIZE


@dataclass(frozen=True)
class DeviceArguments:
    """Arguments that the host function hands to the kernel: TMA atoms with their views, bias and sizes in tiles."""

    tiled_mma: cute.TiledMma
    a_atom: cute.CopyAtom
    a: cute.Tensor
    b_atom: cute.CopyAtom
    b: cute.Tensor
    out_atom: cute.CopyAtom
    out: cute.Tensor
    bias: cute.Tensor | None
    m_tiles: Int32
    n_tiles: Int32
    batches: Int32
    k_blocks: Int32


class GemmHost:
    """Host entry for one plan. Sizes are launch arguments: one compiled kernel serves all of them.

    A subclass has the device code, ``kernel(arguments: DeviceArguments)``, and `operands`.

    Attributes:
        plan, graph: what the kernel does, its roles and barriers.
        dtype: what the tensor core multiplies.
    """

    def __init__(self, plan: GemmPlan, graph: Graph) -> None:
        self.plan, self.graph = plan, graph
        self.dtype = ELEMENT_TYPES[plan.multiplied_dtype]

    def operands(self, a: cute.Tensor, b: cute.Tensor) -> tuple[cute.TiledMma, Tma, Tma]:
        """The tensor-core instruction, and the loads of ``a`` and ``b``, each ``[rows, K, batches]``."""
        raise NotImplementedError

    @cute.jit
    def __call__(
        self,
        a_pointer: cute.Pointer,
        b_pointer: cute.Pointer,
        bias_pointer: cute.Pointer | None,
        out_pointer: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        batches: Int32,
        clusters: Int32,
        stream: Any,
    ) -> None:
        """Builds TMA descriptors and launches ``clusters`` clusters on ``stream``."""
        plan, problem = self.plan, self.plan.problem
        a = matrices(a_pointer, m, k, k, batches, problem.in_dtype)
        b = matrices(b_pointer, n, k, k, batches, problem.in_dtype)
        out = matrices(out_pointer, m, n, out_pitch(plan, n), batches, problem.out_dtype)
        tiled_mma, a_tma, b_tma = self.operands(a, b)
        box = (plan.store_rows, plan.store_columns)
        out_atom, out_view = store_tma(out, staging_layout(*box), box)
        arguments = DeviceArguments(
            tiled_mma=tiled_mma,
            a_atom=a_tma[0],
            a=a_tma[1],
            b_atom=b_tma[0],
            b=b_tma[1],
            out_atom=out_atom,
            out=out_view,
            bias=bias_view(bias_pointer, plan, n),
            m_tiles=cute.ceil_div(m, plan.cluster_rows),
            n_tiles=cute.ceil_div(n, plan.cluster_columns),
            batches=batches,
            k_blocks=cute.ceil_div(k, plan.tile_k),
        )
        launch_clusters(self.kernel(arguments), plan, clusters, stream)


def matrices(
    pointer: cute.Pointer, rows: Int32, columns: Int32, pitch: Int32, batches: Int32, dtype: str
) -> cute.Tensor:
    """``[rows, columns, batches]``, every row ``pitch`` elements after the one before; rows on 16 bytes, as TMA needs.

    The stride between batches is 64-bit: outputs have more than 2^31 elements.
    """
    divisor = 16 // ITEMSIZE[dtype]
    pitch = cute.assume(pitch, divby=divisor)
    stride = cute.assume(Int64(rows) * Int64(pitch), divby=divisor)
    return cute.make_tensor(pointer, cute.make_layout((rows, columns, batches), stride=(pitch, 1, stride)))


def out_pitch(plan: GemmPlan, n: Int32) -> Int32:
    """Elements from one output row to the next: `GemmPlan.out_pitch` of this launch's N."""
    divisor = 16 // ITEMSIZE[plan.problem.out_dtype]
    return cute.ceil_div(n, divisor) * divisor


def bias_view(pointer: cute.Pointer | None, plan: GemmPlan, n: Int32) -> cute.Tensor | None:
    """FP32 values of all columns of all tiles."""
    if pointer is None:
        return None
    return cute.make_tensor(pointer, cute.make_layout(cute.ceil_div(n, plan.cluster_columns) * plan.cluster_columns))


@cute.jit
def finish(
    accumulator: cute.Tensor, bias: cute.Tensor | None, activation: cutlass.Constexpr, dtype: cutlass.Constexpr
) -> cute.Tensor:
    """``activation(accumulator + bias)`` in ``dtype``, elementwise over one thread's registers.

    Args:
        accumulator: FP32 registers; overwritten.
        bias: FP32 registers of the same count, or None.
        activation: one of `cute_kernels.config.ACTIVATIONS`.
        dtype: element type of the result, to which it is rounded once.
    """
    if cutlass.const_expr(bias is not None):
        for i in cutlass.range_constexpr(cute.size(accumulator)):
            accumulator[i] = accumulator[i] + bias[i]
    if cutlass.const_expr(activation != "none"):
        for i in cutlass.range_constexpr(cute.size(accumulator)):
            accumulator[i] = activate(accumulator[i], activation)
    if cutlass.const_expr(dtype is Float32):
        return accumulator
    out = cute.make_rmem_tensor(cute.make_layout(cute.size(accumulator)), dtype)
    out.store(accumulator.load().to(dtype))
    return out
