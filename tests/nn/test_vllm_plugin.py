"""The vLLM plugin's mechanics, against a stand-in for the few names of vLLM that it uses.

tests/integrations/test_vllm.py has it in vLLM itself, which does not install beside this package's pins.
"""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from torch.nn.utils import parametrize

from cute_kernels import reference
from cute_kernels.integrations import vllm as integration
from cute_kernels.nn.engine import PatchEngine
from cute_kernels.operations.patch_weight import prepare_patch_weight


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

        def forward(self, *given):
            return self.chosen(*given)

        @classmethod
        def register_oot(cls, replacement):
            assert cls.__name__ not in registry
            replacement.name = cls.__name__
            registry[cls.__name__] = replacement
            return replacement

    class Conv2dLayer(CustomOp):
        dimensions, convolution = 2, staticmethod(torch.nn.functional.conv2d)

        def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, bias=True):
            super().__init__()
            each = lambda value: (value,) * self.dimensions if isinstance(value, int) else tuple(value)  # noqa: E731
            self.in_channels, self.groups = in_channels, 1
            self.kernel_size, self.stride = each(kernel_size), each(stride)
            self.padding, self.dilation = each(padding), each(1)
            self.weight = torch.nn.Parameter(torch.randn(out_channels, in_channels, *self.kernel_size) * 0.05)
            self.bias = torch.nn.Parameter(torch.randn(out_channels)) if bias else None

        def forward_native(self, x):
            return self.convolution(x, self.weight, self.bias, self.stride, self.padding)

        forward_cuda = forward_native

    class Conv3dLayer(Conv2dLayer):
        dimensions, convolution = 3, staticmethod(torch.nn.functional.conv3d)

    class FusedMMInputNorm(CustomOp):
        calls = 0

        def __init__(self, image_mean, image_std, rescale_factor, channel=3):
            super().__init__()
            mean, std = torch.tensor(image_mean), torch.tensor(image_std)
            self.register_buffer("weight", rescale_factor / std, persistent=False)
            self.register_buffer("bias", -mean / std, persistent=False)

        def forward_native(self, pixel_values, visual_dtype):
            FusedMMInputNorm.calls += 1
            x = pixel_values.reshape(len(pixel_values), 3, -1) * self.weight[:, None] + self.bias[:, None]
            return x.view(pixel_values.shape).to(visual_dtype)

        forward_cuda = forward_native

    names = ["vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.fusion"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[name].__path__ = []
    custom_op = types.ModuleType("vllm.model_executor.custom_op")
    custom_op.op_registry_oot = registry
    layers = types.ModuleType("vllm.model_executor.layers.conv")
    layers.Conv2dLayer, layers.Conv3dLayer = Conv2dLayer, Conv3dLayer
    norms = types.ModuleType("vllm.model_executor.layers.fusion.mm_input_norm")
    norms.FusedMMInputNorm = FusedMMInputNorm
    monkeypatch.setitem(sys.modules, norms.__name__, norms)
    monkeypatch.setitem(sys.modules, custom_op.__name__, custom_op)
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    monkeypatch.delenv(integration.VARIABLE, raising=False)
    return types.SimpleNamespace(layer=Conv2dLayer, rows=Conv3dLayer, norm=FusedMMInputNorm, registry=registry)


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


# --- raw pixels ------------------------------------------------------------------------------------------------------

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


class Rows(torch.nn.Module):
    """As Qwen's towers are: rows of two frames."""

    shape = (16, 3 * 2 * 14 * 14)

    def __init__(self, vllm, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.input_norm = vllm.norm(MEAN, STD, 1 / 255)
        self.proj = vllm.rows(3, 32, (2, 14, 14), stride=(2, 14, 14)).to(dtype)
        self.layers = [self.proj]

    def forward(self, pixels):
        x = self.input_norm(pixels, self.proj.weight.dtype)
        return self.proj(x.view(len(x), -1, 2, 14, 14)).view(len(x), -1)


class Patches(Rows):
    """As Kimi's: images of one patch each."""

    shape = (16, 3, 14, 14)

    def __init__(self, vllm, dtype=torch.float32):
        super().__init__(vllm, dtype)
        self.proj = vllm.layer(3, 32, 14, stride=14).to(dtype)

    def forward(self, pixels):
        x = self.input_norm(pixels.flatten(1), self.proj.weight.dtype).view_as(pixels)
        return self.proj.forward_native(x).view(len(x), -1)


class Images(Patches):
    """As Llama Nemotron's: the tower casts what it gets."""

    shape = (2, 3, 42, 56)

    def forward(self, pixels):
        x = self.input_norm(pixels.flatten(1), self.proj.weight.dtype).view(pixels.shape)
        return self.proj(x.to(self.proj.weight.dtype)).flatten(2).transpose(1, 2)


class Weights(Images):
    """As Pixtral's: the layer's weight is used, and the layer is not called."""

    def forward(self, pixels):
        x = self.input_norm(pixels.flatten(1), self.proj.weight.dtype).view(pixels.shape)
        return torch.nn.functional.conv2d(x, self.proj.weight, self.proj.bias, stride=14)


def raw(shape, seed=1):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def bits(tower, pixels):
    """What the reference gives for the weights that a tower has now."""
    weight, frames = tower.proj.weight, 2 if tower.proj.weight.dim() == 5 else 1
    weight = weight.flatten(1, 2) if frames == 2 else weight
    mean, std = ([value for value in values for _ in range(frames)] for values in (MEAN, STD))
    prepared = prepare_patch_weight(weight, precision="int8", channels=3 * frames, mean=mean, std=std)
    pixels = pixels.reshape(-1, 3 * frames, 14, 14) if pixels.dim() == 2 else pixels
    out = reference.patch_embed_images(
        pixels, prepared.raw, None, prepared.scale, prepared.offset + tower.proj.bias.float(), None, 14, torch.bfloat16
    ).to(weight.dtype)
    return out if isinstance(tower, Images) else out.flatten(0, 1)


@pytest.mark.parametrize("precision", ["int8", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Rows, Patches, Images])
@torch.no_grad()
def test_the_normalisation_and_the_layer_are_one(vllm, kind, dtype, precision):
    """From the first call on; weights that are loaded later count, and parts of a batch have the bits of the whole."""
    plain, pixels = kind(vllm, dtype), raw(kind.shape)
    expected = plain(pixels)
    integration.register(precision)
    tower = kind(vllm, dtype)
    tower.load_state_dict(plain.state_dict())
    before = vllm.norm.calls
    for seed in range(1, 4):
        pixels = raw(kind.shape, seed)
        got = tower(pixels)
        assert got.dtype == dtype and torch.equal(got, bits(tower, pixels))
    assert vllm.norm.calls == before + 1  # which showed what is behind it
    assert 0 < (tower(raw(kind.shape)).float() - expected.float()).norm() / expected.float().norm() < 1.5e-2
    assert torch.equal(torch.cat([tower(pixels[:1]), tower(pixels[1:])]), tower(pixels))
    for parameter in tower.proj.parameters():
        parameter.weight_loader(parameter, torch.randn_like(parameter) * 0.05)
    assert torch.equal(tower(pixels), bits(tower, pixels))


@torch.no_grad()
def test_emulated_rows_have_the_bits_of_the_reference(vllm, monkeypatch):
    integration.register("int8")
    tower, pixels = Rows(vllm), raw(Rows.shape)
    tower(pixels)
    tower.proj.engine = PatchEngine(replace(tower.proj.engine.options, backend="emulator"))
    assert torch.equal(tower(pixels), bits(tower, pixels))


@torch.no_grad()
def test_pixels_that_nobody_takes_are_normalised(vllm):
    integration.register("int8")
    plain = Weights(vllm)
    pixels = raw(Weights.shape)
    expected = torch.nn.functional.conv2d(
        plain.input_norm.normalised(pixels, torch.float32), plain.proj.weight, plain.proj.bias, stride=14
    )
    for _ in range(3):
        assert torch.equal(plain(pixels), expected)
    assert plain.input_norm.pair is False and integration._last.call is None  # whose memory is not kept


@torch.no_grad()
def test_without_a_kernel_the_pair_is_vllms(vllm):
    """Parametrised weights are read anew in each call; those that want gradients have none here."""
    plain, pixels = Rows(vllm), raw(Rows.shape)
    expected = plain(pixels)
    integration.register("int8")
    tower = Rows(vllm)
    tower.load_state_dict(plain.state_dict())
    tower(pixels)
    with torch.enable_grad():
        assert torch.equal(tower(pixels), expected)


@torch.no_grad()
def test_normalised_pixels_of_a_pair_are_vllms(vllm):
    """The host may send floating-point pixels all the same."""
    plain = Rows(vllm)
    integration.register("auto")
    tower = Rows(vllm)
    tower.load_state_dict(plain.state_dict())
    tower(raw(Rows.shape))
    floats = raw(Rows.shape).float()
    assert torch.equal(tower(floats), plain(floats))
    assert torch.equal(tower(raw(Rows.shape)), bits(tower, raw(Rows.shape)))


@torch.no_grad()
def test_int8_without_a_normalisation_on_the_device(vllm):
    integration.register("int8")
    layer, pixels = vllm.layer(3, 16, 14, stride=14), torch.rand(2, 3, 28, 28)
    with pytest.warns(UserWarning, match="mm_device_do_normalize leaves them raw"):
        got = layer(pixels)
    assert torch.equal(got, torch.nn.functional.conv2d(pixels, layer.weight, layer.bias, stride=14))


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 5e-3), (torch.float16, 1e-3), (torch.float32, 1e-6)])
@torch.no_grad()
def test_auto_follows_the_weight(vllm, dtype, most):
    integration.register("auto")
    layer, pixels = vllm.layer(3, 16, 14, stride=14).to(dtype), torch.rand(2, 3, 28, 28).to(dtype)
    expected = torch.nn.functional.conv2d(pixels.double(), layer.weight.double(), layer.bias.double(), stride=14)
    assert (layer(pixels) - expected).norm() / expected.norm() < most


def test_a_vllm_that_normalises_on_the_host(vllm, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fusion.mm_input_norm", None)
    with pytest.raises(ModuleNotFoundError, match="vLLM 0.33 or later"):
        integration.register("int8")
    assert not vllm.registry
    integration.register("auto")
    assert list(vllm.registry) == ["Conv2dLayer"]


@pytest.mark.parametrize("precision", ["int16", "bfloat16"])
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
