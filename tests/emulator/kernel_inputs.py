"""Random, non-uniform inputs for whole-kernel tests, and the reference result of the same contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.config import Config, PatchEmbedProblem, Sm100PatchEmbedConfig
from cute_kernels.operations import reference
from cute_kernels.operations.base import random_values
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.operations.table import build_table
from cute_kernels.plan import make_plan
from cute_kernels.plan.patch_embed import WEIGHT_TYPES
from tests.emulator.cases import Case, poisoned


@dataclass(frozen=True)
class Scales:
    """The factors of a product: a number, as a launch parameter or in memory, one for each row or feature."""

    scale: float = 0.37
    scale_in_memory: bool = False
    row_scale: bool = False
    feature_scale: bool = False


def make_case(
    *,
    batch: int = 2,
    positions: int = 49,
    n: int = 128,
    k: int = 128,
    bias: bool = True,
    pos: bool = True,
    indexed: bool = False,
    dtype: str = "float8_e4m3fn",
    config: Config | None = None,
    sm_count: int | None = None,
    seed: int = 0,
    **scales: Any,
) -> Case:
    """Inputs drawn from a seed, a poisoned output, and what the contract says the output must be.

    ``indexed``: every row asks for a position of its own, some of them for none that exists. ``scales``: fields of
    `Scales`.
    """
    factors = Scales(**scales)
    scale, row_scale, feature_scale = factors.scale, factors.row_scale, factors.feature_scale
    config = config or Sm100PatchEmbedConfig()
    generator = torch.Generator().manual_seed(seed)
    m = batch * positions
    x, weight = draw_operands(generator, m, n, k, dtype)
    bias_values = torch.randn(n, generator=generator) if bias else None
    pos_values = torch.randn(positions, n, generator=generator) if pos else None
    rows = positions if pos else int(bias)
    index = torch.randint(-2, positions + 2, (m,), generator=generator, dtype=torch.int32) if indexed else None
    one = not (row_scale and feature_scale)
    source = "pointer" if factors.scale_in_memory and one else "value"
    problem = PatchEmbedProblem(
        m, n, k, rows, dtype, scale_source=source, table_index=indexed, row_scale=row_scale, feature_scale=feature_scale
    )
    plan = make_plan(problem, config, sm_count=sm_count)
    table = None
    if rows:
        dtype = getattr(torch, plan.table_dtype)
        table = build_table(
            bias_values, pos_values, plan.table_shape, plan.table_layout, dtype, nan_row=indexed
        )
    out = poisoned(m, n, dtype=torch.bfloat16)
    contract = {"f32": reference.patch_embed_f32, "bf16x2": reference.patch_embed_bf16x2}[config.epilogue]
    scale_tensor = torch.tensor([scale if one else 1.0], dtype=torch.float32)
    by_row = torch.rand(m, 1, generator=generator) + 0.5 if row_scale else None
    by_feature = torch.rand(1, n, generator=generator) + 0.5 if feature_scale else None
    factor = scale_tensor if by_feature is None else by_feature * scale_tensor
    expected = contract(x, weight, bias_values, pos_values, factor, index, by_row)
    number = scale_tensor if factors.scale_in_memory else scale
    tensors = Operands(
        x=x, weight=weight, table=table, index=index, out=out, scale=number if one else None, row_scale=by_row,
        feature_scale=by_feature,
    )  # fmt: skip
    return Case(plan, tensors, expected)


def draw_operands(generator: torch.Generator, m: int, n: int, k: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and weight; of integers every other row and feature close to the largest."""
    x = random_values(m, k, dtype=getattr(torch, dtype), generator=generator)
    weight = random_values(n, k, dtype=getattr(torch, WEIGHT_TYPES[dtype]), generator=generator)
    for tensor in (x, weight):
        if not tensor.is_floating_point():
            tensor[1::2] = torch.iinfo(tensor.dtype).max - (tensor[1::2] & 15)
    return x, weight
