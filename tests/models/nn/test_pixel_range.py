"""Pixels beyond what mean and std say: FP8 has no numbers for them, and a promise of normalised ones is believed."""

from __future__ import annotations

import copy

import pytest
import torch

from cute_kernels.emulator.programs import capture
from cute_kernels.models.nn import PatchOptions, convert_layer
from cute_kernels.models.nn.pixels import Contradictions, _Largest
from tests.models.nn.embedding import embedding
from tests.models.nn.test_module import ERRORS, MEAN, STD, convolution, error, normalise, uint8_images

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(params=["images", "rows"])
def embed(request: pytest.FixtureRequest):
    """FP8 of pixels ``[B, C, H, W]``, given as they are or as rows, with these options."""

    def run(given: torch.Tensor, /, **options) -> torch.Tensor:
        layer = convolution()
        if request.param == "images":
            return convert_layer(layer, PatchOptions(precision="fp8", **options))(given).flatten(2).transpose(1, 2)
        linear = torch.nn.Linear(768, 24)
        linear.weight.data, linear.bias.data = layer.weight.data.flatten(1), layer.bias.data
        rows = torch.nn.functional.unfold(given, 16, stride=16).transpose(1, 2)
        return convert_layer(linear, PatchOptions(precision="fp8", **options))(rows)

    return run


def expected(pixels: torch.Tensor) -> torch.Tensor:
    layer = convolution()
    return torch.nn.functional.conv2d(pixels.float(), layer.weight, layer.bias, stride=16).flatten(2).transpose(1, 2)


@pytest.mark.parametrize("promise", ["auto", "normalised"])
@torch.no_grad()
def test_fp8_of_another_normalisation_is_refused(embed, promise: str) -> None:
    pixels = normalise(uint8_images(), *IMAGENET)
    assert error(embed(pixels, mean=IMAGENET[0], std=IMAGENET[1], pixels=promise), expected(pixels)) < ERRORS["fp8"]
    for narrow in ({}, {"mean": 0.5, "std": 0.5}):
        with pytest.raises(ValueError, match="up to 2.64.* reach 1, which is all that precision = 'fp8' represents"):
            embed(pixels, pixels=promise, **narrow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_fp8_takes_the_whole_range_rounded_to_the_pixels_type(embed, dtype: torch.dtype) -> None:
    """The largest pixel of 16 bits may lie beyond what mean and std say, by a rounding."""
    extreme = torch.tensor([0, 255], dtype=torch.uint8).repeat(2, 3, 48, 24)
    pixels = normalise(extreme).to(dtype)
    assert error(embed(pixels, mean=MEAN, std=STD), expected(pixels)) < ERRORS["fp8"]


@pytest.mark.parametrize("factor", [1.2, 7.0, float("inf")])
@torch.no_grad()
def test_where_nobody_looks_fp8_gives_nan_to_the_patch(embed, monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """As on a GPU and in compiled code."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    pixels = uint8_images().float() / 127.5 - 1
    pixels[1, 2, 20, 40] = factor
    got, right = embed(pixels), expected(pixels)
    assert got[1, 5].isnan().all()
    got[1, 5] = right[1, 5] = 0
    assert error(got, right) < ERRORS["fp8"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@torch.no_grad()
def test_pixels_promised_to_be_normalised_may_be_decibels(precision: str) -> None:
    layer = torch.nn.Conv2d(2, 16, 8, stride=8)
    pixels = torch.rand(2, 2, 32, 32) * 40 - 35
    right = layer(pixels)
    options = PatchOptions(precision=precision, channels=2, pixels="normalised")
    assert error(convert_layer(copy.deepcopy(layer), options)(pixels), right) < ERRORS[precision]
    ours = embedding(layer, precision=precision, pixels="normalised")
    assert error(ours(pixels), right.flatten(2).transpose(1, 2)) < ERRORS[precision]
    with pytest.raises(ValueError, match="they look raw"):
        embedding(layer, precision=precision)(pixels)


@pytest.mark.parametrize("storage", [torch.int8, torch.uint8, torch.float8_e4m3fn])
@torch.no_grad()
def test_layers_that_store_their_weight_in_another_type(storage: torch.dtype) -> None:
    """A quantised layer in place of the converted one computes in a type that its weight does not tell."""

    class Quantised(torch.nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            assert input.dtype is torch.float32
            return super()._conv_forward(input, weight.float() / 16, bias)

    layer = convert_layer(convolution(), PatchOptions())
    stored = (layer.weight * 16).round().to(storage)
    layer.weight = torch.nn.Parameter(stored, requires_grad=False)
    engine, pixels = layer.engine, uint8_images()
    for raw in (pixels, pixels.flatten(1)[:, :768]):
        with pytest.raises(TypeError, match=f"images has dtype torch.uint8, raw, .* stored as {storage}"):
            engine.normalised(raw, layer.weight)
    with pytest.raises(TypeError, match="stored as"):
        layer(pixels)
    floats = normalise(pixels)
    assert engine.normalised(floats, layer.weight) is floats
    layer.__class__ = Quantised
    assert torch.equal(
        layer(floats), torch.nn.functional.conv2d(floats, stored.float() / 16, layer.bias, stride=16)
    )


@pytest.mark.parametrize(
    ("wrong", "right", "limit"), [(2.5, 2.0, 2.0), (float("nan"), 2.0, 2.0), (True, False, 0)]
)
def test_what_is_noted_on_a_device_is_reported_once_whatever_follows(wrong: float, right: float, limit: float) -> None:
    """In the words of the last call; each note is two operators, since each of them is a launch."""
    noted = Contradictions()
    with capture("sm_90a"):
        good, bad = (torch.tensor(value).cuda() for value in (right, wrong))
        noted.note(good, limit, str)
        with torch.profiler.profile() as profile:
            noted.note(good, limit, str)
        operators = [event.name for event in profile.events() if event.cpu_parent is None]
        assert [name for name in operators if name.startswith("aten::")] == ["aten::maximum", "aten::copy_"]
        noted.report()
        noted.note(bad, limit, lambda: "of the bad call")
        noted.note(good, limit, lambda: "of the last call")
        with pytest.raises(ValueError, match="an earlier call on cuda:0 gave wrong results: of the last call"):
            noted.report()
        noted.note(good, limit, str)
        noted.report()


def test_a_report_goes_on_while_another_thread_notes_a_number_of_another_device() -> None:
    contradictions = Contradictions()
    later = _Largest(torch.zeros(()), torch.tensor(float("nan")), lambda: "later")

    class AddsOne:
        def item(self) -> float:
            contradictions._largest[torch.device("cuda:1"), 1.0] = later
            return 0.0

    contradictions._largest[torch.device("cuda:0"), 1.0] = _Largest(torch.zeros(()), AddsOne(), lambda: "first")
    contradictions.report()
    with pytest.raises(ValueError, match="an earlier call on cuda:1 gave wrong results: later"):
        contradictions.report()
