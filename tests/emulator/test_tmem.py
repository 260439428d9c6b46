"""Tensor memory: allocation, lane quarters, fragments, uninitialised cells."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.tmem import SHAPES, TensorMemory, split_address, tensor_address


def filled() -> TensorMemory:
    """All 512 columns allocated; the cell of lane l, column c holds 512 * l + c."""
    memory = TensorMemory()
    assert memory.alloc(512) == 0
    memory.check(0, 128, 0, 512, write=True)
    memory.cells[...] = np.arange(512)[:, None] + 512 * np.arange(128)
    return memory


def reference_cell(shape: str, repeat: int, thread: int, register: int) -> tuple[int, int]:
    """(lane, column) by mixed-radix digits: (size, lanes per step, columns per step), lowest digit first."""
    if shape == "32x32b":
        thread_digits, register_digits = [(32, 1, 0)], [(repeat, 0, 1)]
    elif shape == "16x64b":
        thread_digits, register_digits = [(2, 8, 0), (2, 0, 1), (8, 1, 0)], [(repeat, 0, 2)]
    elif shape == "16x128b":
        thread_digits, register_digits = [(4, 0, 1), (8, 1, 0)], [(2, 8, 0), (repeat, 0, 4)]
    else:
        thread_digits, register_digits = [(4, 0, 2), (8, 1, 0)], [(2, 0, 1), (2, 8, 0), (repeat, 0, 8)]
    lane = column = 0
    for value, digits in ((thread, thread_digits), (register, register_digits)):
        for size, lanes, columns in digits:
            value, digit = divmod(value, size)
            lane, column = lane + digit * lanes, column + digit * columns
    return lane, column


ACCESSES = [(shape, 1 << i) for shape, (_, _, most) in SHAPES.items() for i in range(8) if 1 << i <= most]


@pytest.mark.parametrize("shape, repeat", ACCESSES)
def test_every_register_holds_its_cell(shape: str, repeat: int):
    memory = filled()
    for warp, half in itertools.product((0, 3, 5), (0, 16)):
        if half and shape == "32x32b":
            continue
        base, column = 32 * (warp % 4) + half, 512 - SHAPES[shape][0] * repeat
        values = memory.load(warp, tensor_address(base, column), shape, repeat)
        assert values.shape == (32, SHAPES[shape][1] * repeat)
        for thread, register in np.ndindex(values.shape):
            lane, offset = reference_cell(shape, repeat, thread, register)
            assert values[thread, register] == 512 * (base + lane) + column + offset


@given(st.sampled_from(ACCESSES), st.integers(0, 6), st.integers(0, 40))
def test_store_then_load_returns_the_registers_and_touches_nothing_else(access, warp: int, column: int):
    shape, repeat = access
    width, registers, _ = SHAPES[shape]
    memory = filled()
    before = memory.cells.copy()
    column = min(column, 512 - width * repeat)
    values = np.random.default_rng(warp).integers(1 << 20, 1 << 32, (32, registers * repeat), np.uint32)
    address = tensor_address(32 * (warp % 4), column)
    memory.store(warp, address, shape, repeat, values)
    np.testing.assert_array_equal(memory.load(warp, address, shape, repeat), values)
    assert np.count_nonzero(memory.cells != before) == values.size


def test_load_is_a_copy():
    memory = filled()
    values = memory.load(0, 0, "32x32b", 4)
    memory.cells[...] = 0
    assert values[1, 2] == 514


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("warp", range(7))
def test_a_warp_may_touch_the_lanes_of_its_quarter_only(shape: str, warp: int):
    memory = filled()
    for lane in range(0, 128, 16):
        address = tensor_address(lane, 0)
        legal = lane // 32 == warp % 4 and (lane % 32 == 0 or shape != "32x32b")
        if legal:
            memory.load(warp, address, shape, 1)
            continue
        for access in (
            lambda at=address: memory.load(warp, at, shape, 1),
            lambda at=address: memory.store(warp, at, shape, 1, np.zeros((32, SHAPES[shape][1]))),
        ):
            with pytest.raises(IllegalAccess, match=rf"by warp {warp} starts at lane {lane}; .* quarter {warp % 4}"):
                access()


def test_unknown_shapes_are_refused():
    memory = filled()
    for shape, repeat in (("16x32bx2", 1), ("32x32b", 3), ("32x32b", 256), ("16x256b", 64), ("16x64b", 0)):
        with pytest.raises(UnsupportedPTX, match="tcgen05.ld"):
            memory.load(0, 0, shape, repeat)
    with pytest.raises(IllegalAccess, match="x4 of 3 registers"):
        memory.store(0, 0, "32x32b", 4, np.zeros((32, 3)))


def test_accesses_outside_the_allocation_or_the_memory():
    memory = TensorMemory()
    assert memory.alloc(64) == 0
    memory.store(0, 0, "32x32b", 64, np.zeros((32, 64)))
    with pytest.raises(IllegalAccess, match="column 64 is not allocated"):
        memory.load(0, tensor_address(0, 60), "32x32b", 8)
    with pytest.raises(IllegalAccess, match="leaves the 128 x 512 cells"):
        memory.load(0, tensor_address(0, 508), "32x32b", 8)


def test_reading_cells_that_nobody_wrote():
    memory = TensorMemory()
    memory.alloc(32)
    memory.store(1, tensor_address(32, 0), "32x32b", 8, np.ones((32, 8)))
    with pytest.raises(IllegalAccess, match="uninitialised TMEM: lane 32, column 8"):
        memory.load(1, tensor_address(32, 0), "32x32b", 16)
    with pytest.raises(IllegalAccess, match="uninitialised TMEM: lane 0, column 0"):
        memory.load(0, 0, "32x32b", 1)
    memory.dealloc(0, 32)
    memory.alloc(32)
    with pytest.raises(IllegalAccess, match="uninitialised"):
        memory.load(1, tensor_address(32, 0), "32x32b", 8)
    quiet = TensorMemory(detect=False)
    quiet.alloc(32)
    assert not quiet.load(0, 0, "32x32b", 1).any()


def test_allocation_rules():
    memory = TensorMemory()
    for columns in (0, 16, 48, 96, 1024):
        with pytest.raises(IllegalAccess, match=f"alloc of {columns} columns"):
            memory.alloc(columns)
    assert [memory.alloc(n) for n in (256, 128, 64, 32)] == [0, 256, 384, 448]
    assert memory.alloc(64) is None, "32 columns are left: the instruction blocks"
    memory.dealloc(256, 128)
    assert memory.alloc(64) == 256
    assert memory.columns_used == 480
    for address, columns in ((256, 128), (0, 128), (1, 32), (tensor_address(1, 0), 256)):
        with pytest.raises(IllegalAccess, match="dealloc"):
            memory.dealloc(address, columns)
    memory.relinquish()
    with pytest.raises(IllegalAccess, match="relinquish"):
        memory.alloc(32)
    with pytest.raises(IllegalAccess, match="416 TMEM columns allocated"):
        memory.check_released()
    for base, columns in list(memory.allocations.items()):
        memory.dealloc(base, columns)
    memory.check_released()


def test_addresses():
    assert split_address(tensor_address(96, 511)) == (96, 511)
