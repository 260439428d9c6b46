"""Activations in FP32, defined by operations that IEEE 754 rounds correctly, so that every machine gives the same bits.

Hardware approximations (``ex2.approx``, ``tanh.approx``) differ from one architecture to the next and are documented by
error bounds only. SiLU and the tanh form of GELU are ``x / (1 + exp(-z))``; the exponential is ``2**n * p(f)`` with a
polynomial that was fitted by Remez exchange for the least relative error on [-1/2, 1/2], 1.9e-9 before its coefficients
were rounded to FP32.
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

TAIL_SLOPE = 0.27000001072883606
TAIL_COEFFICIENTS = (
    0.10771887749433517,
    0.1075713187456131,
    0.10162019729614258,
    0.072751484811306,
    0.1062641590833664,
    -0.06705845147371292,
    0.167986661195755,
    -0.12564952671527863,
    0.028795305639505386,
)
"""Coefficients of ``Phi(-a) exp(a**2 / 2) = t q(t)`` with ``t = 1 / (1 + TAIL_SLOPE a)``, ascending in t; each an FP32
number. Fitted for the least relative error on [0, 13.1], 2.3e-8 before they were rounded."""

HALF_LOG2_E = 0.7213475108146667
"""FP32."""

TAIL_END = 13.0
"""Magnitude from which on the tail of GELU keeps its value, 8e-38: powers of two that are normal end at 13.2."""

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


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in its exact form, of an FP32 tensor: ``x Phi(x) = max(x, 0) - |x| Phi(-|x|)``; -inf gives its limit, -0.

    The relative error is at most ``5e-7 + 6e-8 x**2``, to -13.
    """
    magnitude = x.abs()
    end = magnitude.clamp(max=TAIL_END)
    t = 1.0 / fma32(torch.full_like(x, TAIL_SLOPE), magnitude, torch.ones_like(x))
    tail = _horner(TAIL_COEFFICIENTS, t) * t * _exp2(end * end * -HALF_LOG2_E)
    return fma32(-end, tail, torch.where(x < 0, -0.0, x))


def _times_sigmoid(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """``x / (1 + 2**t)`` with ``t = -z log2(e)``, clamped to -126 .. 128, of which the last makes infinity.

    The sum with 1 and the quotient are rounded once each.
    """
    return x / (1.0 + _exp2((z * -LOG2_E).clamp(*_EXPONENTS).nan_to_num(0.0)))


def _exp2(t: torch.Tensor) -> torch.Tensor:
    """``2**t = 2**n * p(f)`` where ``t = n + f`` with ``n`` the nearest integer, ties to even."""
    n = t.round()
    # In float64: torch computes 2**n in the exponent's type. Exact, or infinity.
    return torch.ldexp(_horner(EXP2_COEFFICIENTS, t - n).to(torch.float64), n.to(torch.float64)).to(torch.float32)


def _horner(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    """A polynomial by Horner's rule in fused multiply-adds; coefficients ascend."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = fma32(value, x, torch.full_like(x, coefficient))
    return value


ACTIVATIONS = {"none": lambda x: x, "silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}
"""By the names that `cute_kernels.gemm` takes."""
