"""`patch_embed_images`: against normalisation and convolution, on the emulator bit for bit, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels import (
    Sm90GatherConfig,
    Sm90GemmConfig,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    Sm100ImagesConfig,
    patch_embed_images,
    prepare_patch_weight,
)
from cute_kernels.operations import patch_embed_images as patch_embed_images_operation
from cute_kernels.operations import reference
from cute_kernels.operations.patch_weight import PatchWeight
from cute_kernels.operations.runtime.constants import DERIVED
from tests.nightly import examples

SMALL_100 = Sm100ImagesConfig(tile_patches=4, tile_images=4, cta_group=1, stages=3, stage_blocks=1)
SMALL = Sm90ImagesConfig(tile_patches=4, tile_images=4, warpgroups=1, cluster=1, stages=3, stage_blocks=1)
SMALL_GATHER = Sm90GatherConfig(1, 1, 128, 1, 64, 1, stages=3)
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)


def pixels(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gray_weight(n: int = 40, precision: str = "int8", patch: int = 16) -> PatchWeight:
    return prepare_patch_weight(numbers(n, 1, patch, patch) * 0.1, precision=precision, channels=1)


def assert_same_bits(*arguments, **keywords) -> torch.Tensor:
    out = patch_embed_images(*arguments, **keywords, backend="emulator")
    expected = patch_embed_images(*arguments, **keywords, backend="reference")
    assert out.shape == expected.shape and out.is_contiguous()
    assert out.dtype is keywords.get("out_dtype", torch.bfloat16)
    bits = {2: torch.int16, 4: torch.int32}[out.itemsize]
    wrong = out.view(bits) != expected.view(bits)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {wrong.nonzero()[0]}"
    return out


@pytest.mark.parametrize(("precision", "tolerance"), [("int8", 0.02), ("bf16", 0.01)])
@pytest.mark.parametrize("patch", [16, 14])
def test_it_is_normalisation_convolution_and_positions(precision: str, tolerance: float, patch: int) -> None:
    """Root mean square of the difference to FP64, relative to the part without bias and positions."""
    images, kernel = pixels(2, 3, 3 * patch, 2 * patch), numbers(32, 3, patch, patch) * 0.05
    bias, pos = numbers(32, seed=2), numbers(6, 32, seed=3)
    weight = prepare_patch_weight(kernel, precision=precision, mean=MEAN, std=STD)
    mean, std = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in (MEAN, STD))
    normalised = (images.double() / 255 - mean) / std
    product = torch.nn.functional.conv2d(normalised, kernel.double(), stride=patch).flatten(2).transpose(1, 2)
    out = patch_embed_images(images, weight, bias, pos, out_dtype=torch.float32)
    assert out.shape == (2, 6, 32)
    error = out.double() - (product + bias + pos)
    assert error.square().mean().sqrt() < tolerance * product.square().mean().sqrt()
    if precision == "bf16":
        given_normalised = patch_embed_images(normalised.float(), weight, bias, pos, out_dtype=torch.float32)
        error = given_normalised.double() - (product + bias + pos)
        assert error.square().mean().sqrt() < tolerance * product.square().mean().sqrt()


def test_model_width_with_the_default_config() -> None:
    """768 features, three channels; bias, positions and the offset of the normalisation in one table."""
    weight = prepare_patch_weight(numbers(768, 3, 16, 16) * 0.05, mean=MEAN, std=STD)
    out = assert_same_bits(pixels(2, 3, 16, 224), weight, numbers(768, seed=2), numbers(14, 768, seed=3))
    assert out.shape == (2, 14, 768)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(6, 60))
@given(
    batch=st.integers(1, 6),
    grid=st.tuples(st.integers(1, 3), st.integers(4, 6)),
    n=st.integers(1, 12).map(lambda i: 8 * i),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    with_bias=st.booleans(),
    with_pos=st.booleans(),
    layout=st.sampled_from(["contiguous", "channels_last", "sliced", "unaligned"]),
    kind=st.sampled_from([("int8", SMALL), ("int8", SMALL_100)]),
    seed=st.integers(0, 2**20),
)
def test_any_call(batch, grid, n, dtype, with_bias, with_pos, layout, kind, seed) -> None:
    """Images of any layout: TMA reads contiguous ones that begin on 16 bytes, others are copied, not misread."""
    height, width = 16 * grid[0], 16 * grid[1]
    images = pixels(batch, 1, height, width, seed=seed)
    if layout == "channels_last":
        images = images.to(memory_format=torch.channels_last)
    elif layout == "sliced":
        images = pixels(batch, 1, height, width + 3, seed=seed)[..., 2:-1]
    elif layout == "unaligned":
        images = pixels(images.numel() + 1, seed=seed)[1:].view(images.shape)
    bias = numbers(n, seed=seed).to(dtype) if with_bias else None
    pos = numbers(grid[0] * grid[1], n, seed=seed + 1).to(dtype) if with_pos else None
    precision, config = kind
    assert_same_bits(images, gray_weight(n, precision), bias, pos, config=config)


# Other types and another table are another kernel.
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(5, 60))
@given(
    kind=st.sampled_from([
        ("bf16", torch.bfloat16, True, SMALL_GATHER), ("fp16", torch.float32, False, SMALL_GATHER),
        ("bf16", torch.bfloat16, True, SMALL_100),
    ]),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float16, torch.float32]),
    batch=st.integers(1, 4),
    grid=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    n=st.integers(1, 9).map(lambda i: 8 * i),
    with_bias=st.booleans(),
    channels_last=st.booleans(),
    seed=st.integers(0, 2**20),
)  # fmt: skip
def test_any_call_with_floating_point_weights(
    kind, dtype, batch, grid, n, with_bias, channels_last, seed
) -> None:
    """Pixels of another type are rounded to the weight's; raw ones are multiplied by the weight made for them."""
    precision, out_dtype, with_pos, config = kind
    images = pixels(batch, 1, 16 * grid[0], 16 * grid[1], seed=seed)
    if dtype is not torch.uint8:
        images = ((images.float() / 255 - 0.5) / 0.5).to(dtype)
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    bias = numbers(n, seed=seed) if with_bias else None
    pos = numbers(grid[0] * grid[1], n, seed=seed + 1) if with_pos else None
    assert_same_bits(images, gray_weight(n, precision), bias, pos, out_dtype=out_dtype, config=config)


