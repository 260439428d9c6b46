"""`patch_embed_images` where no kernel reads the images themselves: a pass and the kernel over rows, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels import (
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    Sm100ImagesConfig,
    Sm100PatchEmbedConfig,
    patch_embed_images,
    prepare_patch_weight,
)
from cute_kernels.config import PatchEmbedImagesProblem
from cute_kernels.operations.compile import compile_plan
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES, PatchEmbedImagesArguments
from cute_kernels.operations.runtime.constants import DERIVED
from cute_kernels.plan import make_plan
from cute_kernels.plan.images_chain import RowsChainPlan
from tests.nightly import NIGHTLY, nightly

SM90 = Sm90PatchEmbedConfig(tile_rows=16, warpgroups=1, stages=2, stage_blocks=1, cluster=1, weight="streamed")
SM100 = Sm100PatchEmbedConfig(tile_n=128)
ONE_KERNEL = Sm90ImagesConfig(
    tile_patches=4, tile_images=4, warpgroups=1, cluster=1, stages=3, stage_blocks=1, weight="streamed"
)
FP16 = {"precision": "fp16", "in_dtype": "float16"}
HEADLINE = PatchEmbedImagesProblem(4736, 3, 224, 224, 16, 768, table_rows=196)


def draw(patch: int, precision: str, dtype: torch.dtype, *, batch: int = 2, grid=(2, 3), n: int = 24):
    """Images, weight, bias and positions."""
    generator = torch.Generator().manual_seed(patch)
    shape = (batch, 3, grid[0] * patch, grid[1] * patch)
    images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if dtype.is_floating_point:
        images = ((images / 255 - 0.5) / 0.5).to(dtype)
    weight = prepare_patch_weight(torch.randn(n, 3, patch, patch, generator=generator) * 0.05, precision=precision)
    pos = torch.randn(grid[0] * grid[1], n, generator=generator)
    return images, weight, torch.randn(n, generator=generator), pos


def assert_same_bits(images, *arguments, config) -> None:
    out = patch_embed_images(images, *arguments, config=config, backend="emulator")
    expected = patch_embed_images(images, *arguments, backend="reference")
    assert out.shape == expected.shape and torch.equal(out.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(
    ("patch", "precision", "dtype", "config"),
    [
        (14, "int8", torch.uint8, SM90),
        pytest.param(32, "int8", torch.uint8, SM90, marks=nightly),
        pytest.param(14, "bf16", torch.bfloat16, SM90, marks=nightly),
        pytest.param(14, "bf16", torch.uint8, SM90, marks=nightly),
        (14, "fp16", torch.float32, SM90),
        (14, "int8", torch.uint8, SM100),
        (16, "bf16", torch.bfloat16, SM100),
    ],
    ids=str,
)
def test_patches_that_no_kernel_reads(patch, precision, dtype, config) -> None:
    """K of 588 bytes is padded to 608, of 1176 to 1184; the pass rounds float32 and uint8 to the type of the weight."""
    images, weight, bias, pos = draw(patch, precision, dtype)
    assert_same_bits(images, weight, bias, pos, config=config)
    if NIGHTLY or (patch, precision) == (14, "int8"):  # without a table it is another kernel
        assert_same_bits(images, weight, config=config)


@pytest.mark.parametrize(
    ("batch", "together", "precision", "dtype"),
    [(48, 16, "int8", torch.uint8), (7, 1, "int8", torch.uint8), (12, 4, "fp16", torch.float32)],
    ids=str,
)
def test_images_of_one_patch_are_rows_that_are_made_longer(batch, together, precision, dtype) -> None:
    """A CTA copies as many as divide the batch, sixteen at most; channels that are last come in their order."""
    images, weight, bias, pos = draw(14, precision, dtype, batch=batch, grid=(1, 1))
    assert_same_bits(images, weight, bias, pos, config=SM90)
    if precision == "int8":
        assert_same_bits(images.to(memory_format=torch.channels_last), weight, bias, pos, config=SM90)
        problem = plan_of(images, weight, SM90).patchify.problem
        assert (problem.batch, problem.width, problem.channels) == (batch // together, together, 588)


@pytest.mark.parametrize("config", [SM90, ONE_KERNEL], ids=["two kernels", "one kernel"])
def test_channels_that_are_last(config) -> None:
    """Rows and weight in the order of the pixels; images that are no whole tensor are copied first."""
    images, weight, bias, pos = draw(16, "int8", torch.uint8)
    last = images.to(memory_format=torch.channels_last)
    assert_same_bits(last, weight, bias, pos, config=config)
    wide = torch.nn.functional.pad(images, (0, 16)).to(memory_format=torch.channels_last)[..., :-16]
    assert_same_bits(wide, weight, bias, pos, config=config)
    memory = torch.cat([torch.zeros(1, dtype=torch.uint8), last.permute(0, 2, 3, 1).flatten()])[1:]
    unaligned = memory.view(last.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
    assert unaligned.data_ptr() % 16 and unaligned.is_contiguous(memory_format=torch.channels_last)
    assert_same_bits(unaligned, weight, bias, pos, config=config)


def plan_of(images: torch.Tensor, weight, config=None):
    return PATCH_EMBED_IMAGES.plan(PatchEmbedImagesArguments(
        images, weight.raw, weight.scale, weight.offset, None, None, weight.patch, torch.bfloat16,
        "auto", config,
    ))  # fmt: skip


def test_when_there_are_two_kernels() -> None:
    images, weight, _, _ = draw(16, "int8", torch.uint8)
    last = images.to(memory_format=torch.channels_last)
    assert not isinstance(plan_of(images, weight, Sm90ImagesConfig()), RowsChainPlan)
    assert isinstance(plan_of(images, weight, SM90), RowsChainPlan)  # who asks for it gets it
    direct = plan_of(last, weight, Sm90ImagesConfig())
    assert direct.problem.channels_last and not isinstance(direct, RowsChainPlan)
    assert not plan_of(last, weight, Sm100ImagesConfig()).problem.channels_last  # copied
    assert not isinstance(make_plan(PatchEmbedImagesProblem(**vars(HEADLINE) | FP16), arch="sm_100a"), RowsChainPlan)
    # One channel is first and last: no reason for a pass.
    gray = prepare_patch_weight(torch.randn(8, 1, 16, 16), channels=1)
    gray_images = images[:, :1].contiguous(memory_format=torch.channels_last)
    assert not plan_of(gray_images, gray).problem.channels_last


@pytest.mark.parametrize(
    "change",
    [
        {}, {"batch": 1}, {"channels_last": True, "batch": 10}, {"patch": 32, "table_rows": 49},
        {"patch": 32, "table_rows": 49, "channels_last": True}, {"patch": 64, "table_rows": 9},
        {"patch": 14, "table_rows": 256}, {"patch": 14, "table_rows": 256, "n": 1024},
        {"patch": 14, "table_rows": 256, "batch": 4},
    ],
    ids=str,
)
def test_one_kernel_reads_on_sm90_what_is_a_row_of_an_operand(change) -> None:
    sides = {"height": 192, "width": 192} if change.get("patch") == 64 else {}
    plan = make_plan(dataclasses.replace(HEADLINE, **change, **sides), arch="sm_90a")
    assert plan.launches == (plan,) and "one kernel reads the images" in plan.runs
    assert ("with the weight beside them" in plan.runs) == (plan.config.weight == "streamed")


@pytest.mark.parametrize(
    ("change", "arch", "reason"),
    [
        ({"patch": 14, "table_rows": 256}, "sm_100a", "a row of 14 pixels of a patch is not the 16 bytes"),
        ({"patch": 14, "table_rows": 256, "n": 2048}, "sm_90a", "by the model of time it takes less"),
        ({"patch": 14, "width": 126, "height": 126, "table_rows": 81}, "sm_90a", "row of 126 pixels is not whole"),
        ({"patch": 28, "table_rows": 64}, "sm_90a", "a patch's row of 28 pixels is 28 bytes: TMA reads multiples"),
        ({"patch": 32, "table_rows": 49}, "sm_100a", "a row of 32 pixels of a patch is not the 16 bytes"),
        ({"channels_last": True}, "sm_100a", "channels are last"),
        ({"channels_last": True, "channels": 9}, "sm_90a", "16 pixels and 9 channels is 144 bytes"),
        ({"patch": 14, "table_rows": 256, "precision": "bf16", "in_dtype": "uint8"}, "sm_90a", "14 pixels of 16 bits"),
        (FP16 | {"patch": 32, "table_rows": 49}, "sm_100a", "32 pixels of 16 bits is not the 32 bytes of one MMA step"),
        (FP16 | {"channels": 4}, "sm_100a", "weight of 4 channels of 16 bits leaves no room in tensor memory"),
    ],
)
def test_the_plan_says_why(change, arch, reason) -> None:
    plan = make_plan(PatchEmbedImagesProblem(**{**vars(HEADLINE), **change}), arch=arch)
    rows = dict(plan.describe())
    assert reason in rows["source"] and "programmatic dependent launch" in rows["kernel 2, patch_embed"]
    assert [part.operation for part in plan.launches] == ["patchify", "patch_embed"]
    assert plan.rows.problem.k == plan.patchify.row_elements and plan.config == plan.rows.config
    with pytest.raises(ValueError, match="chains kernels, of patchify and patch_embed"):
        compile_plan(plan)


@pytest.mark.parametrize("channels", [7, 13])
def test_rows_that_one_kernel_has_no_registers_for_are_laid_out(channels: int) -> None:
    """Repacked rows keep the weight in registers, 32 for each channel; the kernel over rows has no such limit."""
    problem = dataclasses.replace(HEADLINE, patch=14, table_rows=256, channels=channels)
    plan = make_plan(problem, arch="sm_90a")
    assert len(plan.launches) == 2 and plan.problem == problem


@pytest.mark.parametrize("change", [{"patch": 14, "table_rows": 256}, {"channels_last": True}], ids=str)
def test_who_asks_for_one_kernel_gets_it(change) -> None:
    plan = make_plan(dataclasses.replace(HEADLINE, **change), Sm90ImagesConfig())
    assert plan.launches == (plan,) and plan.config.source == ("repack" if "patch" in change else "split")


def test_rows_of_48_bytes_are_split_unless_there_are_few() -> None:
    """By the model of time; of 96 bytes gathering was faster (bench/results: 2026-11-22-h200)."""
    last = dataclasses.replace(HEADLINE, channels_last=True)
    many, few = (make_plan(dataclasses.replace(last, batch=batch), arch="sm_90a") for batch in (4736, 20))
    assert (many.config.source, many.config.stage_blocks, few.config.source) == ("split", 3, "gather")
    longer = make_plan(dataclasses.replace(last, patch=32, table_rows=49), arch="sm_90a")
    assert longer.config.source == "gather"


@pytest.mark.parametrize(
    ("patch", "channels", "fields"),
    [
        pytest.param(16, 3, {"warpgroups": 1, "cluster": 1, "weight": "streamed", "stages": 2}, marks=nightly),
        (16, 3, {"warpgroups": 2, "cluster": 2, "weight": "registers", "tile_patches": 2, "tile_images": 8}),
        (32, 3, {"warpgroups": 1, "cluster": 2, "weight": "streamed"}),
        (48, 1, {"warpgroups": 1, "cluster": 1, "weight": "streamed"}),
    ],
)
def test_rows_that_are_split_in_two(patch, channels, fields) -> None:
    """48 bytes as 32 and 16, 96 as 64 and 32, each an operand; patches and images beyond the last ones are clipped."""
    generator = torch.Generator().manual_seed(patch)
    images = torch.randint(0, 256, (5, channels, 2 * patch, 3 * patch), generator=generator, dtype=torch.uint8)
    images = images.to(memory_format=torch.channels_last) if channels > 1 else images
    weight = prepare_patch_weight(torch.randn(72, channels, patch, patch, generator=generator), channels=channels)
    pos = torch.randn(6, 72, generator=generator)
    config = Sm90ImagesConfig(**{"source": "split", "tile_patches": 4, "tile_images": 4} | fields)
    assert_same_bits(images, weight, None, pos, config=config)
    plan = plan_of(images, weight, config)
    assert plan.weight_columns_of_k == weight.raw.shape[1] and plan.config.stage_blocks == 3


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        ({}, {}, "source = 'split': must be .*strips"),
        ({"patch": 14, "table_rows": 256}, {}, "source = 'split': must be .*repack"),
        ({"channels_last": True}, {"stage_blocks": 2}, "stage_blocks = 2: must be 3: "),
        ({"channels_last": True}, {"source": "gather", "stage_blocks": 3}, "stage_blocks = 3: must be one of 1, 2: "),
        ({"channels_last": True}, {"source": "strips"}, "source = 'strips': must be one of split, gather: "),
    ],
)
def test_what_cannot_be_split(change, fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(dataclasses.replace(HEADLINE, **change), Sm90ImagesConfig(**{"source": "split"} | fields))


def test_a_row_of_patches_has_to_fit_shared_memory() -> None:
    with pytest.raises(ValueError, match="width = 5544:? .*232,848 B of shared memory.* nearest legal value: 5530"):
        make_plan(PatchEmbedImagesProblem(1, 3, 14, 5544, 14, 768), arch="sm_90a")


@pytest.mark.parametrize("config", [SM90, ONE_KERNEL], ids=["two kernels", "one kernel"])
def test_the_weight_in_the_order_of_the_pixels_is_made_once_and_anew_after_a_write(config) -> None:
    images, weight, bias, pos = draw(16, "int8", torch.uint8)
    images = images.to(memory_format=torch.channels_last)
    assert_same_bits(images, weight, bias, pos, config=config)
    before = DERIVED.misses
    assert_same_bits(images, weight, bias, pos, config=config)
    assert DERIVED.misses == before
    weight.raw.copy_(weight.raw.flip(1))
    assert_same_bits(images, weight, bias, pos, config=config)
    assert DERIVED.misses == before + 1
