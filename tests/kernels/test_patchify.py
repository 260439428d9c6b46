"""The pass that lays out images as rows of patches, executed from its PTX, byte for byte against plain torch."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.operations import reference
from cute_kernels.operations.runtime.emulated import launch
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.plan.base import ARCHS
from cute_kernels.plan.patchify import PatchifyProblem, plan_patchify
from tests.emulator.cases import poisoned


def images_of(problem: PatchifyProblem) -> torch.Tensor:
    """``[B, C, H, W]`` in the problem's memory order; halves of a unit in the last place among them."""
    generator = torch.Generator().manual_seed(problem.height)
    shape = (problem.batch, problem.channels, problem.height, problem.width)
    if problem.in_dtype == "uint8":
        images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    else:
        images = torch.randn(shape, generator=generator)
        images.view(-1)[::7] = 1.0 + 2.0**-8
        images.view(-1)[3::7] = 1.0 + 3 * 2.0**-8
        images = images.to(getattr(torch, problem.in_dtype))
    return images.contiguous(memory_format=torch.channels_last) if problem.channels_last else images


def expected_rows(images: torch.Tensor, problem: PatchifyProblem, width: int) -> torch.Tensor:
    rows = reference.patch_rows(images, problem.patch)
    if problem.order == "hwc":
        split = rows.view(-1, problem.channels, problem.patch, problem.patch)
        rows = split.permute(0, 2, 3, 1).reshape(rows.shape)
    out = torch.zeros(rows.shape[0], width, dtype=getattr(torch, problem.out_dtype))
    out[:, : rows.shape[1]] = rows.to(out.dtype)
    return out


def executed(images: torch.Tensor, problem: PatchifyProblem, arch: str) -> torch.Tensor:
    plan = plan_patchify(problem, ARCHS[arch])
    rows = poisoned(problem.batch * problem.positions, plan.row_elements, dtype=getattr(torch, problem.out_dtype))
    launch(plan, Operands(images=images, x=rows))
    return rows


@pytest.mark.parametrize(
    ("problem", "arch"),
    [
        (PatchifyProblem(2, 3, 32, 80, 16), "sm_90a"),
        (PatchifyProblem(1, 3, 32, 64, 32), "sm_100a"),
        (PatchifyProblem(2, 3, 28, 42, 14), "sm_90a"),
        (PatchifyProblem(2, 3, 28, 224, 14), "sm_90a"),
        (PatchifyProblem(1, 3, 28, 112, 14, "bfloat16", "bfloat16"), "sm_90a"),
        (PatchifyProblem(1, 3, 14, 112, 14, "float32", "float16"), "sm_90a"),
        (PatchifyProblem(1, 3, 14, 112, 14, "uint8", "bfloat16"), "sm_100a"),
        (PatchifyProblem(1, 2, 14, 112, 7), "sm_90a"),
        (PatchifyProblem(1, 4, 16, 24, 8), "sm_90a"),
        (PatchifyProblem(1, 1, 15, 45, 15), "sm_90a"),
        (PatchifyProblem(2, 3, 32, 48, 16, channels_last=True, order="hwc"), "sm_90a"),
        (PatchifyProblem(1, 3, 28, 28, 14, channels_last=True, order="hwc"), "sm_100a"),
        (PatchifyProblem(1, 3, 16, 48, 16, channels_last=True), "sm_90a"),
        (PatchifyProblem(1, 3, 32, 48, 16, "uint8", "bfloat16"), "sm_90a"),
        (PatchifyProblem(1, 3, 28, 42, 14, "bfloat16", "bfloat16"), "sm_90a"),
        (PatchifyProblem(1, 3, 16, 32, 16, "float32", "bfloat16"), "sm_90a"),
        (PatchifyProblem(1, 3, 28, 28, 14, "float32", "float16", channels_last=True), "sm_90a"),
        (PatchifyProblem(1, 3, 16, 16, 16, "float16", "bfloat16", channels_last=True), "sm_100a"),
    ],
    ids=str,
)
def test_rows(problem, arch):
    images = images_of(problem)
    rows = executed(images, problem, arch)
    expected = expected_rows(images, problem, rows.shape[1])
    assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))
