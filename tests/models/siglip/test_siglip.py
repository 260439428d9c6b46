"""Preprocessing, patches, quantisation and checkpoints, against transformers, PIL-free arithmetic and ml_dtypes."""

from __future__ import annotations

import io
import json
import struct
import zlib

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from cute_kernels import patch_embed
from cute_kernels.models import siglip
from cute_kernels.models.siglip.weights import ARCHITECTURES
from cute_kernels.operations import reference


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


def tiny_config(**changes) -> dict:
    return {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
    } | changes  # fmt: skip


def write_fixed_resolution(directory, whole_model=False):
    torch.manual_seed(0)
    vision = tiny_config(image_size=22)  # five patches and a rest of two pixels
    if whole_model:
        text = tiny_config(vocab_size=16) | {"max_position_embeddings": 8}
        text.pop("patch_size")
        config = transformers.SiglipConfig(text_config=text, vision_config=vision)
        model = transformers.SiglipModel(config)
    else:
        model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**vision))
    model.save_pretrained(directory)
    return model.vision_model.embeddings if whole_model or hasattr(model, "vision_model") else model.embeddings


@pytest.mark.parametrize("whole_model", [False, True])
def test_fixed_resolution_checkpoint(tmp_path, whole_model):
    embeddings = write_fixed_resolution(tmp_path, whole_model)
    loaded = siglip.load_patch_embedding(tmp_path)
    assert (loaded.image_size, loaded.patch_size, loaded.grid) == (22, 4, 5)
    pixels = loaded.preprocessing.normalised(loaded.preprocessing.resized([photo(), photo(seed=1)], loaded.image_size))
    with torch.no_grad():
        expected = embeddings(pixels)
    out = reference.patch_embed_conv2d(pixels, loaded.weight, loaded.bias, loaded.pos_embed)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert_close_after_quantisation(loaded, pixels, expected)


def test_naflex_checkpoint(tmp_path):
    torch.manual_seed(0)
    model = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**tiny_config(num_patches=25)))
    model.save_pretrained(tmp_path)
    embeddings = model.vision_model.embeddings if hasattr(model, "vision_model") else model.embeddings
    loaded = siglip.load_patch_embedding(tmp_path)
    assert (loaded.image_size, loaded.patch_size, loaded.grid) == (20, 4, 5)
    pixels = loaded.preprocessing.normalised(loaded.preprocessing.resized([photo(), photo(seed=1)], 20))
    # transformers flattens its own patches, (row, column, channel).
    from transformers.models.siglip2.image_processing_pil_siglip2 import convert_image_to_patches

    patches = torch.stack([torch.from_numpy(convert_image_to_patches(image.numpy(), 4)) for image in pixels])
    with torch.no_grad():
        expected = embeddings(patches, torch.tensor([[5, 5]] * 2))
    out = reference.patch_embed_conv2d(pixels, loaded.weight, loaded.bias, loaded.pos_embed)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert_close_after_quantisation(loaded, pixels, expected)


def assert_close_after_quantisation(model, pixels, expected):
    """FP8 has 3 mantissa bits; over 48 products its errors average out to a few percent of the result's spread."""
    side = model.grid * model.patch_size
    x = reference.patch_rows(pixels[:, :, :side, :side], model.patch_size).unflatten(0, (pixels.shape[0], -1))
    scales = [float(each.abs().amax()) / 448 for each in (x, model.rows())]
    x, weight = ((each / s).to(torch.float8_e4m3fn) for each, s in zip((x, model.rows()), scales, strict=True))
    out = patch_embed(x, weight, model.bias, model.pos_embed, scale_a=scales[0], scale_b=scales[1])
    assert (out.float() - expected).std() < 0.06 * expected.std()


def test_incomplete_checkpoint_is_refused(tmp_path):
    write_fixed_resolution(tmp_path)
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    kept = {name: value for name, value in weights.items() if not name.endswith("patch_embedding.bias")}
    assert len(kept) == len(weights) - 1
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks .*patch_embedding.bias"):
        siglip.load_patch_embedding(tmp_path)


def test_other_models_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        siglip.load_patch_embedding(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(ValueError, match="'clip' model: must be one of 'siglip'"):
        siglip.load_patch_embedding(tmp_path)


def test_damaged_checkpoints_are_refused_by_name(tmp_path):
    write_fixed_resolution(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, text = weights.read_bytes(), config.read_text()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be read as a checkpoint"):
        siglip.load_patch_embedding(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be read as a checkpoint"):
        siglip.load_patch_embedding(tmp_path)
    for content, message in ((text[:-9], "is no JSON"), ("[]", "holds list: must be an object")):
        config.write_text(content)
        with pytest.raises(ValueError, match=f"config.json {message}"):
            siglip.load_patch_embedding(tmp_path)


def test_preprocessing_of_the_checkpoint(tmp_path):
    write_fixed_resolution(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    valid = {
        "resample": 3, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], "size": {"height": 22, "width": 22},
        "rescale_factor": 0.00392156862745098, "do_resize": True,
    }  # fmt: skip
    path.write_text(json.dumps(valid))
    loaded = siglip.load_patch_embedding(tmp_path).preprocessing
    assert loaded == siglip.Preprocessing("bicubic", (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    for change, message in [
        ({"resample": 0}, "resample = 0"),
        ({"size": {"height": 24, "width": 24}}, "takes 22 x 22"),
        ({"do_resize": False}, "do_resize = False"),
        ({"rescale_factor": 1.0}, "rescale_factor = 1.0"),
    ]:
        path.write_text(json.dumps(valid | change))
        with pytest.raises(ValueError, match=message):
            siglip.load_patch_embedding(tmp_path)
