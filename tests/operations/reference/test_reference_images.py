"""The reference of the patch embed of images against exact rational arithmetic, pixel by pixel."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from cute_kernels.operations import reference
from cute_kernels.operations.reference import images as module
from tests.operations.reference import exact

N, CHANNELS, PATCH, HEIGHT, WIDTH = 3, 2, 4, 8, 12


def operands(dtype: torch.dtype, image_dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape, kernel = (2, CHANNELS, HEIGHT, WIDTH), (N, CHANNELS * PATCH * PATCH)
    if image_dtype is torch.uint8:
        images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    else:
        images = torch.randn(shape, generator=generator).to(image_dtype)
    if dtype is torch.int8:
        values = torch.randint(-128, 128, kernel, generator=generator, dtype=torch.int8)
    else:
        values = torch.randn(kernel, generator=generator).to(dtype)
    return {
        "images": images,
        "values": values,
        "scale": torch.rand(N, generator=generator) * 1e-3,
        "bias": torch.randn(N, generator=generator),
        "pos_embed": torch.randn(HEIGHT // PATCH * (WIDTH // PATCH), N, generator=generator).bfloat16(),
    }


def pixels_of(images: torch.Tensor, batch: int, position: int) -> list[Fraction]:
    """One patch, written out: channel, row, column."""
    top, left = position // (WIDTH // PATCH) * PATCH, position % (WIDTH // PATCH) * PATCH
    return [
        Fraction(float(images[batch, c, top + y, left + x]))
        for c in range(CHANNELS)
        for y in range(PATCH)
        for x in range(PATCH)
    ]


def dot(pixels: list[Fraction], weight: torch.Tensor) -> Fraction:
    return sum((p * w for p, w in zip(pixels, exact.fractions(weight), strict=True)), Fraction(0))


def accumulated(pixels: list[Fraction], weight: torch.Tensor) -> Fraction:
    """FP32, rounded once per 16 elements."""
    total = Fraction(0)
    for k in range(0, len(pixels), 16):
        total = exact.fp32(total + dot(pixels[k : k + 16], weight[k : k + 16]))
    return total


@pytest.mark.parametrize("parts", [("bias", "pos_embed"), ("bias",), ("pos_embed",), ()], ids=str)
@pytest.mark.parametrize(
    ("contract", "image_dtype"),
    [("int8", torch.uint8), ("bf16", torch.uint8), ("bf16", torch.float32),
     ("bf16", torch.float16), ("fp16", torch.float16)],
)  # fmt: skip
def test_contracts(contract, image_dtype, parts):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(contract, torch.int8)
    given = operands(dtype, image_dtype)
    used = {name: given[name] if name in parts else None for name in ("bias", "pos_embed")}
    integers = dtype is torch.int8
    scale = given["scale"] if integers else None
    out = reference.patch_embed_images(given["images"], given["values"], scale, **used, patch=PATCH)
    assert out.shape == (2, 6, N) and out.dtype is torch.bfloat16
    rounded = given["images"] if integers else given["images"].to(dtype)
    for batch in range(2):
        for position in range(6):
            pixels = pixels_of(rounded, batch, position)
            for n in range(N):
                addends = [Fraction(float(value)) for value in (
                    used["bias"][n] if "bias" in parts else 0.0,
                    used["pos_embed"][position, n] if "pos_embed" in parts else 0.0,
                )]  # fmt: skip
                table = exact.fp32(sum(addends))
                if integers:
                    total = exact.fp32(dot(pixels, given["values"][n]))
                    value = exact.fp32(total * Fraction(float(scale[n])) + table)
                else:
                    value = exact.fp32(accumulated(pixels, given["values"][n]) + table)
                assert Fraction(float(out[batch, position, n])) == exact.bf16(value)


def test_chunks_and_output_types(monkeypatch):
    given = operands(torch.int8, torch.uint8)
    call = {name: given[name] for name in ("images", "values", "scale", "bias", "pos_embed")}
    whole = reference.patch_embed_images(**call, patch=PATCH, out_dtype=torch.float32)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 5 * 32)
    assert torch.equal(reference.patch_embed_images(**call, patch=PATCH, out_dtype=torch.float32), whole)
    assert torch.equal(reference.patch_embed_images(**call, patch=PATCH), whole.bfloat16())
    assert whole.dtype is torch.float32 and not torch.equal(whole, whole.bfloat16().float())
