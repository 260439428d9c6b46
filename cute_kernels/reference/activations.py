"""Activations in FP32, defined by operations that IEEE 754 rounds correctly, so that every machine gives the same bits.

Hardware approximations (``ex2.approx``, ``tanh.approx``) differ from one architecture to the next and are documented by
error bounds only. Both activations here are ``x / (1 + exp(-z))``; the exponential is ``2**n * p(f)`` with a polynomial
that was fitted by Remez exchange for the least relative error on [-1/2, 1/2], 1.9e-9 before its coefficients were
rounded to FP32.
"""

from __future__ import annotations

import torch

from cute_kernels.reference.rounding import fma32

EXP2_COEFFICIENTS = (
    1.0,
    0.6931471824645996,
    0.24022646248340607,
    0.05550328642129898,
    0.009618489071726799,
    0.0013399930903688073,
    0.0001534581242594868,
)
"""Coefficients of ``2**f`` on [-1/2, 1/2], ascending; each an FP32 number."""

LOG2_E = 1.4426950216293335
"""FP32."""

GELU_LINEAR, GELU_CUBIC = 1.5957691669464111, 0.0713548138737678
"""FP32 numbers nearest to ``2 sqrt(2 / pi)`` and that times 0.044715: ``gelu(x) = x * sigmoid(a x + b x**3)``, which is
the tanh form, ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x**3)))``."""

_EXPONENTS = (-126.0, 128.0)
"""From the least normal power of two, beside which 1 is all of the sum, to infinity, which makes the quotient zero."""


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)`` of an FP32 tensor; -inf gives NaN, as it does in torch."""
    return _times_sigmoid(x, x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form, of an FP32 tensor: ``z = x * fma32(b, x * x, a)``; -inf gives NaN, as it does in torch."""
    square = x * x
    z = x * fma32(torch.full_like(x, GELU_CUBIC), square, torch.full_like(x, GELU_LINEAR))
    return _times_sigmoid(x, z)


def _times_sigmoid(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """``x / (1 + 2**t)`` with ``t = -z log2(e)``, clamped to -126 .. 128, of which the last makes infinity.

    ``t = n + f`` with ``n`` the nearest integer, ties to even; ``p(f)`` by Horner's rule in fused multiply-adds; the
    sum with 1 and the quotient are rounded once each.
    """
    t = (z * -LOG2_E).clamp(*_EXPONENTS).nan_to_num(0.0)
    n = t.round()
    f = t - n
    power = torch.full_like(x, EXP2_COEFFICIENTS[-1])
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        power = fma32(power, f, torch.full_like(x, coefficient))
    # In float64: torch computes 2**n in the exponent's type. Exact, or infinity.
    power = torch.ldexp(power.to(torch.float64), n.to(torch.float64)).to(torch.float32)
    return x / (1.0 + power)


ACTIVATIONS = {"none": lambda x: x, "silu": silu, "gelu_tanh": gelu_tanh}
"""By the names that `cute_kernels.gemm` takes."""
