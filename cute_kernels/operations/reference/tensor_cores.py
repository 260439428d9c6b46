"""Accumulation as tensor cores do it, in plain torch.

Papers that measured it: MMA-Sim (arXiv 2511.10909) and "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004). The
exact products of 32 bytes of K and the accumulator are aligned to the largest of their exponents, cut there to so many
bits behind the point, toward zero, and added exactly; the sum is cut to FP32, toward zero.
"""

from dataclasses import dataclass

import torch

# Bounds the float64 temporaries of one chunk of rows, in products.
_CHUNK_PRODUCTS = 1 << 22

_LOWEST = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14, torch.float16: -14}
"""Exponent of subnormal numbers; -126 elsewhere."""
_NONE = -(1 << 20)  # exponent of a term that is zero
_FLOOR = -133

ARITHMETICS = ("exact", "sm_90a", "sm_100a")
"""How accumulators add: exact sums, rounded to nearest even, or as the tensor cores of an architecture."""


@dataclass(frozen=True)
class _Sums:
    """Bits behind the point: of aligned terms, and of the result."""

    terms: int
    result: int


def check_arithmetic(arithmetic: str) -> None:
    """Raises ValueError for what is not in `ARITHMETICS`."""
    if arithmetic not in ARITHMETICS:
        raise ValueError(f"arithmetic = {arithmetic!r}: must be one of {', '.join(map(repr, ARITHMETICS))}")


def accumulate_as(
    a: torch.Tensor, b: torch.Tensor, step: int, arithmetic: str, dtype: torch.dtype
) -> torch.Tensor:
    """``a @ b.T`` from +0, in ascending k, as wgmma on sm_90a or tcgen05.mma on sm_100a adds: ``[rows, N]`` float32.
    ``a``, ``b``: float64, values of ``dtype`` (float32 for TF32); ``step``: elements of K that are added at once, 32
    bytes."""
    sums = _Sums(13, 13) if arithmetic == "sm_90a" and dtype.itemsize == 1 else _Sums(25, 23)
    lowest = _LOWEST.get(dtype, -126)
    chunk = max(1, _CHUNK_PRODUCTS // max(1, b.shape[0] * step))
    out = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for row in range(0, a.shape[0], chunk):
        for start in range(0, a.shape[1], step):
            x, y = (t[:, start : start + step] for t in (a[row : row + chunk], b))
            out[row : row + chunk] = _step(x, y, out[row : row + chunk], sums, lowest)
    return out


def _exponents(values: torch.Tensor, lowest: int) -> torch.Tensor:
    """Exponents as encoded; of zero `_NONE`."""
    exponent = (torch.frexp(values)[1].to(torch.int64) - 1).clamp(min=lowest)
    return torch.where((values == 0) | ~torch.isfinite(values), _NONE, exponent)


def _step(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor, sums: _Sums, lowest: int) -> torch.Tensor:
    products = a[:, None, :] * b[None, :, :]
    exponents = _exponents(a, lowest)[:, None, :] + _exponents(b, lowest)[None, :, :]
    wide = acc.to(torch.float64)
    # Where the accumulator is 0, the largest exponent has a floor, which the smallest products show.
    own = torch.where(acc == 0, _FLOOR, _exponents(wide, -126))
    top = torch.maximum(exponents.amax(-1), own).clamp(min=_FLOOR)
    unit = torch.ldexp(torch.ones_like(wide), (top - sums.terms).to(torch.float64))
    total = (products / unit[..., None]).trunc().sum(-1) + (wide / unit).trunc()
    return _toward_zero(total * unit, sums.result)


def _toward_zero(values: torch.Tensor, bits: int) -> torch.Tensor:
    """FP32 with so many bits behind the point; infinity from 2^128 on, +0 for zero."""
    nearest = values.to(torch.float32)
    away = (nearest.to(torch.float64).abs() > values.abs()) & (values.abs() < 2.0**128)
    cut = torch.where(away, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
    kept = cut.contiguous().view(torch.int32) & (-1 << (23 - bits))
    return torch.where(torch.isfinite(cut), kept.view(torch.float32), cut) + 0.0
