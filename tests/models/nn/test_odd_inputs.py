"""What users of modules and converted layers try: arguments of other kinds are refused by name, odd ones computed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.nn.utils import parametrizations

from cute_kernels.models.nn import PatchConv2d, PatchOptions, convert_layer, revert_layer
from tests.models.nn.embedding import embedding
from tests.models.nn.test_module import (
    ERRORS,
    PRECISIONS,
    convolution,
    error,
    normalise,
    plain,
    positions,
    uint8_images,
)

HALF = (0.5, 0.5, 0.5)


def converted(precision: str = "bf16") -> PatchConv2d:
    return convert_layer(convolution().requires_grad_(False), PatchOptions(precision=precision))


def patches(layer: torch.nn.Module, *arguments: torch.Tensor) -> torch.Tensor:
    return layer(*arguments).flatten(2).transpose(1, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x.tolist(), "input is list: must be torch.Tensor"),
        (lambda x: x.numpy(), "input is ndarray: must be torch.Tensor"),
        (lambda x: x.to_sparse(), "input is of layout torch.sparse_coo: must be a strided tensor"),
        (lambda x: torch.nested.nested_tensor(list(x)), "input is a nested tensor: must be a strided"),
    ],
)
def test_what_is_no_strided_tensor(make, words: str) -> None:
    linear = convert_layer(torch.nn.Linear(768, 8), PatchOptions())
    for layer, pixels in ((converted(), torch.zeros(2, 3, 16, 16)), (linear, torch.zeros(2, 768))):
        with torch.no_grad(), pytest.raises(TypeError, match=words):
            layer(make(pixels))


@pytest.mark.parametrize("shape", [(), (767,), (2, 3, 16, 16)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_rows_of_another_length(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    linear = convert_layer(torch.nn.Linear(768, 8), PatchOptions())
    with torch.no_grad(), pytest.raises(ValueError, match=r"input has shape .*: must be \[.., 768\]"):
        linear(torch.zeros(shape, dtype=dtype))


def test_positions_that_are_elsewhere_or_missing() -> None:
    images, pos = uint8_images(), positions().detach()
    with pytest.raises(ValueError, match="pos_embed is on meta and weight is on cpu: they must be on one device"):
        converted()(images, pos.to("meta"))
    with pytest.raises(ValueError, match=r"grid = \(3, 3\) without pos_embed"):
        converted()(images, grid=(3, 3))
    for value in ([0.0], torch.nn.Embedding(9, 24)):
        with pytest.raises(TypeError, match=f"pos_embed is {type(value).__name__}: must be torch.Tensor"):
            converted()(images, value)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (parametrizations.weight_norm(convolution()), "module is parametrised in weight: must be a plain layer"),
        (torch.nn.LazyConv2d(24, 16, 16), "module is LazyConv2d without parameters yet"),
    ],
)
def test_layers_whose_parameters_are_made_by_something_else(module: torch.nn.Module, words: str) -> None:
    kind = type(module)
    with pytest.raises((TypeError, ValueError), match=f"{words}|channels = 0"):
        convert_layer(module, PatchOptions())
    assert type(module) is kind


def test_options_of_another_kind() -> None:
    layer = convolution()
    with pytest.raises(TypeError, match="options is str: must be PatchOptions"):
        convert_layer(layer, "bf16")
    with pytest.raises(TypeError, match="antialias is str: must be bool"):
        convert_layer(layer, PatchOptions(), antialias="no")
    assert type(layer) is torch.nn.Conv2d


def test_a_subclass_comes_back() -> None:
    class Stem(torch.nn.Conv2d):
        pass

    layer = Stem(3, 24, 16, 16)
    assert type(convert_layer(layer, PatchOptions())) is PatchConv2d
    assert type(convert_layer(layer, PatchOptions(precision="int8"))) is PatchConv2d
    assert revert_layer(layer) and type(layer) is Stem and not {"engine", "plain_class"} & set(vars(layer))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_four_channels_with_options_for_three(precision: str) -> None:
    """One mean and one standard deviation serve any number of channels; three do not, and the conversion says so."""
    images = torch.randint(0, 256, (2, 4, 48, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    layer = torch.nn.Conv2d(4, 24, 16, 16).requires_grad_(False)
    expected = layer(images / 127.5 - 1)
    with pytest.raises(ValueError, match="mean has 3 numbers"):
        convert_layer(layer, PatchOptions(precision=precision, mean=(0.4, 0.5, 0.6)))
    embed = embedding(layer, precision=precision)
    assert error(embed(images), expected.flatten(2).transpose(1, 2)) < ERRORS[precision]
    assert error(convert_layer(layer, PatchOptions(precision=precision))(images), expected) < ERRORS[precision]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
@torch.no_grad()
def test_pixels_of_eight_bits_are_looked_at_as_others_are(precision: str) -> None:
    pixels = normalise(uint8_images(), HALF, HALF).to(torch.float8_e4m3fn)
    layer = converted(precision)
    expected = torch.nn.functional.conv2d(pixels.float(), layer.weight, layer.bias, stride=16)
    assert error(layer(pixels), expected) < ERRORS[precision]
    with pytest.raises(ValueError, match="they look raw"):
        layer((pixels.float() * 100).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_autocast_leaves_results_in_the_type_of_the_weight(precision: str, dtype: torch.dtype) -> None:
    layer, images, pos = converted(precision), uint8_images(), positions().detach()
    expected = patches(layer, images, pos)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(patches(layer, images, pos), expected) and expected.dtype == torch.float32
        following = torch.nn.functional.linear(expected, torch.eye(24))
    assert following.dtype == dtype


def embeddings(layer: torch.nn.Module, pos: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    return patches(layer, pixels, pos) if isinstance(layer, PatchConv2d) else patches(layer, pixels) + pos


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_derivatives_of_forward_mode_are_the_plain_modules(precision: str) -> None:
    """Of pixels, weight and positions; a kernel has no rule for them, and would return none."""
    pixels, tangent = normalise(uint8_images(), HALF, HALF), torch.randn(2, 3, 48, 48)
    pos, ours, theirs = positions().detach()[None], converted(precision), convolution()
    expected = torch.func.jvp(lambda x, p: embeddings(theirs, p, x), (pixels, pos), (tangent, pos))
    got = torch.func.jvp(lambda x, p: embeddings(ours, p, x), (pixels, pos), (tangent, pos))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, expected, strict=True))
    module = embedding(convolution().requires_grad_(False), pos_embed=pos)
    assert torch.allclose(torch.func.jvp(module, (pixels,), (tangent,))[1], expected[1] - pos, atol=1e-4)
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        dual = torch.autograd.forward_ad.make_dual(pixels, tangent)
        got = torch.autograd.forward_ad.unpack_dual(patches(ours, dual)).tangent
        assert torch.allclose(got, expected[1] - pos, atol=1e-4)
        assert error(patches(ours, pixels), patches(theirs, pixels)) > 1e-6  # others keep the kernel
    assert error(patches(ours, pixels), patches(theirs, pixels).detach()) > 1e-6


@torch.no_grad()
def test_vmap_over_images_and_over_models() -> None:
    layer, pos, pixels = converted("int8"), positions().detach()[None], uint8_images()
    expected = plain(normalise(pixels, HALF, HALF), convolution(), pos[0])
    got = torch.func.vmap(lambda image: patches(layer, image[None], pos)[0])(pixels)
    assert torch.allclose(got, expected, atol=1e-4)
    state = {name: torch.stack([tensor, -tensor]) for name, tensor in layer.named_parameters()}

    def run(parameters: dict[str, torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, parameters, (pixels, positions)).flatten(2).transpose(1, 2)

    got = torch.func.vmap(run)(state, torch.stack([pos, -pos]))
    assert torch.allclose(got, torch.stack([expected, -expected]), atol=1e-4)


def test_gradients_by_torch_func() -> None:
    pixels, pos, layer, theirs = uint8_images(), positions().detach()[None], converted("int8"), convolution()
    state = {name: tensor.detach().clone() for name, tensor in layer.named_parameters()}

    def loss(of: torch.nn.Module, images: torch.Tensor):
        def run(parameters: dict[str, torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(of, parameters, (images, positions)).square().sum()

        return run

    class Sum(torch.nn.Conv2d):
        def forward(self, images: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return super().forward(images).flatten(2).transpose(1, 2) + positions

    theirs.__class__ = Sum
    got = torch.func.grad(loss(layer, pixels), (0, 1))(state, pos)
    expected = torch.func.grad(loss(theirs, normalise(pixels, HALF, HALF)), (0, 1))(state, pos)
    for a, b in zip([*got[0].values(), got[1]], [*expected[0].values(), expected[1]], strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_converted_model_is_saved_without_what_was_made_from_it(precision: str, tmp_path: Path) -> None:
    images, model = uint8_images(), torch.nn.Sequential(converted(precision))
    expected = model(images)
    safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    other = torch.nn.Sequential(convert_layer(convolution(seed=1), PatchOptions(precision=precision)))
    other.requires_grad_(False)
    before = other(images)
    safetensors.torch.load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(other(images), expected) and not torch.equal(before, expected)
    theirs = torch.nn.Sequential(convolution(seed=1))
    safetensors.torch.load_model(theirs, tmp_path / "model.safetensors")
    assert torch.equal(theirs[0].weight, model[0].weight)


@torch.no_grad()
def test_loading_counts_as_a_change_whatever_it_wrote() -> None:
    """Of shards no version counter of the whole parameter tells."""
    images, layer = uint8_images(), converted("int8")
    layer(images)
    layer.weight.data.mul_(-1)
    layer.load_state_dict({}, strict=False)
    assert torch.equal(layer(images), copy.deepcopy(layer)(images))
