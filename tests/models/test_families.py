"""Families of transformers whose layer is replaced, raw pixels through code that casts, and who says how they are
normalised: whole small models of the library against themselves."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers import conversion_mapping, monkey_patching

from cute_kernels.models import transformers as integration
from cute_kernels.models.nn.engine import PatchEngine
from cute_kernels.operations import reference
from cute_kernels.operations.patch_weight import prepare_patch_weight
from tests.models.nn.test_traced import check_graphs_of_plain_torch

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
ERRORS = {"bf16": 1e-2, "fp16": 2e-3, "int8": 4e-2, "fp8": 1e-1}


def _radio() -> torch.nn.Module:
    config = transformers.RadioConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, patch_size=16, max_img_size=128
    )
    return transformers.RadioModel(config)


def _internvl() -> torch.nn.Module:
    config = transformers.InternVLVisionConfig(**SMALL, image_size=[64, 64], patch_size=[16, 16])
    return transformers.InternVLVisionModel(config)


def _dinov3(kind: type) -> torch.nn.Module:
    config = transformers.DINOv3ViTConfig(**SMALL, patch_size=16, image_size=64)
    return kind(config)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SMALL, image_size=64, patch_size=16)),
    "metaclip_2": lambda: transformers.MetaClip2VisionModel(
        transformers.MetaClip2VisionConfig(**SMALL, image_size=64, patch_size=16)
    ),
    "dinov2": lambda: transformers.Dinov2Model(
        transformers.Dinov2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=64)
    ),
    "dinov2 with registers": lambda: transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=64
        )
    ),
    "dinov3": lambda: _dinov3(transformers.DINOv3ViTModel),
    "dinov3 backbone": lambda: _dinov3(transformers.DINOv3ViTBackbone),
    "aimv2": lambda: transformers.Aimv2VisionModel(
        transformers.Aimv2VisionConfig(**SMALL, image_size=64, patch_size=16)
    ),
    "internvl": _internvl,
    "radio": _radio,
}


def build(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # what begins as zeros, too
    return model


def raw(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def normalised(images: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "radio":  # whose model does it
        return images / 255
    mean, std = (torch.tensor(value)[:, None, None] for value in (MEAN, STD))
    return (images / 255 - mean) / std


@torch.no_grad()
def run(model: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    out = model(pixel_values=pixels)
    return out.feature_maps[0] if "feature_maps" in out else out.last_hidden_state


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("kind", "precision"),
    [*((kind, precision) for kind in MODELS for precision in ("bf16", "int8")),
     *(("clip", precision) for precision in ("fp16", "fp8"))],
)  # fmt: skip
def test_a_model(kind: str, precision: str) -> None:
    """Raw and normalised pixels; what is saved, copied and reverted."""
    plain, images = build(kind), raw(2, 3, 64, 64)
    pixels = normalised(images, kind)
    expected = run(plain, pixels)
    ours = integration.convert(copy.deepcopy(plain), precision, mean=MEAN, std=STD)
    assert not integration.is_converted(plain) and integration.is_converted(ours)
    assert list(ours.state_dict()) == list(plain.state_dict())
    got = run(ours, images)
    assert 0 < error(got, expected) < ERRORS[precision]
    copies = [copy.deepcopy(ours)]
    if "backbone" not in kind:  # whose own hooks do not pickle
        copies.append(pickle.loads(pickle.dumps(ours)))
    for again in copies:
        assert integration.is_converted(again) and torch.equal(run(again, images), got)
    if precision.startswith("int"):
        with pytest.raises(ValueError, match="do_rescale=False"):
            run(ours, pixels)
    else:
        assert 0 < error(run(ours, pixels), expected) < ERRORS[precision]
    integration.revert(ours)
    assert not integration.is_converted(ours) and torch.equal(run(ours, pixels), expected)
    assert not any(module._forward_pre_hooks for module in ours.modules())


@pytest.mark.parametrize("kind", MODELS)
def test_raw_pixels_of_a_model_in_bfloat16(kind: str) -> None:
    plain, images = build(kind), raw(2, 3, 64, 64)
    expected = run(plain, normalised(images, kind))
    half = copy.deepcopy(plain).bfloat16()
    library = error(run(half, normalised(images, kind).bfloat16()), expected)
    ours = integration.convert(half, "auto", mean=MEAN, std=STD)
    assert error(run(ours, images), expected) < 1.1 * library


@pytest.mark.parametrize("precision", ["auto", "int8"])
def test_versions_that_cast_in_front_of_the_layers_class(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.17 does, in the class that holds the one with the layer."""
    kind = transformers.models.dinov2.modeling_dinov2.Dinov2Embeddings
    forward = kind.forward

    def casts(self: torch.nn.Module, pixel_values: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
        dtype = self.patch_embeddings.projection.weight.dtype
        return forward(self, pixel_values.to(dtype=dtype), *rest, **named)

    plain, images = build("dinov2"), raw(2, 3, 64, 64)
    expected = run(plain, normalised(images, "dinov2"))
    monkeypatch.setattr(kind, "forward", casts)
    ours = integration.convert(plain.bfloat16(), precision, mean=MEAN, std=STD)
    assert error(run(ours, images), expected) < ERRORS["int8"]


def test_the_layer_gives_the_bits_of_the_reference() -> None:
    ours = integration.convert(build("clip"), "int8", mean=MEAN, std=STD)
    seen = []
    layer = ours.embeddings.patch_embedding
    layer.register_forward_hook(lambda module, given, out: seen.append(out))
    images = raw(2, 3, 64, 64)
    run(ours, images)
    weight = prepare_patch_weight(layer.weight, precision="int8", mean=MEAN, std=STD)
    expected = reference.patch_embed_images(
        images, weight.raw, weight.scale, weight.offset, None, 16, torch.bfloat16
    )
    assert torch.equal(seen[0].flatten(2).transpose(1, 2), expected.float())


def test_training_is_the_librarys() -> None:
    plain, images = build("dinov2").train(), raw(2, 3, 56, 56)
    ours = integration.convert(copy.deepcopy(plain), "int8", mean=MEAN, std=STD)
    for model, pixels in ((plain, normalised(images, "dinov2")), (ours, images)):
        model(pixel_values=pixels).last_hidden_state.square().mean().backward()
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters()):
        if theirs.grad is not None:
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6), name


