"""The pass that finds what a LayerNorm multiplies rows by, executed from its PTX, bit for bit against the reference."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.operations import reference
from cute_kernels.operations.runtime.emulated import launch
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.operations.scales import fp32
from cute_kernels.plan.base import ARCHS
from cute_kernels.plan.layer_norm import LayerNormScaleProblem, plan_layer_norm_scale
from tests.emulator.cases import poisoned

EPS = 1e-5 * 255**2


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120"])
@pytest.mark.parametrize(("m", "k"), [(6, 6912), (5, 16), (9, 528), (1, 65_792), (4, 512)])
def test_rows(m: int, k: int, arch: str) -> None:
    """Rows that fill no CTA, vectors that fill no warp, sums that need all 32 bits."""
    rows = torch.randint(0, 256, (m, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(k))
    rows[m // 2] = 255
    if m > 1:
        rows[0], rows[1] = 0, rows[1] // 64 + 200
    out = poisoned(m, 1, dtype=torch.float32)
    plan = plan_layer_norm_scale(LayerNormScaleProblem(m, k), ARCHS[arch])
    launch(plan, Operands(x=rows, addend=fp32(k * k * EPS), scale=out))
    assert torch.equal(out, reference.layer_norm_scale(rows, EPS))
