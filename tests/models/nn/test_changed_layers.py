"""Layers that are changed after they were converted, weights in other memory than usual, tensors without numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels import prepare_patch_weight
from cute_kernels.models import transformers as integration
from cute_kernels.models.nn import PatchOptions, convert_layer
from tests.models.nn.embedding import embedding
from tests.models.nn.test_module import ERRORS, PRECISIONS, convolution, error, normalise, positions, uint8_images

HALF = (0.5, 0.5, 0.5)


def overlapping(layer: torch.nn.Conv2d) -> None:
    """Published feature extractors set this alone, for more patches of the same size."""
    layer.stride = (8, 8)


def in_one_number(layer: torch.nn.Conv2d) -> None:
    layer.stride = 8


def padded(layer: torch.nn.Conv2d) -> None:
    layer.padding = (4, 4)


def apart(layer: torch.nn.Conv2d) -> None:
    layer.dilation = (2, 2)


def smaller(layer: torch.nn.Conv2d) -> None:
    layer.weight = torch.nn.Parameter(torch.nn.functional.interpolate(layer.weight.detach(), size=(8, 8)))


def another_product(layer: torch.nn.Conv2d) -> None:
    product = torch.nn.functional.conv2d
    layer._conv_forward = lambda images, weight, bias: product(images, 2 * weight, bias, stride=16)


CHANGES = (overlapping, in_one_number, padded, apart, smaller, another_product)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("again", [False, True])
@torch.no_grad()
def test_a_convolution_that_is_no_product_of_patches_any_more(change: Callable, precision: str, again: bool) -> None:
    images, plain = uint8_images(), convolution()
    layer = convert_layer(convolution(), PatchOptions(precision=precision))
    layer.eval()
    layer(images)  # what was prepared before the change
    change(plain)
    change(layer)
    if again:
        convert_layer(layer, PatchOptions(precision=precision))
    with pytest.warns(UserWarning, match="the layer has .*, and is called. The plain torch module runs instead"):
        got = layer(images)
    assert torch.equal(got, plain(normalise(images, HALF, HALF)))


@pytest.mark.parametrize("change", [overlapping, in_one_number, padded, apart, another_product])
def test_such_a_convolution_is_not_converted(change: Callable) -> None:
    layer = convolution()
    change(layer)
    with pytest.raises(ValueError, match="module has a? ?(stride|padding|dilation|_conv_forward)"):
        convert_layer(layer, PatchOptions())


@torch.no_grad()
def test_its_positions_are_those_of_its_grid() -> None:
    images, pos, layer = uint8_images(), positions(), convolution().eval()
    convert_layer(layer, PatchOptions())
    overlapping(layer)
    with pytest.warns(UserWarning, match="stride"):
        bare, got = layer(images), layer(images, pos)
    table = pos.view(1, 3, 3, 24).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(table, size=bare.shape[2:], mode="bicubic")
    assert error(got, bare + resized) < 1e-6


# --- memory ----------------------------------------------------------------------------------------------------------


def features_last(weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(weight.shape, (1, *(s * len(weight) for s in weight.stride()[1:]))).copy_(weight)


MEMORY = {
    "features last": features_last,
    "channels last": lambda weight: weight.to(memory_format=torch.channels_last),
    "negated": torch._neg_view,
    "one feature": lambda weight: weight[:1].expand_as(weight),
    "of a larger one": lambda weight: torch.cat([weight, weight], 1)[:, 1:4],
}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("as_layer", [True, False])
@torch.no_grad()
def test_weights_of_any_strides(memory: str, precision: str, as_layer: bool) -> None:
    images, layer = uint8_images(), convolution()
    layer.weight = torch.nn.Parameter(MEMORY[memory](layer.weight.detach()), requires_grad=False)
    expected = layer(normalise(images, HALF, HALF))
    if as_layer:
        assert error(convert_layer(layer, PatchOptions(precision=precision))(images), expected) < ERRORS[precision]
    else:
        got = embedding(layer, precision=precision)(images)
        assert error(got, expected.flatten(2).transpose(1, 2)) < ERRORS[precision]


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_prepared_weight_is_what_kernels_read(precision: str) -> None:
    weight = convolution().weight.detach()
    usual = dict(prepare_patch_weight(weight, precision=precision).named_buffers())
    for name, buffer in prepare_patch_weight(features_last(weight), precision=precision).named_buffers():
        assert buffer.is_contiguous() and torch.equal(buffer, usual[name]), name


# --- no numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["convolution", "linear", "module"])
@pytest.mark.parametrize("precision", PRECISIONS)
@torch.no_grad()
def test_to_the_meta_device_and_back(kind: str, precision: str) -> None:
    """As tools do that measure a model, or give each process its share of it."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(768, 16) if kind == "linear" else convolution()
    layer = torch.nn.Linear(768, 16) if kind == "linear" else convolution()
    if kind == "module":
        ours = embedding(layer, precision=precision)
    else:
        ours = convert_layer(layer, PatchOptions(precision=precision))
    images = uint8_images()
    pixels = images.flatten(1)[:, : 3 * 768].view(-1, 3, 768) if kind == "linear" else images
    expected = plain((pixels / 255 - 0.5) / 0.5)
    ours(pixels)  # what is prepared before it leaves
    ours = ours.to("meta").to_empty(device="cpu")
    ours.load_state_dict(plain.state_dict())
    got = ours(pixels)
    assert error(got, expected.flatten(2).transpose(1, 2) if kind == "module" else expected) < ERRORS[precision]


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_tensors_without_memory(precision: str, gradients: bool) -> None:
    """Of `FakeTensorMode`, by which tools find the shapes, the memory and the costs of a model."""
    with FakeTensorMode(), torch.set_grad_enabled(gradients):
        layer = convert_layer(torch.nn.Conv2d(3, 24, 16, 16), PatchOptions(precision=precision))
        pos = torch.zeros(9, 24)
        embed = embedding(torch.nn.Conv2d(3, 24, 16, 16), pos_embed=pos, precision=precision)
        images = torch.empty(2, 3, 64, 48, dtype=torch.uint8)
        assert layer(images).shape == (2, 24, 4, 3)
        assert embed(images).shape == (2, 12, 24)


@torch.no_grad()
def test_images_without_memory_for_a_model_with_numbers() -> None:
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**small, image_size=64)).eval()
    integration.convert(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(pixel_values=torch.empty(2, 3, 64, 64)).last_hidden_state.shape == (2, 16, 64)
