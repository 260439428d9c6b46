"""The vLLM plugin's mechanics, against a stand-in for the few names of vLLM that it uses.

tests/integrations/test_vllm.py has it in vLLM itself, which does not install beside this package's pins.
"""

from __future__ import annotations

import sys
import types
from importlib import metadata

import pytest
import torch
from torch.nn.utils import parametrize

from cute_kernels.integrations import vllm as integration


@pytest.fixture
def vllm(monkeypatch):
    """``CustomOp`` creates what is registered under its class's name and dispatches to one of the forwards."""
    registry: dict[str, type] = {}

    class CustomOp(torch.nn.Module):
        def __new__(cls, *_, **__):
            return super().__new__(registry.get(cls.__name__, cls))

        def __init__(self):
            super().__init__()
            self.chosen = self.forward_native

        def forward(self, x):
            return self.chosen(x)

        @classmethod
        def register_oot(cls, replacement):
            assert cls.__name__ not in registry
            replacement.name = cls.__name__
            registry[cls.__name__] = replacement
            return replacement

    class Conv2dLayer(CustomOp):
        def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, bias=True):
            super().__init__()
            self.in_channels, self.groups = in_channels, 1
            self.kernel_size, self.stride = (kernel_size,) * 2, (stride,) * 2
            self.padding, self.dilation = (padding,) * 2, (1, 1)
            self.weight = torch.nn.Parameter(torch.randn(out_channels, in_channels, kernel_size, kernel_size) * 0.05)
            self.bias = torch.nn.Parameter(torch.randn(out_channels)) if bias else None

        def forward_native(self, x):
            return torch.nn.functional.conv2d(x, self.weight, self.bias, self.stride, self.padding)

        forward_cuda = forward_native

    names = ["vllm", "vllm.model_executor", "vllm.model_executor.layers"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[name].__path__ = []
    custom_op = types.ModuleType("vllm.model_executor.custom_op")
    custom_op.op_registry_oot = registry
    layers = types.ModuleType("vllm.model_executor.layers.conv")
    layers.Conv2dLayer = Conv2dLayer
    monkeypatch.setitem(sys.modules, custom_op.__name__, custom_op)
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    monkeypatch.delenv(integration.VARIABLE, raising=False)
    return types.SimpleNamespace(layer=Conv2dLayer, registry=registry)


@pytest.mark.parametrize(("precision", "allowed"), [("bf16", 4e-3), ("fp16", 5e-4), ("fp8", 7e-2)])
@torch.no_grad()
def test_a_patch_embedding_is_replaced_and_others_are_not(vllm, monkeypatch, precision, allowed):
    monkeypatch.setenv(integration.VARIABLE, precision)
    integration.plugin()
    integration.plugin()  # vLLM may load it again
    layer, overlapping = vllm.layer(3, 16, 14, stride=14, bias=False), vllm.layer(3, 16, 14, stride=7)
    assert isinstance(layer, vllm.layer) and type(layer) is vllm.registry["Conv2dLayer"]
    assert list(layer.state_dict()) == ["weight"]
    pixels = torch.rand(2, 3, 42, 30) * 2 - 1
    for forward in (layer, layer.forward_cuda, layer.forward_native):
        layer.weight.mul_(-1)  # as a loader writes after the layer was made
        expected = torch.nn.functional.conv2d(pixels, layer.weight, stride=14)
        got = forward(pixels)
        assert got.shape == expected.shape
        assert 1e-6 < (got - expected).norm() / expected.norm() < allowed
    expected = torch.nn.functional.conv2d(pixels, overlapping.weight, overlapping.bias, stride=7)
    assert torch.equal(overlapping(pixels), expected)


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
        ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ],
    ids=["siglip", "clip", "imagenet"],
)
@torch.no_grad()
def test_the_range_of_fp8_has_white_and_black_of_every_tower(vllm, mean, std):
    integration.register("fp8")
    layer = vllm.layer(3, 16, 14, stride=14)
    mean, std = (torch.tensor(value)[:, None, None] for value in (mean, std))
    pixels = (torch.randint(0, 2, (2, 3, 42, 30)) - mean) / std
    expected = torch.nn.functional.conv2d(pixels, layer.weight, layer.bias, stride=14)
    assert (layer(pixels) - expected).norm() / expected.norm() < 7e-2


