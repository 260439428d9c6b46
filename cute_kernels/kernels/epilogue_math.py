"""Scale, bias + position, rounding: registers to registers, one function per contract of `cute_kernels.reference`."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_kernels.kernels import ptx


@cute.jit
def scale_add_round(
    accumulator: cute.Tensor,
    table: cute.Tensor | None,
    scale: Float32 | cute.Tensor,
    epilogue: cutlass.Constexpr,
    packed_f32: cutlass.Constexpr[bool],
) -> cute.Tensor:
    """``accumulator * scale + table`` in BF16, elementwise over one thread's registers.

    Args:
        accumulator: FP32 registers; overwritten.
        table: registers of the same count, FP32 for ``"f32"`` and BF16 for ``"bf16x2"``; None adds nothing.
        scale: dequantisation multiplier, or registers of one for each element.
        epilogue: ``"f32"``: one fused multiply-add and one rounding to BF16. ``"bf16x2"``: the product is rounded to
            FP32, then to BF16, and the sum with the BF16 table is rounded to BF16 again.
        packed_f32: the architecture has two-wide FP32 arithmetic (sm_100 and later).

    Returns:
        BF16 registers.
    """
    out = cute.make_rmem_tensor(cute.make_layout(cute.size(accumulator)), BFloat16)
    count = cute.size(accumulator)
    for i in cutlass.range_constexpr(0, count, 2):
        pair = (accumulator[i], accumulator[i + 1])
        addends = None
        if cutlass.const_expr(epilogue == "f32" and table is not None):
            addends = (table[i], table[i + 1])
        scales = (scale, scale)
        if cutlass.const_expr(isinstance(scale, cute.Tensor)):
            scales = (scale[i], scale[i + 1])
        accumulator[i], accumulator[i + 1] = _scale_add(pair, addends, scales, packed_f32)
    out.store(accumulator.load().to(BFloat16))
    if cutlass.const_expr(epilogue == "bf16x2" and table is not None):
        packed, packed_table = cute.recast_tensor(out, Int32), cute.recast_tensor(table, Int32)
        for i in cutlass.range_constexpr(count // 2):
            packed[i] = cute.arch.add_packed_bf16x2(packed[i], packed_table[i], rnd="rn")
    return out


def _scale_add(
    pair: tuple[Float32, Float32],
    addends: tuple[Float32, Float32] | None,
    scales: tuple[Float32, Float32],
    packed_f32: bool,
) -> tuple[Float32, Float32]:
    if packed_f32:
        if addends is None:
            return ptx.mul_rn_f32x2(pair, scales)
        return ptx.fma_rn_f32x2(pair, scales, addends)
    if addends is None:
        return tuple(ptx.mul_rn_f32(value, scale) for value, scale in zip(pair, scales, strict=True))
    return tuple(ptx.fma_rn_f32(*operands) for operands in zip(pair, scales, addends, strict=True))