def test_a_config_of_the_other_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="precision = 'int8': must be one of bf16, fp16: .*floating-point numbers"):
        patch_embed_images(IMAGES, gray_weight(), config=SMALL_GATHER)
    with pytest.raises(ValueError, match="precision = 'bf16': must be int8: .*strip's pixels are bytes"):
        patch_embed_images(IMAGES, gray_weight(precision="bf16"), config=SMALL)


def test_bias_offset_and_positions_are_added_in_this_order() -> None:
    """FP32 additions: (bias + offset) + position, by hand."""
    weight, images = gray_weight(8), pixels(1, 1, 16, 64)
    bias, pos = numbers(8) * 1e3, numbers(4, 8, seed=2) * 1e-3
    table = (bias + weight.offset) + pos
    sums = reference.images.integer_sums(reference.images.patch_rows(images, 16), weight.raw).float()
    expected = reference.fma32(sums, weight.scale.expand_as(sums), table).bfloat16()
    assert torch.equal(patch_embed_images(images, weight, bias, pos)[0], expected)
    for config in (SMALL, SMALL_100):
        assert torch.equal(assert_same_bits(images, weight, bias, pos, config=config)[0], expected)


def test_the_table_is_made_once_and_anew_after_a_write() -> None:
    weight, images, pos = gray_weight(), pixels(1, 1, 16, 64), numbers(4, 40)
    assert_same_bits(images, weight, None, pos, config=SMALL)
    before = DERIVED.misses
    assert_same_bits(images, weight, None, pos, config=SMALL)
    assert DERIVED.misses == before
    pos += 1
    assert_same_bits(images, weight, None, pos, config=SMALL)
    assert DERIVED.misses == before + 1


@pytest.mark.parametrize("backend", ["auto", "emulator", "reference"])
def test_no_images(backend: str) -> None:
    out = patch_embed_images(torch.empty(0, 1, 32, 64, dtype=torch.uint8), gray_weight(), backend=backend)
    assert out.shape == (0, 8, 40) and out.dtype is torch.bfloat16
    with pytest.raises(ValueError, match="H = 33"):
        patch_embed_images(torch.empty(0, 1, 33, 64, dtype=torch.uint8), gray_weight(), backend=backend)
    with pytest.raises(ValueError, match="stages = 1"):
        config = Sm90ImagesConfig(stages=1)
        patch_embed_images(torch.empty(0, 1, 32, 64, dtype=torch.uint8), gray_weight(), config=config, backend=backend)


IMAGES = pixels(2, 1, 32, 64)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"images": IMAGES.numpy()}, TypeError, "images is ndarray: must be torch.Tensor"),
        ({"images": IMAGES.int()}, TypeError, "images has dtype torch.int32 .*must be torch.uint8"),
        ({"images": IMAGES.float()}, TypeError, "images has dtype torch.float32 with a weight of precision 'int8'"),
        ({"images": IMAGES[0]}, ValueError, r"images has shape \[1, 32, 64\]: must be \[B, C, H, W\]"),
        ({"images": pixels(2, 3, 32, 64)}, ValueError, "images has C = 3: must be C = 1, which weight was prepared"),
        ({"images": pixels(2, 1, 40, 64)}, ValueError, "images has H = 40: must be .*multiples of 16, nearest 48"),
        ({"images": pixels(2, 1, 32, 8)}, ValueError, "images has W = 8: must be .*nearest 16"),
        ({"images": IMAGES.to_sparse()}, TypeError, "images has layout torch.sparse_coo"),
        ({"bias": torch.nested.nested_tensor(list(numbers(5, 8)))}, TypeError, "bias is a nested tensor: must be"),
        ({"weight": numbers(40, 256)}, TypeError, "weight is Tensor: must be what .*prepare_patch_weight returns"),
        ({"bias": numbers(41)}, ValueError, r"bias has shape \[41\]: must be \[N\] = \[40\]"),
        ({"bias": numbers(40).double()}, TypeError, "bias has dtype torch.float64"),
        ({"bias": 1.0}, TypeError, "bias is float: must be torch.Tensor"),
        ({"pos_embed": numbers(7, 40)}, ValueError, r"pos_embed has shape \[7, 40\]: must be \[S, N\] = \[8, 40\]"),
        ({"pos_embed": numbers(8, 40).to("meta")}, ValueError, "pos_embed is on meta and images is on cpu"),
        ({"out_dtype": torch.int8}, ValueError, "out_dtype = torch.int8: must be one of torch.bfloat16"),
        ({"out_dtype": "bfloat16"}, TypeError, "out_dtype is str: must be torch.dtype"),
        ({"backend": "cuda"}, ValueError, "backend = 'cuda': must be"),
        ({"config": Sm90GemmConfig()}, TypeError, "config is Sm90GemmConfig: must be .*Sm90ImagesConfig"),
        ({"config": Sm90PatchEmbedConfig(warpgroups=4)}, ValueError, "warpgroups = 4: must be"),
        ({"config": Sm90ImagesConfig(tile_patches=17)}, ValueError, "tile_patches = 17: must be"),
        ({"config": Sm100ImagesConfig(tile_patches=17)}, ValueError, "tile_patches = 17: must be"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "emulator"])
