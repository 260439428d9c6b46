"""Single roundings of sums and products, which plain torch does not offer."""

import math
from fractions import Fraction

import torch

from cute_kernels.common.float_environment import default_environment


@default_environment()
def fma32(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of FP32 tensors with a single rounding to FP32 (IEEE 754 fusedMultiplyAdd, nearest even)."""
    return _fused_to_odd(a, b, c).to(torch.float32)


def fma16(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of FP16 tensors with a single rounding to FP16."""
    total = _fused_to_odd(a, b, c)
    # torch converts by way of FP32: that rounding is one to odd as well.
    single = total.to(torch.float32)
    return _to_odd(single, total - single.to(torch.float64)).to(torch.float16)


def _fused_to_odd(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """The float64 sum of an exact product and ``c``, rounded to odd.

    The product of two FP32 numbers is exact in float64. Its sum with ``c`` may not be, and rounding that sum twice
    (float64, then FP32) can miss the nearest FP32 number by a half. After a rounding to odd, the second rounding is
    correct (Boldo and Melquiond, 2008).
    """
    product, addend = a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64)
    total = product + addend
    # TwoSum: the error is exactly what `total` lost.
    virtual = total - product
    return _to_odd(total, (product - (total - virtual)) + (addend - virtual))


def _to_odd(nearest: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Rounding to odd of ``nearest + error``, of which ``nearest`` is the rounding to nearest."""
    kind = torch.int64 if nearest.dtype is torch.float64 else torch.int32
    bits = nearest.view(kind)
    inexact = torch.isfinite(error) & (error != 0) & (bits & 1 == 0)
    step = torch.where((nearest > 0) == (error > 0), 1, -1).to(kind)
    return torch.where(inexact, bits + step, bits).view(nearest.dtype)


def round_tf32(values: torch.Tensor) -> torch.Tensor:
    """FP32 numbers rounded to TF32 (FP32's exponent, 10 fraction bits), to nearest, ties to even.

    This is what TMA does to elements of a TF32 tensor map, as recorded on an H200; beyond the largest TF32 number lies
    infinity. (Tensor cores by themselves drop the low 13 bits, and find none here.) A number that is TF32 already stays
    as it is: a weight that is rounded once gives `cute_kernels.gemm` the bits of the weight itself, and kernels of
    ``mma.sync`` need not round it again (``Sm80GemmConfig(rounding="nearest_a")``).

    Args:
        values: float32, any shape and device.

    Returns:
        The same shape, contiguous, float32 with 13 zero bits at the end; no derivative.

    Raises:
        TypeError: values of another element type.
    """
    if values.dtype is not torch.float32:
        raise TypeError(f"values has dtype {values.dtype}: must be torch.float32")
    values = values.detach().contiguous()
    bits = values.view(torch.int32)
    kept = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF  # leaves 32 bits where a NaN was alone
    return torch.where(values.isnan(), torch.nan, kept.view(torch.float32))


def granularity(values: torch.Tensor, bits: int) -> torch.Tensor:
    """A power of two of which each value, of ``bits`` significant bits, is a multiple; infinity for zero."""
    _, exponents = torch.frexp(values)
    return torch.where(values == 0, math.inf, torch.ldexp(torch.ones_like(values), (exponents - bits).to(values.dtype)))


def round_exactly(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """The FP32 number nearest to ``acc + a . b``, ties to even."""
    exact = Fraction(float(acc)) + sum(Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True))
    # Round to odd at 53 bits, then to FP32: two roundings that give the result of one (Boldo and Melquiond, 2008).
    nearest = float(exact)
    rest = exact - Fraction(nearest)
    mantissa, _ = math.frexp(nearest)
    if rest and int(mantissa * 2**53) % 2 == 0:
        nearest = math.nextafter(nearest, math.inf if rest > 0 else -math.inf)
    return float(torch.tensor(nearest, dtype=torch.float64, device="cpu").to(torch.float32))
