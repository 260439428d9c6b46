"""Scale, bias + position, rounding: registers to registers, one function per contract of `cute_kernels.reference`."""

from __future__ import annotations

from dataclasses import dataclass

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
    adds_bf16: cutlass.Constexpr[bool] = True,
) -> cute.Tensor:
    """``accumulator * scale + table`` in BF16, elementwise over one thread's registers.

    Args:
        accumulator: FP32 registers; overwritten.
        table: registers of the same count, FP32 for ``"f32"`` and BF16 for ``"bf16x2"``; None adds nothing.
        scale: dequantisation multiplier, or registers of one for each element.
        epilogue: ``"f32"``: one fused multiply-add and one rounding to BF16. ``"bf16x2"``: the product is rounded to
            FP32, then to BF16, and the sum with the BF16 table is rounded to BF16 again.
        packed_f32: the architecture has two-wide FP32 arithmetic (sm_100 and later).
        adds_bf16: it has two-wide sums of BF16 (sm_90 and later); earlier ones multiply by 1 and add.

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
        accumulator[i], accumulator[i + 1] = scale_add(pair, scales, addends, packed_f32)
    out.store(accumulator.load().to(BFloat16))
    if cutlass.const_expr(epilogue == "bf16x2" and table is not None):
        packed, packed_table = cute.recast_tensor(out, Int32), cute.recast_tensor(table, Int32)
        for i in cutlass.range_constexpr(count // 2):
            if cutlass.const_expr(adds_bf16):
                packed[i] = cute.arch.add_packed_bf16x2(packed[i], packed_table[i], rnd="rn")
            else:
                packed[i] = ptx.add_rn_bf16x2_by_fma(packed[i], packed_table[i])
    return out


def scale_add(
    sums: tuple[Float32, ...],
    scales: tuple[Float32, ...],
    addends: tuple[Float32, ...] | None,
    packed_f32: bool = False,
) -> tuple[Float32, ...]:
    """``fma(sum, scale, addend)`` elementwise, or the product where nothing is added: FP32, rounded once.

    With ``packed_f32`` there are two of each.
    """
    if packed_f32:
        return ptx.mul_rn_f32x2(sums, scales) if addends is None else ptx.fma_rn_f32x2(sums, scales, addends)
    if addends is None:
        return tuple(ptx.mul_rn_f32(total, scale) for total, scale in zip(sums, scales, strict=True))
    return tuple(ptx.fma_rn_f32(*operands) for operands in zip(sums, scales, addends, strict=True))


TERM_FACTOR = 256.0
"""Factor of the high one of a weight's two terms."""


def sum_of_terms(high: tuple[Float32, ...], low: tuple[Float32, ...], packed_f32: bool = False) -> tuple[Float32, ...]:
    """Sums over a weight of two terms, from those over each of them."""
    return scale_add(high, (Float32(TERM_FACTOR),) * len(high), low, packed_f32)


# --- scale of an accumulator: one for the call, or a product of factors of rows and features -------------------------


@dataclass(frozen=True)
class Scales:
    """``scale[m, n] = fp32(row[m] * feature[n])``, where a factor that is the same for all is the call's number.

    Attributes:
        call: that number, a view of its place in memory, or None where rows and features both have factors.
        rows: ``[M]`` FP32, or None.
        features: ``[N]`` FP32, or None.
    """

    call: Float32 | cute.Tensor | None
    rows: cute.Tensor | None
    features: cute.Tensor | None

    def loaded(self) -> Scales:
        """With the call's number in a register; global memory may be read from here on."""
        call = self.call[0] if isinstance(self.call, cute.Tensor) else self.call
        return Scales(call, self.rows, self.features)

    def row(self, row: Int32) -> Float32:
        """The factor of a row, with the call's number."""
        return self._factor(self.rows, row)

    def feature(self, feature: Int32) -> Float32:
        """The factor of a feature, with the call's number."""
        return self._factor(self.features, feature)

    @cute.jit
    def _factor(self, factors: cute.Tensor, index: Int32) -> Float32:
        # Beyond the last one, where nobody stores, the last.
        factor = factors[min(index, cute.size(factors) - 1)]
        if cutlass.const_expr(self.call is not None):
            factor = ptx.mul_rn_f32(factor, self.call)
        return factor