def test_bad_input_is_refused_by_name(change: dict, error: type[Exception], message: str, backend: str) -> None:
    arguments = {"images": IMAGES, "weight": gray_weight(), "backend": backend} | change
    with pytest.raises(error, match=message):
        patch_embed_images(**arguments)


PATCHES_OF_14 = pixels(2, 1, 28, 28)


@pytest.mark.parametrize(
    ("images", "weight", "keywords", "message"),
    [
        (IMAGES, gray_weight(), {"out_dtype": torch.float32}, "out_dtype = 'float32': must be"),
        (PATCHES_OF_14, gray_weight(patch=14), {"out_dtype": torch.float32}, "out_dtype = 'float32': must be"),
        (PATCHES_OF_14, gray_weight(patch=14), {"config": SMALL}, "patch = 14: must be"),
        (PATCHES_OF_14, gray_weight(8, "bf16", 14), {"config": SMALL_GATHER}, "patch = 14: must be"),
    ],
)
def test_what_has_no_kernel_is_plain_torch_elsewhere(images, weight, keywords, message: str) -> None:
    if "config" not in keywords:
        assert patch_embed_images(images, weight, **keywords).shape[0] == 2
    with pytest.raises(ValueError, match=message):
        patch_embed_images(images, weight, **keywords, backend="emulator")


def test_operator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Schema, fake tensors and autograd by torch's own check; one node under torch.compile."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch would set it, and leave it
    weight = gray_weight()
    flat = (IMAGES, weight.raw, weight.scale, weight.offset, None, None, 16, torch.bfloat16, "auto")
    torch.library.opcheck(torch.ops.cute_kernels.patch_embed_images, flat)
    compiled = torch.compile(patch_embed_images, fullgraph=True, backend="eager")
    assert torch.equal(compiled(IMAGES, weight), patch_embed_images(IMAGES, weight))
    torch.compiler.reset()
    wide = prepare_patch_weight(numbers(40, 3, 16, 16), precision="bf16").normalised
    tensors = numbers(1, 3, 32, 32).bfloat16(), wide, None, None, numbers(40), None
    given = (None if tensor is None else tensor.requires_grad_() for tensor in tensors)
    torch.library.opcheck(torch.ops.cute_kernels.patch_embed_images, (*given, 16, torch.bfloat16, "auto"))


def test_pixels_of_another_type_are_rounded_before_a_remembered_call_is_looked_for(monkeypatch) -> None:
    """What the kernel multiplies is a new tensor in every such call; with it the second one is as short as any."""
    seen: list[torch.Tensor] = []

    class Remembered:
        plans: dict = {}

        def run(self, values: tuple, gradients: bool) -> str | None:
            images, weight, *_ = values
            seen.append(images)
            return "found" if images.dtype == weight.dtype else None

    monkeypatch.setattr(patch_embed_images_operation.PATCH_EMBED_IMAGES, "repeated", Remembered())
    weight, smaller = (prepare_patch_weight(numbers(8, 3, side, side), precision="bf16") for side in (16, 14))
    for images in (pixels(1, 3, 16, 16), numbers(1, 3, 16, 16), numbers(1, 3, 16, 16).half()):
        assert patch_embed_images(images, weight) == "found"
        assert torch.equal(seen[-1], images.bfloat16()) and seen[-2] is images
    count = len(seen)
    given = numbers(1, 3, 16, 16).bfloat16()
    assert patch_embed_images(given, weight) == "found" and seen[count:] == [given]
    # The pass in front of the kernel over rows rounds by itself.
    count = len(seen)
    out = patch_embed_images(images := pixels(1, 3, 14, 14), smaller)
    assert torch.equal(out, patch_embed_images(images, smaller, backend="reference"))
    assert len(seen) > count and all(found is images for found in seen[count:])
