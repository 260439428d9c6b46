"""WGMMA on TF32 operands, which CuTe DSL 4.8 has no operation for."""

from __future__ import annotations

import cutlass
from cutlass.cute.nvgpu import warpgroup

TF32_K = 8
"""Elements of K of one instruction: 32 bytes, as of every element type."""


class MmaTf32Op(warpgroup.MmaF16BF16Op):
    """``wgmma.mma_async.m64nNk8.f32.tf32.tf32``: FP32 accumulators, both operands K-major.

    The operation of 16-bit operands with another element type: the compiler makes the instruction from the types, and
    only the checks of that class stand in the way.
    """

    descriptive_name = "warpgroup TF32 MMA Operation"

    def _verify(self) -> None:
        if self.a_dtype is not cutlass.TFloat32 or self.acc_dtype is not cutlass.Float32:
            raise TypeError(f"{self.a_dtype} operands with {self.acc_dtype} accumulators, allowed: TFloat32, Float32")
        if self.shape_mnk[2] != TF32_K:
            raise ValueError(f"shape_mnk = {self.shape_mnk}, allowed: K = {TF32_K}")
