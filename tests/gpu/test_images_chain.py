"""Patches whose rows are no strips, on a GPU: gathered by one kernel, or laid out by a pass, and what is remembered."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import (
    Sm90ImagesConfig,
    Sm100ImagesConfig,
    patch_embed_images,
    prepare_patch_weight,
)
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES
from tests.gpu import architecture, harness
from tests.gpu.harness import DRY_RUN

SHAPES = [(2, 2, 3, 40)] if DRY_RUN else [(1, 16, 16, 768), (9, 16, 16, 1152), (300, 7, 7, 768), (67, 3, 5, 40)]
"""Images, patches down and across, features."""


def draw(shape: tuple[int, int, int, int], patch: int, precision: str, dtype: torch.dtype, seed: int = 0):
    """Images, weight, bias and positions. Floating-point pixels and weights are such that sums are exact."""
    batch, down, across, n = shape
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def integers(low: int, high: int, *extents: int) -> torch.Tensor:
        return torch.randint(low, high, extents, generator=generator, device="cuda")

    extents = (batch, 3, down * patch, across * patch)
    images = integers(0, 256, *extents).to(torch.uint8) if dtype is torch.uint8 else integers(-4, 5, *extents).to(dtype)
    weight = prepare_patch_weight(integers(-4, 5, n, 3, patch, patch).float(), precision=precision)
    pos = torch.randn(down * across, n, generator=generator, device="cuda")
    return images, weight, torch.randn(n, generator=generator, device="cuda"), pos


def assert_same_bits(*arguments) -> None:
    out = patch_embed_images(*arguments)
    expected = patch_embed_images(*arguments, backend="reference")
    differ = int((out.view(torch.int16) != expected.view(torch.int16)).sum())
    assert differ == 0, f"{differ} of {out.numel()} elements differ from the contract"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("patch", "precision", "dtype", "layout"),
    [
        (14, "int8", torch.uint8, torch.contiguous_format),
        (32, "int8", torch.uint8, torch.contiguous_format),
        (64, "int8", torch.uint8, torch.contiguous_format),
        (16, "int8", torch.uint8, torch.channels_last),
        (32, "int8", torch.uint8, torch.channels_last),
        (14, "int8", torch.uint8, torch.channels_last),
        (14, "bf16", torch.bfloat16, torch.contiguous_format),
        (14, "fp16", torch.float32, torch.contiguous_format),
    ],
)
def test_every_bit(shape, patch, precision, dtype, layout) -> None:
    images, *arguments = draw(shape, patch, precision, dtype)
    assert_same_bits(images.contiguous(memory_format=layout), *arguments)


ONE_KERNEL = {
    "sm_90a": [
        (Sm90ImagesConfig(), 14, torch.contiguous_format),
        (Sm90ImagesConfig(), 16, torch.channels_last),
        (Sm90ImagesConfig(source="split"), 16, torch.channels_last),
        (Sm90ImagesConfig(source="split", warpgroups=3), 16, torch.channels_last),
        (Sm90ImagesConfig(source="split"), 32, torch.channels_last),
    ],
    "sm_100a": [(Sm100ImagesConfig(), 16, torch.channels_last)],
}
"""Configurations of kernels that read images themselves; SM100's gets a copy of images whose channels are last."""


@pytest.mark.parametrize(("config", "patch", "layout"), ONE_KERNEL.get(architecture.at_hand(), ()), ids=str)
@pytest.mark.parametrize("shape", [(9, 1, 8, 40)] if DRY_RUN else [(9, 16, 16, 1152), (300, 8, 24, 768)], ids=str)
def test_one_kernel_where_two_are_the_default(shape, patch, layout, config) -> None:
    images, *arguments = draw(shape, patch, "int8", torch.uint8)
    out = patch_embed_images(images.contiguous(memory_format=layout), *arguments, config=config)
    expected = patch_embed_images(images, *arguments, backend="reference")
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_repeated_calls_read_their_new_images(layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a call are written over by the next one, which may not begin before they are read."""
    shape, made = SHAPES[-1], harness.long_ways(monkeypatch, PATCH_EMBED_IMAGES)
    _, *arguments = draw(shape, 14, "int8", torch.uint8)
    batches = [draw(shape, 14, "int8", torch.uint8, seed)[0].contiguous(memory_format=layout) for seed in range(6)]
    expected = [patch_embed_images(images, *arguments, backend="reference") for images in batches]
    outs = [patch_embed_images(images, *arguments) for images in batches]
    assert len(made) == 1
    assert all(torch.equal(out, same) for out, same in zip(outs, expected, strict=True))


@pytest.mark.parametrize(
    ("patch", "precision", "dtype", "layout"),
    [
        (14, "int8", torch.uint8, torch.contiguous_format),
        (14, "bf16", torch.bfloat16, torch.contiguous_format),
        (16, "int8", torch.uint8, torch.channels_last),
        (32, "int8", torch.uint8, torch.channels_last),
    ],
)
def test_rows_are_complete_before_they_are_read(patch, precision, dtype, layout) -> None:
    """The long way, then remembered twice, on other images and on another stream."""
    shape = (18, 1, 2, 40) if DRY_RUN else (300, 7, 7, 768)
    _, *arguments = draw(shape, patch, precision, dtype)
    for seed in range(1 if DRY_RUN else 3):
        images = draw(shape, patch, precision, dtype, seed)[0].contiguous(memory_format=layout)
        expected = patch_embed_images(images, *arguments, backend="reference")
        out = patch_embed_images(images, *arguments)
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
    if not DRY_RUN:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = patch_embed_images(images, *arguments)
        stream.synchronize()
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


@pytest.mark.gpu_only("a CUDA graph")
def test_both_kernels_in_a_graph() -> None:
    images, *arguments = draw(SHAPES[0], 14, "int8", torch.uint8)
    patch_embed_images(images, *arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = patch_embed_images(images, *arguments)
    images.copy_(images.flip(0, 2))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, patch_embed_images(images, *arguments, backend="reference"))
