"""`cute_kernels.clear_cache`, after writes that nothing notices, reaches what modules made.

As on a GPU before an optimiser's first step: nothing is compared there.
"""

from __future__ import annotations

import pytest
import torch
import transformers

import cute_kernels
from cute_kernels.models import transformers as integration
from cute_kernels.models.nn import PatchOptions, convert_layer
from cute_kernels.operations.runtime import constants
from tests.models.nn.embedding import embedding
from tests.models.nn.test_module import ERRORS, convolution, error, normalise, plain, positions, uint8_images

HALF = (0.5, 0.5, 0.5)


@pytest.fixture(autouse=True)
def nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants.DerivedTensors, "_is_compared", lambda *_: False)


@torch.no_grad()
def test_weight_and_interpolated_positions_of_a_module() -> None:
    module, pos, images = convolution(), positions(), uint8_images(64, 80)
    ours = embedding(module, pos_embed=pos, precision="int8")

    def expected() -> torch.Tensor:
        image = pos.view(1, 3, 3, 24).permute(0, 3, 1, 2)
        resized = torch.nn.functional.interpolate(image, size=(4, 5), mode="bicubic").flatten(2).transpose(1, 2)
        return plain(normalise(images, HALF, HALF), module, resized)

    assert error(ours(images), expected()) < ERRORS["int8"]
    for parameter in (module.weight, pos):
        parameter.data.mul_(-1)
        assert error(ours(images), expected()) > 0.1  # the write is not noticed
        cute_kernels.clear_cache()
        assert error(ours(images), expected()) < ERRORS["int8"]


@torch.no_grad()
def test_a_converted_layer() -> None:
    images = uint8_images()
    layer = convert_layer(convolution(), PatchOptions(precision="fp16"))
    layer(images)
    layer.weight.data.mul_(-1)
    cute_kernels.clear_cache()
    expected = torch.nn.functional.conv2d(normalise(images, HALF, HALF), layer.weight, layer.bias, stride=16)
    assert error(layer(images), expected) < ERRORS["fp16"]


@torch.no_grad()
def test_what_was_cleared_does_not_follow_a_cast() -> None:
    images = uint8_images()
    layer = convert_layer(convolution(), PatchOptions(precision="int8"))
    layer(images)
    layer.weight.data.mul_(-1)
    cute_kernels.clear_cache()
    layer.to(torch.bfloat16)
    expected = torch.nn.functional.conv2d(
        normalise(images, HALF, HALF), layer.weight.float(), layer.bias.float(), stride=16
    )
    assert error(layer(images).float(), expected) < 2 * ERRORS["int8"]


@torch.no_grad()
def test_a_converted_model_of_a_library() -> None:
    torch.manual_seed(0)
    config = transformers.SiglipVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, image_size=64, patch_size=16
    )
    embeddings = next(m for m in transformers.SiglipVisionModel(config).modules() if hasattr(m, "patch_embedding"))
    pixels = uint8_images(64, 64)
    integration.convert(embeddings, "fp16", mean=0.5, std=0.5)
    embeddings(pixels)
    embeddings.patch_embedding.weight.data.mul_(-1)
    cute_kernels.clear_cache()
    got = embeddings(pixels)
    integration.revert(embeddings)
    assert error(got, embeddings(normalise(pixels, HALF, HALF))) < ERRORS["fp16"]
