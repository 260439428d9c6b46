"""Layers, options and pixels that cannot be taken are refused, by name."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.models.nn import PatchOptions, convert_layer
from tests.models.nn.embedding import embedding
from tests.models.nn.test_module import convolution, positions, uint8_images


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
        convert_layer(module, PatchOptions())


@pytest.mark.parametrize("module", [torch.nn.Conv3d(3, 8, 16, 16), torch.nn.Conv1d(3, 8, 4), torch.zeros(8, 3, 16, 16)])
def test_other_modules(module):
    with pytest.raises(TypeError, match="must be torch.nn.Conv2d or torch.nn.Linear"):
        convert_layer(module, PatchOptions())


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
    ],
)
def test_options(arguments, message):
    with pytest.raises(ValueError, match=message):
        embedding(convolution(), **arguments)


@pytest.mark.parametrize(
    ("pos", "grid", "message"),
    [
        (torch.zeros(8, 24), None, "square"),
        (torch.zeros(9, 16), None, "pos_embed has shape"),
        (torch.zeros(2, 9, 24), None, "pos_embed has shape"),
        (torch.zeros(9, 24), (2, 4), "grid"),
        (torch.zeros(9, 24), (0, 4), "grid"),
    ],
)
def test_positions_and_their_grid(pos, grid, message):
    layer = convert_layer(convolution(), PatchOptions())
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        layer(uint8_images(), pos, grid=grid)


def test_a_grid_that_is_no_pair():
    with pytest.raises(TypeError, match=r"grid is int: must be two integers \(rows, columns\)"):
        convert_layer(convolution(), PatchOptions())(uint8_images(), positions(), grid=4)


def test_a_weight_with_nan():
    module = convolution()
    module.weight.data[0, 0, 0, 0] = float("nan")
    with torch.no_grad(), pytest.raises(ValueError, match="NaN"):
        embedding(module)(uint8_images())


def test_pixels_that_are_not_what_was_promised():
    with torch.no_grad():
        raw = uint8_images()
        floats = raw.float()
        ours = embedding(convolution(), pixels="normalised")
        with pytest.raises(TypeError, match="raw"):
            ours(raw)
        for looks_raw in (floats, floats.bfloat16()):
            assert ours(looks_raw).isfinite().all()  # as was promised
            with pytest.raises(ValueError, match="they look raw.*pixels='normalised' promises"):
                embedding(convolution())(looks_raw)
        assert ours(floats / 127.5 - 1).isfinite().all()
        for arguments in ({"pixels": "raw"}, {"precision": "int8"}):
            with pytest.raises(ValueError, match="others than whole numbers from 0 to 255: must be raw pixels"):
                embedding(convolution(), **arguments)(floats / 127.5 - 1)
        with pytest.raises(TypeError, match="int64"):
            ours(raw.long())


@torch.no_grad()
def test_shapes_of_pixels():
    ours = embedding(convolution(), pos_embed=positions())
    for shape in ((2, 4, 48, 48), (2, 3, 8, 48), (2, 9, 767), (48, 48)):
        with pytest.raises(ValueError, match=r"input has shape .*: must be \[B, 3, H, W\] or \[3, H, W\]"):
            ours(torch.zeros(shape))
