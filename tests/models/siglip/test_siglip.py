"""Preprocessing and seeded weights, against transformers, PIL-free arithmetic and ml_dtypes."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from cute_kernels.models import siglip
from cute_kernels.models.siglip.weights import ARCHITECTURES


def photo(height=40, width=56, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


# --- pixels ----------------------------------------------------------------------------------------------------------


def test_preprocessing_is_siglip2s():
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    images = [photo(), photo(300, 250, 1)]
    processor = SiglipImageProcessorPil(
        size={"height": 32, "width": 32}, resample=Image.Resampling.BILINEAR, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    expected = processor([Image.fromarray(i) for i in images], return_tensors="pt")["pixel_values"]
    pixels = siglip.Preprocessing().normalised(siglip.Preprocessing().resized(images, 32))
    assert pixels.shape == (2, 3, 32, 32)
    torch.testing.assert_close(pixels, expected, rtol=0, atol=1e-6)


def test_grey_and_alpha_images_become_rgb():
    grey, colour = photo()[..., 0], photo()
    alpha = np.concatenate([colour, np.full((40, 56, 1), 7, np.uint8)], axis=2)
    pixels = siglip.Preprocessing().resized([grey, colour, alpha], 16)
    assert torch.equal(pixels[0, 0], pixels[0, 2])
    assert torch.equal(pixels[1], pixels[2])


def png(values: np.ndarray, colour_type: int) -> Image.Image:
    """A 16-bit PNG ``[H, W, channels]``, written byte by byte, as Pillow opens it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return Image.open(io.BytesIO(b"\x89PNG\r\n\x1a\n" + content))


def test_sixteen_bit_images_keep_their_upper_byte():
    values = np.random.default_rng(0).integers(0, 1 << 16, (7, 9), dtype=np.uint16)
    values[0, :6] = [0, 127, 255, 256, 65279, 65535]
    expected = np.repeat((values // 256).astype(np.uint8)[..., None], 3, axis=2)
    opaque = np.full_like(values, 65535)
    images = {
        "grey": png(values[..., None], 0),
        "grey and alpha": png(np.stack([values, opaque], 2), 4),
        "colour": png(np.stack([values] * 3, 2), 2),
        "colour and alpha": png(np.stack([values] * 3 + [opaque], 2), 6),
        "little-endian": Image.fromarray(values.astype("<u2")),
        "big-endian": Image.fromarray(values.astype(">u2")),
    }
    assert images["grey"].mode == "I;16"
    assert images["big-endian"].mode == "I;16B"
    for name, image in images.items():
        assert np.array_equal(np.asarray(siglip.to_rgb(image)), expected), name


def test_every_mode_of_pillow_is_converted_or_refused_by_name():
    grey = np.random.default_rng(0).integers(0, 256, (6, 5), dtype=np.uint8)
    expected = np.repeat(grey[..., None], 3, axis=2)
    for mode in ("L", "LA", "RGB", "RGBA", "RGBX", "P", "PA"):
        image = Image.fromarray(grey).convert(mode)
        assert np.array_equal(np.asarray(siglip.to_rgb(image)), expected), mode
    assert np.array_equal(np.asarray(siglip.to_rgb(Image.fromarray(grey > 99))), np.where(expected > 99, 255, 0))
    assert np.array_equal(np.asarray(siglip.to_rgb(Image.new("CMYK", (1, 1), (255, 0, 128, 0)))), [[[0, 255, 127]]])
    for mode in ("I", "F", "La"):
        with pytest.raises(ValueError, match=f"image has mode {mode}: must be 1, L, "):
            siglip.Preprocessing().resized([Image.new(mode, (4, 4))], 4)
    for shape in ((4,), (4, 4, 1), (4, 4, 2), (4, 4, 5), (0, 4, 3), (1, 4, 4, 3)):
        with pytest.raises(ValueError, match=r"image has shape .*: must be \[H, W\], "):
            siglip.to_rgb(np.zeros(shape, np.uint8))
    with pytest.raises(TypeError, match="image is list"):
        siglip.to_rgb([[0]])


def test_float_images_are_refused():
    with pytest.raises(ValueError, match="dtype float64: must be uint8"):
        siglip.Preprocessing().resized([photo() / 255], 16)
    with pytest.raises(ValueError, match="no images"):
        siglip.Preprocessing().resized([], 16)


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "positions"), [("base-p16", 196), ("so400m-p14", 256), ("giant-opt-p16", 196)])
def test_seeded_weights(name, positions):
    features, patch = ARCHITECTURES[name]
    model, same, other = (siglip.seeded_patch_embedding(name, 224, seed) for seed in (1, 1, 2))
    assert model.weight.shape == (features, 3, patch, patch)
    assert model.pos_embed.shape == (positions, features)
    assert torch.equal(model.weight, same.weight)
    assert not torch.equal(model.weight, other.weight)
    assert model.weight.std().item() == pytest.approx((3 * patch**2) ** -0.5, rel=0.01)
    assert "seeded" in model.source


def test_seeded_weights_refuse_the_unknown():
    with pytest.raises(ValueError, match="'tiny': must be one of 'base-p16'"):
        siglip.seeded_patch_embedding("tiny")
    with pytest.raises(ValueError, match="image_size = 15"):
        siglip.seeded_patch_embedding("base-p16", 15)
    with pytest.raises(ValueError, match="image_size = 50: must be a whole number of patches of 16; nearest 48 or 64"):
        siglip.seeded_patch_embedding("base-p16", 50)
