"""`cute_kernels.models.open_clip` on small models of open_clip: ``make integrations``."""

from __future__ import annotations

import copy
import pickle

import open_clip
import pytest
import torch
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from open_clip.model import CLIP
from open_clip.transformer import VisionTransformer

from cute_kernels.models import open_clip as integration
from cute_kernels.models.nn import PatchConv2d

ERRORS = {"bf16": 5e-3, "fp16": 8e-4, "int8": 2e-2, "fp8": 8e-2}
TEXT = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1}
OWN = {"image_size": 64, "layers": 2, "width": 48, "head_width": 12, "patch_size": 16}
TIMM = {
    "image_size": 224,
    "timm_model_name": "vit_base_patch16_siglip_224",
    "timm_model_pretrained": False,
    "timm_pool": "map",
    "timm_proj": "none",
}


def clip(vision: dict) -> CLIP:
    torch.manual_seed(0)
    return CLIP(embed_dim=768 if "timm_model_name" in vision else 32, vision_cfg=vision, text_cfg=TEXT).eval()


def raw(size: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (1, 3, size, size), dtype=torch.uint8, generator=generator)


def normalised(mean, std, size: int = 64) -> torch.Tensor:
    mean, std = (torch.tensor(value)[:, None, None] for value in (mean, std))
    return (raw(size) / 255 - mean) / std


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("precision", ERRORS)
@torch.no_grad()
def test_open_clips_own_tower(precision):
    plain = clip(OWN)
    said = {"mean": OPENAI_DATASET_MEAN, "std": OPENAI_DATASET_STD}
    with pytest.raises(ValueError, match="mean and std of an open_clip model are not known"):
        integration.convert(copy.deepcopy(plain), "int8")
    ours = integration.convert(copy.deepcopy(plain), precision, **said)
    assert type(ours.visual.conv1) is PatchConv2d and list(ours.state_dict()) == list(plain.state_dict())
    pixels = normalised(OPENAI_DATASET_MEAN, OPENAI_DATASET_STD)
    expected = plain.encode_image(pixels)
    for given in (raw(),) if precision.startswith("int") else (raw(), pixels):
        assert 1e-7 < error(ours.encode_image(given), expected) < ERRORS[precision]


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@torch.no_grad()
def test_a_tower_of_timm(precision):
    plain = clip(TIMM)
    ours = integration.convert(copy.deepcopy(plain), precision, mean=0.5, std=0.5)
    assert type(ours.visual.trunk.patch_embed.proj) is PatchConv2d
    expected = plain.encode_image(normalised((0.5,) * 3, (0.5,) * 3, 224))
    assert 1e-7 < error(ours.encode_image(raw(224)), expected) < ERRORS[precision]


