"""Writes to parameters that autograd's version counter does not see, made by libraries: found at the next call."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import transformers

from cute_kernels import gemm, patch_embed
from cute_kernels.models import transformers as integration
from cute_kernels.models.nn import PatchOptions, convert_layer
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


def teacher_of_dino(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data.mul_(0.5).add_(-3.0 * parameter.detach().data)


def teacher_of_lists(parameters: list[torch.nn.Parameter]) -> None:
    torch._foreach_lerp_([p.data for p in parameters], [-p.data for p in parameters], 1.0)


def loader(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data.copy_(-parameter.data)


def flat_memory(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.detach().numpy()[...] *= -1


@pytest.mark.parametrize("write", [teacher_of_dino, teacher_of_lists, loader, flat_memory])
@pytest.mark.parametrize("precision", PRECISIONS)
@torch.no_grad()
def test_in_every_round(precision: str, write) -> None:
    """Of weight, bias and positions that are interpolated; the list of parameters is from before the first call."""
    module, pos, images = convolution(), positions(), uint8_images(64, 80)
    ours = embedding(module, pos_embed=pos, precision=precision, mean=0.5, std=0.5)
    parameters = list(ours.parameters())
    for _ in range(3):
        image = pos.view(1, 3, 3, 24).permute(0, 3, 1, 2)
        resized = torch.nn.functional.interpolate(image, size=(4, 5), mode="bicubic").flatten(2).transpose(1, 2)
        expected = plain(normalise(images, HALF, HALF), module, resized)
        got = ours(images)
        assert error(got, expected) < ERRORS[precision]
        assert torch.equal(ours(images), got)
        write(parameters)


@pytest.mark.parametrize("write", [teacher_of_dino, flat_memory])
@torch.no_grad()
def test_of_what_the_emulated_kernel_reads(write) -> None:
    module, pos, images = convolution(), positions(), uint8_images()
    ours = embedding(module, pos_embed=pos, precision="int8", mean=0.5, std=0.5, backend="emulator")
    for _ in range(2):
        assert error(ours(images), plain(normalise(images, HALF, HALF), module, pos)) < ERRORS["int8"]
        write(list(ours.parameters()))


@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
@torch.no_grad()
def test_the_merge_of_an_adapter(merge: str) -> None:
    torch.manual_seed(0)
    config = transformers.SiglipVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, image_size=64, patch_size=16
    )
    pixels = torch.rand(1, 3, 64, 64) * 2 - 1
    model = integration.convert(transformers.SiglipVisionModel(config).eval(), "fp16", mean=0.5, std=0.5)
    model(pixel_values=pixels)
    lora = peft.LoraConfig(r=4, target_modules=["patch_embedding"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora).eval()
    expected = adapted(pixel_values=pixels).last_hidden_state
    merged = getattr(adapted, merge)() or adapted
    assert error(merged(pixel_values=pixels).last_hidden_state, expected) < 2e-3
    if merge == "merge_adapter":
        adapted.unmerge_adapter()
        assert error(adapted(pixel_values=pixels).last_hidden_state, expected) < 2e-3


@pytest.mark.parametrize("backend", ["auto", "emulator"])
@pytest.mark.parametrize("operation", [gemm, patch_embed])
@torch.no_grad()
def test_parameters_of_the_operations_are_swapped(operation, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
    layer, rows = torch.nn.Linear(64, 16).bfloat16(), torch.rand(4, 64).bfloat16()

    def result() -> torch.Tensor:
        return operation(rows, layer.weight, bias=layer.bias, backend=backend)

    before = result()
    layer.half().bfloat16()
    assert error(result(), before) < 1e-2
    layer.bias.data.add_(1)
    assert error(result(), before + 1) < 1e-2


@pytest.mark.parametrize("backend", ["auto", "emulator"])
@pytest.mark.parametrize("sides", [(64, 80), (48, 48)], ids=["resized", "native"])
@pytest.mark.parametrize("conversion", [torch.nn.Module.bfloat16, torch.nn.Module.double])
@torch.no_grad()
def test_parameters_are_swapped(conversion, sides, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torch refuses of tensors that a weak reference points to, and of those that a view is kept of."""
    monkeypatch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
    module, images = convolution(), uint8_images(*sides)
    pos = torch.nn.Parameter(positions().detach()[None], requires_grad=backend == "auto")
    model = torch.nn.Module()
    model.proj, model.pos = copy.deepcopy(module), copy.deepcopy(pos)
    convert_layer(model.proj, PatchOptions(precision="int8", backend=backend))
    ours = embedding(module, pos_embed=pos, precision="int8", backend=backend)
    expected = ours(images)
    assert torch.equal(model.proj(images, model.pos).flatten(2).transpose(1, 2), expected)
    weight = model.proj.weight
    for converted in (model, ours):
        conversion(converted)
    assert model.proj.weight is weight and weight.dtype is ours.weight.dtype is not torch.float32
    assert error(model.proj(images, model.pos).flatten(2).transpose(1, 2), expected) < 1e-2
    assert error(ours(images), expected) < 1e-2
    model.proj.load_state_dict({name: -value for name, value in model.proj.state_dict().items()})
    layer, pixels = model.proj, normalise(images, HALF, HALF).to(weight.dtype)
    negated = torch.nn.functional.conv2d(pixels, layer.weight, layer.bias, stride=16)
    assert error(layer(images), negated) < 2e-2
