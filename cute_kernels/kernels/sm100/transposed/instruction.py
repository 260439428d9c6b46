"""The instruction of the transposed product, and its accumulators in tensor memory."""

from __future__ import annotations

import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from cute_kernels.kernels.elements import ELEMENT_TYPES
from cute_kernels.kernels.sm100.mma import IntegerMmaOp
from cute_kernels.plan.sm100_transposed import Sm100TransposedPlan

MMA_STEPS = 4
"""MMAs of K = 32 bytes in one K block of 128 bytes."""

LANE_STRIDE = 1 << 16
"""Tensor-memory addresses have the lane in their upper half."""


def accumulator_type(plan: Sm100TransposedPlan) -> type:
    """Of integers 32-bit integers, which are exact."""
    return Int32 if plan.weight_dtype == "int8" else Float32


def make_mma(plan: Sm100TransposedPlan, columns: int) -> cute.TiledMma:
    """The instruction of one part of a tile: ``kind::i8``, ``kind::f8f6f4``, or ``kind::f16`` of 16-bit elements."""
    group = tcgen05.CtaGroup.TWO if plan.cta_group == 2 else tcgen05.CtaGroup.ONE
    source = tcgen05.OperandSource.TMEM if plan.config.weight == "tmem" else tcgen05.OperandSource.SMEM
    shape = (plan.lanes * plan.cta_group, columns)
    weight, rows = ELEMENT_TYPES[plan.weight_dtype], ELEMENT_TYPES[plan.problem.in_dtype]
    if plan.weight_dtype == "int8":
        return cute.make_tiled_mma(IntegerMmaOp(weight, rows, shape, group, source))
    return sm100_utils.make_trivial_tiled_mma(
        weight, rows, OperandMajorMode.K, OperandMajorMode.K, Float32, group, shape, source
    )


def accumulators_of_parts(plan: Sm100TransposedPlan, tmem: cute.Pointer) -> tuple[cute.Tensor, ...]:
    """Tensor-memory view ``[.., accumulator]`` of each part of the columns."""
    return tuple(_accumulators(plan, tmem, first, columns) for first, columns in plan.parts)


def _accumulators(plan: Sm100TransposedPlan, tmem: cute.Pointer, first: int, columns: int) -> cute.Tensor:
    shape = ((plan.lanes, columns), 1, 1, plan.config.accumulators)
    return cute.make_tensor(
        cute.recast_ptr(tmem + first, dtype=accumulator_type(plan)),
        cute.make_layout(shape, stride=((LANE_STRIDE, 1), 0, 0, plan.columns)),
    )
