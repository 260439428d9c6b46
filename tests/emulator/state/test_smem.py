"""Shared memory of a cluster: addressing, gathers and scatters, initialisation, mbarrier protection."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.state.smem import SYSTEM_BYTES, ClusterMemory, SharedMemory, shared_address

SIZES = (1, 2, 4, 8, 16, 32)


def cluster(ctas: int = 2, size: int = 4096, detect: bool = True) -> ClusterMemory:
    return ClusterMemory([SharedMemory(size, rank, detect=detect) for rank in range(ctas)])


@given(
    st.sampled_from(SIZES),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 95)), min_size=1, max_size=32, unique=True),
)
def test_load_returns_what_store_wrote_lane_by_lane(size: int, places: list[tuple[int, int]]):
    memory = cluster()
    addresses = np.array([shared_address(rank, SYSTEM_BYTES + size * item) for rank, item in places], np.uint32)
    values = np.random.default_rng(size).integers(0, 256, (len(places), size), np.uint8)
    memory.store(addresses, values)
    np.testing.assert_array_equal(memory.load(addresses, size), values)
    expected = np.zeros((2, 4096), np.uint8)
    for (rank, item), value in zip(places, values, strict=True):
        start = SYSTEM_BYTES + size * item
        expected[rank, start : start + size] = value
    for rank, cta in enumerate(memory.ctas):
        np.testing.assert_array_equal(cta.data, expected[rank])


def test_view_is_the_memory_of_the_named_cta():
    memory = cluster()
    memory.view(shared_address(1, 2048), 64, write=True)[...] = 9
    assert memory.ctas[1].data[2048:2112].tolist() == [9] * 64 and not memory.ctas[0].data.any()
    assert memory.resolve(shared_address(1, 2048)) == (1, 2048)


def test_reads_of_uninitialised_bytes():
    memory = cluster()
    memory.store(np.array([2048]), np.ones((1, 4), np.uint8))
    with pytest.raises(IllegalAccess, match="uninitialised shared memory: 8 bytes at offset 2048 of CTA 0"):
        memory.load(np.array([2048]), 8)
    with pytest.raises(IllegalAccess, match="uninitialised shared memory at offset 2052"):
        memory.view(2048, 16)
    memory.ctas[0].check_initialised(np.array([[2048 // 4]]), 4)
    with pytest.raises(IllegalAccess, match="uninitialised shared memory at offset 2048"):
        memory.ctas[0].check_initialised(np.array([[2048 // 16]]), 16)
    quiet = cluster(detect=False)
    assert not quiet.load(np.array([2048]), 8).any()


def test_bounds_alignment_and_sizes():
    memory = cluster()
    with pytest.raises(IllegalAccess, match="4 bytes at offset 4096 of CTA 1 leaves its 4096 bytes"):
        memory.store(np.array([shared_address(1, 4096)]), np.zeros((1, 4), np.uint8))
    with pytest.raises(IllegalAccess, match="leaves its 4096 bytes"):
        memory.view(4090, 16, write=True)
    for size in SIZES[1:]:
        with pytest.raises(IllegalAccess, match=f"misaligned shared store of {size} bytes at 0x"):
            memory.store(np.array([2048 + size // 2]), np.zeros((1, size), np.uint8))
    with pytest.raises(IllegalAccess, match="access of 3 bytes"):
        memory.load(np.array([2048]), 3)
    with pytest.raises(IllegalAccess, match="names CTA 2 of a cluster of 2"):
        memory.load(np.array([shared_address(2, 2048)]), 4)
    for size in (0, 1023, (1 << 18) + 1):
        with pytest.raises(IllegalAccess, match=f"shared memory of {size} bytes"):
            SharedMemory(size)
    with pytest.raises(ValueError, match="CTA 1 stands at position 0"):
        ClusterMemory([SharedMemory(2048, 1)])


def test_live_mbarriers_are_opaque():
    memory = cluster()
    memory.ctas[0].protect(1032)
    for offset, size in ((1032, 8), (1036, 4), (1024, 16)):
        with pytest.raises(IllegalAccess, match="store to .* the live mbarrier at offset 1032"):
            memory.store(np.array([offset]), np.zeros((1, size), np.uint8))
        with pytest.raises(IllegalAccess, match="load from .* the live mbarrier"):
            memory.load(np.array([offset]), size)
    with pytest.raises(IllegalAccess, match="live mbarrier"):
        memory.view(1024, 64, write=True)
    memory.store(np.array([1024, 1040]), np.zeros((2, 8), np.uint8))
    memory.ctas[0].unprotect(1032)
    memory.store(np.array([1032]), np.zeros((1, 8), np.uint8))
