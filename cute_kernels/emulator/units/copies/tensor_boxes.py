"""Boxes of tensors in global memory: which bytes a tensor copy reads or writes there, and its moves.

Behaviour that the PTX ISA leaves open follows an H200 (tests/emulator/data): TF32 tensors are rounded on the way to
shared memory, F32_FTZ tensors are not flushed, the NaN fill is 0x7FF7 in every 16 bits, a store clips its rows at
whole 16-byte chunks (so that an extent that is no multiple of 16 bytes does not protect what follows it), and a store
with a negative coordinate or any copy whose first coordinate is not a multiple of 16 bytes is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.observe.races.shadow import Rows
from cute_kernels.emulator.observe.shared_banks import SECTOR_BYTES
from cute_kernels.emulator.state.gmem import GlobalMemory
from cute_kernels.emulator.units.copies.im2col import check_im2col, pixel_rows
from cute_kernels.emulator.units.copies.packed_elements import UNIT
from cute_kernels.emulator.units.copies.reductions import combine
from cute_kernels.emulator.units.copies.tensor_map import CHUNK, Im2colMap, TensorMap


def _global_tile(
    tensor_map: TensorMap, coords: Sequence[int], gmem: GlobalMemory, *, write: bool
) -> tuple[np.ndarray, tuple[slice, ...]] | None:
    """The in-bounds part of a box: a strided uint8 view [.., dim 1, bytes of dim 0] and its place in the tile.

    A store writes every 16-byte chunk of a row whole of which one byte is in bounds.
    """
    known = gmem.last_tile  # a copy asks up to three times in a row
    if known is not None and known[0] is tensor_map and known[1] == coords and known[2] is write:
        return known[3]
    found = None
    start, firsts, counts, byte_strides = _clip(tensor_map, coords, write=write)
    if min(counts) > 0:
        span = counts[0] + sum((count - 1) * stride for count, stride in zip(counts[1:], byte_strides[1:]))
        view = gmem.view(start, span, write=write)
        part = np.ndarray(tuple(reversed(counts)), np.uint8, buffer=view, strides=tuple(reversed(byte_strides)))
        found = part, tuple(slice(first, first + n) for first, n in zip(reversed(firsts), part.shape, strict=True))
    gmem.last_tile = tensor_map, coords, write, found
    return found


def _clip(
    tensor_map: TensorMap, coords: Sequence[int], *, write: bool
) -> tuple[int, list[int], list[int], list[int]]:
    """The in-bounds part of a box: address of its first byte; per dimension, the innermost in bytes, its first item in
    the tile, its number of items (none where <= 0) and their stride in bytes."""
    first_byte = tensor_map.bytes_of(coords[0])
    inside = tensor_map.bytes_of(tensor_map.extents[0]) - first_byte
    if write:
        inside = -(-inside // CHUNK) * CHUNK
    firsts = [max(-first_byte, 0)]
    counts = [min(tensor_map.row_bytes, inside) - firsts[0]]
    start = tensor_map.address + first_byte + firsts[0]
    byte_strides = [1]
    for d in range(1, tensor_map.rank):
        step, stride = tensor_map.element_strides[d], tensor_map.strides[d - 1]
        first = -(coords[d] // step) if coords[d] < 0 else 0
        end = min(tensor_map.tile[d], -((coords[d] - tensor_map.extents[d]) // step))
        firsts.append(first)
        counts.append(end - first)
        byte_strides.append(step * stride)
        start += (coords[d] + first * step) * stride
    return start, firsts, counts, byte_strides


def tile_sectors(
    tensor_map: TensorMap | Im2colMap, coords: Sequence[int], offsets: Sequence[int] = (), *, write: bool
) -> int:
    """32-byte sectors of global memory that a copy touches, row by row of its box; arguments as `load_tile`."""
    if isinstance(tensor_map, Im2colMap):
        _, starts, inside = pixel_rows(tensor_map, coords, offsets)
        ends = starts + (inside.stop - inside.start)
        return int(((ends - 1) // SECTOR_BYTES - starts // SECTOR_BYTES + 1).sum())
    start, _, counts, byte_strides = _clip(tensor_map, coords, write=write)
    if min(counts) <= 0:
        return 0
    rows = np.array([start % SECTOR_BYTES], np.int64)  # an address may be beyond all memory, which is reported later
    for count, stride in zip(counts[1:], byte_strides[1:]):
        rows = (rows[:, None] + stride * np.arange(count)).reshape(-1)
    return int(((rows + counts[0] - 1) // SECTOR_BYTES - rows // SECTOR_BYTES + 1).sum())


def inside_box(tensor_map: TensorMap | Im2colMap, coords: Sequence[int]) -> np.ndarray:
    """Which bytes of the box of a store belong to elements in bounds: bool in the shape of `_tile_shape`."""
    inside = np.zeros(_tile_shape(tensor_map), bool)
    if isinstance(tensor_map, Im2colMap):
        numbers, _, part = pixel_rows(tensor_map, coords, ())
        inside[numbers, part] = True
        return inside
    _, firsts, counts, _ = _clip(tensor_map, coords, write=False)
    inside[tuple(slice(first, first + max(count, 0)) for first, count in zip(firsts[::-1], counts[::-1]))] = True
    return inside


def _tile_shape(tensor_map: TensorMap | Im2colMap) -> tuple[int, ...]:
    if isinstance(tensor_map, Im2colMap):
        return tensor_map.pixels, tensor_map.row_bytes
    return (*reversed(tensor_map.tile[1:]), tensor_map.row_bytes)


def load_tile(
    tensor_map: TensorMap | Im2colMap, coords: Sequence[int], gmem: GlobalMemory, offsets: Sequence[int] = ()
) -> np.ndarray:
    """One box from global memory: uint8 [box bytes] in box order (dimension 0 fastest).

    Out-of-bounds elements are zero, or NaN where the tensor map says so; TF32 elements are rounded.

    Args:
        tensor_map: the tensor.
        coords: signed element coordinates of the box's first element, innermost first.
        gmem: where the tensor lives.
        offsets: of the im2col mode.

    Raises:
        IllegalAccess: the in-bounds part is not registered memory, or the coordinates are illegal.
    """
    check_coords(tensor_map, coords, offsets)
    return load_checked_tile(tensor_map, coords, gmem, offsets)


def load_checked_tile(
    tensor_map: TensorMap | Im2colMap, coords: Sequence[int], gmem: GlobalMemory, offsets: Sequence[int]
) -> np.ndarray:
    """`load_tile` at coordinates that have been checked."""
    if isinstance(tensor_map, Im2colMap):
        return _load_pixels(tensor_map, coords, gmem, offsets)
    found = _global_tile(tensor_map, coords, gmem, write=False)
    if found is not None and found[0].size == tensor_map.box_bytes:
        data = np.ascontiguousarray(found[0])
    else:
        data = _filled(tensor_map)
        if found is not None:
            data[found[1]] = found[0]
    if found is not None and tensor_map.dtype.startswith("tf32"):
        inside = np.ascontiguousarray(found[0]).view(np.uint32)
        data = data.copy() if np.shares_memory(data, found[0]) else data
        data[found[1]] = _round_tf32(inside).view(np.uint8)
    return data.reshape(-1)


def _filled(tensor_map: TensorMap | Im2colMap) -> np.ndarray:
    """A box of which all is out of bounds: uint8 in the shape of `_tile_shape`."""
    data = np.zeros(_tile_shape(tensor_map), np.uint8)
    if tensor_map.nan_fill:
        data.view(np.uint16)[...] = 0x7FF7
    return data


def _load_pixels(
    tensor_map: Im2colMap, coords: Sequence[int], gmem: GlobalMemory, offsets: Sequence[int]
) -> np.ndarray:
    data = _filled(tensor_map)
    numbers, starts, inside = pixel_rows(tensor_map, coords, offsets)
    for number, start in zip(numbers.tolist(), starts.tolist()):
        data[number, inside] = gmem.view(start, inside.stop - inside.start, write=False)
    if tensor_map.dtype.startswith("tf32"):
        found = np.ascontiguousarray(data[numbers, inside])
        data[numbers, inside] = _round_tf32(found.view(np.uint32)).view(np.uint8)
    return data.reshape(-1)


def _round_tf32(bits: np.ndarray) -> np.ndarray:
    """FP32 bit patterns rounded to nearest even TF32 (10 fraction bits); NaN becomes 0x7FFFE000."""
    rounded = (bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FFFE000), rounded).astype(np.uint32)


def store_tile(
    tensor_map: TensorMap | Im2colMap,
    coords: Sequence[int],
    gmem: GlobalMemory,
    data: np.ndarray,
    reduction: str | None,
) -> None:
    """Writes uint8 [box bytes] in box order to global memory, at coordinates that `check_coords` has passed.

    Elements out of bounds are dropped. With a ``reduction`` (a name of `reductions.combine`) the elements are combined
    with what is there.

    Raises:
        IllegalAccess: the in-bounds part is not registered memory that may be written.
    """
    tile = data.reshape(_tile_shape(tensor_map))
    if isinstance(tensor_map, Im2colMap):
        numbers, starts, inside = pixel_rows(tensor_map, coords, ())
        for number, start in zip(numbers.tolist(), starts.tolist()):
            part = gmem.view(start, inside.stop - inside.start, write=True)
            _put(part, tile[number, inside], tensor_map, reduction)
        return
    found = _global_tile(tensor_map, coords, gmem, write=True)
    if found is not None:
        _put(found[0], tile[found[1]], tensor_map, reduction)


def _put(part: np.ndarray, tile: np.ndarray, tensor_map: TensorMap | Im2colMap, reduction: str | None) -> None:
    """Writes or combines bytes of global memory."""
    if reduction is None:
        part[...] = tile
    else:
        kind = tensor_map.dtype.removesuffix("_ftz")
        part[...] = combine(reduction, kind, np.ascontiguousarray(part), np.ascontiguousarray(tile), flush=True)


def global_rows(
    tensor_map: TensorMap | Im2colMap,
    coords: Sequence[int],
    gmem: GlobalMemory,
    offsets: Sequence[int] = (),
    *,
    write: bool,
) -> tuple[np.ndarray | Rows | None, int]:
    """Global addresses of the in-bounds rows of a box (int64 [rows] or `Rows`; None: there are none), bytes of each."""
    if isinstance(tensor_map, Im2colMap):
        _, starts, inside = pixel_rows(tensor_map, coords, offsets)
        for start in starts.tolist():
            gmem.view(start, inside.stop - inside.start, write=write)
        return (starts if len(starts) else None), inside.stop - inside.start
    found = _global_tile(tensor_map, coords, gmem, write=write)
    if found is None:
        return None, 0
    part, _ = found
    start = part.__array_interface__["data"][0]
    outer = [(count, stride) for count, stride in zip(part.shape[:-1], part.strides[:-1]) if count > 1]
    if len(outer) < 2:
        count, stride = outer[0] if outer else (1, 0)
        return Rows(start, stride, count), part.shape[-1]
    rows = np.array(start, np.int64)
    for count, stride in outer:
        rows = np.add.outer(rows, np.arange(count) * stride)
    return rows.reshape(-1), part.shape[-1]


def check_coords(
    tensor_map: TensorMap | Im2colMap, coords: Sequence[int], offsets: Sequence[int] = (), *, store: bool = False
) -> None:
    """Checks the coordinates of a copy, and the offsets of the im2col mode.

    Raises:
        IllegalAccess: their number differs from the rank; the first is not a multiple of 16 bytes, or of 128 elements
            that are packed with padding; one is negative (stores); what `check_im2col` says.
        UnsupportedPTX: what `check_im2col` says.
    """
    if isinstance(tensor_map, Im2colMap):
        check_im2col(tensor_map, coords, offsets, store=store)
    elif len(coords) != tensor_map.rank:
        raise IllegalAccess(f"{len(coords)} coordinates for a tensor map of rank {tensor_map.rank}")
    if coords[0] * tensor_map.element_bits % (8 * CHUNK):
        raise IllegalAccess(
            f"tensor copy at coordinates {tuple(coords)}: the first is {tensor_map.bytes_of(coords[0])} bytes, "
            f"no multiple of {CHUNK}"
        )
    if tensor_map.padding and coords[0] % UNIT:
        raise IllegalAccess(
            f"tensor copy at coordinates {tuple(coords)} of {tensor_map.dtype} elements: the first is no multiple of "
            f"{UNIT}"
        )
    if store and min(coords) < 0:
        raise IllegalAccess(f"tensor store at the negative coordinates {tuple(coords)}")
