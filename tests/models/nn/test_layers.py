"""`convert_layer`: a convolution or linear layer of a model that is somebody else's."""

from __future__ import annotations

import copy

import pytest
import torch

from cute_kernels.models.nn import PatchConv2d, PatchLinear, PatchOptions, convert_layer, revert_layer

OPTIONS = PatchOptions(precision="fp16")


def images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (2, 3, 40, 48), dtype=torch.uint8, generator=generator)


@pytest.fixture
def convolution() -> torch.nn.Conv2d:
    torch.manual_seed(0)
    return torch.nn.Conv2d(3, 16, 16, 16).requires_grad_(False)


def test_a_convolution_becomes_the_kernel_and_back(convolution):
    expected = convolution(images() / 127.5 - 1)
    assert "precision" not in repr(convolution)
    keys, before = list(convolution.state_dict()), dict(convolution.named_parameters())
    converted = convert_layer(convolution, OPTIONS)
    assert converted is convolution and type(convolution) is PatchConv2d and isinstance(convolution, torch.nn.Conv2d)
    assert repr(convolution).endswith("precision='fp16')")
    got = convolution(images())
    assert got.shape == expected.shape == (2, 16, 2, 3)
    assert torch.allclose(got, expected, atol=2e-3)
    assert got.flatten(2).transpose(1, 2).is_contiguous()  # what models do next costs no copy
    assert list(convolution.state_dict()) == keys
    assert all(before[name] is parameter for name, parameter in convolution.named_parameters())
    assert revert_layer(convolution) and type(convolution) is torch.nn.Conv2d
    assert not revert_layer(convolution)
    assert torch.equal(convolution(images() / 127.5 - 1), expected)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_an_image_without_a_batch(convolution, backend):
    """W = 192 is a multiple of C, so mean and std of three channels would broadcast along it."""
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    image = torch.randint(0, 256, (3, 64, 192), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    normalised = (image / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    expected = convolution(normalised)
    convert_layer(convolution, PatchOptions(precision="bf16", mean=mean, std=std, backend=backend))
    for pixels in (image, normalised):
        got = convolution(pixels)
        assert got.shape == (16, 4, 12)
        assert (got - expected).norm() < 4e-3 * expected.norm()


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("shape", [(2, 1, 48, 48), (1, 48, 48), (3, 16, 12), (48, 48), (1, 2, 3, 48, 48)])
def test_shapes_that_are_no_images(convolution, shape, backend):
    """Grey uint8 images would be broadcast to the mean's three channels before the plain layer refused them."""
    convert_layer(convolution, PatchOptions(backend=backend))
    for dtype in (torch.uint8, torch.float32):
        with pytest.raises(ValueError, match=r"input has shape .*must be \[B, 3, H, W\] or \[3, H, W\]"):
            convolution(torch.zeros(shape, dtype=dtype))


def test_the_kernel_and_not_the_convolution_ran(convolution):
    """int8 differs from the convolution by its rounding, and by no more."""
    expected = convolution(images() / 127.5 - 1)
    got = convert_layer(convolution, PatchOptions(precision="int8"))(images())
    error = (got - expected).norm() / expected.norm()
    assert 1e-4 < error < 1e-2


def test_a_linear_layer_of_rows():
    torch.manual_seed(0)
    linear = torch.nn.Linear(768, 16).requires_grad_(False)
    rows = torch.randint(0, 256, (2, 5, 768), dtype=torch.uint8)
    expected = linear(rows / 127.5 - 1)
    converted = convert_layer(linear, OPTIONS)
    assert type(converted) is PatchLinear
    assert torch.allclose(converted(rows), expected, atol=2e-3)
    convert_layer(linear, PatchOptions(precision="bf16"))  # new options for a converted one
    got = linear(rows / 127.5 - 1)
    assert 1e-4 < (got - expected).norm() / expected.norm() < 4e-3


def test_rows_whose_length_the_product_does_not_read():
    """K = 588 is no multiple of 8."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(588, 16).requires_grad_(False)
    rows = torch.rand(2, 5, 588) * 2 - 1
    expected = linear(rows)
    got = convert_layer(linear, PatchOptions(precision="bf16"))(rows)
    assert 1e-4 < (got - expected).norm() / expected.norm() < 4e-3


def test_training_and_the_step_after_it(convolution):
    convolution.requires_grad_(True)
    twin = copy.deepcopy(convolution)
    convert_layer(convolution, OPTIONS)
    with torch.no_grad():
        convolution(images())
    for layer, pixels in ((convolution, images()), (twin, images() / 127.5 - 1)):
        layer(pixels).square().mean().backward()
        torch.optim.SGD(layer.parameters(), lr=1.0).step()
    assert torch.allclose(convolution.weight, twin.weight)
    with torch.no_grad():
        assert torch.allclose(convolution(images()), twin(images() / 127.5 - 1), atol=2e-3)


def test_the_plain_layer_on_demand(convolution):
    expected = convolution(images() / 127.5 - 1)
    got = convert_layer(convolution, PatchOptions(backend="torch"))(images())
    assert torch.allclose(got, expected, atol=1e-6)


def test_a_model_that_is_cast_keeps_its_integers(convolution):
    model = torch.nn.Sequential(convert_layer(convolution, PatchOptions(precision="int8")))
    model(images())
    before = convolution.engine.prepared("images", convolution.weight).raw.clone()
    model.to(torch.bfloat16)
    assert convolution.weight.dtype == torch.bfloat16
    after = convolution.engine.prepared("images", convolution.weight).raw
    assert after.dtype == torch.int8 and torch.equal(after, before)


def test_layers_that_are_refused():
    class Other(torch.nn.Linear):
        def forward(self, input):
            return input

    with pytest.raises(TypeError, match=r"module is .*Other: must be"):
        convert_layer(Other(768, 8), OPTIONS)
    with pytest.raises(TypeError, match="module is .*Identity: must be"):
        convert_layer(torch.nn.Identity(), OPTIONS)
    refused = torch.nn.Conv2d(3, 8, 16, 16, padding=2)
    with pytest.raises(ValueError, match="padding"):
        convert_layer(refused, OPTIONS)
    assert type(refused) is torch.nn.Conv2d


def test_a_convolution_has_one_order(convolution):
    """Rows of it would be read in another order by some precisions, and normalised in another by all."""
    for module in (convolution, convert_layer(torch.nn.Conv2d(3, 16, 16, 16), OPTIONS)):
        before = type(module), vars(module).get("engine")
        with pytest.raises(ValueError, match="order = 'hwc' with a Conv2d: must be 'chw'"):
            convert_layer(module, PatchOptions(order="hwc"))
        assert (type(module), vars(module).get("engine")) == before


@pytest.mark.parametrize("layer", [torch.nn.Conv2d(3, 8, 16, 16), torch.nn.Linear(1536, 8)], ids=["conv", "linear"])
def test_layers_have_one_frame(layer):
    """The refusal comes before the first call, and says which option is at fault."""
    with pytest.raises(ValueError, match="frames = 2: must be 1"):
        convert_layer(layer, PatchOptions(precision="fp8", frames=2))
    assert "engine" not in vars(layer)


def test_channels_are_those_of_the_convolution():
    """Two, with options for three: one mean and one standard deviation serve all, different ones do not."""
    images = torch.randint(0, 256, (2, 2, 32, 32), dtype=torch.uint8)
    plain = torch.nn.Conv2d(2, 8, 16, 16)
    layer = convert_layer(copy.deepcopy(plain), PatchOptions())
    with torch.no_grad():
        expected = plain((images.double() / 255 - 0.5).div(0.5).float())
        assert (layer(images) - expected).norm() < 5e-3 * expected.norm()
    with pytest.raises(ValueError, match="mean has 3 numbers"):
        convert_layer(plain, PatchOptions(mean=(0.4, 0.5, 0.6)))
    assert type(plain) is torch.nn.Conv2d


@pytest.mark.parametrize("features", [4, 12, 20, 28])
@torch.no_grad()
def test_features_that_are_no_multiple_of_8_are_left_to_torch(features: int) -> None:
    """Of a layer whose weight is replaced; bit for bit as the plain one, since the kernels read 16 bytes at once."""
    plain, images = torch.nn.Conv2d(3, features, 16, 16).bfloat16(), torch.rand(2, 3, 32, 32).bfloat16() * 2 - 1
    converted = convert_layer(torch.nn.Conv2d(3, 16, 16, 16).bfloat16(), PatchOptions(precision="bf16")).eval()
    assert converted.engine.takes_over(None, images, lambda: (converted.weight, converted.bias))
    converted.weight, converted.bias = plain.weight, plain.bias
    assert not converted.engine.takes_over(None, images, lambda: (converted.weight, converted.bias))
    assert torch.equal(converted(images), plain(images))
