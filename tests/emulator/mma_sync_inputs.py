"""Random calls of the patch embeds for the kernels of ``mma.sync``, and what the contract says they return."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import prepare_patch_weight
from cute_kernels.config import Sm80ImagesConfig, Sm80PatchEmbedConfig
from cute_kernels.operations.patch_embed import PATCH_EMBED, PatchEmbedArguments
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES, PatchEmbedImagesArguments
from tests.emulator.cases import Case, Output, case_of
from tests.emulator.kernel_inputs import draw_operands

SMALL = {"tile_m": 64, "tile_n": 64}


def make_rows_case(
    dtype: str, *, m: int = 70, n: int = 72, k: int = 112, arch: str = "sm_80", sm_count: int | None = None,
    seed: int = 5, **changes: Any,
) -> Case:  # fmt: skip
    """A patch embed of rows with everything that an epilogue may have, unless ``changes`` of the arguments say."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = draw_operands(generator, m, n, k, dtype)
    values = {
        "bias": torch.randn(n, generator=generator), "pos_embed": torch.randn(7, n, generator=generator),
        "pos_index": torch.randint(0, 7, (m,), generator=generator, dtype=torch.int32),
        "scale_a": torch.rand(m, 1, generator=generator), "scale_b": torch.rand(1, n, generator=generator),
        "config": Sm80PatchEmbedConfig(**SMALL),
    }  # fmt: skip
    arguments = PatchEmbedArguments(x=x, weight=weight, backend="emulator", **values | changes)
    return case_of(PATCH_EMBED, arguments, arch, sm_count)


def make_image_case(
    precision: str,
    *,
    config: Sm80ImagesConfig | None = None,
    patch: int = 16,
    batch: int = 9,
    grid: tuple[int, int] = (2, 3),
    n: int = 72,
    channels: int = 3,
    arch: str = "sm_80",
    channels_last: bool = False,
    sm_count: int | None = None,
    seed: int = 0,
    **output: Any,
) -> Case:
    """A patch embed of images of uint8; ``output``: fields of `Output`."""
    made = Output(**output)
    generator = torch.Generator().manual_seed(seed)
    conv = torch.randn(n, channels, patch, patch, generator=generator) * 0.05
    weight = prepare_patch_weight(conv, precision=precision)
    shape = (batch, channels, grid[0] * patch, grid[1] * patch)
    images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    arguments = PatchEmbedImagesArguments(
        images=images, weight=weight.raw, weight_scale=weight.scale,
        weight_offset=weight.offset, bias=torch.randn(n, generator=generator) if made.bias else None,
        pos_embed=torch.randn(grid[0] * grid[1], n, generator=generator) if made.pos else None, patch=patch,
        out_dtype=made.out_dtype, backend="emulator", config=config,
    )  # fmt: skip
    return case_of(PATCH_EMBED_IMAGES, arguments, arch, sm_count)
