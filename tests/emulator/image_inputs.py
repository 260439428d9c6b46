"""Random images, weights and tables for whole-kernel tests, and what integer arithmetic says the output must be."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import numpy as np
import torch

from cute_kernels.config import ImagesConfig, PatchEmbedImagesProblem
from cute_kernels.operations import reference
from cute_kernels.operations.base import random_values
from cute_kernels.operations.compile import Artifact, compile_plan
from cute_kernels.operations.patch_weight import strip_weight
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.operations.table import fragment_table
from cute_kernels.plan import make_plan
from tests.emulator.cases import Case, Output, poisoned

PATCH = 16


def edited(case: Case, pattern: str, replacement: str = "") -> Artifact:
    """The kernel of a case with every match of a pattern replaced."""
    artifact = compile_plan(case.plan, emulated=True)
    ptx, count = re.subn(pattern, replacement, artifact.ptx)
    assert count, f"nothing matches {pattern}"
    return dataclasses.replace(artifact, ptx=ptx)


def sums(images: torch.Tensor, weight: torch.Tensor, patch: int = PATCH) -> torch.Tensor:
    """Exact int64 ``[B, S, N]``, pixel by pixel of a patch: no rows are made, no floating-point number is used."""
    batch, channels, height, width = images.shape
    wide = images.numpy().astype(np.int64)
    kernel = weight.numpy().astype(np.int64).reshape(-1, channels, patch, patch)
    total = np.zeros((batch, height // patch, width // patch, kernel.shape[0]), np.int64)
    for channel, row, column in np.ndindex(channels, patch, patch):
        pixels = wide[:, channel, row::patch, column::patch]
        total += pixels[..., None] * kernel[:, channel, row, column]
    return torch.from_numpy(total.reshape(batch, -1, kernel.shape[0]))


def make_images_case(
    *,
    batch: int = 3,
    channels: int = 3,
    grid: tuple[int, int] = (2, 4),
    patch: int = PATCH,
    channels_last: bool = False,
    n: int = 64,
    extreme: bool = False,
    config: ImagesConfig | None = None,
    arch: str | None = None,
    sm_count: int | None = None,
    seed: int = 0,
    **output: Any,
) -> Case:
    """Inputs drawn from a seed, a poisoned output, and what the contract says the output must be.

    Args:
        batch, channels, n: sizes.
        grid: patches of a column and of a row of an image.
        patch: side of a patch in pixels.
        channels_last: the layout of the images.
        extreme: pixels of 255 and weights near both ends, whose sums pass 2^24 where FP32 cannot hold all integers.
        config, arch, sm_count: as for `make_plan`.
        seed: of the numbers.
        output: ``bias`` and ``pos`` of `Output`.
    """
    made = Output(**output)
    bias, pos = made.bias, made.pos
    generator = torch.Generator().manual_seed(seed)
    height, width = grid[0] * patch, grid[1] * patch
    positions = grid[0] * grid[1]
    draw = functools.partial(random_values, generator=generator)
    images = draw(batch, channels, height, width, dtype=torch.uint8)
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    weight = draw(n, channels * patch**2, dtype=torch.int8)
    if extreme:
        images |= 0xF0
        weight[::2], weight[1::2] = weight[::2].abs().clamp(max=127) | 0x78, -(weight[1::2].abs() | 0x78)
    scale = torch.rand(n, generator=generator) * 1e-5 + 1e-6
    bias_values = draw(n, dtype=torch.float32) if bias else None
    pos_values = draw(positions, n, dtype=torch.float32) if pos else None
    rows = positions if pos else int(bias)
    problem = PatchEmbedImagesProblem(
        batch, channels, height, width, patch, n, table_rows=rows, channels_last=channels_last
    )
    plan = make_plan(problem, config, arch, sm_count=sm_count)
    table = None
    if rows:
        table = fragment_table(bias_values, pos_values, plan.table_shape, grid[1], plan.tile_patches)
        assert tuple(table.shape) == plan.table_shape
    out = poisoned(batch, positions, n, dtype=torch.bfloat16)
    addend = None
    for part in (bias_values, pos_values):
        if part is not None:
            addend = part if addend is None else addend + part
    # FP32 of an int64 is rounded to nearest, ties to even, as the contract has it.
    accumulator = sums(images, weight, patch).to(torch.float32)
    wide = scale.expand_as(accumulator)
    if addend is None:
        result = accumulator * wide
    else:
        result = reference.fma32(accumulator, wide, addend.expand_as(accumulator))
    weight = strip_weight(weight, plan)
    tensors = Operands(images=images, weight=weight, scale=scale, table=table, out=out)
    return Case(plan, tensors, result.to(torch.bfloat16))
