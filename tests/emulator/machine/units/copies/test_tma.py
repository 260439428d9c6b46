"""TMA unit: against what an H200 and its driver did (data/tma_h200.json), and against plain NumPy indexing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator.errors import (
    BarrierMisuse,
    IllegalAccess,
    ProxyFenceMissing,
    SharedMemoryRace,
    UnsupportedPTX,
)
from cute_kernels.emulator.machine.state.smem import shared_address
from cute_kernels.emulator.machine.units.copies.tensor_map import SWIZZLES, TensorMap, decode, encode
from cute_kernels.emulator.races.happens_before import FULL
from tests.emulator.copies import BARRIER, DATA, SHARED_BYTES, Machine
from tests.emulator.crew import bulk_waited, converge, fence_proxy

CASES = json.loads((Path(__file__).parents[3] / "data" / "tma_h200.json").read_text())
GLOBAL_BYTES, SHARED_FILL = 1 << 16, 0xCD  # of record_tma_on_gpu.py


def noise(seed: int, nbytes: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_256(str(seed).encode()).digest(nbytes), np.uint8).copy()


def special_floats() -> np.ndarray:
    bits = [0, 1, 0x7FFFFF, 0x800000, 0x7F800000, 0x7F800001, 0x7FC00000, 0xFFC12345, 0x3F800FFF, 0x3F801000]
    bits += [0x3F801001, 0x3F803000, 0x7F7FFFFF, 0x7F7FF000, 0x3F802FFF]
    both_signs = np.array(bits + [b ^ 0x80000000 for b in bits] + [0x12345678, 0x9ABCDEF0], np.uint32)
    return np.resize(both_signs, GLOBAL_BYTES // 4).view(np.uint8).copy()


def tensor_map_of(case: dict, address: int) -> TensorMap:
    names = ("dtype", "extents", "strides", "box", "element_strides", "swizzle", "nan_fill", "l2_promotion")
    values = {name: tuple(case[name]) if isinstance(case[name], list) else case[name] for name in names}
    return TensorMap(address=address, **values)


def name_of(number: int) -> str:
    case = CASES[number]
    return f"{number}-{case['kind']}-{case['dtype']}-{case['swizzle']}"


def test_recorded_cases_cover_what_they_claim():
    assert {case["dtype"] for case in CASES if case.get("completed")} >= {"u8", "bf16", "f32", "tf32", "f64"}
    assert {len(case["box"]) for case in CASES if case.get("completed")} == {1, 2, 3, 4, 5}
    assert sum(case["map"] is None for case in CASES) > 50 and sum("fault" in case for case in CASES) > 20


@pytest.mark.parametrize("number", range(len(CASES)), ids=name_of)
def test_tensor_map_as_the_driver_encodes_it(number: int):
    case = CASES[number]
    if case.get("map") is None and "fault" not in case:
        with pytest.raises(IllegalAccess, match="illegal tensor map"):
            tensor_map_of(case, 0x7F0012345670)
    elif "fault" not in case:
        driver = bytes.fromhex(case["map"]) + bytes(64)
        tensor_map = tensor_map_of(case, 0x7F0012345670)
        assert decode(driver) == tensor_map
        assert encode(tensor_map) == driver


COPIES = [n for n, case in enumerate(CASES) if case["kind"] != "encode" and ("fault" in case or case["map"])]


@pytest.mark.parametrize("number", COPIES, ids=name_of)
def test_copy_as_an_h200_does_it(number: int):
    case = CASES[number]
    memory = special_floats() if case["data"] == "floats" else noise(0, GLOBAL_BYTES)
    machine = Machine(memory)
    descriptor = encode(tensor_map_of(case, memory.ctypes.data))
    place = DATA + case["offset"]

    def copy() -> None:
        if case["kind"] == "load":
            machine.load(descriptor, case["coords"], place, BARRIER)
        else:
            machine.store(descriptor, case["coords"], place)

    if "fault" in case:
        machine.fill(noise(number, SHARED_BYTES))  # so that nothing but the copy's arguments is at fault
        negative = case["kind"] == "store" and min(case["coords"]) < 0
        with pytest.raises(IllegalAccess, match="negative coordinates" if negative else "no multiple of 16|misaligned"):
            copy()
        return
    if case["kind"] == "load":
        machine.fill(np.full(SHARED_BYTES, SHARED_FILL, np.uint8))
        machine.barriers.arrive_expect_tx(BARRIER, decode(descriptor).box_bytes)
        copy()
        assert machine.barriers.test_parity(BARRIER, 0) == case["completed"]
        after = machine.ctas[0].data[DATA:]
    else:
        machine.fill(noise(number, SHARED_BYTES))
        copy()
        after = memory
    assert hashlib.sha256(after.tobytes()).hexdigest()[:16] == case["digest"]


@st.composite
def tiles(draw) -> tuple[np.ndarray, TensorMap, tuple[int, ...]]:
    """A random tensor of bytes, a map of it and coordinates around it."""
    rank = draw(st.integers(1, 3))
    row = 16 * draw(st.integers(1, 6))
    extents = (draw(st.integers(1, row)), *(draw(st.integers(1, 9)) for _ in range(rank - 1)))
    array = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, (*extents[:0:-1], row), np.uint8)
    swizzle = draw(st.sampled_from(sorted(SWIZZLES)))
    inner = draw(st.sampled_from([n for n in (16, 32, 64, 128) if n <= (SWIZZLES[swizzle].span or 128)]))
    box = (inner, *(draw(st.integers(1, 9)) for _ in range(rank - 1)))
    coords = (16 * draw(st.integers(-5, 7)), *(draw(st.integers(-9, 10)) for _ in range(rank - 1)))
    strides = tuple(array.strides[::-1][1:])
    return array, TensorMap(array.ctypes.data, "u8", extents, strides, box, (1,) * rank, swizzle), coords


def expected_box(array: np.ndarray, tensor_map: TensorMap, coords: tuple[int, ...]) -> np.ndarray:
    """Element by element."""
    box = np.zeros(tensor_map.box[::-1], np.uint8)
    for index in np.ndindex(box.shape):
        position = [c + i for c, i in zip(coords, index[::-1], strict=True)]
        if all(0 <= p < extent for p, extent in zip(position, tensor_map.extents, strict=True)):
            box[index] = array[tuple(position[::-1])]
    return box.reshape(-1)


@settings(max_examples=60, deadline=None)
@given(tiles(), st.integers(0, 7))
def test_swizzle_permutes_by_absolute_address_bits(tile, blocks):
    array, tensor_map, coords = tile
    machine = Machine(array)
    machine.fill(np.zeros(SHARED_BYTES, np.uint8))
    machine.barriers.arrive_expect_tx(BARRIER, tensor_map.box_bytes)
    start = DATA + 128 * blocks
    machine.load(encode(tensor_map), coords, start, BARRIER)
    box = expected_box(array, tensor_map, coords)
    pitch = SWIZZLES[tensor_map.swizzle].span or tensor_map.box[0]
    for i, value in enumerate(box):
        address = start + i // tensor_map.box[0] * pitch + i % tensor_map.box[0]
        # 16-byte atoms: bits 4.. ^= bits 7..; 32-byte atoms: bits 5-6 ^= bits 7-8.
        match tensor_map.swizzle:
            case "32B":
                address ^= (address >> 7 & 1) << 4
            case "64B":
                address ^= (address >> 7 & 3) << 4
            case "128B":
                address ^= (address >> 7 & 7) << 4
            case "128B_atom32B":
                address ^= (address >> 7 & 3) << 5
        assert machine.ctas[0].data[address] == value


def byte_map(array: np.ndarray, box: tuple[int, int] = (64, 8), swizzle: str = "64B") -> TensorMap:
    return TensorMap(array.ctypes.data, "u8", array.shape[::-1], (array.strides[0],), box, (1, 1), swizzle)


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
def test_store_then_load_round_trip(policy: str):
    array = np.zeros((16, 128), np.uint8)
    machine = Machine(array, policy=policy)
    data = noise(3, 512)
    machine.fill(data)
    descriptor = encode(byte_map(array))
    machine.store(descriptor, (64, 8), DATA)
    machine.commit()
    machine.go_on_until(machine.waits(0, False))
    bulk_waited(machine.crew.tracker, machine.crew[0].agent, 0, 1, read=False)
    machine.barriers.arrive_expect_tx(BARRIER, 512)
    machine.load(descriptor, (64, 8), DATA + 1024, BARRIER)
    machine.engine.drain()
    assert machine.barriers.test_parity(BARRIER, 0)
    np.testing.assert_array_equal(machine.ctas[0].data[DATA + 1024 : DATA + 1536], data)
    assert (machine.barriers.tables.loaded, machine.barriers.tables.stored) == (512, 512)


def test_multicast_lands_in_each_cta_and_signals_each_barrier():
    array = np.random.default_rng(0).integers(0, 256, (16, 128), np.uint8)
    machine = Machine(array, ctas=4)
    for rank in (0, 2, 3):
        machine.barriers.arrive_expect_tx(shared_address(rank, BARRIER), 512)
    machine.load(
        encode(byte_map(array, swizzle="none")), (0, 0), DATA, BARRIER, multicast=0b1101
    )
    for rank in (0, 2, 3):
        assert machine.barriers.phase(shared_address(rank, BARRIER)) == 1
        np.testing.assert_array_equal(machine.ctas[rank].data[DATA : DATA + 512].reshape(8, 64), array[:8, :64])
    assert machine.barriers.phase(shared_address(1, BARRIER)) == 0 and not machine.ctas[1].data[DATA:].any()


def test_pair_multicast_signals_the_cta_of_the_given_parity():
    array = np.random.default_rng(0).integers(0, 256, (16, 128), np.uint8)
    machine = Machine(array, ctas=4)
    for rank in (0, 2):
        machine.barriers.arrive_expect_tx(shared_address(rank, BARRIER), 1024)
    machine.load(
        encode(byte_map(array)), (0, 0), shared_address(1, DATA), BARRIER, cta_group=2, multicast=0b1111
    )
    assert [machine.barriers.phase(shared_address(rank, BARRIER)) for rank in range(4)] == [1, 0, 1, 0]


def test_pair_copy_may_signal_the_other_cta_of_its_pair_only():
    array = np.zeros((16, 128), np.uint8)
    machine = Machine(array, ctas=4)
    descriptor = encode(byte_map(array))
    machine.barriers.arrive_expect_tx(BARRIER, 512)
    machine.load(descriptor, (0, 0), shared_address(1, DATA), BARRIER, cta_group=2)
    assert machine.barriers.phase(BARRIER) == 1
    for group, rank in ((None, 1), (1, 1), (2, 2)):
        with pytest.raises(IllegalAccess, match="signals an mbarrier of CTA 0"):
            machine.load(descriptor, (0, 0), shared_address(rank, DATA), BARRIER, cta_group=group)
    with pytest.raises(IllegalAccess, match="mask"):
        machine.load(descriptor, (0, 0), DATA, BARRIER, multicast=0b10001)


def test_illegal_copies_are_named():
    array = np.zeros((16, 128), np.uint8)
    machine = Machine(array)
    good = encode(byte_map(array))
    with pytest.raises(IllegalAccess, match="128-byte aligned"):
        machine.load(good, (0, 0), DATA + 64, BARRIER)
    with pytest.raises(IllegalAccess, match="coordinates for a tensor map of rank 2"):
        machine.load(good, (0, 0, 0), DATA, BARRIER)
    with pytest.raises(BarrierMisuse, match="not initialised"):
        machine.load(good, (0, 0), DATA + 2048, BARRIER + 64)
    with pytest.raises(IllegalAccess, match="leaves its"):
        machine.load(good, (0, 0), DATA + SHARED_BYTES - 128, BARRIER)
    with pytest.raises(IllegalAccess, match="touches the live mbarrier"):
        machine.load(good, (0, 0), BARRIER, BARRIER)
    with pytest.raises(BarrierMisuse, match="more arrived than expect_tx announced"):
        machine.barriers.arrive_expect_tx(BARRIER, 256)
        machine.load(good, (0, 0), DATA, BARRIER)
    too_long = dataclasses.replace(byte_map(array), extents=(128, 17))
    with pytest.raises(IllegalAccess, match="outside every registered region"):
        machine.load(encode(too_long), (0, 12), DATA + 1024, BARRIER)


def test_unknown_modes_are_refused():
    header = struct.pack_into
    base = encode(TensorMap(0x10000, "u8", (64, 8), (64,), (64, 8), (1, 1)))
    for word, bits, text in (
        (2, 3 << 7 | 15 << 7, "data type code 15"),
        (2, 14 << 7, "data type code 14"),
        (2, 1 << 11, r"interleaved layout 1 \(16B\)"),
        (2, 2 << 11, r"interleaved layout 2 \(32B\)"),
        (2, 2 << 19, "swizzle 0, atom 2"),
        (2, 1 << 22, "not implemented"),
        (2, 7 << 4, "rank 8"),
        (15, 1, "not implemented"),
    ):
        data = bytearray(base)
        header("<I", data, 4 * word, struct.unpack_from("<I", data, 4 * word)[0] | bits)
        with pytest.raises(UnsupportedPTX, match=text):
            decode(bytes(data))
    with pytest.raises(IllegalAccess, match="128 bytes"):
        decode(base[:64])


def test_store_of_unfenced_data_is_reported():
    array = np.zeros((16, 128), np.uint8)
    machine = Machine(array)
    lanes = DATA + 16 * np.arange(32)
    machine.crew.store(0, machine.shared, lanes, np.ones((32, 16), np.uint8))
    converge(machine.crew[0].agent, FULL)
    with pytest.raises(ProxyFenceMissing, match=r"offset 2048 of CTA 0, which the store of warp 0 wrote"):
        machine.store(encode(byte_map(array)), (0, 0), DATA)
    fence_proxy(machine.crew[0].agent, FULL)
    machine.store(encode(byte_map(array)), (0, 0), DATA)
    assert array[:8, :64].all() and not array[8:].any()


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_source_may_be_overwritten_only_after_the_thread_waited(policy: str):
    array = np.zeros((16, 128), np.uint8)
    machine = Machine(array, policy=policy)
    machine.fill(noise(1, 512))
    machine.store(encode(byte_map(array)), (0, 0), DATA)
    machine.commit()
    overwrite = (np.array([DATA + 496]), np.zeros((1, 4), np.uint8))
    with pytest.raises(SharedMemoryRace, match="a store of warp 0 writes .* which the TMA store of 512 bytes .* read"):
        machine.crew.store(0, machine.shared, *overwrite)
    machine.crew.store(0, machine.shared, overwrite[0] + 16, overwrite[1])
    machine.go_on_until(machine.waits(0, True))
    bulk_waited(machine.crew.tracker, machine.crew[0].agent, 0, machine.thread().committed, read=True)
    machine.crew.store(0, machine.shared, *overwrite)


def stored_from(case: dict) -> set[int]:
    """Offsets in the box of what a store takes to elements of the tensor: found by storing the offsets themselves."""
    digits = []
    for fill in (np.arange(SHARED_BYTES), np.arange(SHARED_BYTES) >> 8, ~np.arange(SHARED_BYTES)):
        memory = np.zeros(GLOBAL_BYTES, np.uint8)
        tensor_map = tensor_map_of(case, memory.ctypes.data)
        machine = Machine(memory, detectors=False)
        machine.fill(fill.astype(np.uint8))
        machine.store(encode(tensor_map), case["coords"], DATA + case["offset"])
        digits.append(memory[tensor_map.address - memory.ctypes.data :])
    size = tensor_map.element_bits // 8
    inside = np.zeros(len(digits[0]), bool)
    shape, strides = (*tensor_map.extents[::-1], size), (*tensor_map.strides[::-1], size, 1)
    np.lib.stride_tricks.as_strided(inside, shape, strides)[...] = True
    inside &= digits[0] != digits[2]  # what was stored
    return set((digits[0][inside] + 256 * digits[1][inside].astype(int)).tolist())


@pytest.mark.parametrize("number", [n for n in COPIES if CASES[n]["kind"] == "store" and "fault" not in CASES[n]])
def test_a_store_reads_what_is_in_bounds(number: int):
    """What it does not store need not hold data; without one byte of what it stores, it is reported."""
    case, memory = CASES[number], np.zeros(GLOBAL_BYTES, np.uint8)
    descriptor, needed = encode(tensor_map_of(case, memory.ctypes.data)), sorted(stored_from(case))
    for left_out in (None, *needed[:: max(len(needed) - 1, 1)]):
        machine = Machine(memory)
        for place in needed:
            if place != left_out:
                machine.shared.view(shared_address(0, DATA + place), 1, write=True)[...] = 1
        if left_out is None:
            machine.store(descriptor, case["coords"], DATA + case["offset"])
            continue
        with pytest.raises(IllegalAccess, match="read of uninitialised shared memory"):
            machine.store(descriptor, case["coords"], DATA + case["offset"])


def test_load_over_a_pending_store_is_a_race():
    array = np.zeros((16, 128), np.uint8)
    machine = Machine(array)
    machine.fill(noise(1, 512))
    descriptor = encode(byte_map(array))
    machine.store(descriptor, (0, 0), DATA)
    with pytest.raises(SharedMemoryRace, match="TMA load"):
        machine.load(descriptor, (0, 0), DATA + 384, BARRIER)
