"""uint8 rows -> what a LayerNorm multiplies each of them by: one pass at the speed of memory, a warp for each row.

Sum and sum of squares are exact integers, so that neither the order of the additions nor the architecture changes a
bit: `cute_kernels.operations.reference.layer_norm_scale` says which operations follow.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.dsl import compiling
from cute_kernels.kernels import ptx
from cute_kernels.kernels.host import Operands
from cute_kernels.plan.base import LANES, VECTOR_BYTES
from cute_kernels.plan.layer_norm import LayerNormScalePlan

_WORDS = VECTOR_BYTES // 4
_ONES = 0x01010101


class LayerNormScaleKernel:
    """Host entry and kernel for one plan; sizes are launch arguments."""

    def __init__(self, plan: LayerNormScalePlan) -> None:
        self.plan = plan

    @cute.jit
    def __call__(self, o: Operands, stream: Any) -> None:
        """Launches a warp for each row."""
        plan = self.plan
        self.kernel(o.x, o.addend, o.scale, o.m, o.k).launch(
            grid=(cute.ceil_div(o.m, plan.warps), 1, 1), block=(plan.threads, 1, 1), stream=stream,
            use_pdl=plan.overlaps
        )

    @cute.kernel
    def kernel(self, x: cute.Pointer, addend: Float32, scale: cute.Pointer, m: Int32, k: Int32) -> None:
        thread = cute.arch.thread_idx()[0]
        lane = thread % LANES
        row = cute.arch.block_idx()[0] * self.plan.warps + thread // LANES
        if cutlass.const_expr(self.plan.overlaps):
            ptx.griddepcontrol()
        if row < m:
            pixels = cute.recast_ptr(x + cute.assume(Int64(row) * Int64(k), divby=VECTOR_BYTES), dtype=Uint32)
            total, squares = Uint32(0), Uint32(0)
            for i in cutlass.range(lane, k // VECTOR_BYTES, LANES, unroll=4):
                words = cute.make_rmem_tensor(_WORDS, Uint32)
                place = pixels + cute.assume(i * _WORDS, divby=_WORDS)
                cute.autovec_copy(cute.make_tensor(place, _WORDS), words)
                for j in cutlass.range_constexpr(_WORDS):
                    total = ptx.dp4a_u32(words[j], Uint32(_ONES), total)
                    squares = ptx.dp4a_u32(words[j], words[j], squares)
            total, squares = ptx.redux_sync_add_u32(total), ptx.redux_sync_add_u32(squares)
            if lane == 0:
                # k * k times the variance, as an integer.
                spread = Int64(squares) * Int64(k) - Int64(total) * Int64(total)
                deviation = ptx.sqrt_rn_f32(ptx.add_rn_f32(Float32(spread), addend))
                cute.make_tensor(scale + row, 1)[0] = ptx.div_rn_f32(Float32(k), deviation)


compiling.name_kernel(LayerNormScaleKernel.kernel, "layer_norm_scale")
