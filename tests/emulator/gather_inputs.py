"""Random 16-bit images, weights and tables for whole-kernel tests, and what the contract says the output must be."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_kernels import reference
from cute_kernels.compile import Artifact
from cute_kernels.config import ImagesConfig, PatchEmbedImagesProblem
from cute_kernels.emulator import Options
from cute_kernels.operations.table import fragment_table
from cute_kernels.plan import ImagesPlan, Sm100ImagesPlan, make_plan
from cute_kernels.runtime.operands import Operands
from tests.emulator.exact_sums import emulate
from tests.emulator.gemm_inputs import BITS, POISON

PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class GatherCase:
    plan: ImagesPlan
    tensors: Operands
    expected: torch.Tensor

    def mismatches(self) -> torch.Tensor:
        """Boolean ``[B, S, N]``: output bits that differ."""
        bits = BITS[self.tensors.out.dtype]
        return self.tensors.out.view(bits) != self.expected.view(bits)

    def fresh(self) -> GatherCase:
        """The same inputs with a poisoned output of its own."""
        dtype = self.tensors.out.dtype
        out = torch.full_like(self.tensors.out.view(BITS[dtype]), POISON[dtype]).view(dtype)
        return GatherCase(self.plan, self.tensors.replace(out=out), self.expected)


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
    out_dtype: torch.dtype = torch.bfloat16,
    bias: bool = True,
    pos: bool = True,
    config: ImagesConfig | None = None,
    arch: str = "sm_90a",
    sm_count: int | None = None,
    seed: int = 0,
) -> GatherCase:
    """Inputs drawn from a seed, a poisoned output, and what the contract says the output must be.

    Args:
        batch, channels, n: sizes.
        grid: patches of a column and of a row of an image.
        patch: side of a patch in pixels.
        dtype, out_dtype: of images and weight, and of the output.
        bias, pos: parts of the table.
        config, arch, sm_count: as for `make_plan`.
        seed: of the numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    height, width = grid[0] * patch, grid[1] * patch
    positions = grid[0] * grid[1]
    images = torch.randn(batch, channels, height, width, generator=generator).to(dtype)
    weight = torch.randn(n, channels * patch**2, generator=generator).to(dtype)
    table = torch.randn(positions if pos else 1, n, generator=generator) * 9 if pos or bias else None
    names = (str(kind).removeprefix("torch.") for kind in (dtype, out_dtype))
    in_name, out_name = names
    problem = PatchEmbedImagesProblem(
        batch, channels, height, width, patch, n, in_name, precision=PRECISIONS[dtype],
        table_rows=0 if table is None else len(table), out_dtype=out_name,
    )  # fmt: skip
    plan = make_plan(problem, config, arch, sm_count=sm_count)
    accumulator = reference.gemm(rows_of(images, patch).view(-1, weight.shape[1]), weight, None, torch.float32)
    accumulator = accumulator.view(batch, positions, n)
    expected = (accumulator if table is None else accumulator + table).to(out_dtype)
    padded = None if table is None else torch.nn.functional.pad(table, (0, plan.padded_n - n))
    if padded is not None and isinstance(plan, Sm100ImagesPlan):
        parts = (None, table) if pos else (table[0], None)
        padded = fragment_table(*parts, plan.table_shape, grid[1], plan.tile_patches)
    out = torch.full(expected.shape, POISON[out_dtype], dtype=BITS[out_dtype]).view(out_dtype)
    return GatherCase(plan, Operands(images=images, weight=weight, scale=None, table=padded, out=out), expected)


def check(case: GatherCase, options: Options | None = None, artifact: Artifact | None = None) -> None:
    """Emulates a launch, of another kernel if there is one, and asserts that its result is the reference's."""
    emulate(case.plan, case.tensors, options, artifact=artifact)
    wrong = case.mismatches()
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {wrong.nonzero()[0]}"
