"""Activations of an epilogue, register to register, by the contract of `cute_kernels.reference.activations`."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.kernels import ptx

# The contract's numbers, written down independently of the reference.
EXP2_COEFFICIENTS = (
    1.0, 0.6931471824645996, 0.24022646248340607, 0.05550328642129898, 0.009618489071726799, 0.0013399930903688073,
    0.0001534581242594868,
)  # fmt: skip
LOG2_E = 1.4426950216293335
GELU_LINEAR, GELU_CUBIC = 1.5957691669464111, 0.0713548138737678
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
    return value


@cute.jit
def _times_sigmoid(x: Float32, z: Float32) -> Float32:
    """``x / (1 + 2**(-z log2(e)))``."""
    t = ptx.mul_rn_f32(z, Float32(-LOG2_E))
    t = ptx.min_f32(ptx.max_f32(t, Float32(LEAST_EXPONENT)), Float32(INFINITE_EXPONENT))
    shifted = ptx.add_rn_f32(t, Float32(ROUNDER))
    fraction = ptx.sub_rn_f32(t, ptx.sub_rn_f32(shifted, Float32(ROUNDER)))
    power = Float32(EXP2_COEFFICIENTS[-1])
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        power = ptx.fma_rn_f32(power, fraction, Float32(coefficient))
    # At 128 the polynomial is 1, and the exponent's field becomes infinity's; next to it, it is below 1.
    power = ptx.add_exponent(power, shifted)
    return ptx.div_rn_f32(x, ptx.add_rn_f32(power, Float32(1.0)))
