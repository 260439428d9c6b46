"""Checkpoints, replaced parameters, meta tensors and copies: what the model has is used, or an error tells."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from cute_kernels.models.nn import PatchOptions, convert_layer
from tests.models.nn.embedding import Embedding, embedding
from tests.models.nn.test_module import ERRORS, convolution, error, positions, uint8_images


class Plain(torch.nn.Module):
    """What a model is before."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Conv2d(3, 24, 16, 16)
        self.pos_embed = torch.nn.Parameter(torch.randn(1, 9, 24) * 0.3)
        self.prepare()

    def prepare(self) -> None:
        pass

    def expected(self, images: torch.Tensor) -> torch.Tensor:
        image = self.pos_embed.view(1, 3, 3, 24).permute(0, 3, 1, 2)
        grid = (images.shape[2] // 16, images.shape[3] // 16)
        resized = torch.nn.functional.interpolate(image, size=grid, mode="bicubic").flatten(2).transpose(1, 2)
        weight, bias = self.proj.weight, self.proj.bias
        pixels = images.to(weight.dtype) / 127.5 - 1
        return torch.nn.functional.conv2d(pixels, weight, bias, stride=16).flatten(2).transpose(1, 2) + resized


class Converted(Plain):
    """As the page on models of one's own says."""

    def prepare(self) -> None:
        convert_layer(self.proj, PatchOptions(precision="int8"))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.proj(images, self.pos_embed).flatten(2).transpose(1, 2)


def build(kind: type[Plain], seed: int) -> Plain:
    torch.manual_seed(seed)
    return kind().eval().requires_grad_(False)


def assign(model: Plain) -> Plain:
    model.load_state_dict(build(type(model), 1).state_dict(), assign=True)
    return model


def assign_plain(model: Plain) -> Plain:
    model.load_state_dict(build(Plain, 1).state_dict(), assign=True, strict=False)
    return model


def from_meta(model: Plain) -> Plain:
    with torch.device("meta"):
        empty = build(type(model), 0)
    empty.to_empty(device="cpu")
    for parameter in empty.parameters():
        parameter.fill_(float("nan"))
    empty.load_state_dict(build(Plain, 1).state_dict(), strict=False)
    return empty


def replace_weight(model: Plain) -> Plain:
    model.proj.weight = torch.nn.Parameter(build(Plain, 1).proj.weight, requires_grad=False)
    return model


def replace_bias(model: Plain) -> Plain:
    model.proj.bias = torch.nn.Parameter(build(Plain, 1).proj.bias * 100, requires_grad=False)
    return model


CHANGES = [assign, assign_plain, from_meta, replace_weight, replace_bias]


@pytest.mark.parametrize("size", [(48, 48), (64, 80)])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_converted_layer_uses_what_the_model_has(change: Callable[[Plain], Plain], size: tuple[int, int]) -> None:
    images, model = uint8_images(*size), build(Converted, 0)
    assert list(model.state_dict()) == list(build(Plain, 0).state_dict())
    before = model(images)
    assert error(before, model.expected(images)) < ERRORS["int8"]
    model = change(model)
    assert error(model(images), model.expected(images)) < ERRORS["int8"]
    assert error(model(images), before) > 0.1
    model.pos_embed = torch.nn.Parameter(-model.pos_embed, requires_grad=False)
    assert error(model(images), model.expected(images)) < ERRORS["int8"]


@pytest.mark.parametrize("as_buffer", [False, True])
@torch.no_grad()
def test_alone_it_saves_and_loads_all_that_it_holds(as_buffer: bool) -> None:
    def make(seed: int) -> Embedding:
        pos = positions().detach() * (1 + seed)
        return embedding(
            convolution(seed=seed), pos_embed=pos if as_buffer else torch.nn.Parameter(pos), precision="int8"
        )

    images, source = uint8_images(64, 80), make(1)
    state = source.state_dict()
    assert sorted(state) == ["bias", "pos_embed", "weight"]
    for kwargs in ({}, {"assign": True}):
        ours = make(0)
        ours(images)
        ours.load_state_dict(state, **kwargs)
        assert torch.equal(ours(images), source(images))
    with torch.device("meta"):
        empty = make(0)
    empty.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(empty(images), source(images))
    del state["pos_embed"]
    with pytest.raises(RuntimeError, match="Missing key.*pos_embed"):
        make(0).load_state_dict(state)


@torch.no_grad()
def test_what_it_loads_itself_is_used_beside_its_source() -> None:
    module, images = convolution(), uint8_images()
    ours = embedding(module, precision="int8")
    other = embedding(convolution(seed=1), precision="int8")
    ours.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(ours(images), other(images))


def test_gradients_reach_the_positions_of_a_converted_layer() -> None:
    """The plain convolution runs and the positions are an addition, interpolated with a backward."""
    images, model = uint8_images(64, 80), build(Converted, 0).requires_grad_(True).train()
    gradients = []
    for run in (model, model.expected):
        model.zero_grad()
        run(images).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for got, expected in zip(*gradients, strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_positions_that_do_not_fit_a_converted_layer() -> None:
    layer = convert_layer(convolution(), PatchOptions(precision="int8"))
    pos = positions()
    for arguments, message in (
        ((uint8_images(), pos[:8]), "square grid"),
        ((uint8_images(), pos[:, :16]), "N = 24"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(*arguments)
    with pytest.raises(ValueError, match="rows x columns must be S"):
        layer(uint8_images(), pos, grid=(2, 4))
    with pytest.raises(TypeError, match="pos_embed is list"):
        layer(uint8_images(), [0.0])
    with pytest.raises(ValueError, match="interpolation = 'nearest'"):
        convert_layer(convolution(), PatchOptions(), interpolation="nearest")


@torch.no_grad()
def test_an_automatic_precision_follows_the_type_of_the_weight() -> None:
    """What a type cannot hold is lost, as in a plain layer: nothing is kept that was made from the type before."""
    images = torch.randn(1, 3, 32, 32)
    plain = convolution(bias=False).bfloat16()
    plain.weight.mul_(2.0**-30)  # of bfloat16, and 0 in float16
    layer = convert_layer(copy.deepcopy(plain), PatchOptions(precision="auto")).eval()
    assert layer(images.bfloat16()).any()
    for module in (plain, layer):
        module.to(torch.float16).to(torch.bfloat16)
    assert not plain(images.bfloat16()).any() and not layer(images.bfloat16()).any()