@torch.no_grad()
def test_layers_over_features_are_vllms(vllm):
    """Such as GLM's, which halves a grid: FP8 of a scale for pixels would not reach the magnitudes of features."""
    integration.register("fp8")
    layer, features = vllm.layer(16, 8, 2, stride=2), 100 * torch.randn(2, 16, 8, 8)
    assert torch.equal(layer(features), torch.nn.functional.conv2d(features, layer.weight, layer.bias, stride=2))


@torch.no_grad()
def test_weights_that_are_loaded_again_are_used(vllm):
    """By the loader that parameters have, and by vLLM's reloading: taken out, written past the counter, put back."""
    integration.register("fp16")
    layer, pixels = vllm.layer(3, 16, 14, stride=14), torch.rand(2, 3, 42, 30) * 2 - 1

    def load() -> None:
        for parameter in layer.parameters():
            parameter.weight_loader(parameter, torch.randn_like(parameter) * 0.05)

    def reload() -> None:
        for name, parameter in list(layer.named_parameters()):
            delattr(layer, name)
            parameter.data.copy_(torch.randn_like(parameter) * 0.05)
            layer.register_parameter(name, parameter)

    for again in (load, reload, load):
        layer(pixels)
        again()
        expected = torch.nn.functional.conv2d(pixels, layer.weight, layer.bias, stride=14)
        assert (layer(pixels) - expected).norm() / expected.norm() < 5e-4
    weight = layer.weight
    with pytest.raises(ValueError, match=r"loaded_weight has shape \[8\], allowed: \[16, 3, 14, 14\]"):
        weight.weight_loader(weight, torch.zeros(8))


def test_raw_pixels_are_refused(vllm):
    """Layers are not told the model's mean and standard deviation, and vLLM's own layer refuses uint8."""
    integration.register()
    layer, images = vllm.layer(3, 16, 14, stride=14), torch.zeros(1, 3, 28, 28, dtype=torch.uint8)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), pytest.raises(TypeError, match=r"x is torch\.uint8, allowed"):
            layer(images)


@torch.no_grad()
def test_hooks_and_parametrisations_count(vllm):
    integration.register("fp16")
    layer, pixels = vllm.layer(3, 16, 14, stride=14), torch.rand(1, 3, 28, 28) * 2 - 1
    layer(pixels)  # what was prepared before the change
    parametrize.register_parametrization(layer, "weight", torch.nn.Tanh())
    layer.register_forward_hook(lambda module, inputs, out: 2 * out)
    expected = 2 * torch.nn.functional.conv2d(pixels, layer.weight, layer.bias, stride=14)
    assert 0 < (layer(pixels) - expected).norm() / expected.norm() < 5e-4


def test_nothing_happens_without_the_variable(vllm):
    integration.plugin()
    assert not vllm.registry


@pytest.mark.parametrize("precision", ["int8", "int16", "bfloat16"])
def test_other_precisions(vllm, monkeypatch, precision):
    monkeypatch.setenv(integration.VARIABLE, precision)
    with pytest.raises(ValueError, match="CUTE_KERNELS_VLLM"):
        integration.plugin()
    assert not vllm.registry


def test_somebody_elses_replacement(vllm):
    vllm.layer.register_oot(type("Theirs", (vllm.layer,), {}))
    with pytest.raises(ValueError, match="Theirs"):
        integration.register()


def test_without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModuleNotFoundError, match="needs vLLM"):
        integration.register()


def test_the_entry_point(request):
    """As pyproject.toml declares it: an installation that is older than the declaration would not have it."""
    text, target = (request.config.rootpath / "pyproject.toml").read_text(), "cute_kernels.integrations.vllm:plugin"
    assert f'[project.entry-points."vllm.general_plugins"]\ncute_kernels = "{target}"' in text
    entry = metadata.EntryPoint("cute_kernels", target, "vllm.general_plugins")
    assert entry.load() is integration.plugin
