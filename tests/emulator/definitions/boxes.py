"""Tiled tensor copies, byte by byte in Python (PTX ISA, "Tiled Mode", "Swizzling modes"; the rest as on an H200)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from cute_kernels.emulator import TensorMap

#: Swizzle -> bytes from row to row, and bits of an address that others are combined with: lowest of both, how many.
_SWIZZLES = {"32B": (32, 7, 4, 1), "64B": (64, 7, 4, 2), "128B": (128, 7, 4, 3), "128B_atom32B": (128, 7, 5, 2)}


def _place(tensor_map: TensorMap, start: int, number: int) -> int:
    """Shared address of a byte of a box that begins at ``start``."""
    row, byte = divmod(number, tensor_map.row_bytes)
    if tensor_map.swizzle == "none":
        return start + number
    pitch, source, target, bits = _SWIZZLES[tensor_map.swizzle]
    address = start + row * pitch + byte
    return address ^ (address >> source & (1 << bits) - 1) << target


def _bytes(tensor_map: TensorMap, coords: Sequence[int], row: int) -> Iterator[tuple[int, int, bool]]:
    """Of each byte of a box its number, its offset from the tensor's first one, and whether it belongs to the tensor.

    The first dimension counts bytes; it ends ``row`` bytes behind its beginning.
    """
    size = tensor_map.element_bits // 8
    outer = [range(-(-b // step)) for b, step in zip(tensor_map.box[1:], tensor_map.element_strides[1:], strict=True)]
    for number, (*index, byte) in enumerate(itertools.product(*outer[::-1], range(tensor_map.box[0] * size))):
        first = coords[0] * size + byte
        places = [c + i * n for c, i, n in zip(coords[1:], index[::-1], tensor_map.element_strides[1:], strict=True)]
        inside = 0 <= first < row and all(0 <= p < n for p, n in zip(places, tensor_map.extents[1:], strict=True))
        yield number, first + sum(p * stride for p, stride in zip(places, tensor_map.strides, strict=True)), inside


def _tf32(bits: int) -> int:
    """FP32 to the nearest TF32, to even between two."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFFE000
    quotient, rest = divmod(bits, 1 << 13)
    return (quotient + (rest > 1 << 12 or (rest == 1 << 12 and quotient % 2 == 1))) << 13


def loaded(tensor_map: TensorMap, coords: Sequence[int], memory: bytes, start: int) -> dict[int, int]:
    """Shared memory after a load, by address; ``memory``: of the tensor, from its first byte on."""
    size = tensor_map.element_bits // 8
    box = []
    for number, offset, inside in _bytes(tensor_map, coords, tensor_map.extents[0] * size):
        fill = (0xF7, 0x7F)[number % 2] if tensor_map.nan_fill else 0
        box.append((memory[offset] if inside else fill, inside))
    if tensor_map.dtype.startswith("tf32"):
        for first in range(0, len(box), 4):
            word = bytes(byte for byte, _ in box[first : first + 4])
            if box[first][1]:
                rounded = _tf32(int.from_bytes(word, "little")).to_bytes(4, "little")
                box[first : first + 4] = [(byte, True) for byte in rounded]
    return {_place(tensor_map, start, number): byte for number, (byte, _) in enumerate(box)}


def stored(tensor_map: TensorMap, coords: Sequence[int], shared: bytes, start: int) -> dict[int, int]:
    """What a store writes, by offset from the tensor's first byte; rows end at whole 16 bytes."""
    row = -(-tensor_map.extents[0] * tensor_map.element_bits // 8 // 16) * 16
    found = _bytes(tensor_map, coords, row)
    return {offset: shared[_place(tensor_map, start, number)] for number, offset, inside in found if inside}
