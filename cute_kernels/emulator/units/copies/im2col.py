"""Copies through tensor maps in im2col mode: which pixels a copy moves, and where they are (PTX ISA, "im2col mode").

What the PTX ISA leaves open is taken from how CUTLASS computes the coordinates of convolutions: a position of the
bounding box is a first position plus a whole number of element strides, the upper corner included.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.units.copies.tensor_map import Im2colMap

_OFFSET_BITS = {3: 16, 4: 8, 5: 5}  # of each offset, by rank


def check_im2col(tensor_map: Im2colMap, coords: Sequence[int], offsets: Sequence[int], *, store: bool) -> None:
    """Checks the operands of a copy.

    Args:
        tensor_map: the tensor.
        coords: C, W, (H, (D,)) N of the first pixel, before the offsets are added.
        offsets: W, (H, (D)), of loads.
        store: whether it is a store, which has no offsets.

    Raises:
        IllegalAccess: a number of coordinates or offsets that does not fit the rank, an offset out of range, a first
            pixel outside of the bounding box, negative coordinates of a store.
        UnsupportedPTX: a store through a map whose bounding box begins at a negative position.
    """
    rank = tensor_map.rank
    where = f"im2col copy at coordinates {tuple(coords)}"
    if len(coords) != rank:
        raise IllegalAccess(f"{len(coords)} coordinates for a tensor map of rank {rank}")
    if store:
        if min(coords) < 0:
            raise IllegalAccess(f"tensor store at the negative coordinates {tuple(coords)}")
        if min(tensor_map.lower_corner) < 0:
            raise UnsupportedPTX(f"{where}: a store through a map with the lower corner {tensor_map.lower_corner}")
    elif len(offsets) != rank - 2:
        raise IllegalAccess(f"{where}: {len(offsets)} im2col offsets for a tensor map of rank {rank}")
    if any(offset >> _OFFSET_BITS[rank] for offset in offsets):
        raise IllegalAccess(
            f"{where}: im2col offsets {tuple(offsets)}; legal at rank {rank} are 0 to {(1 << _OFFSET_BITS[rank]) - 1}"
        )
    for name, position, lower, size in zip("WHD", coords[1:-1], tensor_map.lower_corner, tensor_map.box):
        if not lower <= position < lower + size:
            raise IllegalAccess(
                f"{where}: {name} = {position} is outside of the bounding box, {lower} to {lower + size - 1}"
            )


def pixel_positions(tensor_map: Im2colMap, coords: Sequence[int], offsets: Sequence[int]) -> np.ndarray:
    """Positions of the pixels of a copy, in its order: int64 [pixels, rank - 1] of W, (H, (D,)) N, offsets added."""
    rest = np.arange(tensor_map.pixels)
    columns = []
    spatial = zip(coords[1:-1], tensor_map.lower_corner, tensor_map.box, tensor_map.element_strides[1:-1])
    for first, lower, size, step in spatial:
        # The first row of positions begins at the coordinate, all others at the lower corner.
        begun = -(-(lower + size - first) // step)
        whole = -(-size // step)
        inside = rest < begun
        columns.append(np.where(inside, first + rest * step, lower + (rest - begun) % whole * step))
        rest = np.where(inside, 0, 1 + (rest - begun) // whole)
    columns.append(coords[-1] + rest)
    positions = np.stack(columns, axis=1)
    positions[:, : len(offsets)] += np.asarray(offsets, np.int64)
    return positions


def pixel_rows(
    tensor_map: Im2colMap, coords: Sequence[int], offsets: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, slice]:
    """The part of a copy that is in bounds.

    Returns:
        Numbers of the pixels, int64 [n]; global addresses of their first bytes in bounds, int64 [n]; which bytes of a
        pixel are in bounds.
    """
    positions = pixel_positions(tensor_map, coords, offsets)
    extents = np.asarray(tensor_map.extents[1:], np.int64)
    numbers = np.flatnonzero(((positions >= 0) & (positions < extents)).all(axis=1))
    size = tensor_map.element_bits // 8  # no packed elements in this mode
    first = min(max(-coords[0] * size, 0), tensor_map.row_bytes)
    end = max(min((tensor_map.extents[0] - coords[0]) * size, tensor_map.row_bytes), first)
    if first == end:
        numbers = numbers[:0]
    strides = np.asarray(tensor_map.strides, np.int64)
    starts = tensor_map.address + coords[0] * size + first + positions[numbers] @ strides
    return numbers, starts, slice(first, end)
