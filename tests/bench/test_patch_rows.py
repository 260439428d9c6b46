"""`bench.patch_rows` with few rows on a CPU: what is launched computes the same layer; no time is taken."""

from __future__ import annotations

import pytest
import torch

from bench import patch_rows as program


def test_without_a_gpu() -> None:
    assert torch.cuda.is_available() or program.main() == 2


@pytest.mark.parametrize("patch", [14, 16])
def test_all_are_the_same_layer(patch: int) -> None:
    """Against FP64 of the first one's pixels: quantised weights are off by less than 1%, a wrong mean by far more."""
    with torch.no_grad():
        runs = program.launches(patch, 64, 5, "cpu")
        expected = runs[program.LIBRARY](0, 0).double()
        for name in (program.INT8, program.STILL):
            found = runs[name](0, 0).double()
            assert found.shape == expected.shape
            assert (found - expected).norm() < 0.02 * expected.norm(), name


def test_frames_of_a_still_image_are_equal() -> None:
    both, one = program.still_rows(3, 4, "cpu")
    frames = both.view(3, program.COLOURS, program.FRAMES, 16)
    assert torch.equal(frames[:, :, 0], frames[:, :, 1])
    assert torch.equal(frames[:, :, 0].reshape(3, -1), one)
