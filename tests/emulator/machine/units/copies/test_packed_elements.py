"""Tensor copies of packed elements of 4 and 6 bits, element by element against Python integers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.machine.units.copies.tensor_map import SWIZZLES, TensorMap, decode, encode, replace
from tests.emulator.copies import BARRIER, DATA, Machine

WIDTH = {"b4x16": 4, "b4x16_p64": 4, "b6x16_p32": 6}
GROUP_BYTES = {"b4x16": 8, "b4x16_p64": 16, "b6x16_p32": 16}  # of 16 elements in shared memory
ROWS, ELEMENTS = 24, 384


def tensor(dtype: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Random elements [rows, elements], their bytes in aligned memory, and bytes per row."""
    width, rng = WIDTH[dtype], np.random.default_rng(5)
    values = rng.integers(0, 1 << width, (ROWS, ELEMENTS))
    pitch = ELEMENTS * width // 8 + 32
    raw = np.zeros(ROWS * pitch + 128, np.uint8)
    memory = raw[-raw.ctypes.data % 128 :][: ROWS * pitch]
    for row, line in enumerate(values.tolist()):
        number = sum(value << width * i for i, value in enumerate(line))
        nbytes = ELEMENTS * width // 8
        memory[row * pitch : row * pitch + nbytes] = list(number.to_bytes(nbytes, "little"))
    return values, memory, pitch


def packed_map(dtype: str, memory: np.ndarray, pitch: int, box: tuple[int, int], swizzle: str = "none") -> TensorMap:
    return TensorMap(memory.ctypes.data, dtype, (ELEMENTS, ROWS), (pitch,), box, (1, 1), swizzle)


def swizzled(address: int, swizzle: str) -> int:
    pattern = SWIZZLES[swizzle]
    return address ^ (address >> pattern.shift & pattern.mask)


CASES = [
    ("b4x16", 128, "none"), ("b4x16", 128, "64B"), ("b4x16", 256, "128B"), ("b4x16", 64, "32B"), ("b4x16", 64, "64B"),
    ("b4x16_p64", 128, "none"), ("b4x16_p64", 128, "128B"), ("b4x16_p64", 128, "128B_atom32B"),
    ("b6x16_p32", 128, "none"), ("b6x16_p32", 128, "128B"), ("b6x16_p32", 128, "128B_atom32B"),
]  # fmt: skip


