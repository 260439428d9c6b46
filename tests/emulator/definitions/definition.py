"""What a pure operation of the core is by definition: its types, and arithmetic of NumPy or Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

KINDS = {
    "pred": np.bool_, "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32,
    "s32": np.int32, "u64": np.uint64, "s64": np.int64, "f32": np.float32, "f64": np.float64,
}  # fmt: skip


@dataclass(frozen=True)
class Definition:
    """An operation.

    Attributes:
        function: of arrays of the types of ``inputs``, all of one length or of length 1; gives one array of the type of
            ``output``, or of one as wide.
        inputs, output: keys of `KINDS`. FP16, BF16 and narrower floats are bits.
    """

    function: Callable[..., np.ndarray]
    inputs: tuple[str, ...]
    output: str


def one_by_one(function: Callable[..., int], kind: str) -> Callable[..., np.ndarray]:
    """A function of Python integers as one of arrays; of its results the low bits count."""
    dtype = np.dtype(KINDS[kind])
    mask = (1 << 8 * dtype.itemsize) - 1

    def vector(*arrays: np.ndarray) -> np.ndarray:
        rows = zip(*(array.tolist() for array in np.broadcast_arrays(*arrays)), strict=True)
        return np.array([function(*row) & mask for row in rows], f"u{dtype.itemsize}").view(dtype)

    return vector


def quiet(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Without NumPy's warnings of overflow, of NaN, of divisions by zero."""

    def inner(*arrays: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return function(*arrays)

    return inner
