"""Random 16-bit images, weights and tables for whole-kernel tests, and what the contract says the output must be."""

from __future__ import annotations

import functools
from typing import Any

import torch

from cute_kernels.config import ImagesConfig, PatchEmbedImagesProblem, name_of
from cute_kernels.operations import reference
from cute_kernels.operations.base import random_values
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.operations.table import fragment_table
from cute_kernels.plan import make_plan
from cute_kernels.plan.images_sm100 import Sm100ImagesPlan
from tests.emulator.cases import Case, Output, poisoned

PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def rows_of(images: torch.Tensor, patch: int) -> torch.Tensor:
    """``[B, S, C * p * p]``, patch by patch."""
    batch, _, height, width = images.shape
    rows = [
        images[:, :, y : y + patch, x : x + patch].reshape(batch, -1)
        for y in range(0, height, patch)
        for x in range(0, width, patch)
    ]
    return torch.stack(rows, 1)


def make_gather_case(
    *,
    batch: int = 3,
    channels: int = 1,
    grid: tuple[int, int] = (2, 4),
    patch: int = 16,
    n: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    config: ImagesConfig | None = None,
    arch: str = "sm_90a",
    sm_count: int | None = None,
    seed: int = 0,
    **output: Any,
) -> Case:
    """Inputs drawn from a seed, a poisoned output, and what the contract says the output must be.

    Args:
        batch, channels, n: sizes.
        grid: patches of a column and of a row of an image.
        patch: side of a patch in pixels.
        dtype: of images and weight.
        config, arch, sm_count: as for `make_plan`.
        seed: of the numbers.
        output: fields of `Output`.
    """
    made = Output(**output)
    pos, out_dtype = made.pos, made.out_dtype
    generator = torch.Generator().manual_seed(seed)
    height, width = grid[0] * patch, grid[1] * patch
    positions = grid[0] * grid[1]
    draw = functools.partial(random_values, generator=generator)
    images = draw(batch, channels, height, width, dtype=dtype)
    weight = draw(n, channels * patch**2, dtype=dtype)
    table = draw(positions if pos else 1, n, dtype=torch.float32) if pos or made.bias else None
    problem = PatchEmbedImagesProblem(
        batch, channels, height, width, patch, n, name_of(dtype), precision=PRECISIONS[dtype],
        table_rows=0 if table is None else len(table), out_dtype=name_of(out_dtype),
    )  # fmt: skip
    plan = make_plan(problem, config, arch, sm_count=sm_count)
    accumulator = reference.gemm(rows_of(images, patch).view(-1, weight.shape[1]), weight, None, torch.float32)
    accumulator = accumulator.view(batch, positions, n)
    expected = (accumulator if table is None else accumulator + table).to(out_dtype)
    padded = None if table is None else torch.nn.functional.pad(table, (0, plan.padded_n - n))
    if padded is not None and isinstance(plan, Sm100ImagesPlan):
        parts = (None, table) if pos else (table[0], None)
        padded = fragment_table(*parts, plan.table_shape, grid[1], plan.tile_patches)
    out = poisoned(*expected.shape, dtype=out_dtype)
    return Case(plan, Operands(images=images, weight=weight, scale=None, table=padded, out=out), expected)