def scales_of(
    by_pointer: bool,
    scale: Float32 | cute.Pointer | None,
    row_scale: cute.Pointer | None,
    feature_scale: cute.Pointer | None,
    m: Int32,
    n: Int32,
) -> Scales:
    """Scales that a host function is given, as views."""
    call = cute.make_tensor(scale, cute.make_layout(1)) if by_pointer else scale
    rows = None if row_scale is None else cute.make_tensor(row_scale, cute.make_layout((m,)))
    features = None if feature_scale is None else cute.make_tensor(feature_scale, cute.make_layout((n,)))
    return Scales(call, rows, features)


# --- activations of an epilogue, register to register, by the contract of `cute_kernels.reference.activations` -------


# The contract's numbers, written down independently of the reference.
EXP2_COEFFICIENTS = (
    1.0, 0.6931471824645996, 0.24022646248340607, 0.05550328642129898, 0.009618489071726799, 0.0013399930903688073,
    0.0001534581242594868,
)  # fmt: skip
LOG2_E = 1.4426950216293335
GELU_LINEAR, GELU_CUBIC = 1.5957691669464111, 0.0713548138737678
TAIL_COEFFICIENTS = (
    0.10771887749433517, 0.1075713187456131, 0.10162019729614258, 0.072751484811306, 0.1062641590833664,
    -0.06705845147371292, 0.167986661195755, -0.12564952671527863, 0.028795305639505386,
)  # fmt: skip
TAIL_SLOPE, TAIL_END, HALF_LOG2_E = 0.27000001072883606, 13.0, 0.7213475108146667
LEAST_EXPONENT, INFINITE_EXPONENT = -126.0, 128.0

ROUNDER = 12582912.0
"""1.5 * 2^23: an FP32 sum with it has no fraction bits, and its low bits are the addend rounded to an integer."""


@cute.jit
def activate(value: Float32, activation: cutlass.Constexpr[str]) -> Float32:
    """One of `cute_kernels.config.ACTIVATIONS` of one register."""
    if cutlass.const_expr(activation == "silu"):
        return _times_sigmoid(value, value)
    if cutlass.const_expr(activation == "gelu_tanh"):
        square = ptx.mul_rn_f32(value, value)
        slope = ptx.fma_rn_f32(Float32(GELU_CUBIC), square, Float32(GELU_LINEAR))
        return _times_sigmoid(value, ptx.mul_rn_f32(value, slope))
    if cutlass.const_expr(activation == "gelu"):
        return _gelu(value)
    return value


@cute.jit
def _gelu(x: Float32) -> Float32:
    """``max(x, 0) - |x| Phi(-|x|)``; a NaN stays one in the quotient, the only place where it is not dropped."""
    magnitude = ptx.max_f32(x, ptx.mul_rn_f32(x, Float32(-1.0)))
    end = ptx.min_f32(magnitude, Float32(TAIL_END))
    t = ptx.div_rn_f32(Float32(1.0), ptx.fma_rn_f32(Float32(TAIL_SLOPE), magnitude, Float32(1.0)))
    power = _exp2(ptx.mul_rn_f32(ptx.mul_rn_f32(end, end), Float32(-HALF_LOG2_E)))
    tail = ptx.mul_rn_f32(ptx.mul_rn_f32(_horner(TAIL_COEFFICIENTS, t), t), power)
    # Of the two zeros the positive one is greater: each stays what it is.
    return ptx.fma_rn_f32(ptx.mul_rn_f32(end, Float32(-1.0)), tail, ptx.max_f32(x, Float32(-0.0)))


@cute.jit
def _times_sigmoid(x: Float32, z: Float32) -> Float32:
    """``x / (1 + 2**(-z log2(e)))``."""
    t = ptx.mul_rn_f32(z, Float32(-LOG2_E))
    t = ptx.min_f32(ptx.max_f32(t, Float32(LEAST_EXPONENT)), Float32(INFINITE_EXPONENT))
    return ptx.div_rn_f32(x, ptx.add_rn_f32(_exp2(t), Float32(1.0)))


@cute.jit
def _exp2(t: Float32) -> Float32:
    """``2**t`` from -126 to 128, where it is infinity."""
    shifted = ptx.add_rn_f32(t, Float32(ROUNDER))
    fraction = ptx.sub_rn_f32(t, ptx.sub_rn_f32(shifted, Float32(ROUNDER)))
    # At 128 the polynomial is 1, and the exponent's field becomes infinity's; next to it, it is below 1.
    return ptx.add_exponent(_horner(EXP2_COEFFICIENTS, fraction), shifted)


@cute.jit
def _horner(coefficients: cutlass.Constexpr[tuple], x: Float32) -> Float32:
    """A polynomial whose coefficients ascend."""
    value = Float32(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = ptx.fma_rn_f32(value, x, Float32(coefficient))
    return value