def test_raw_pixels_in_front_of_an_adapter_are_normalised() -> None:
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["patch_embedding"], init_lora_weights=False)
    images, adapted = raw(2, 3, 64, 64), []
    for model in (build("clip"), integration.convert(build("clip"), mean=MEAN, std=STD)):
        torch.manual_seed(2)
        adapted.append(peft.get_peft_model(model, config).eval())
    plain, ours = adapted
    assert not integration.is_converted(ours)
    assert error(run(ours, images), run(plain, normalised(images, "clip"))) < ERRORS["bf16"]


# --- Qwen ------------------------------------------------------------------------------------------------------------


def qwen() -> torch.nn.Module:
    torch.manual_seed(0)
    vision = {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1}
    text = {**SMALL, "num_key_value_heads": 2, "vocab_size": 32, "rope_parameters": None}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
    tokens = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    config = transformers.Qwen2VLConfig(vision_config=vision, text_config=text, **tokens)
    return transformers.Qwen2VLModel(config).eval()


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@torch.no_grad()
def test_raw_rows_through_a_whole_qwen(precision: str) -> None:
    """The model casts what it is given before its tower sees it."""
    plain, rows = qwen(), raw(16, 1176)
    mean, std = (torch.tensor(value).repeat_interleave(392) for value in (MEAN, STD))
    inputs = {
        "input_ids": torch.tensor([[7, 5, 5, 5, 5, 8, 1]]),
        "mm_token_type_ids": torch.tensor([[0, 1, 1, 1, 1, 0, 0]]),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    expected = plain(pixel_values=(rows / 255 - mean) / std, **inputs).last_hidden_state
    ours = integration.convert(copy.deepcopy(plain), precision, mean=MEAN, std=STD)
    assert integration.is_converted(ours)
    assert error(ours(pixel_values=rows, **inputs).last_hidden_state, expected) < ERRORS[precision]
    patches = ours.visual.patch_embed(rows)
    weight = ours.visual.patch_embed.proj.weight
    if precision == "int8":  # each frame of a channel is a channel
        prepared = prepare_patch_weight(
            weight.flatten(1, 2), precision="int8", channels=6,
            mean=[m for m in MEAN for _ in range(2)], std=[s for s in STD for _ in range(2)],
        )  # fmt: skip
        bits = reference.patch_embed_images(
            rows.view(16, 6, 14, 14), prepared.raw, prepared.scale, prepared.offset, None, 14, torch.bfloat16
        )
        assert torch.equal(patches, bits[:, 0].float())
        with pytest.raises(ValueError, match="do_rescale=False"):
            ours(pixel_values=(rows / 255 - mean) / std, **inputs)


@pytest.mark.parametrize(("precision", "most"), [("bf16", 3e-3), ("int8", 1.2e-2)])
@torch.no_grad()
def test_rows_of_a_still_images_only_frame(precision: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against both of its equal frames in the library; the weight's frames are one, and K is half."""
    plain, one = qwen(), raw(16, 3, 1, 196)
    rows, both = one.flatten(1), one.expand(-1, -1, 2, -1).reshape(16, 1176)
    mean, std = (torch.tensor(value).repeat_interleave(392) for value in (MEAN, STD))
    expected = plain.visual.patch_embed((both / 255 - mean) / std)
    ours = integration.convert(copy.deepcopy(plain), precision, mean=MEAN, std=STD).visual.patch_embed
    used = []
    monkeypatch.setattr(PatchEngine, "_rows", lambda self, rows, *given, run=PatchEngine._rows: (
        used.append(rows.shape[-1]) or run(self, rows, *given)))  # fmt: skip
    for _ in range(2):
        got = ours(rows)
        assert used.pop() == 588 and got.shape == expected.shape and 0 < error(got, expected) < most
        for parameter in (*ours.parameters(), *plain.visual.patch_embed.parameters()):
            parameter.mul_(-1)  # the sum is made anew
        expected = -expected
    with torch.enable_grad():
        assert torch.allclose(ours(rows), expected, atol=1e-5)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    assert torch.equal(compiled(rows), ours(rows))
    if precision == "bf16":
        normalised = ((rows / 255).unflatten(1, (3, -1)) - mean[::392, None]) / std[::392, None]
        assert 0 < error(ours(normalised.flatten(1)), expected) < most


@torch.no_grad()
def test_rows_of_one_frame_in_graphs_of_plain_torch() -> None:
    """Where no sum of the weight's frames is kept, a still image has both frames."""
    ours = integration.convert(torch.nn.ModuleList([qwen().visual.patch_embed]), "int8", mean=MEAN, std=STD)[0]
    check_graphs_of_plain_torch(ours, raw(8, 588))


def test_rows_of_one_frame_under_transformations() -> None:
    """Weights that torch.func hands in have no memory of their own: the library's layer runs."""
    rows = torch.randn(4, 588, generator=torch.Generator().manual_seed(0))
    both = rows.view(4, 3, 1, 196).expand(-1, -1, 2, -1).reshape(4, 1176)
    plain = qwen().visual.patch_embed
    ours = integration.convert(torch.nn.ModuleList([copy.deepcopy(plain)]), mean=MEAN, std=STD)[0]

    def loss(module: torch.nn.Module, given: torch.Tensor) -> Any:
        call = torch.func.functional_call
        return lambda weight: call(module, {"proj.weight": weight}, (given,)).square().sum()

    weight = plain.proj.weight.detach()
    with torch.no_grad():
        got, expected = (torch.func.grad(loss(*each))(weight) for each in ((ours, rows), (plain, both)))
    assert torch.allclose(got, expected, atol=1e-4)


# --- Gemma 4 ---------------------------------------------------------------------------------------------------------


def gemma() -> torch.nn.Module:
    torch.manual_seed(0)
    kind = transformers.models.gemma4.modeling_gemma4.Gemma4VisionPatchEmbedder
    module = kind(transformers.Gemma4VisionConfig(hidden_size=64, patch_size=16, position_embedding_size=32)).eval()
    torch.nn.init.normal_(module.position_embedding_table)
    return module


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@torch.no_grad()
def test_rows_that_the_model_scales_itself(precision: str) -> None:
    """Their pixels are from 0 to 1, so that nobody's mean counts; padding gets no position."""
    plain, pixels = gemma(), raw(2, 12, 768)
    ids = torch.randint(0, 32, (2, 12, 2), generator=torch.Generator().manual_seed(3))
    ids[:, 9:] = -1
    padding = (ids == -1).all(dim=-1)
    expected = plain(pixels / 255, ids, padding)
    ours = integration.convert(torch.nn.ModuleList([copy.deepcopy(plain)]), precision, processor={"image_mean": 0.1})
    assert integration.is_converted(ours)
    got = ours[0](pixels, ids, padding)
    assert 0 < error(got, expected) < ERRORS[precision]
    if precision == "bf16":
        assert 0 < error(ours[0](pixels / 255, ids, padding), expected) < ERRORS[precision]
    else:
        weight = prepare_patch_weight(plain.input_proj.weight, precision="int8", mean=0.5, std=0.5)
        bits = reference.patch_embed_images(
            pixels.view(24, 3, 16, 16), weight.raw, weight.scale, weight.offset, None, 16, torch.bfloat16
        )
        positions = plain._position_embeddings(ids, padding)
        assert torch.equal(got, bits.float().view(2, 12, 64) + positions)
    with torch.enable_grad():
        assert torch.allclose(ours[0](pixels, ids, padding), expected, atol=1e-5)
    assert torch.equal(integration.revert(ours)[0](pixels / 255, ids, padding), expected)


@torch.no_grad()
def test_what_a_processor_says_in_front_of_a_model_that_normalises() -> None:
    """Gemma 4's only divides by 255: mean 0 and deviation 1. Another one's pixels are not what the model scales."""
    plain, rows = gemma(), raw(2, 12, 768)
    ids = torch.zeros(2, 12, 2, dtype=torch.int64)
    given = ids, torch.zeros(2, 12, dtype=torch.bool)
    expected = plain(rows / 255, *given)
    processor = transformers.Gemma4ImageProcessor()
    for said in ({}, {"mean": 0, "std": 1}, {"mean": (0.0,) * 3, "std": (1.0,) * 3}, {"processor": processor}):
        ours = integration.convert(torch.nn.ModuleList([copy.deepcopy(plain)]), "int8", **said)
        assert error(ours[0](rows, *given), expected) < ERRORS["int8"]
    processor = transformers.Gemma4ImageProcessor(do_normalize=True, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    for said in ({"mean": 0.5, "std": 0.5}, {"mean": MEAN, "std": STD}, {"processor": processor}):
        with pytest.raises(ValueError, match="of gemma4, which normalises pixels of 0 to 1 itself: must be left out"):
            integration.convert(torch.nn.ModuleList([copy.deepcopy(plain)]), "int8", **said)
    try:
        assert "gemma4" in integration.enable("int8", mean=MEAN, std=STD)  # which is said of the others
    finally:
        integration.disable()


@pytest.fixture
def fusion(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint whose embeddings the library fuses when it is asked to; what it registers then is taken back."""
    qwen().visual.save_pretrained(tmp_path)
    yield tmp_path
    integration.disable()
    monkey_patching.clear_patch_mapping()
    conversion_mapping.register_checkpoint_conversion_mapping("qwen2_vl_vision", [], overwrite=True)


def loaded(folder: Path, **keywords: object) -> torch.nn.Module:
    kind = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel
    return kind.from_pretrained(folder, **keywords).eval()


@pytest.mark.parametrize("first", ["enabled", "fused", "converted"])
@torch.no_grad()
def test_the_librarys_own_fusion(fusion: Path, first: str) -> None:
    """Before `enable`, behind it, and in a model that exists."""
    fused = {"fusion_config": {"patch_embeddings": True}}
    plain, rows = loaded(fusion).patch_embed, torch.rand(16, 1176) * 3 - 1.5
    if first == "enabled":
        integration.enable()
        ours = loaded(fusion, **fused)
    else:
        theirs = loaded(fusion, **fused)
        assert not integration.is_converted(theirs)
        assert error(theirs.patch_embed(rows), plain(rows)) < 1e-6
        if first == "fused":
            integration.enable()
            ours = loaded(fusion, **fused)
        else:
            ours = integration.convert(copy.deepcopy(theirs))
    assert integration.is_converted(ours) and "linear_proj" in ours.patch_embed._modules
    assert 1e-5 < error(ours.patch_embed(rows), plain(rows)) < ERRORS["bf16"]
    integration.convert(ours, "int8", mean=MEAN, std=STD)
    pixels = raw(16, 1176)
    mean, std = (torch.tensor(value).repeat_interleave(392) for value in (MEAN, STD))
    assert error(ours.patch_embed(pixels), plain((pixels / 255 - mean) / std)) < ERRORS["int8"]
    integration.revert(ours)
    assert not integration.is_converted(ours) and error(ours.patch_embed(rows), plain(rows)) < 1e-6
    integration.disable()
    again = loaded(fusion, **fused)
    assert not integration.is_converted(again) and error(again.patch_embed(rows), plain(rows)) < 1e-6


# --- precision by the weight's type ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "like"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, None)])
def test_the_precision_of_the_weight(dtype: torch.dtype, like: str | None) -> None:
    images = raw(2, 3, 64, 64)
    model = integration.convert(build("clip"), "auto", mean=MEAN, std=STD)
    run(model, images)  # what was made from float32 is nothing
    got = run(model.to(dtype), images)
    if like is None:
        assert error(got, run(build("clip"), normalised(images, "clip"))) < 1e-6
    else:
        assert torch.equal(got, run(integration.convert(build("clip").to(dtype), like, mean=MEAN, std=STD), images))
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16  # whose precision is another one
    again = run(model.to(other), images)
    assert torch.equal(again, run(integration.convert(copy.deepcopy(model), "auto", mean=MEAN, std=STD), images))
    again = run(model.float(), images)
    assert error(again, run(integration.revert(copy.deepcopy(model)), normalised(images, "clip"))) < 1e-6


# --- who says how pixels are normalised ------------------------------------------------------------------------------


def test_the_processor_says_it(tmp_path: Path) -> None:
    build("clip").save_pretrained(tmp_path)
    model = transformers.CLIPVisionModel.from_pretrained(tmp_path).eval()
    with pytest.raises(ValueError, match="mean and std of a clip model are not known, .*: must be processor="):
        integration.convert(model, "int8")
    assert not integration.is_converted(model)
    images = raw(2, 3, 64, 64)
    expected = run(integration.convert(copy.deepcopy(model), "int8", mean=MEAN, std=STD), images)
    processor = transformers.CLIPImageProcessorPil()
    for given in (processor, processor.to_dict()):
        ours = integration.convert(copy.deepcopy(model), "int8", processor=given)
        assert torch.equal(run(ours, images), expected)
    processor.save_pretrained(tmp_path)
    assert torch.equal(run(integration.convert(copy.deepcopy(model), "int8"), images), expected)
    nested = {"image_processor": json.loads((tmp_path / "preprocessor_config.json").read_text())}
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert torch.equal(run(integration.convert(copy.deepcopy(model), "int8"), images), expected)
    with pytest.raises(ValueError, match="processor is dict without image_mean and image_std"):
        integration.convert(model, processor={})


@pytest.mark.parametrize(
    ("config", "mean", "std"),
    [
        ({"do_normalize": False}, 0.0, 1.0),
        ({"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [51.0] * 3}, 0.5, 0.2),
        ({"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3}, 0.5, 0.5),
    ],
)
def test_processors_that_do_something_else(config: dict, mean: float, std: float) -> None:
    ours = integration.convert(build("aimv2"), "fp16", processor=config)
    images = raw(2, 3, 64, 64)
    assert error(run(ours, images), run(build("aimv2"), (images / 255 - mean) / std)) < ERRORS["fp16"]


def test_a_processor_beside_the_checkpoint_counts_more_than_the_family(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.SiglipVisionConfig(**SMALL, image_size=64, patch_size=16)
    transformers.SiglipVisionModel(config).save_pretrained(tmp_path)
    transformers.SiglipImageProcessorPil(image_mean=list(MEAN), image_std=list(STD)).save_pretrained(tmp_path)
    model = transformers.SiglipVisionModel.from_pretrained(tmp_path).eval()
    images = raw(2, 3, 64, 64)
    expected = run(model, normalised(images, "clip"))
    assert error(run(integration.convert(model, "fp16"), images), expected) < ERRORS["fp16"]


def test_a_family_of_layers_is_not_enabled() -> None:
    with pytest.raises(ValueError, match=r"models has 'clip': must be .*convert\(model\) serves it"):
        integration.enable(models=["clip"])
