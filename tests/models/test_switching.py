"""`convert`, `revert`, `enable` and `disable` in any order, with every precision and type, on a small SigLIP."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest
import torch
import transformers

from cute_kernels.models import transformers as integration
from tests.models.test_transformers import ERRORS, SMALL, error

LIBRARYS = "transformers.models.siglip.modeling_siglip"


@pytest.fixture(autouse=True)
def disabled_afterwards() -> Iterator[None]:
    yield
    integration.disable()


def build() -> transformers.SiglipVisionModel:
    torch.manual_seed(0)
    config = transformers.SiglipVisionConfig(**SMALL, image_size=32, patch_size=16)
    return transformers.SiglipVisionModel._from_config(config).eval()


def raw_images() -> torch.Tensor:
    return torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("seed", range(2))
@torch.no_grad()
def test_any_order(seed: int) -> None:
    """After every step each model computes with what was last said of it, and `enable` counts for new models alone."""
    choose = random.Random(seed)
    plain, raw = build(), raw_images()
    expected = plain(raw / 127.5 - 1).last_hidden_state
    models: list[tuple[torch.nn.Module, str | None]] = [(copy.deepcopy(plain), None)]
    enabled = None
    for _ in range(12):
        step = choose.choice(("enable", "disable", "build", "convert", "revert", "copy"))
        precision, place = choose.choice(list(ERRORS)), choose.randrange(len(models))
        model, state = models[place]
        if step == "enable":
            enabled = precision if integration.enable(precision, models=["siglip"], mean=0.5, std=0.5) else enabled
        elif step == "disable":
            integration.disable()
            enabled = None
        elif step == "build":
            models.append((build(), enabled))
        elif step == "convert":
            models[place] = (integration.convert(model, precision, mean=0.5, std=0.5), precision)
        elif step == "revert":
            models[place] = (integration.revert(model), None)
        else:
            models.append((copy.deepcopy(model), state))
        for model, state in models[-2:]:
            embedding = model.get_submodule("embeddings")
            assert (type(embedding).__module__ == LIBRARYS) == (state is None), (step, state)
            assert list(model.state_dict()) == list(plain.state_dict())
            if state is None:
                assert torch.equal(model(raw / 127.5 - 1).last_hidden_state, expected)
            else:
                assert embedding.engine.options.precision == state
                assert 1e-6 < error(model(raw).last_hidden_state, expected) < ERRORS[state]


@pytest.mark.filterwarnings("ignore:A patch embedding in eval mode runs the plain torch module")
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("precision", ERRORS)
def test_every_type_of_weights_and_pixels(precision: str, weights: torch.dtype) -> None:
    """What the library's model takes, and uint8; integers are raw in every type."""
    plain, raw = build(), raw_images()
    ours = integration.convert(copy.deepcopy(plain).to(weights), precision, mean=0.5, std=0.5)
    with torch.no_grad():
        expected = plain(raw / 127.5 - 1).last_hidden_state
    for pixels in (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64):
        rounded = 0.02 if torch.bfloat16 in (weights, pixels) else 2e-3  # of the tower, or of the pixels
        given = raw if pixels == torch.uint8 else (raw / 127.5 - 1).to(pixels)
        with torch.no_grad():
            if precision == "int8" and pixels != torch.uint8:
                for enabled in (False, True):
                    with torch.set_grad_enabled(enabled), pytest.raises(ValueError, match="do_rescale=False"):
                        ours(given)
                given = raw.to(pixels)  # as a model casts them
            got = ours(given).last_hidden_state
            assert got.dtype == weights and error(got, expected) < ERRORS[precision] + rounded
        trained = ours(given).last_hidden_state  # with gradients, by the plain module
        assert trained.dtype == weights and error(trained.detach(), expected) < rounded


@pytest.mark.filterwarnings("ignore:A patch embedding in eval mode runs the plain torch module")
def test_the_plain_module_takes_what_it_always_took() -> None:
    """Pixels that no processor makes, such as those of another normalisation or of an optimisation over images."""
    plain = build()
    ours = integration.convert(copy.deepcopy(plain))
    pixels = 100 * torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ours(pixels).last_hidden_state, plain(pixels).last_hidden_state)
    with torch.no_grad(), pytest.raises(ValueError, match="look raw"):
        ours(pixels)
