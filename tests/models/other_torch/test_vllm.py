"""The plugin in vLLM itself, on a CPU: its loading, layers, small towers, reloading of weights. ``make integrations``.

vLLM is asked for its CPU platform, whose operators a vLLM that was built for GPUs does not have: what runs is its
Python, which makes the layers, chooses among their forwards and loads their weights as it does on a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

if sys.version_info < (3, 11):
    pytest.skip("vLLM 0.33 is for Python 3.11 and later", allow_module_level=True)
os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # read when vLLM is imported
import vllm.config
from vllm import distributed, plugins
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.conv import Conv2dLayer
from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.reload import inplace
from vllm.model_executor.models.clip import CLIPVisionModel
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionTransformer
from vllm.model_executor.models.qwen3_vl import Qwen3_VisionTransformer
from vllm.model_executor.models.siglip import SiglipVisionModel
from vllm.model_executor.models.utils import AutoWeightsLoader

from cute_kernels.models import vllm as integration
from cute_kernels.models.nn.engine import PatchEngine
from cute_kernels.operations import reference
from cute_kernels.operations.patch_weight import prepare_patch_weight

ERRORS = {"bf16": 4e-3, "fp16": 5e-4, "fp8": 8e-2}
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 16,
}
TOWERS = {
    "siglip": (SiglipVisionModel, transformers.SiglipVisionModel, transformers.SiglipVisionConfig),
    "clip": (CLIPVisionModel, transformers.CLIPVisionModel, transformers.CLIPVisionConfig),
}


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Towers ask how many processes share their layers."""
    store: Path = tmp_path_factory.mktemp("vllm") / "store"
    with set_current_vllm_config(VllmConfig()):
        distributed.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        distributed.initialize_model_parallel(1, 1)
        yield
        distributed.destroy_model_parallel()
        distributed.destroy_distributed_environment()


@pytest.fixture(autouse=True)
def nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    monkeypatch.delenv(integration.VARIABLE, raising=False)
    assert not op_registry_oot
    yield
    op_registry_oot.clear()


def custom_operations(wanted: str) -> AbstractContextManager:
    return set_current_vllm_config(VllmConfig(compilation_config={"custom_ops": [wanted]}))


def filled(module: torch.nn.Module) -> torch.nn.Module:
    """vLLM makes parameters of memory as it finds it, and adds what its linear layers call when they are loaded."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.05, generator=generator)
    for part in module.modules():
        if getattr(part, "quant_method", None) is not None:
            part.quant_method.process_weights_after_loading(part)
    return module


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def raw(height: int = 64, width: int = 64) -> torch.Tensor:
    return torch.randint(0, 256, (2, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def normalised(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(value)[:, None, None] for value in (MEAN, STD))
    return (images / 255 - mean) / std


def test_the_entry_point_is_found_by_vllm() -> None:
    assert plugins.load_plugins_by_group("vllm.general_plugins")["cute_kernels"] is integration.plugin
    plugins.load_general_plugins()
    assert not op_registry_oot  # without the variable


def test_vllm_loads_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(integration.VARIABLE, "bf16")
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    plugins.load_general_plugins()
    assert not op_registry_oot  # another plugin was asked for
    monkeypatch.delenv("VLLM_PLUGINS")
    for _ in range(2):  # as in its processes of both kinds
        monkeypatch.setattr(plugins, "plugins_loaded", False)
        plugins.load_general_plugins()
    layer = Conv2dLayer(3, 16, 14, 14)
    assert type(layer) is op_registry_oot["Conv2dLayer"] and "precision='bf16'" in repr(layer)
    monkeypatch.setenv(integration.VARIABLE, "int16")
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    with pytest.raises(ValueError, match="CUTE_KERNELS_VLLM = 'int16': must be .*'fp16', 'fp8', 'int8', 'auto'"):
        plugins.load_general_plugins()


@pytest.mark.parametrize("custom_ops", ["all", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ERRORS)
@torch.inference_mode()
def test_a_layer(precision: str, dtype: torch.dtype, custom_ops: str) -> None:
    images = raw(70, 90)
    with custom_operations(custom_ops):
        plain = filled(Conv2dLayer(3, 32, 16, 16, params_dtype=dtype))
        integration.register(precision)
        ours = Conv2dLayer(3, 32, 16, 16, padding="valid", params_dtype=dtype)
    ours.load_state_dict(plain.state_dict())
    expected = torch.nn.functional.conv2d(normalised(images), plain.weight.float(), plain.bias.float(), stride=16)
    rounded = 4e-3 if dtype == torch.bfloat16 else 0.0  # of pixels or of results
    for forward in (ours, ours.forward_cuda, ours.forward_native):
        got = forward(normalised(images).to(dtype))
        assert got.shape == (2, 32, 4, 5) and got.dtype == dtype
        assert 1e-6 < error(got, expected) < ERRORS[precision] + rounded
        with pytest.raises(TypeError, match=r"x is torch\.uint8: must be normalised pixels"):
            forward(images)
    assert error(plain(normalised(images).to(dtype)), expected) < 1e-6 + rounded


@pytest.mark.parametrize("channels", [1, 16])
@torch.inference_mode()
def test_layers_over_features_are_vllms(channels: int) -> None:
    """GLM halves the grid of its features by such a layer, and a scale for pixels would not reach their magnitudes."""
    features = 100 * torch.randn(2, channels, 8, 8, generator=torch.Generator().manual_seed(2))
    plain = filled(Conv2dLayer(channels, 32, 2, 2))
    integration.register("fp8")
    ours = Conv2dLayer(channels, 32, 2, 2)
    ours.load_state_dict(plain.state_dict())
    assert isinstance(ours, op_registry_oot["Conv2dLayer"])
    assert torch.equal(ours(features), plain(features))


@torch.inference_mode()
def test_images_that_do_not_fit_are_refused_by_vllm() -> None:
    integration.register()
    layer = filled(Conv2dLayer(3, 32, 16, 16))
    for shape in ((2, 4, 32, 32), (2, 3, 8, 32)):
        with pytest.raises(RuntimeError, match="shape|size"):
            layer.forward_cuda(torch.zeros(shape))


def build(kind: str, seed: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A tower of transformers and the one of vLLM that loaded its checkpoint."""
    ours, theirs, config = TOWERS[kind]
    torch.manual_seed(seed)
    library = theirs(config(**SMALL, hidden_act="gelu")).eval()  # CLIP's own is an operator that a GPU's vLLM brings
    tower = filled(ours(library.config))
    load(tower, library)
    return tower, library


