"""The factor of a row behind a LayerNorm against exact rational arithmetic, operation by operation."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from cute_kernels.operations import reference
from tests.operations.reference import exact

EPS = 1e-5 * 255**2


def root(value: Fraction) -> Fraction:
    """Square root of an FP32 number, rounded to FP32."""
    wide = Fraction(math.isqrt(int(value * 4**80)), 2**80)  # more than 40 bits behind the point of FP32's
    sticky = Fraction(0) if wide * wide == value else Fraction(1, 2**90)
    return exact.fp32(wide + sticky)


def written_out(row: list[int], eps: float) -> Fraction:
    k = len(row)
    spread = exact.fp32(Fraction(k * sum(p * p for p in row) - sum(row) ** 2))
    deviation = root(exact.fp32(spread + exact.fp32(Fraction(k * k * eps))))
    return exact.fp32(Fraction(k) / deviation)


def rows_of(count: int, k: int) -> torch.Tensor:
    rows = torch.randint(0, 256, (count, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(k))
    rows[0], rows[1], rows[2] = 0, 255, rows[2] // 64 + 200
    rows[3] = 7
    rows[3, 0] = 8
    return rows


@pytest.mark.parametrize("eps", [EPS, 1e-12, 3e5])
@pytest.mark.parametrize("k", [16, 768, 6912])
def test_bits_and_error(k: int, eps: float) -> None:
    rows = rows_of(40, k)
    got = reference.layer_norm_scale(rows, eps)
    assert got.shape == (40, 1) and got.dtype is torch.float32
    assert exact.fractions(got.view(-1)) == [written_out(row, eps) for row in rows.tolist()]
    true = (rows.double().var(1, unbiased=False) + eps).rsqrt()
    assert float(((got.view(-1).double() - true) / true).abs().max()) < 3.5 * 2.0**-24


def test_the_longest_row_of_the_largest_sums() -> None:
    rows = torch.full((2, 65_792), 255, dtype=torch.uint8)
    rows[1, ::2] = 0
    got = reference.layer_norm_scale(rows, EPS)
    assert exact.fractions(got.view(-1)) == [written_out(row, EPS) for row in rows.tolist()]
