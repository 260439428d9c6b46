"""`torch.inference_mode`: its tensors have no version counter, and what is made in it is found again all the same."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.models.nn.layers import convert_layer
from cute_kernels.models.nn.options import PatchOptions
from tests.models.nn.embedding import embedding
from tests.models.nn.test_module import (
    ERRORS,
    PRECISIONS,
    convolution,
    error,
    normalise,
    plain,
    positions,
    uint8_images,
)

HALF = (0.5, 0.5, 0.5)


@pytest.mark.parametrize("precision", PRECISIONS)
@torch.inference_mode()
def test_writes_to_parameters_that_were_made_in_inference_mode(precision: str) -> None:
    """Of the weight, and of a position embedding that is interpolated and kept."""
    module, pos, images = convolution(), positions(), uint8_images(64, 80)
    assert module.weight.is_inference() and pos.is_inference()
    ours = embedding(module, pos_embed=pos, precision=precision)

    def expected() -> torch.Tensor:
        image = pos.view(1, 3, 3, 24).permute(0, 3, 1, 2)
        resized = torch.nn.functional.interpolate(image, size=(4, 5), mode="bicubic").flatten(2).transpose(1, 2)
        return plain(normalise(images, HALF, HALF), module, resized)

    before = ours(images)
    assert error(before, expected()) < ERRORS[precision] and torch.equal(ours(images), before)
    for parameter in (module.weight, pos):
        parameter.mul_(-1)
        assert error(ours(images), expected()) < ERRORS[precision]
    module.load_state_dict(convolution(seed=3).state_dict())
    assert error(ours(images), expected()) < ERRORS[precision]


@torch.inference_mode()
def test_what_is_unchanged_is_not_made_again() -> None:
    module, pos, images = convolution(), positions(), uint8_images(64, 80)
    ours = embedding(module, pos_embed=pos, precision="int8")
    ours(images)
    made = ours.engine.prepared("images", ours.weight)
    ours(images)
    assert ours.engine.prepared("images", ours.weight) is made and ours.positions.misses == 1


@torch.inference_mode()
def test_a_cast_after_a_write_makes_it_anew() -> None:
    ours = convert_layer(convolution(), PatchOptions(precision="int8"))
    images = uint8_images()
    ours(images)
    ours.weight.mul_(-1)
    ours.to(torch.bfloat16)
    fresh = convert_layer(convolution(), PatchOptions(precision="int8")).to(torch.bfloat16)
    fresh.weight.copy_(ours.weight)
    assert torch.equal(ours(images), fresh(images))


def test_what_is_made_in_inference_mode_has_a_version_counter() -> None:
    """Operations find a tensor without one again by nothing, and would lay out weight and positions at every call."""
    ours = embedding(convolution(), pos_embed=positions(), precision="int8")
    with torch.inference_mode():
        ours(uint8_images(64, 80))
    weight = ours.engine.prepared("images", ours.weight)
    table = ours.positions.table(ours.pos_embed, (3, 3), (4, 5))
    assert ours.positions.misses == 1
    assert not any(tensor.is_inference() for tensor in (*weight.buffers(), table))