def load(tower: torch.nn.Module, library: torch.nn.Module) -> None:
    prefix = "" if next(iter(library.state_dict())).startswith("vision_model.") else "vision_model."
    state = {prefix + name: tensor for name, tensor in library.state_dict().items() if "head." not in name}
    AutoWeightsLoader(tower).load_weights(state.items())


@torch.inference_mode()
def run(model: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """As vLLM calls models; it makes and loads them outside of inference mode."""
    out = model(pixels)
    return out if isinstance(out, torch.Tensor) else out.last_hidden_state


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize("precision", ERRORS)
def test_a_tower(precision: str, kind: str) -> None:
    """Against the tower of transformers with the same weights, and vLLM's own without the plugin."""
    pixels = normalised(raw())
    plain, library = build(kind, 0)
    integration.register(precision)
    ours, _ = build(kind, 0)
    assert type(ours.vision_model.embeddings.patch_embedding) is op_registry_oot["Conv2dLayer"]
    assert list(ours.state_dict()) == list(plain.state_dict())
    expected = run(library, pixels)
    if kind == "clip":  # vLLM's normalises all of the last hidden state, transformers' what it pools of it
        expected = run(library.get_submodule(next(n for n, _ in library.named_modules() if "post_l" in n)), expected)
    assert error(run(plain, pixels), expected) < 1e-5
    assert 1e-6 < error(run(ours, pixels), expected) < 2 * ERRORS[precision]


ROWS = {  # not Qwen2-VL, whose activation is an operator that a GPU's vLLM brings
    "qwen2_5_vl": (
        Qwen2_5_VisionTransformer,
        transformers.Qwen2_5_VLConfig,
        {"intermediate_size": 96, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
        1176,
    ),
    "qwen3_vl": (
        Qwen3_VisionTransformer,
        transformers.Qwen3VLConfig,
        {"intermediate_size": 96, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        1536,
    ),
}


def rows_tower(kind: str, dtype: torch.dtype) -> torch.nn.Module:
    made, config, sizes, _ = ROWS[kind]
    vision = type(config().vision_config)(depth=1, hidden_size=64, num_heads=2, **sizes)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with custom_operations("none"):  # whose operators a GPU's vLLM brings
            return filled(made(vision, input_norm=FusedMMInputNorm(list(MEAN), list(STD), 1 / 255)))
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("precision", ["int8", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ROWS)
def test_a_tower_of_uint8_rows(kind: str, dtype: torch.dtype, precision: str) -> None:
    """Whole towers that normalise on the device: the bits of the reference, and vLLM's result within int8's error."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 256, (32, ROWS[kind][3]), dtype=torch.uint8, generator=generator)
    grids = [[1, 4, 4], [1, 2, 8]]
    plain = rows_tower(kind, dtype)
    integration.register(precision)
    ours = rows_tower(kind, dtype)
    ours.load_state_dict(plain.state_dict())
    assert type(ours.input_norm) is op_registry_oot["FusedMMInputNorm"]
    with torch.inference_mode():
        expected = plain(rows, grids)
        first, second = ours(rows, grids), ours(rows, grids)
        assert ours.input_norm(rows, dtype) is rows  # left to the layer
        assert torch.equal(first, second) and 1e-6 < error(second, expected) < 3e-2
        patches = ours.patch_embed(rows)
        assert torch.equal(torch.cat([ours.patch_embed(rows[:7]), ours.patch_embed(rows[7:])]), patches)
    layer = ours.patch_embed.proj
    patch, bias = layer.kernel_size[1], layer.bias
    prepared = prepare_patch_weight(
        layer.weight.flatten(1, 2), precision="int8", channels=6,
        mean=[value for value in MEAN for _ in range(2)], std=[value for value in STD for _ in range(2)],
    )  # fmt: skip
    offset = prepared.offset if bias is None else bias.float() + prepared.offset
    bits = reference.patch_embed_images(
        rows.view(-1, 6, patch, patch), prepared.raw, prepared.scale, offset, None, patch, torch.bfloat16
    )
    assert torch.equal(patches, bits[:, 0].to(dtype))


@pytest.mark.parametrize("kind", ROWS)
@torch.inference_mode()
def test_a_tower_of_still_images(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two equal frames, where vLLM takes no videos."""
    side = int((ROWS[kind][3] // 6) ** 0.5)
    generator = torch.Generator().manual_seed(3)
    one = torch.randint(0, 256, (32, 3, 1, side * side), dtype=torch.uint8, generator=generator)
    rows, grids = one.expand(-1, -1, 2, -1).reshape(32, -1), [[1, 4, 4], [1, 2, 8]]
    expected = rows_tower(kind, torch.float32)(rows, grids)
    integration.register("auto", still=True)
    with pytest.raises(ValueError, match="vLLM takes videos"):
        rows_tower(kind, torch.float32)
    limits = SimpleNamespace(multimodal_config=vllm.config.MultiModalConfig(limit_per_prompt={"video": 0}))
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: SimpleNamespace(model_config=limits))
    ours, multiplied = rows_tower(kind, torch.float32), []
    monkeypatch.setattr(PatchEngine, "_rows", lambda self, rows, *given, run=PatchEngine._rows: (
        multiplied.append(rows.shape[1]) or run(self, rows, *given)))  # fmt: skip
    for _ in range(2):
        assert 1e-6 < error(ours(rows, grids), expected) < 3e-2 and multiplied.pop() == 3 * side * side


@pytest.mark.parametrize("way", ["load_weights", "reload", "reload in kernel format"])
def test_weights_that_are_loaded_again_are_used(way: str) -> None:
    """As reinforcement learning does between its steps; vLLM keeps the parameters and writes to their ``.data``."""
    integration.register("fp16")
    pixels = normalised(raw())
    tower, _ = build("siglip", 0)
    reload.record_metadata_for_reloading(tower)
    before = run(tower, pixels)
    _, other = build("siglip", 1)
    weight = tower.vision_model.embeddings.patch_embedding.weight
    if way == "load_weights":
        load(tower, other)
    elif way == "reload":
        reload.initialize_layerwise_reload(tower)
        load(tower, other)
        reload.finalize_layerwise_reload(tower, SimpleNamespace(dtype=torch.float32))
    else:
        parameters = dict(build("siglip", 1)[0].named_parameters())
        with torch.inference_mode():
            for name, loaded in parameters.items():
                inplace.get_parameter_for_reload(tower, name).copy_(loaded)
    assert tower.vision_model.embeddings.patch_embedding.weight is weight
    got, expected = run(tower, pixels), run(other, pixels)
    assert error(got, expected) < 2 * ERRORS["fp16"] and error(before, expected) > 0.1


def test_a_loader_refuses_other_shapes() -> None:
    integration.register()
    weight = Conv2dLayer(3, 16, 14, 14).weight
    with pytest.raises(ValueError, match=r"loaded_weight has shape \[16, 3, 16, 16\]: must be \[16, 3, 14, 14\]"):
        weight.weight_loader(weight, torch.zeros(16, 3, 16, 16))
