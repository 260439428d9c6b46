"""Bulk copies of any form, against a model byte by byte; multicast, maps that change, groups, policies."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import TensorMap
from cute_kernels.emulator.errors import BarrierMisuse, IllegalAccess, SharedMemoryRace
from cute_kernels.emulator.machine.state.mbarrier import MAX_COUNT
from cute_kernels.emulator.machine.state.smem import shared_address
from cute_kernels.emulator.machine.units.copies import bulk
from cute_kernels.emulator.machine.units.copies.tensor_map import SWIZZLES, encode
from cute_kernels.testing.ptx import aligned
from tests.emulator.copies import BARRIER, DATA, SHARED_BYTES, Machine
from tests.emulator.definitions import boxes
from tests.emulator.machine.units.copies.test_tma import GLOBAL_BYTES, noise
from tests.nightly import examples

CTAS = 4
BYTES = TensorMap(0, "u8", (128, 8), (128,), (64, 4), (1, 1), "64B")


@st.composite
def copies(draw: st.DrawFn) -> tuple[TensorMap, tuple[int, ...], int]:
    """A map of a tensor in `GLOBAL_BYTES` of bytes at address 0, coordinates in it and around, a shared offset."""
    rank = draw(st.integers(1, 5))
    dtype, size = draw(st.sampled_from([("u8", 1), ("bf16", 2), ("f32", 4), ("tf32", 4), ("f64", 8)]))
    swizzle = draw(st.sampled_from(sorted(SWIZZLES)))
    span = SWIZZLES[swizzle].span
    row = span if span and draw(st.booleans()) else 16 * draw(st.integers(1, span // 16 if span else 9))
    box = (row // size, *[draw(st.integers(1, most)) for most in (4, 3, 2, 2)[: rank - 1]])
    extents = (box[0] + draw(st.integers(0, 48)) // size, *[n + draw(st.integers(0, 1)) for n in box[1:]])
    strides = []
    nbytes = -(-extents[0] * size // 16) * 16
    for extent in extents[1:]:
        strides.append(nbytes + 16 * draw(st.integers(0, 1)))
        nbytes = strides[-1] * extent
    steps = (1, *[draw(st.sampled_from([1, 1, 1, 2])) for _ in range(rank - 1)])
    fill = draw(st.booleans()) and dtype != "u8"
    tensor_map = TensorMap(0, dtype, extents, tuple(strides), box, steps, swizzle, fill)
    inner = st.integers(-1, extents[0] * size // 16).map(lambda chunk: chunk * 16 // size)
    coords = draw(st.tuples(inner, *[st.integers(-1, extent) for extent in extents[1:]]))
    return tensor_map, coords, 128 * draw(st.integers(0, 9))


def placed(tensor_map: TensorMap, memory: np.ndarray) -> bytes:
    return encode(dataclasses.replace(tensor_map, address=memory.ctypes.data))


@settings(max_examples=examples(150, 3000), deadline=None)
@given(copies(), st.sampled_from(["eager", "lazy", "random"]), st.booleans(), st.integers(0, 5))
def test_loads(case: tuple, policy: str, detectors: bool, seed: int) -> None:
    tensor_map, coords, offset = case
    memory = aligned(noise(seed, GLOBAL_BYTES))
    machine = Machine(memory, policy=policy, detectors=detectors)
    machine.fill(noise(seed + 1, SHARED_BYTES))
    before = machine.ctas[0].data.copy()
    machine.barriers.arrive_expect_tx(BARRIER, tensor_map.box_bytes)
    machine.load(placed(tensor_map, memory), coords, DATA + offset, BARRIER)
    machine.engine.drain()
    for place, byte in boxes.loaded(tensor_map, coords, memory.tobytes(), DATA + offset).items():
        before[place] = byte
    np.testing.assert_array_equal(machine.ctas[0].data, before)
    assert machine.barriers.phase(BARRIER) == 1 and machine.barriers.tables.loaded == tensor_map.box_bytes


@settings(max_examples=examples(150, 3000), deadline=None)
@given(copies(), st.sampled_from(["eager", "lazy", "random"]), st.booleans(), st.integers(0, 5))
def test_stores(case: tuple, policy: str, detectors: bool, seed: int) -> None:
    tensor_map, coords, offset = case
    memory = aligned(noise(seed, GLOBAL_BYTES))
    machine = Machine(memory, policy=policy, detectors=detectors)
    machine.fill(noise(seed + 1, SHARED_BYTES))
    before = memory.copy()
    if min(coords) < 0:
        with pytest.raises(IllegalAccess, match="negative"):
            machine.store(placed(tensor_map, memory), coords, DATA + offset)
    else:
        machine.store(placed(tensor_map, memory), coords, DATA + offset)
        machine.engine.drain()
        for place, byte in boxes.stored(tensor_map, coords, machine.ctas[0].data.tobytes(), DATA + offset).items():
            before[place] = byte
        assert machine.barriers.tables.stored == tensor_map.box_bytes
    np.testing.assert_array_equal(memory, before)


# --- multicast --------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60, 1000), deadline=None)
@given(st.integers(0, 31), st.booleans(), st.integers(0, CTAS - 1), st.booleans())
def test_multicast(mask: int, pair: bool, signal: int, detectors: bool) -> None:
    """Each CTA of a mask has the box, each signalled mbarrier its bytes: with .cta_group::2 that of a parity."""
    memory = aligned(noise(3, GLOBAL_BYTES))
    machine = Machine(memory, CTAS, detectors=detectors)
    for rank in range(CTAS):
        machine.fill(noise(rank, SHARED_BYTES), rank)
        machine.barriers.expect_tx(shared_address(rank, BARRIER), 512)
    before = [cta.data.copy() for cta in machine.ctas]
    copy = placed(BYTES, memory), (64, 2), shared_address(1, DATA), shared_address(signal, BARRIER)
    if not mask or mask >> CTAS:
        with pytest.raises(IllegalAccess, match="multicast mask"):
            machine.load(*copy, multicast=mask, cta_group=2 if pair else None)
        return
    machine.load(*copy, multicast=mask, cta_group=2 if pair else None)
    left = [512] * CTAS
    for rank in (rank for rank in range(CTAS) if mask >> rank & 1):
        left[rank & ~1 | signal & 1 if pair else rank] -= 256
        for place, byte in boxes.loaded(BYTES, (64, 2), memory.tobytes(), DATA).items():
            before[rank][place] = byte
    assert [machine.barriers._barriers[shared_address(r, BARRIER)].words.tx for r in range(CTAS)] == left
    assert all(np.array_equal(cta.data, data) for cta, data in zip(machine.ctas, before, strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_multicast_that_races_in_one_cta(rank: int) -> None:
    memory = aligned(noise(3, GLOBAL_BYTES))
    machine = Machine(memory, 2)
    machine.cluster.tracker.enter(machine.crew[1].agent)
    machine.crew.touch(1, np.array([shared_address(rank, DATA + 16)]), 4, write=False)
    copy = placed(BYTES, memory), (0, 0), DATA, BARRIER
    with pytest.raises(SharedMemoryRace, match=f"writes .* offset {DATA + 16} of CTA {rank}, which the load of"):
        machine.load(*copy, multicast=3)


def test_mbarriers_that_a_copy_may_signal() -> None:
    """Only that of the other CTA of a pair beside its own, and only with .cta_group::2."""
    memory = aligned(noise(3, GLOBAL_BYTES))
    machine = Machine(memory, CTAS, detectors=False)
    for rank in range(CTAS):
        machine.barriers.expect_tx(shared_address(rank, BARRIER), 4096)
    for group, rank, signal in itertools.product((1, 2), range(CTAS), range(CTAS)):
        copy = placed(BYTES, memory), (0, 0), shared_address(rank, DATA), shared_address(signal, BARRIER)
        if rank ^ signal < group:
            machine.load(*copy, cta_group=group)
            continue
        with pytest.raises(IllegalAccess, match=f"to CTA {rank} signals an mbarrier of CTA {signal}"):
            machine.load(*copy, cta_group=group)


# --- mbarriers, maps and memory ---------------------------------------------------------------------------------------


def small(policy: str = "eager") -> tuple[Machine, bytes, np.ndarray]:
    memory = aligned(noise(3, GLOBAL_BYTES))
    machine = Machine(memory, policy=policy, detectors=False)
    machine.fill(noise(4, SHARED_BYTES))
    return machine, placed(BYTES, memory), memory


def test_bytes_that_nothing_expects() -> None:
    machine, descriptor, _ = small()
    machine.load(descriptor, (0, 0), DATA, BARRIER)  # early bytes are legal
    machine.barriers.expect_tx(BARRIER, 256 - (MAX_COUNT - 100))
    with pytest.raises(BarrierMisuse, match="takes the transaction count out of range"):
        machine.load(descriptor, (0, 0), DATA, BARRIER)
    machine, descriptor, _ = small()
    machine.barriers.expect_tx(BARRIER, 200)
    machine.barriers.arrive(BARRIER)
    with pytest.raises(BarrierMisuse, match="56 bytes more arrived than expect_tx announced"):
        machine.load(descriptor, (0, 0), DATA, BARRIER)


def test_a_map_that_changes_is_decoded_again() -> None:
    """A kernel may rewrite a tensor map (tensormap.replace) where it is."""
    machine, descriptor, memory = small()
    before = memory.copy()
    machine.store(descriptor, (0, 0), DATA)
    for moved in (4096, 8192):
        machine.store(encode(dataclasses.replace(BYTES, address=memory.ctypes.data + moved)), (0, 0), DATA)
    for start in (0, 4096, 8192):
        for place, byte in boxes.stored(BYTES, (0, 0), machine.ctas[0].data.tobytes(), DATA).items():
            before[start + place] = byte
    np.testing.assert_array_equal(memory, before)


def test_memory_that_may_not_be_written_or_reached() -> None:
    memory = aligned(noise(3, GLOBAL_BYTES))
    machine = Machine(np.zeros(16, np.uint8), detectors=False)
    machine.fill(noise(4, SHARED_BYTES))
    descriptor = placed(BYTES, memory)
    with pytest.raises(IllegalAccess, match="load of 448 bytes .* is outside every registered region"):
        machine.load(descriptor, (0, 0), DATA, BARRIER)
    machine.gmem.register_tensor(memory, "memory", writable=False)
    machine.load(descriptor, (0, 0), DATA, BARRIER)
    with pytest.raises(IllegalAccess, match="store of 448 bytes .* hits the read-only region memory"):
        machine.store(descriptor, (0, 0), DATA)


def test_a_tensor_beyond_all_memory() -> None:
    """Extents and strides that no memory has: an address does not come round to one that is there."""
    machine, _, memory = small()
    huge = TensorMap(memory.ctypes.data, "u8", (128, 1 << 32, 1 << 32), ((1 << 40) - 16,) * 2, (64, 4, 1), (1,) * 3)
    for coords in ((0, (1 << 31) - 1, (1 << 31) - 1), (0, 1 << 24, 0), (0, 0, 1 << 30)):
        with pytest.raises(IllegalAccess, match="outside every registered region"):
            machine.load(encode(huge), coords, DATA, BARRIER)


@pytest.mark.parametrize("strides", [(0, 64), (64, 0), (16, 16), (0, 0)])
def test_a_reduction_of_rows_that_overlap(strides: tuple[int, int]) -> None:
    """Every element is combined on its own, also with what another row of the box has made of the same place."""
    memory = aligned(np.zeros(64, np.uint32))
    machine = Machine(memory, detectors=False)
    values = np.arange(96, dtype=np.uint32)
    machine.fill(values.view(np.uint8))
    tensor_map = TensorMap(0, "u32", (8, 4, 3), strides, (8, 4, 3), (1, 1, 1))
    machine.store(placed(tensor_map, memory), (0, 0, 0), DATA, reduction="add")
    expected = np.zeros(64, np.uint32)
    for number, (k, j, i) in enumerate(np.ndindex(3, 4, 8)):
        expected[i + (j * strides[0] + k * strides[1]) // 4] += number
    np.testing.assert_array_equal(memory, expected)


def test_a_tensor_map_at_an_address_of_ones() -> None:
    machine, descriptor, _ = small()
    copy = machine.tensor_copy(bulk.LOAD, descriptor, (0, 0), DATA)
    copy.other, copy.signal, copy.mask = -1, BARRIER, -1
    with pytest.raises(IllegalAccess, match="tensor map at .* not 64-byte aligned"):
        machine.issue(copy)


# --- bulk groups ------------------------------------------------------------------------------------------------------


def test_a_wait_looks_at_all_but_the_newest_groups() -> None:
    """Groups of two stores, of one and of one, of which each step reads or writes, the oldest first."""
    machine, descriptor, _ = small("lazy")
    for size in (2, 1, 1):
        for _ in range(size):
            machine.store(descriptor, (0, 0), DATA)
        machine.commit()
    ends = {step: [(n, read) for n in range(4) for read in (True, False) if machine_waits(machine, n, read)]
            for step in range(9) if step == 0 or machine.engine.step()}  # fmt: skip
    assert ends[0] == [(3, True), (3, False)]
    assert ends[3] == [(2, True), (3, True), (3, False)], "the second store has been read, but not written"
    assert ends[4] == [(2, True), (2, False), (3, True), (3, False)]
    assert len(ends[8]) == 8 and not machine.engine.step()


def machine_waits(machine: Machine, newest: int, read: bool) -> bool:
    return machine.waits(newest, read)()


def test_the_open_group_does_not_count_and_only_waits_observe() -> None:
    machine, descriptor, _ = small("lazy")
    machine.store(descriptor, (0, 0), DATA)
    assert machine_waits(machine, 0, False), "nothing is committed"
    machine.commit()
    assert not machine_waits(machine, 0, True)
    machine.engine.drain()
    (found,) = machine.bulk.unobserved()
    assert found[0] == (0, 0, 0) and found[1].startswith(f"TMA store of 256 bytes from shared offset {DATA}")
    assert machine_waits(machine, 0, True) and not list(machine.bulk.unobserved())