@pytest.mark.parametrize("start", [(0, 0), (128, 3), (256, 20), (-128, -2), (256, 0)])
@pytest.mark.parametrize(("dtype", "inner", "swizzle"), CASES)
def test_loads_element_by_element(dtype: str, inner: int, swizzle: str, start: tuple[int, int]):
    values, memory, pitch = tensor(dtype)
    machine, tensor_map = Machine(memory), packed_map(dtype, memory, pitch, (inner, 8), swizzle)
    width, group = WIDTH[dtype], GROUP_BYTES[dtype]
    machine.barriers.arrive_expect_tx(BARRIER, 8 * inner * width // 8)
    machine.load(encode(tensor_map), start, DATA, BARRIER)
    assert machine.barriers.test_parity(BARRIER, 0)  # the bytes without the padding
    shared, states = machine.ctas[0].data, machine.ctas[0].states
    row_bytes = SWIZZLES[swizzle].span or inner // 16 * group
    holding = set()
    for row in range(8):
        for first in range(0, inner, 16):
            place = swizzled(DATA + row * row_bytes + first // 16 * group & ~15, swizzle) + (first // 16 * group & 15)
            used = 2 * width
            number = int.from_bytes(shared[place : place + used].tobytes(), "little")
            holding.update(range(place, place + used))
            for i in range(16):
                x, y = start[0] + first + i, start[1] + row
                expected = int(values[y, x]) if 0 <= x < ELEMENTS and 0 <= y < ROWS else 0
                assert number >> width * i & (1 << width) - 1 == expected
    assert set((np.flatnonzero(states[DATA:]) + DATA).tolist()) == holding


@pytest.mark.parametrize("start", [(0, 0), (256, 20)])
@pytest.mark.parametrize(("dtype", "inner", "swizzle"), [case for case in CASES if case[0] != "b4x16_p64"])
def test_stores_element_by_element(dtype: str, inner: int, swizzle: str, start: tuple[int, int]):
    """b6p2x16 takes six bits of every byte."""
    values, memory, pitch = tensor(dtype)
    machine, tensor_map = Machine(memory), packed_map(dtype, memory, pitch, (inner, 8), swizzle)
    width, rng = WIDTH[dtype], np.random.default_rng(6)
    row_bytes = SWIZZLES[swizzle].span or inner // 16 * GROUP_BYTES[dtype]
    source = rng.integers(0, 256, 8 * row_bytes).astype(np.uint8)
    machine.fill(source)
    before = memory.copy()
    machine.store(encode(tensor_map), start, DATA)
    per_byte = width == 6
    expected = values.copy()
    for row in range(min(8, ROWS - start[1])):
        for column in range(min(inner, ELEMENTS - start[0])):
            offset = column if per_byte else column // 2
            place = swizzled(DATA + row * row_bytes + (offset & ~15), swizzle) + (offset & 15) - DATA
            value = int(source[place]) & 63 if per_byte else int(source[place]) >> 4 * (column & 1) & 15
            expected[start[1] + row, start[0] + column] = value
    for row, line in enumerate(expected.tolist()):
        number = sum(value << width * i for i, value in enumerate(line))
        nbytes = ELEMENTS * width // 8
        assert memory[row * pitch : row * pitch + nbytes].tobytes() == number.to_bytes(nbytes, "little")
        rest = slice(row * pitch + nbytes, (row + 1) * pitch)
        assert np.array_equal(memory[rest], before[rest])


def test_padding_holds_nothing():
    _, memory, pitch = tensor("b4x16_p64")
    machine = Machine(memory)
    machine.fill(np.full(1024, 0xEE, np.uint8))
    machine.barriers.arrive_expect_tx(BARRIER, 8 * 64)
    machine.load(encode(packed_map("b4x16_p64", memory, pitch, (128, 8))), (0, 0), DATA, BARRIER)
    machine.ctas[0].check_range(DATA, 8, write=False)
    with pytest.raises(IllegalAccess, match=f"uninitialised shared memory at offset {DATA + 8}"):
        machine.ctas[0].check_range(DATA, 16, write=False)


@pytest.mark.parametrize(
    ("dtype", "changes", "message"),
    [
        ("b4x16", {"extents": (383, ROWS)}, "extent 383 of 16U4_ALIGN8B elements, legal are multiples of 2"),
        ("b4x16", {"box": (16, 8)}, "box rows of 8 bytes, legal are multiples of 16"),
        ("b4x16", {"nan_fill": True}, "NaN fill of b4x16"),
        ("b4x16_p64", {"extents": (192, ROWS)}, "extent 192 of 16U4_ALIGN16B elements, legal are multiples of 128"),
        ("b4x16_p64", {"box": (64, 8)}, "box rows of 64 16U4_ALIGN16B elements, legal are 128"),
        ("b6x16_p32", {"box": (256, 8)}, "box rows of 256 16U6_ALIGN16B elements, legal are 128"),
        ("b6x16_p32", {"strides": (336,)}, "strides .336,. of 16U6_ALIGN16B elements, legal: multiples of 32"),
        ("b6x16_p32", {"address": 4096 + 16}, "is not 32-byte aligned"),
        ("b4x16_p64", {"swizzle": "64B"}, "swizzle 64B of 16U4_ALIGN16B elements"),
    ],
)
def test_what_the_driver_rejects(dtype: str, changes: dict, message: str):
    _, memory, pitch = tensor(dtype)
    with pytest.raises(IllegalAccess, match=message):
        dataclasses.replace(packed_map(dtype, memory, pitch, (128, 8)), **changes)


def test_copies_that_do_not_exist():
    _, memory, pitch = tensor("b4x16_p64")
    machine = Machine(memory)
    machine.fill(np.zeros(4096, np.uint8))
    padded = encode(packed_map("b4x16_p64", memory, pitch, (128, 8)))
    with pytest.raises(IllegalAccess, match="type 16U4_ALIGN16B, which is for loads only"):
        machine.store(padded, (0, 0), DATA)
    with pytest.raises(IllegalAccess, match="the first is no multiple of 128"):
        machine.load(padded, (64, 0), DATA, BARRIER)
    with pytest.raises(IllegalAccess, match="the first is 8 bytes, no multiple of 16"):
        machine.load(encode(packed_map("b4x16", memory, pitch, (128, 8))), (16, 0), DATA, BARRIER)
    with pytest.raises(UnsupportedPTX, match=r"tensor reduction \.add of b4x16 elements"):
        machine.store(encode(packed_map("b4x16", memory, pitch, (128, 8))), (0, 0), DATA, reduction="add")


@pytest.mark.parametrize(("dtype", "value"), [("b4x16", 13), ("b4x16_p64", 14), ("b6x16_p32", 15)])
def test_types_are_encoded_as_by_the_driver_and_replaced_by_their_ptx_numbers(dtype: str, value: int):
    tensor_map = TensorMap(1 << 20, dtype, (256, 8), (256,), (128, 8), (1, 1))
    assert decode(encode(tensor_map)) == tensor_map
    header = int.from_bytes(encode(tensor_map)[8:12], "little")
    assert header >> 7 & 15 == {"b4x16": 11, "b4x16_p64": 12, "b6x16_p32": 13}[dtype]
    base = dataclasses.replace(tensor_map, dtype="u8")
    assert decode(replace(encode(base), "elemtype", 0, value)) == tensor_map


def test_a_map_that_cute_dsl_encodes():
    """4-bit A of a mixed-input GEMM: [256, 256] in rows of 128 bytes, boxes of 128 x 64, swizzle 64B."""
    words = "dd714a00 0000561b 000445a2 00000008 00000800 0 0 0 ff ff 0 0 0 7f000000 3f 0".split()
    data = b"".join(int(word, 16).to_bytes(4, "little") for word in words) + bytes(64)
    found = decode(data)
    assert (found.dtype, found.extents, found.strides) == ("b4x16", (256, 256, 1), (128, 32768))
    assert (found.box, found.swizzle, found.row_bytes, found.box_bytes) == ((128, 64, 1), "64B", 64, 4096)
