"""`cute_kernels.models.timm` on small models of timm: ``make integrations``."""

from __future__ import annotations

import copy

import peft
import pytest
import timm
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from timm.models.naflexvit import NaFlexEmbeds, NaFlexVit, NaFlexVitCfg
from timm.models.vision_transformer import VisionTransformer
from torch.nn.utils import parametrize

from cute_kernels.models import timm as integration
from cute_kernels.models.nn import PatchConv2d, PatchLinear

SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 0}
ERRORS = {"bf16": 5e-3, "fp16": 8e-4, "int8": 2e-2, "fp8": 8e-2}


def raw(height: int = 64, width: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (2, 3, height, width), dtype=torch.uint8, generator=generator)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def vit(**kwargs) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(img_size=64, patch_size=16, **SMALL, **kwargs).eval()


def naflex(**kwargs) -> NaFlexVit:
    torch.manual_seed(0)
    config = NaFlexVitCfg(
        patch_size=16, embed_dim=48, depth=2, num_heads=4, pos_embed_grid_size=(4, 4), class_token=False,
        global_pool="avg", **kwargs,
    )  # fmt: skip
    return NaFlexVit(config, num_classes=0).eval()


@pytest.mark.parametrize("precision", ERRORS)
@pytest.mark.parametrize("kwargs", [{}, {"class_token": False, "global_pool": "map"}, {"dynamic_img_size": True}])
@torch.no_grad()
def test_a_vision_transformer(kwargs, precision):
    plain = vit(**kwargs)
    ours = integration.convert(copy.deepcopy(plain), precision, mean=0.5, std=0.5)
    assert type(ours.patch_embed.proj) is PatchConv2d and list(ours.state_dict()) == list(plain.state_dict())
    images = raw()
    expected = plain.forward_features(images / 127.5 - 1)
    for pixels in (images,) if precision.startswith("int") else (images, images / 127.5 - 1):
        assert 1e-6 < error(ours.patch_embed(pixels), plain.patch_embed(images / 127.5 - 1)) < ERRORS[precision]
        assert error(ours.forward_features(pixels), expected) < ERRORS[precision]


@torch.no_grad()
def test_dynamic_sizes():
    plain = vit(dynamic_img_size=True, dynamic_img_pad=True)
    ours = integration.convert(copy.deepcopy(plain), "fp16")
    pixels = raw(70, 90) / 127.5 - 1
    assert error(ours(pixels), plain(pixels)) < ERRORS["fp16"]


@pytest.mark.parametrize("again", [lambda model: model, copy.deepcopy])
@pytest.mark.parametrize("make", [
    lambda: vit(dynamic_img_size=True, dynamic_img_pad=True),
    lambda: naflex(embed_proj_type="conv", dynamic_img_pad=True),
    lambda: naflex(embed_proj_type="linear", dynamic_img_pad=True),
])  # fmt: skip
@torch.no_grad()
def test_uint8_images_are_padded_as_normalised_ones_are(make, again):
    """With the mean, which is zero there: 51 of 255, and not 0."""
    plain = make()
    ours = again(integration.convert(integration.convert(copy.deepcopy(plain)), "fp16", mean=0.2, std=0.5))
    images = raw(70, 90)
    normalised = (images / 255 - 0.2) / 0.5
    for pixels in (images, raw(80, 96)):
        assert error(ours(pixels), plain((pixels / 255 - 0.2) / 0.5)) < ERRORS["fp16"]
    reverted = integration.revert(ours)
    assert torch.equal(reverted(normalised), plain(normalised))
    assert not any(module._forward_pre_hooks for module in reverted.modules())


