"""Random images, weights and tables for whole-kernel tests, and what integer arithmetic says the output must be."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import numpy as np
import torch

from cute_kernels import reference
from cute_kernels.compile import Artifact, compile_plan
from cute_kernels.config import ImagesConfig, PatchEmbedImagesProblem
from cute_kernels.emulator import Options, Report
from cute_kernels.operations.patch_weight import strip_weight
from cute_kernels.operations.table import fragment_table
from cute_kernels.plan import ImagesPlan, make_plan
from cute_kernels.runtime import emulated
from cute_kernels.runtime.operands import Operands
from tests.emulator.kernel_inputs import POISON

PATCH = 16


@dataclass(frozen=True)
class ImagesCase:
    plan: ImagesPlan
    tensors: Operands
    expected: torch.Tensor

    def mismatches(self) -> torch.Tensor:
        """Boolean ``[B, S, N]``: output bits that differ."""
        return self.tensors.out.view(torch.int16) != self.expected.view(torch.int16)

    def fresh(self) -> ImagesCase:
        """The same inputs with a poisoned output of its own."""
        out = torch.full_like(self.tensors.out.view(torch.int16), POISON).view(torch.bfloat16)
        return ImagesCase(self.plan, self.tensors.replace(out=out), self.expected)


def check(case: ImagesCase, options: Options | None = None) -> Report:
    """Executes a case, every bit of whose output must be the expected one."""
    report = emulated.launch(case.plan, case.tensors, options)
    wrong = case.mismatches()
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {wrong.nonzero()[0]}"
    return report


def edited(case: ImagesCase, pattern: str, replacement: str = "") -> Artifact:
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
    bias: bool = True,
    pos: bool = True,
    precision: str = "int8",
    extreme: bool = False,
    config: ImagesConfig | None = None,
    arch: str | None = None,
    sm_count: int | None = None,
    seed: int = 0,
) -> ImagesCase:
    """Inputs drawn from a seed, a poisoned output, and what the contract says the output must be.

    Args:
        batch, channels, n: sizes.
        grid: patches of a column and of a row of an image.
        patch: side of a patch in pixels.
        channels_last: the layout of the images.
        bias, pos: parts of the table.
        precision: ``"int8"``, or ``"int16"``: a weight of two terms.
        extreme: pixels of 255 and weights near both ends, whose sums pass 2^24 where FP32 cannot hold all integers.
        config, arch, sm_count: as for `make_plan`.
        seed: of the numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    height, width = grid[0] * patch, grid[1] * patch
    positions = grid[0] * grid[1]
    images = torch.randint(0, 256, (batch, channels, height, width), generator=generator, dtype=torch.uint8)
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    weight = torch.randint(-128, 128, (n, channels * patch**2), generator=generator, dtype=torch.int8)
    if extreme:
        images |= 0xF0
        weight[::2], weight[1::2] = weight[::2].abs().clamp(max=127) | 0x78, -(weight[1::2].abs() | 0x78)
    low = None
    if precision == "int16":
        low = torch.randint(-128, 128, weight.shape, generator=generator, dtype=torch.int8)
    scale = torch.rand(n, generator=generator) * 1e-5 + 1e-6
    bias_values = torch.randn(n, generator=generator) if bias else None
    pos_values = torch.randn(positions, n, generator=generator) if pos else None
    rows = positions if pos else int(bias)
    problem = PatchEmbedImagesProblem(
        batch, channels, height, width, patch, n, precision=precision, table_rows=rows, channels_last=channels_last
    )
    plan = make_plan(problem, config, arch, sm_count=sm_count)
    table = None
    if rows:
        table = fragment_table(bias_values, pos_values, plan.table_shape, grid[1], plan.tile_patches)
        assert tuple(table.shape) == plan.table_shape
    out = torch.full((batch, positions, n), POISON, dtype=torch.int16).view(torch.bfloat16)
    addend = None
    for part in (bias_values, pos_values):
        if part is not None:
            addend = part if addend is None else addend + part
    # FP32 of an int64 is rounded to nearest, ties to even, as the contract has it.
    accumulator = sums(images, weight, patch).to(torch.float32)
    if low is not None:
        factor = torch.full_like(accumulator, 256.0)
        accumulator = reference.fma32(accumulator, factor, sums(images, low, patch).to(torch.float32))
    wide = scale.expand_as(accumulator)
    if addend is None:
        result = accumulator * wide
    else:
        result = reference.fma32(accumulator, wide, addend.expand_as(accumulator))
    weight = strip_weight(weight, plan)
    tensors = Operands(images=images, weight=weight, weight_low=low, scale=scale, table=table, out=out)
    return ImagesCase(plan, tensors, result.to(torch.bfloat16))
