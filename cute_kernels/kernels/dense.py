"""What the dense GEMM's kernels have in common on every architecture: views of its tensors and element types."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.plan import GemmPlan
from cute_kernels.plan.base import ITEMSIZE

ELEMENT_TYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}

OPERAND_TYPES = ELEMENT_TYPES | {"float32": cutlass.TFloat32}
"""What the tensor core multiplies. A tensor map of TF32 makes TMA round FP32 on its way to shared memory."""


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
def add_round(accumulator: cute.Tensor, bias: cute.Tensor | None, dtype: cutlass.Constexpr) -> cute.Tensor:
    """``accumulator + bias`` in ``dtype``, elementwise over one thread's registers: one addition, one conversion.

    Args:
        accumulator: FP32 registers; overwritten.
        bias: FP32 registers of the same count, or None.
        dtype: element type of the result.
    """
    if cutlass.const_expr(bias is not None):
        for i in cutlass.range_constexpr(cute.size(accumulator)):
            accumulator[i] = accumulator[i] + bias[i]
    if cutlass.const_expr(dtype is Float32):
        return accumulator
    out = cute.make_rmem_tensor(cute.make_layout(cute.size(accumulator)), dtype)
    out.store(accumulator.load().to(dtype))
    return out
