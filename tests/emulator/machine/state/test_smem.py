"""Shared memory of a cluster: addressing, initialisation, mbarrier protection."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.machine.state.smem import ClusterMemory, SharedMemory, shared_address


def cluster(ctas: int = 2, size: int = 4096, detect: bool = True) -> ClusterMemory:
    return ClusterMemory([SharedMemory(size, rank, detect=detect) for rank in range(ctas)])


def test_view_is_the_memory_of_the_named_cta():
    memory = cluster()
    memory.view(shared_address(1, 2048), 64, write=True)[...] = 9
    assert memory.ctas[1].data[2048:2112].tolist() == [9] * 64 and not memory.ctas[0].data.any()
    assert memory.resolve(shared_address(1, 2048)) == (1, 2048)


def test_reads_of_uninitialised_bytes():
    memory = cluster()
    memory.view(2048, 4, write=True)[:] = 1
    with pytest.raises(IllegalAccess, match="uninitialised shared memory at offset 2052"):
        memory.view(2048, 16)
    memory.ctas[0].check_initialised(np.array([[2048 // 4]]), 4)
    with pytest.raises(IllegalAccess, match="uninitialised shared memory at offset 2048"):
        memory.ctas[0].check_initialised(np.array([[2048 // 16]]), 16)
    assert not cluster(detect=False).view(2048, 8).any()


def test_bounds_and_sizes():
    memory = cluster()
    with pytest.raises(IllegalAccess, match="4 bytes at offset 4096 of CTA 1 leaves its 4096 bytes"):
        memory.view(shared_address(1, 4096), 4, write=True)
    with pytest.raises(IllegalAccess, match="names CTA 2 of a cluster of 2"):
        memory.view(shared_address(2, 2048), 4)
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
            memory.view(offset, size, write=True)
        with pytest.raises(IllegalAccess, match="load from .* the live mbarrier"):
            memory.view(offset, size)
    for offset in (1024, 1040):
        memory.view(offset, 8, write=True)
    memory.ctas[0].unprotect(1032)
    memory.view(1032, 8, write=True)
