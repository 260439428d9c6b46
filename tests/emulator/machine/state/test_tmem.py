"""Tensor memory: allocation, lane quarters, fragments, uninitialised cells."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError, IllegalAccess, TensorMemoryRace, UnsupportedPTX
from cute_kernels.emulator.machine.state.tmem import HALVES, SHAPES, split_address, tensor_address
from cute_kernels.testing.ptx import THREAD_OUTPUT, module
from tests.emulator.ptx_launch import launch
from tests.emulator.tensor_registers import TensorRegisters


def filled() -> TensorRegisters:
    """All 512 columns allocated; the cell of lane l, column c holds 512 * l + c."""
    memory = TensorRegisters()
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


@pytest.mark.parametrize("half", [0, 16])
@pytest.mark.parametrize("repeat", [1, 4, 128])
def test_two_halves_of_16_lanes(half: int, repeat: int):
    """16x32bx2: threads 16 to 31 have the lanes of threads 0 to 15, so many columns further on."""
    memory = filled()
    for warp, column, split in ((0, 3, 200), (5, 100, repeat), (2, 40, 0)):
        first = 32 * (warp % 4) + half
        address = tensor_address(first, column)
        values = memory.load(warp, address, HALVES, repeat, split)
        assert values.shape == (32, repeat)
        for thread, register in np.ndindex(values.shape):
            where = column + register + (split if thread >= 16 else 0)
            assert values[thread, register] == 512 * (first + thread % 16) + where
    before, new = memory.cells.copy(), np.arange(32 * repeat, dtype=np.uint32).reshape(32, repeat) + (1 << 24)
    memory.store(5, tensor_address(32 + half, 100), HALVES, repeat, new, 128)
    np.testing.assert_array_equal(memory.load(5, tensor_address(32 + half, 100), HALVES, repeat, 128), new)
    assert np.count_nonzero(memory.cells != before) == new.size


def test_halves_that_are_refused():
    memory = filled()
    with pytest.raises(IllegalAccess, match="starts at lane 32; the warp may touch the lanes of its quarter 0"):
        memory.load(0, tensor_address(32, 0), HALVES, 1, 1)
    with pytest.raises(IllegalAccess, match="leaves the 128 x 512 cells"):
        memory.load(0, tensor_address(0, 300), HALVES, 2, 211)


#: Warp 0 stores two columns, 100 * thread + register, as one shape, and loads them as another.
SHAPES_IN_TURN = f"""{THREAD_OUTPUT} tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic], 32;
    bar.warp.sync -1; ld.shared.b32 %r20, [dynamic]; mul.lo.u32 %r2, %r1, 100; add.u32 %r3, %r2, 1; mov.b32 %r9, 0;
    tcgen05.st.sync.aligned.32x32b.x4.b32 [%r20], {{%r9, %r9, %r9, %r9}}; tcgen05.wait::st.sync.aligned;
    STORE tcgen05.wait::st.sync.aligned; LOAD tcgen05.wait::ld.sync.aligned; add.u32 %r6, %r6, 0; add.u32 %r7, %r7, 0;
    mul.wide.u32 %d3, %r1, 8; add.u64 %d3, %d0, %d3; st.global.v2.b32 [%d3], {{%r6, %r7}};
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32; ret;"""
WHOLE, SPLIT = "32x32b.x2.b32", "16x32bx2.x2.b32"


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("ld.sync.aligned.32x32b.x3.b32 {%r1, %r2, %r3}, [%r4]", ".x3"),
        ("ld.sync.aligned.16x32bx4.x1.b32 {%r1}, [%r4]", ".16x32bx4"),
        ("ld.sync.aligned.16x256b.x64.b32 {%r1}, [%r4]", "qualifiers .16x256b and .x64 do not go together"),
        ("st.sync.aligned.32x32b.x4.b32 [%r4], {%r1, %r2, %r3}", "must be a list of 4 registers"),
        ("st.sync.aligned.16x32bx2.x2.b32 [%r4], 1, {%r1}", "must be a list of 2 registers"),
    ],
)
def test_unknown_shapes_are_refused(instruction: str, message: str):
    with pytest.raises(UnsupportedPTX, match=re.escape(message)):
        launch(module(f"tcgen05.{instruction}; ret;"), np.zeros(4, np.uint32), np.zeros(4, np.uint32))


def test_halves_in_a_kernel():
    """Registers of the lower 16 threads are columns 0 and 1 of lanes 0 to 15, those of the others columns 2 and 3."""
    whole = (
        f"tcgen05.st.sync.aligned.{WHOLE} [%r20], {{%r2, %r3}};",
        f"tcgen05.ld.sync.aligned.{WHOLE} {{%r6, %r7}}, [%r20];",
    )
    split = (
        f"tcgen05.st.sync.aligned.{SPLIT} [%r20], 2, {{%r2, %r3}};",
        f"tcgen05.ld.sync.aligned.{SPLIT} {{%r6, %r7}}, [%r20], 2;",
    )
    own = [[100 * n, 100 * n + 1] for n in range(32)]
    for store, load, expected in (
        (split[0], split[1], own),
        (whole[0], split[1], own[:16] + [[0, 0]] * 16),
        (split[0], whole[1], own[:16] + [[0, 0]] * 16),
        (split[0], whole[1].replace("[%r20]", "[%r20+2]"), own[16:] + [[0, 0]] * 16),
    ):
        out = np.zeros((32, 2), np.uint32)
        text = SHAPES_IN_TURN.replace("STORE", store).replace("LOAD", load)
        launch(module(text, parameters=1), out, options=Options())
        assert out.tolist() == expected
    racing = SHAPES_IN_TURN.replace("STORE tcgen05.wait::st.sync.aligned;", split[0])
    second = whole[1].replace("[%r20]", "[%r20+2]")
    with pytest.raises(TensorMemoryRace, match=r"tcgen05.ld of .* TMEM column 2, .* which the tcgen05.st"):
        text = module(racing.replace("LOAD", second), parameters=1)
        launch(text, np.zeros((32, 2), np.uint32), options=Options())


def test_accesses_outside_the_allocation_or_the_memory():
    memory = TensorRegisters()
    assert memory.alloc(64) == 0
    memory.store(0, 0, "32x32b", 64, np.zeros((32, 64)))
    with pytest.raises(IllegalAccess, match="column 64 is not allocated"):
        memory.load(0, tensor_address(0, 60), "32x32b", 8)
    with pytest.raises(IllegalAccess, match="leaves the 128 x 512 cells"):
        memory.load(0, tensor_address(0, 508), "32x32b", 8)


def test_reading_cells_that_nobody_wrote():
    memory = TensorRegisters()
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
    quiet = TensorRegisters(detect=False)
    quiet.alloc(32)
    assert not quiet.load(0, 0, "32x32b", 1).any()


def test_allocation_rules():
    memory = TensorRegisters()
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
    memory.note_alloc(256, -1, "CTA 0 warp 3")
    left: list[EmulatorError] = []
    memory.report = left.append
    memory.check_released()
    assert {error.message.partition("with ")[2] for error in left} == {
        "256 TMEM columns allocated", "64 TMEM columns allocated by warp 3", "64 TMEM columns allocated",
        "32 TMEM columns allocated",
    }  # fmt: skip
    for base, columns in list(memory.allocations.items()):
        memory.dealloc(base, columns)
    left.clear()
    memory.check_released()
    assert not left


def test_addresses():
    assert split_address(tensor_address(96, 511)) == (96, 511)