@torch.no_grad()
def test_a_model_by_name_has_its_own_normalisation():
    """CLIP's mean and standard deviation are in the model's configuration."""
    plain = timm.create_model("vit_base_patch32_clip_224", pretrained=False, depth=1, num_classes=0).eval()
    mean, std = (torch.tensor(plain.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    assert mean.flatten().tolist() != [0.5] * 3
    ours = integration.convert(copy.deepcopy(plain), "fp16")
    images = raw(224, 224)
    assert error(ours(images), plain((images / 255 - mean) / std)) < ERRORS["fp16"]
    inside = integration.convert(torch.nn.ModuleDict({"tower": copy.deepcopy(plain)}), "fp16")
    assert torch.equal(inside["tower"](images), ours(images))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("precision", ERRORS)
@torch.no_grad()
def test_naflex_embeds_of_patches(precision, channels_last):
    plain = NaFlexEmbeds(
        16, embed_dim=48, proj_type="linear", class_token=False, pos_embed_grid_size=(4, 4), channels_last=channels_last
    )
    ours = integration.convert(copy.deepcopy(plain), precision, mean=0.5, std=0.5)
    assert type(ours.proj) is PatchLinear
    rows = torch.randint(0, 256, (2, 12, 768), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    coordinates = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"), -1).view(1, 12, 2)
    coordinates, valid = coordinates.expand(2, -1, -1), torch.ones(2, 12, dtype=torch.bool)
    expected, _ = plain(rows / 127.5 - 1, coordinates, valid)
    for pixels in (rows,) if precision.startswith("int") else (rows, rows / 127.5 - 1):
        got, _ = ours(pixels, coordinates, valid)
        assert 1e-6 < error(got, expected) < ERRORS[precision]
    images = raw()  # which such a module takes as well, and cuts itself
    assert error(ours(images)[0], plain(images / 127.5 - 1)[0]) < ERRORS[precision]


@torch.no_grad()
def test_a_naflex_model_of_patches():
    plain = naflex(embed_proj_type="linear")
    ours = integration.convert(copy.deepcopy(plain), "fp16", mean=0.5, std=0.5)
    assert type(ours.embeds.proj) is PatchLinear
    assert error(ours(raw()), plain(raw() / 127.5 - 1)) < ERRORS["fp16"]


@torch.no_grad()
def test_naflex_embeds_of_images():
    plain = naflex(embed_proj_type="conv")
    ours = integration.convert(copy.deepcopy(plain), "fp16", mean=0.5, std=0.5)
    assert type(ours.embeds.proj) is PatchConv2d
    images = raw(96, 64)
    assert error(ours(images), plain(images / 127.5 - 1)) < ERRORS["fp16"]


def test_training():
    plain = vit()
    ours = integration.convert(copy.deepcopy(plain), "int8", mean=0.5, std=0.5)
    images = raw()
    for model, pixels in ((plain, images / 127.5 - 1), (ours, images)):
        model.train()(pixels).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert torch.allclose(ours.patch_embed.proj.weight, plain.patch_embed.proj.weight, atol=1e-6)
    with torch.no_grad():
        assert error(ours.eval()(images), plain.eval()(images / 127.5 - 1)) < ERRORS["int8"]


def doubled(_: torch.nn.Module, __: tuple, out: torch.Tensor) -> torch.Tensor:
    return 2 * out


@pytest.mark.parametrize("make", [
    vit, lambda: naflex(embed_proj_type="conv"), lambda: naflex(embed_proj_type="linear"),
])  # fmt: skip
@pytest.mark.parametrize("first", ["adapted", "converted"])
@torch.no_grad()
def test_hooks_of_embedding_and_layer_are_called(make, first):
    def adapted(model: torch.nn.Module) -> torch.nn.Module:
        embedding = getattr(model, "patch_embed", None) or model.embeds
        embedding.proj.register_forward_hook(doubled)
        add_hook_to_module(embedding.proj, ModelHook())
        add_hook_to_module(embedding, ModelHook())
        return model

    pixels = raw() / 127.5 - 1
    expected = adapted(make())(pixels)
    if first == "adapted":
        ours = integration.convert(adapted(make()), "fp16")
    else:
        ours = adapted(integration.convert(make(), "fp16"))
    assert integration.is_converted(ours) and error(ours(pixels), expected) < 2 * ERRORS["fp16"]
    assert error(make()(pixels), expected) > 4 * ERRORS["fp16"]  # what stands there matters


def test_a_model_tells_whether_it_is_converted():
    """True only where calls of every embedding reach the kernels."""
    ours = integration.convert(vit(), "int8", mean=0.5, std=0.5)
    assert integration.is_converted(ours) and integration.is_converted(copy.deepcopy(ours))
    assert not integration.is_converted(vit())
    assert not integration.is_converted(torch.nn.ModuleList([ours, vit()]))  # one is left to be converted
    for part in (ours.patch_embed, ours.patch_embed.proj):
        part.forward = lambda images: images
        assert not integration.is_converted(ours)
        del part.forward
        assert integration.is_converted(ours)
    parametrize.register_parametrization(ours.patch_embed.proj, "weight", torch.nn.Identity())
    assert integration.is_converted(ours)
    parametrize.remove_parametrizations(ours.patch_embed.proj, "weight")
    assert not integration.is_converted(integration.revert(ours))
    with pytest.raises(ValueError, match="model is Linear, which has no PatchEmbed or NaFlexEmbeds"):
        integration.is_converted(torch.nn.Linear(8, 8))
    with pytest.raises(TypeError, match="model is str"):
        integration.is_converted("model")


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(2)
    (path,) = (path for path, module in model.named_modules() if path in ("patch_embed.proj", "embeds.proj"))
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=[path], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.filterwarnings("ignore:a layer of a converted")
@torch.no_grad()
def test_an_adapter_around_the_layer_is_called():
    pixels = raw() / 127.5 - 1
    expected = adapted(vit())(pixels)
    ours = adapted(integration.convert(vit()))
    assert error(ours(pixels), expected) < 2 * ERRORS["bf16"] < error(vit()(pixels), expected)
    assert not integration.is_converted(ours)
    assert integration.is_converted(ours.merge_and_unload()) and error(ours(pixels), expected) < 2 * ERRORS["bf16"]
    with pytest.raises(ValueError, match="proj cannot be converted: module is peft.tuners.lora.layer.Conv2d: must be"):
        integration.convert(adapted(vit()))


@torch.no_grad()
def test_reverted():
    plain = vit()
    ours = integration.revert(integration.convert(copy.deepcopy(plain), "int8", mean=0.5, std=0.5))
    pixels = raw() / 127.5 - 1
    assert type(ours.patch_embed.proj) is torch.nn.Conv2d and torch.equal(ours(pixels), plain(pixels))


def test_models_that_are_refused():
    with pytest.raises(TypeError, match="model is str"):
        integration.convert("vit_base_patch16_224")
    with pytest.raises(ValueError, match="no PatchEmbed"):
        integration.convert(torch.nn.Linear(8, 8))
    with pytest.raises(ValueError, match="precision"):
        integration.convert(vit(), "int4")
    refused = VisionTransformer(img_size=64, patch_size=16, embed_dim=12, depth=1, num_heads=2)
    with pytest.raises(ValueError, match="patch_embed.proj cannot be converted: module has 12 features"):
        integration.convert(refused)
    assert type(refused.patch_embed.proj) is torch.nn.Conv2d


@torch.no_grad()
def test_a_normalisation_that_no_weights_say_is_asked_for() -> None:
    """timm's defaults are those of nothing."""
    named = vit()
    named.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "url": ""}
    for plain in (vit(), named):
        with pytest.raises(ValueError, match="mean and std of a timm model are not known"):
            integration.convert(plain, "int8")
        ours = integration.convert(copy.deepcopy(plain))
        assert error(ours(raw() / 127.5 - 1), plain(raw() / 127.5 - 1)) < ERRORS["bf16"]
        with pytest.raises(ValueError, match="mean and std are not known"):
            ours(raw())
    named.pretrained_cfg["hf_hub_id"] = "timm/a_model"
    assert error(integration.convert(copy.deepcopy(named))(raw()), named(raw() / 127.5 - 1)) < ERRORS["bf16"]


def smaller_patches(model: torch.nn.Module) -> torch.nn.Module:
    model.set_input_size((64, 64), patch_size=8)
    return model


RAW = [("bf16", "auto"), ("bf16", "raw"), ("int8", "auto"), ("int8", "raw")]


@pytest.mark.parametrize(("precision", "pixels"), RAW)
@pytest.mark.parametrize(("make", "change"), [
    (vit, adapted), (vit, smaller_patches), (lambda: naflex(embed_proj_type="conv"), adapted),
    (lambda: naflex(embed_proj_type="linear"), adapted),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:a layer of a converted")
@torch.no_grad()
def test_raw_pixels_before_what_stands_in_place_of_a_layer(make, change, precision: str, pixels: str) -> None:
    expected, images = change(make())(raw() / 127.5 - 1), raw()
    ours = change(integration.convert(make(), precision, pixels=pixels, mean=0.5, std=0.5))
    for given in (images,) if (precision, pixels) == ("bf16", "auto") else (images, images.float()):
        assert error(ours(given), expected) < ERRORS["bf16"]


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(("precision", "pixels"), RAW)
@torch.no_grad()
def test_patches_of_any_size(precision: str, pixels: str, channels_last: bool) -> None:
    """timm multiplies them by weights that it makes of the layer's, which is not called."""
    kwargs = {"embed_proj_type": "linear", "enable_patch_interpolator": True, "patchify_channels_last": channels_last}
    plain = naflex(**kwargs)
    ours = integration.convert(copy.deepcopy(plain), precision, pixels=pixels, mean=(0.2, 0.5, 0.6), std=0.25)
    shape = (2, 16, 6, 6, 3) if channels_last else (2, 16, 3, 6, 6)
    rows = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    mean = torch.tensor([0.2, 0.5, 0.6]).view((3,) if channels_last else (3, 1, 1))
    coordinates = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, 16, 2)
    more = {"patch_coord": coordinates, "patch_valid": torch.ones(2, 16, dtype=torch.bool)}
    expected = plain.forward_features((rows / 255 - mean) / 0.25, **more)["patches"]
    for given in (rows,) if (precision, pixels) == ("bf16", "auto") else (rows, rows.float()):
        assert error(ours.forward_features(given, **more)["patches"], expected) < 1e-5


@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_naflex_trains_through_the_kernel(kind: str) -> None:
    """It adds positions in place."""
    plain = naflex(embed_proj_type=kind).bfloat16()
    ours = integration.convert(copy.deepcopy(plain))
    for model in (plain, ours):
        model(raw().bfloat16() / 127.5 - 1).float().square().sum().backward()
    assert error(ours.embeds.proj.weight.grad, plain.embeds.proj.weight.grad) < 5e-2
