"""Activations in operations that IEEE 754 rounds correctly, so that every machine gives the same bits.

Hardware approximations (``ex2.approx``, ``tanh.approx``) differ from one architecture to the next and are documented by
error bounds only. SiLU and both forms of GELU are ``x * s(x)`` with a sigmoid s, a step from 0 to 1 around 1/2, which
is a polynomial of a polynomial here: no quotient, no exponential, and few multiply-adds, as an epilogue pays for each.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cute_kernels.operations.reference.rounding import fma16, fma32

LARGEST_FP16 = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Sigmoid:
    """``sat(1/2 + u B(sat(u u)))`` with ``u = q A(sat(q q))`` and ``q = scale * x``; sat is into [0, 1], NaN to 0.

    Without coefficients of ``A`` u is q.

    Coefficients were fitted for the least error of all arguments, those beyond the step included, where sat ends it."""

    scale: float  # of the argument
    # inner, outer: coefficients of ``A`` and ``B``, ascending
    inner: tuple[float, ...]
    outer: tuple[float, ...]


SHORT = {
    "gelu": Sigmoid(0.2856, (1.585, -1.102, 0.3545), (0.881, -0.4692, 0.09143)),
    "gelu_tanh": Sigmoid(0.3035, (1.844, -1.26, 0.4), (0.713, -0.2363, 0.02524)),
    "silu": Sigmoid(0.1333, (2.176, -2.67, 2.326, -0.8413), (0.861, -0.6104, 0.3767, -0.1278)),
    "quick_gelu": Sigmoid(0.2133, (2.252, -2.992, 2.76, -1.018), (0.885, -0.67, 0.4355, -0.1509)),
}
"""In FP16 arithmetic, each number an FP16 number. The error of ``x * s(x)`` is at most ``7e-4 |x|``, less than a fifth
of what rounding to BF16 adds."""

NARROW = SHORT | {
    "gelu": Sigmoid(0.3369, (), (1.171, -1.523, 1.316, -0.4668)),
    "gelu_tanh": Sigmoid(0.3403, (), (1.159, -1.483, 1.269, -0.4473)),
}
"""Fewer operations of the same kind, for `gated_e4m3`: an error of at most ``3e-3 |x|``, a twentieth of what rounding
to E4M3 adds, that of FP16 products included, where ``|factor x|`` is at least ``2**-13``. Smaller ones are no normal
numbers of FP16, and round to 0 in E4M3, whose smallest number is ``2**-9``."""

LONG = {
    "gelu": Sigmoid(
        0.16949153,
        (2.0993423, -2.4454384, 2.351717, -1.6328466, 0.7259374, -0.14563194),
        (1.1211889, -1.1795907, 0.74863464, -0.19337028, 0.003142447),
    ),
    "gelu_tanh": Sigmoid(
        0.19607843,
        (2.5835042, -4.1110377, 5.0278287, -3.910118, 1.7645273, -0.35471418),
        (0.7875376, -0.32628098, 0.038144577, 0.0022820847, -0.001683326),
    ),
    "silu": Sigmoid(
        0.06896552,
        (3.6005964, -12.249812, 33.302116, -61.036915, 73.625114, -55.995056, 24.305672, -4.584079),
        (1.0067685, -1.0958704, 1.2782457, -1.4361918, 1.4214661, -1.0797008, 0.52356434, -0.11726415),
    ),
}
"""In FP32 arithmetic, each number an FP32 number. The error of ``x * s(x)`` is at most ``8e-7 |x|``."""
LONG["quick_gelu"] = dataclasses.replace(LONG["silu"], scale=0.11737931)


def relu(x: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The greater of x and +0; NaN stays NaN. ``out_dtype`` makes no difference."""
    return torch.where(x > 0, x, torch.where(x.isnan(), x, 0.0))


def relu_squared(x: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The square of `relu`, rounded once."""
    positive = relu(x)
    return positive * positive


def sigmoid_gated(name: str, x: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``x * s(x)`` of an FP32 tensor; of -inf NaN, as in torch. ``name``: a key of `SHORT` and `LONG`.

    Where the caller rounds the result to a type with fewer significant bits than FP16 (bfloat16, FP8), ``out_dtype``,
    ``s`` is computed in FP16 from x rounded to FP16; otherwise in FP32. The product is FP32's.
    """
    if out_dtype in (torch.float16, torch.float32):
        share = _sigmoid(LONG[name], x)
    else:
        share = _sigmoid(SHORT[name], x.to(torch.float16)).to(torch.float32)
    return x * share


def gated_e4m3(name: str, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``factor * x * s(x)`` of an FP32 tensor, as FP16 numbers that the caller rounds to E4M3; of -inf 0. ``name``: a
    key of `NARROW`. ``factor * x`` is rounded to FP32 and then to FP16, beyond 65504 to that."""
    scaled = (x * factor).clamp(-LARGEST_FP16, LARGEST_FP16).to(torch.float16)
    return scaled * _sigmoid(NARROW[name], x.to(torch.float16))


def _sigmoid(sigmoid: Sigmoid, x: torch.Tensor) -> torch.Tensor:
    """The sigmoid in the arithmetic of ``x``, FP16 or FP32: every operation is rounded once."""
    fma = fma16 if x.dtype is torch.float16 else fma32
    u = x * torch.full_like(x, sigmoid.scale)
    if sigmoid.inner:
        u = u * _horner(sigmoid.inner, _saturated(u * u), fma)
    slope = _horner(sigmoid.outer, _saturated(u * u), fma)
    return _saturated(fma(u, slope, torch.full_like(x, 0.5)))


def _saturated(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), 0.0, x).clamp(0, 1)


def _horner(coefficients: tuple[float, ...], x: torch.Tensor, fma: Callable[..., torch.Tensor]) -> torch.Tensor:
    """A polynomial by Horner's rule in fused multiply-adds; coefficients ascend."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = fma(value, x, torch.full_like(x, coefficient))
    return value


ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "none": lambda x, out_dtype=torch.float32: x,
    "relu": relu,
    "relu_squared": relu_squared,
    **{name: functools.partial(sigmoid_gated, name) for name in SHORT},
}
"""Functions of an FP32 tensor and of the type that the result is rounded to, by the names of `cute_kernels.gemm`."""
