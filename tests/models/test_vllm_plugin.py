"""The vLLM plugin's mechanics, against a stand-in for the few names of vLLM that it uses.

tests/models/other_torch/test_vllm.py has it in vLLM itself, which does not install beside this package's pins.
"""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from torch.nn.utils import parametrize

from cute_kernels.models import vllm as integration
from cute_kernels.models.nn.engine import PatchEngine
from tests.models.vllm_stand_in import Images, Patches, Rows, Weights, bits, raw, still, vllm_names


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    return vllm_names(monkeypatch)


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
    with pytest.raises(ValueError, match=r"loaded_weight has shape \[8\]: must be \[16, 3, 14, 14\]"):
        weight.weight_loader(weight, torch.zeros(8))


def test_raw_pixels_are_refused(vllm):
    """Layers are not told the model's mean and standard deviation, and vLLM's own layer refuses uint8."""
    integration.register()
    layer, images = vllm.layer(3, 16, 14, stride=14), torch.zeros(1, 3, 28, 28, dtype=torch.uint8)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), pytest.raises(TypeError, match=r"x is torch\.uint8: must be"):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_still_images_have_one_frame(monkeypatch, dtype):
    """Half of the bytes and of K; weights that are loaded later count."""
    vllm = vllm_names(monkeypatch, videos=0)
    plain = Rows(vllm, dtype)
    monkeypatch.setenv(integration.VARIABLE, "auto")
    monkeypatch.setenv(integration.STILL, "1")
    integration.plugin()
    tower, multiplied = Rows(vllm, dtype), []
    tower.load_state_dict(plain.state_dict())
    monkeypatch.setattr(PatchEngine, "_rows", lambda self, rows, *given, run=PatchEngine._rows: (
        multiplied.append(rows.shape[1]) or run(self, rows, *given)))  # fmt: skip
    for seed in range(3):
        pixels = still(16, seed)
        got, expected = tower(pixels), plain(pixels).float()
        assert multiplied.pop() == 588 and torch.equal(got, bits(tower, pixels, one_frame=True).to(dtype))
        assert 0 < (got.float() - expected).norm() / expected.norm() < 1.5e-2
        for parameter, other in zip(tower.parameters(), plain.parameters()):
            parameter.weight_loader(parameter, other.mul_(-1))
    images = Images(vllm, dtype)
    assert torch.equal(images(raw(Images.shape)), bits(images, raw(Images.shape)))


@pytest.mark.parametrize(("value", "message"), [("1", "vLLM takes videos, .*allowed with --limit"), ("yes", "'yes'")])
def test_what_is_still_is_promised(vllm, monkeypatch, value, message):
    monkeypatch.setenv(integration.VARIABLE, "int8")
    monkeypatch.setenv(integration.STILL, value)
    with pytest.raises(ValueError, match=f"CUTE_KERNELS_VLLM_STILL.*{message}"):
        integration.plugin()
        Rows(vllm)


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


@pytest.mark.parametrize("precision", ["int4", "bfloat16"])
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
    text, target = (request.config.rootpath / "pyproject.toml").read_text(), "cute_kernels.models.vllm:plugin"
    assert f'[project.entry-points."vllm.general_plugins"]\ncute_kernels = "{target}"' in text
    entry = metadata.EntryPoint("cute_kernels", target, "vllm.general_plugins")
    assert entry.load() is integration.plugin
