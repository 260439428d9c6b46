"""`cute_kernels.models.nn.PatchEmbed` refuses modules, arguments and pixels that it cannot take, by name."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.models.nn import PatchEmbed
from tests.models.nn.test_module import ERRORS, MEAN, STD, convolution, error, normalise, plain, positions, uint8_images


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (torch.nn.Conv2d(3, 8, (16, 8), (16, 8)), "kernel_size"),
        (torch.nn.Conv2d(3, 8, 16, 8), "stride"),
        (torch.nn.Conv2d(3, 8, 16, 16, padding=1), "padding"),
        (torch.nn.Conv2d(3, 8, 16, 16, dilation=2), "dilation"),
        (torch.nn.Conv2d(4, 8, 16, 16, groups=2), "groups"),
        (torch.nn.Conv2d(3, 12, 16, 16), "multiples of 8"),
        (torch.nn.Linear(700, 8), "in_features"),
    ],
)
def test_modules_that_are_no_patch_embedding(module, message):
    with pytest.raises(ValueError, match=message):
        PatchEmbed.from_module(module, channels=3)


@pytest.mark.parametrize("module", [torch.nn.Conv3d(3, 8, 16, 16), torch.nn.Conv1d(3, 8, 4), torch.zeros(8, 3, 16, 16)])
def test_other_modules(module):
    with pytest.raises(TypeError, match="must be torch.nn.Conv2d or torch.nn.Linear"):
        PatchEmbed.from_module(module)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "int4"}, "precision"),
        ({"order": "cwh"}, "order"),
        ({"pixels": "yes"}, "pixels"),
        ({"backend": "cuda"}, "backend"),
        ({"interpolation": "nearest"}, "interpolation"),
        ({"mean": (0.5, 0.5)}, "mean"),
        ({"std": 0.0}, "std"),
        ({"std": float("nan")}, "std"),
        ({"precision": "int8", "pixels": "normalised"}, "uint8"),
        ({"pos_embed": torch.zeros(8, 24)}, "square"),
        ({"pos_embed": torch.zeros(9, 16)}, "pos_embed has shape"),
        ({"pos_embed": torch.zeros(2, 9, 24)}, "pos_embed has shape"),
        ({"pos_embed": torch.zeros(9, 24), "grid": (2, 4)}, "grid"),
        ({"grid": (0, 4)}, "grid"),
    ],
)
def test_arguments_of_from_module(arguments, message):
    with pytest.raises(ValueError, match=message):
        PatchEmbed.from_module(convolution(), **arguments)


def test_a_grid_that_is_no_pair():
    with pytest.raises(TypeError, match=r"grid is int: must be two integers \(rows, columns\)"):
        PatchEmbed.from_module(convolution(), grid=4)


def test_a_weight_with_nan():
    module = convolution()
    module.weight.data[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        PatchEmbed.from_module(module)


def test_pixels_that_are_not_what_was_promised():
    with torch.no_grad():
        raw = uint8_images()
        floats = raw.float()
        ours = PatchEmbed.from_module(convolution(), pixels="normalised")
        with pytest.raises(TypeError, match="raw"):
            ours(raw)
        for looks_raw in (floats, floats.bfloat16()):
            assert ours(looks_raw).isfinite().all()  # as was promised
            with pytest.raises(ValueError, match="they look raw.*pixels='normalised' promises"):
                PatchEmbed.from_module(convolution())(looks_raw)
        assert ours(floats / 127.5 - 1).isfinite().all()
        for arguments in ({"pixels": "raw"}, {"precision": "int8"}):
            with pytest.raises(ValueError, match="others than whole numbers from 0 to 255: must be raw pixels"):
                PatchEmbed.from_module(convolution(), **arguments)(floats / 127.5 - 1)
        with pytest.raises(TypeError, match="int64"):
            ours(raw.long())


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda x: x.numpy(), TypeError, "pixels is ndarray: must be torch.Tensor"),
        (lambda x: x.to_sparse(), TypeError, "pixels is of layout torch.sparse_coo: must be a strided tensor"),
        (lambda x: torch.nested.nested_tensor(list(x)), TypeError, "pixels is a nested tensor: must be a strided"),
        (lambda x: x.to("meta"), ValueError, "pixels is on meta and weight is on cpu: they must be on one device"),
    ],
)
def test_pixels_that_are_no_strided_tensor_of_the_device(make, error, words):
    with torch.no_grad(), pytest.raises(error, match=words):
        PatchEmbed.from_module(convolution())(make(uint8_images().float() / 255))


def test_shapes_of_pixels():
    with torch.no_grad():
        ours = PatchEmbed.from_module(convolution(), pos_embed=positions())
        for shape in ((3, 48, 48), (2, 4, 48, 48), (2, 3, 8, 48), (2, 9, 767)):
            with pytest.raises(ValueError, match="must be"):
                ours(torch.zeros(shape))
        with pytest.raises(ValueError, match=r"K = 767: must be \[B, L, 768\]$"):
            ours(torch.zeros(2, 9, 767, dtype=torch.uint8), spatial_shapes=[[3, 3], [3, 3]])
        rows = torch.zeros(2, 9, 768)
        with pytest.raises(ValueError, match="spatial_shapes is missing"):
            ours(rows)
        for shapes in ([[3, 3]], [[3, 4], [1, 1]], [[0, 3], [1, 1]], [[3], [3]], [[1.5, 2], [1, 1]]):
            with pytest.raises(ValueError, match="spatial_shapes"):
                ours(rows, spatial_shapes=shapes)
        for dtype in (torch.float32, torch.uint8):
            with pytest.raises(ValueError, match=r"must be \[B, L, 768\]: an image needs a batch dimension"):
                ours(torch.zeros(3, 48, 48, dtype=dtype))
        with pytest.raises(TypeError, match="pixels is list"):
            ours([1.0])


@torch.no_grad()
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_an_image_without_a_batch_is_not_taken_for_rows(backend):
    """[3, 32, 768] is an image of 2 x 48 patches, and three times 32 rows; a linear layer's module takes rows."""
    module, image = convolution(), uint8_images(32, 768, batch=1)
    ours = PatchEmbed.from_module(module, precision="bf16", mean=MEAN, std=STD, backend=backend)
    for pixels in (image[0], normalise(image)[0]):
        with pytest.raises(ValueError, match="may be .C, H, W. or rows .*needs a batch dimension.*spatial_shapes"):
            ours(pixels)
    with pytest.raises(ValueError, match="needs a batch dimension"):
        PatchEmbed.from_module(module, pos_embed=positions())(image[0])
    assert error(ours(image), plain(normalise(image), module)) < ERRORS["bf16"]
    linear = torch.nn.Linear(768, 24)
    linear.weight.data, linear.bias.data = module.weight.data.flatten(1), module.bias.data
    rows = normalise(image)[0]
    expected = linear(rows)
    assert error(ours(rows, spatial_shapes=[[4, 8]] * 3), expected) < ERRORS["bf16"]
    assert error(PatchEmbed.from_module(linear, backend=backend)(rows), expected) < ERRORS["bf16"]
    assert error(ours(rows[:, :31]), expected[:, :31]) < ERRORS["bf16"]  # no whole patches: rows
