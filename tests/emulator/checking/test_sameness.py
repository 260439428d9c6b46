"""Memory of two runs of a program, compared."""

from __future__ import annotations

import numpy as np

from cute_kernels.emulator.checking.sameness import LaunchMemory, first_difference


def test_bytes_that_nobody_has_written_are_not_compared() -> None:
    """Both outputs have other garbage where their launches store nothing."""
    before = [np.array([7, 7, 7], np.uint8), np.array([9, 9, 9], np.uint8)]
    after = [np.array([1, 7, 2], np.uint8), np.array([1, 9, 2], np.uint8)]
    runs = [[LaunchMemory("k", (b,), (a,))] for b, a in zip(before, after)]
    assert first_difference(*runs) is None
    after[1][2] = 3
    assert first_difference(*runs).byte == 2