@torch.no_grad()
def test_the_normalisation_of_the_tower():
    """`open_clip.create_model` says on the tower how its images are normalised."""
    plain = clip(OWN)
    open_clip.model.set_model_preprocess_cfg(plain, {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)})
    ours = integration.convert(copy.deepcopy(plain), "fp16")
    expected = plain.encode_image(normalised((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    assert error(ours.encode_image(raw()), expected) < ERRORS["fp16"]


@torch.no_grad()
def test_a_normalisation_that_open_clip_filled_in_is_asked_for() -> None:
    """Its default is OpenAI's, whatever the checkpoint was trained with."""
    plain = clip(OWN)
    filled_in = {"mean": OPENAI_DATASET_MEAN, "std": list(OPENAI_DATASET_STD)}
    open_clip.model.set_model_preprocess_cfg(plain, filled_in)
    with pytest.raises(ValueError, match="mean and std of an open_clip model are not known"):
        integration.convert(copy.deepcopy(plain), "int8")
    transforms = open_clip.image_transform(64, is_train=False, **filled_in)
    expected = plain.encode_image(normalised(*filled_in.values()))
    for said in (filled_in, {"processor": transforms}):
        assert error(integration.convert(copy.deepcopy(plain), "int8", **said).encode_image(raw()), expected) < 2e-2
    with pytest.raises(ValueError, match="mean and std are not known"):
        integration.convert(copy.deepcopy(plain)).encode_image(raw())


@pytest.mark.parametrize("vision", [OWN, TIMM])
def test_a_model_tells_whether_it_is_converted(vision):
    """True only where calls of the tower's embedding reach the kernels."""
    ours = integration.convert(clip(vision))
    assert integration.is_converted(ours) and integration.is_converted(ours.visual)
    assert not integration.is_converted(clip(vision))
    layer = ours.visual.conv1 if vision is OWN else ours.visual.trunk.patch_embed.proj
    layer.register_forward_hook(lambda *_: None)
    assert integration.is_converted(ours)  # it is called
    layer.forward = lambda images: images
    assert not integration.is_converted(ours)
    with pytest.raises(ValueError, match="cannot be converted: module is PatchConv2d with a forward of its own"):
        integration.convert(ours)
    del layer.forward
    assert not integration.is_converted(integration.revert(ours))
    with pytest.raises(ValueError, match="model is Linear, which has no vision transformer of open_clip"):
        integration.is_converted(torch.nn.Linear(8, 8))
    with pytest.raises(TypeError, match="model is int"):
        integration.is_converted(3)


@torch.no_grad()
def test_hooks_of_the_layer_are_called():
    def hooked(model: CLIP) -> CLIP:
        model.visual.conv1.register_forward_hook(lambda module, images, out: 2 * out)
        return model

    pixels = normalised(OPENAI_DATASET_MEAN, OPENAI_DATASET_STD)
    expected = hooked(clip(OWN)).encode_image(pixels)
    for ours in (integration.convert(hooked(clip(OWN)), "fp16"), hooked(integration.convert(clip(OWN), "fp16"))):
        assert error(ours.encode_image(pixels), expected) < 2 * ERRORS["fp16"]
    assert error(clip(OWN).encode_image(pixels), expected) > 4 * ERRORS["fp16"]


def test_reverted_and_refused():
    ours = integration.revert(integration.convert(clip(OWN)))
    assert type(ours.visual.conv1) is torch.nn.Conv2d
    with pytest.raises(ValueError, match="no vision transformer"):
        integration.convert(torch.nn.Linear(8, 8))
    with pytest.raises(TypeError, match="model is int"):
        integration.convert(3)
    with pytest.raises(ValueError, match="std"):
        integration.convert(clip(OWN), mean=0.5, std=-1)


class Adapter(torch.nn.Module):
    """Beside the layer in it another one sees the pixels."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.base_layer, self.beside = layer, torch.nn.Conv2d(3, layer.out_channels, 16, stride=16, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.base_layer(images) + self.beside(images.to(self.beside.weight.dtype))


class Doubled(VisionTransformer):
    """A tower that uses its layer's weight itself."""

    def _embeds(self, images: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.conv2d(images.to(self.conv1.weight.dtype), 2 * self.conv1.weight, stride=16)
        rows = rows.flatten(2).transpose(1, 2)
        rows = torch.cat((self.class_embedding.expand(len(rows), 1, -1), rows), 1) + self.positional_embedding
        return self.ln_pre(rows)


def adapted(model: CLIP) -> CLIP:
    model.visual.conv1 = Adapter(model.visual.conv1)
    return model


def doubled(model: CLIP) -> CLIP:
    model.visual.__class__ = Doubled
    return model


@pytest.mark.parametrize(("precision", "pixels"), [("bf16", "auto"), ("bf16", "raw"), ("int8", "auto")])
@pytest.mark.parametrize("change", [adapted, doubled])
@pytest.mark.filterwarnings("ignore:Doubled has methods that are not open_clip's")
@torch.no_grad()
def test_raw_pixels_of_each_way_into_a_tower(change, precision: str, pixels: str) -> None:
    """`forward_intermediates` calls neither the tower's forward nor its hooks."""
    normal = normalised([0.5] * 3, [0.5] * 3)
    expected = [change(clip(OWN)).visual.forward_intermediates(normal)["image_intermediates"][-1]]
    expected.append(change(clip(OWN)).encode_image(normal))
    ours = integration.convert(clip(OWN), precision, mean=0.5, std=0.5, pixels=pixels)
    before = ours.encode_image(raw())
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        changed = change(again)
        got = [changed.visual.forward_intermediates(raw())["image_intermediates"][-1], changed.encode_image(raw())]
        for one, other in zip(got, expected, strict=True):
            assert error(one, other) < ERRORS[precision]
    assert torch.equal(ours.encode_image(raw()), before)
    assert not vars(integration.revert(ours).visual).keys() & {"_embeds"}
