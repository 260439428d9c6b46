"""Masks of the lanes of a warp, bit i for lane i, and bool arrays of its 32 lanes: one from the other."""

import functools

import numpy as np

LaneValues = int | np.ndarray
"""Values of the lanes of a warp: one of all, or [32]."""


@functools.lru_cache(maxsize=4096)
def block_lanes(mask: int) -> np.ndarray:
    """A lane mask as bool [32]."""
    return np.array([bool(mask >> i & 1) for i in range(32)])


def mask_of(lanes: np.ndarray) -> int:
    """bool [32] as a lane mask (a result that is the same for all lanes may come as [1])."""
    if lanes.shape != (32,):
        lanes = np.broadcast_to(lanes, 32)
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")
