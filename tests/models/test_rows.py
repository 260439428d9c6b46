"""Families that are rows of data alone: small models of the library against themselves, and what their kind brings."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import peft
import pytest
import torch
import transformers

from cute_kernels.models import transformers as integration

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64}
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SAID = {"mean": MEAN, "std": STD}
ERRORS = {"bf16": 1e-2, "int8": 4e-2}

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**SMALL)),
    "deit": lambda: transformers.DeiTModel(transformers.DeiTConfig(**SMALL)),
    "mae": lambda: transformers.ViTMAEModel(transformers.ViTMAEConfig(**SMALL, mask_ratio=0.0)),
    "beit": lambda: transformers.BeitModel(transformers.BeitConfig(**SMALL)),
    "ijepa": lambda: transformers.IJepaModel(transformers.IJepaConfig(**SMALL)),
    "sam": lambda: transformers.SamVisionModel(
        transformers.SamVisionConfig(
            hidden_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=64, window_size=2,
            global_attn_indexes=[0], output_channels=16, mlp_dim=64,
        )
    ),
}  # fmt: skip


def raw() -> torch.Tensor:
    return torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def normalised(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(value)[:, None, None] for value in (MEAN, STD))
    return (images / 255 - mean) / std


@torch.no_grad()
def run(model: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    noise = {"noise": torch.arange(16.0).expand(2, 16)} if hasattr(model.config, "mask_ratio") else {}
    return model(pixel_values=pixels, **noise)[0]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kind", MODELS)
def test_a_model(kind: str) -> None:
    torch.manual_seed(0)
    plain = MODELS[kind]().eval()
    images, expected = raw(), run(plain, normalised(raw()))
    for precision, most in ERRORS.items():
        ours = integration.convert(copy.deepcopy(plain), precision, **SAID)
        assert integration.is_converted(ours) and list(ours.state_dict()) == list(plain.state_dict())
        assert 0 < error(run(ours, images), expected) < most
    cast = integration.convert(copy.deepcopy(plain), pixels="raw", **SAID)
    assert 0 < error(run(cast, images.float()), expected) < ERRORS["bf16"]
    assert torch.equal(run(integration.revert(ours), normalised(images)), expected)


def _lora(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["projection"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval().get_base_model()


def _another(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(2)
    path = next(path for path, _ in model.named_modules() if path.endswith("projection"))
    model.set_submodule(path, torch.nn.Conv2d(3, 64, 16, stride=16))
    return model


def _darker(model: torch.nn.Module) -> torch.nn.Module:
    layer = next(module for path, module in model.named_modules() if path.endswith("projection"))
    layer.register_forward_pre_hook(lambda _, given: (given[0] * 0.5,))
    return model


@pytest.mark.parametrize("change", [_lora, _another, _darker])
@pytest.mark.parametrize("kind", ["beit", "sam", "vit"])  # of which two do not cast their pixels
@pytest.mark.filterwarnings("ignore:a layer of a converted")
def test_raw_pixels_before_what_stands_around_or_in_place_of_a_layer(kind: str, change: Callable) -> None:
    torch.manual_seed(0)
    plain, images = MODELS[kind]().eval(), raw()
    expected = run(change(copy.deepcopy(plain)), normalised(images))
    for precision, pixels in (("bf16", "auto"), ("bf16", "raw"), ("int8", "auto"), ("int8", "raw")):
        ours = change(integration.convert(copy.deepcopy(plain), precision, pixels=pixels, **SAID))
        for given in (images, images.float()) if (precision, pixels) != ("bf16", "auto") else (images,):
            assert error(run(ours, given), expected) < ERRORS["bf16"]


def test_a_loss_that_compares_with_pixels_is_of_normalised_ones() -> None:
    torch.manual_seed(0)
    decoder = {"decoder_hidden_size": 32, "decoder_intermediate_size": 32, "decoder_num_hidden_layers": 1}
    config = transformers.ViTMAEConfig(**SMALL, **decoder, decoder_num_attention_heads=2)
    plain = transformers.ViTMAEForPreTraining(config).eval()
    ours = integration.convert(copy.deepcopy(plain), **SAID)
    assert torch.allclose(run(ours, raw()), run(plain, normalised(raw())), rtol=1e-2)
    for wrong in ({"precision": "int8"}, {"pixels": "raw"}):
        with pytest.raises(ValueError, match="ViTMAEForPreTraining compares with normalised pixels"):
            integration.convert(torch.nn.ModuleList([plain]), **wrong, **SAID)


def test_what_was_put_around_an_embedding_is_removed_before_it_is_reverted() -> None:
    ours = integration.convert(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SMALL)))
    embeddings = next(module for module in ours.modules() if hasattr(module, "position_embedding"))
    ours_class = type(embeddings)
    embeddings.__class__ = type("Sharded", (ours_class,), {})  # as FSDP's fully_shard does
    with pytest.raises(TypeError, match="Sharded: remove what was put around it"):
        integration.revert(ours)
    embeddings.__class__ = ours_class
    assert not integration.is_converted(integration.revert(ours))


class _Padding:
    """An image processor that pads to 8 x 8 after it normalised, as SAM's does."""

    image_mean, image_std, do_pad = MEAN, STD, True

    def preprocess(self, image: np.ndarray, do_rescale: bool = True, do_normalize: bool = True) -> dict:
        mean, std = (np.array(value, np.float32)[:, None, None] for value in (MEAN, STD))
        image = image / np.float32(255) if do_rescale else image
        image = (image - mean) / std if do_normalize else image
        return {"pixel_values": [np.pad(image, ((0, 0), (0, 8 - image.shape[1]), (0, 8 - image.shape[2])))]}


def test_raw_pixels_are_padded_as_normalised_ones_are() -> None:
    image = np.random.default_rng(0).integers(0, 4, (3, 5, 6), dtype=np.uint8)  # dark, and zeros among them
    (got,) = integration.raw_processor(_Padding()).preprocess(image)["pixel_values"]
    (expected,) = _Padding().preprocess(image)["pixel_values"]
    assert got.dtype == np.uint8 and np.array_equal(got[:, :5, :6], image)
    assert np.abs(normalised(torch.tensor(got)).numpy() - expected).max() < 0.5 / 255 / min(STD) + 1e-6


@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_on_the_way_back_are_called(everywhere: bool) -> None:
    ours = integration.convert(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SMALL))).bfloat16()
    layer = next(module for module in ours.modules() if isinstance(module, torch.nn.Conv2d))
    seen: list[torch.nn.Module] = []

    def hook(module: torch.nn.Module, *_: object) -> None:
        seen.append(module)

    register = torch.nn.modules.module.register_module_full_backward_hook if everywhere else None
    handle = register(hook) if everywhere else layer.register_full_backward_hook(hook)
    try:
        ours(pixel_values=normalised(raw()).bfloat16())[0].float().sum().backward()
    finally:
        handle.remove()
    assert layer in seen


def test_a_model_that_enables_nothing_is_pickled() -> None:
    ours = integration.convert(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SMALL)).eval())
    again = pickle.loads(pickle.dumps(ours))
    assert torch.equal(run(again, normalised(raw())), run(ours, normalised(raw())))
