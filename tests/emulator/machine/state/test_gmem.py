"""Global memory: regions, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.machine.state.gmem import GlobalMemory


def aligned(nbytes: int, skew: int = 0) -> np.ndarray:
    """uint8 noise whose first byte lies ``skew`` bytes behind a multiple of 64."""
    raw = np.random.default_rng(nbytes + skew).integers(0, 256, nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + skew
    return raw[start : start + nbytes]


def test_view_is_the_memory_itself():
    tensor = torch.arange(64, dtype=torch.int32)
    gmem = GlobalMemory()
    gmem.register_tensor(tensor, "tensor")
    gmem.view(tensor.data_ptr() + 8, 4, write=True).view(np.int32)[0] = -7
    assert tensor[2] == -7


def test_views_of_one_storage_may_overlap():
    tensor = torch.zeros(64, dtype=torch.uint8)
    gmem = GlobalMemory()
    gmem.register_tensor(tensor, "whole", writable=False)
    gmem.register_tensor(tensor[16:32], "slice", writable=True)
    gmem.view(tensor.data_ptr() + 16, 16, write=True)[:] = 3
    assert tensor.tolist() == [0] * 16 + [3] * 16 + [0] * 32
    with pytest.raises(IllegalAccess, match="read-only region whole"):
        gmem.view(tensor.data_ptr(), 16, write=True)


def test_strided_tensors_register_their_span():
    tensor = torch.zeros(10, 8)[2:4, 1::3]
    gmem = GlobalMemory()
    gmem.register_tensor(tensor, "strided")
    span = 4 * (8 + 6 + 1)
    gmem.view(tensor.data_ptr(), span)
    with pytest.raises(IllegalAccess):
        gmem.view(tensor.data_ptr(), span + 1)
    backwards = np.zeros(16, np.int32)[::-1]
    gmem.register_tensor(backwards, "backwards")
    gmem.view(backwards.ctypes.data - 60, 64)
    gmem.register_tensor(np.zeros((0, 4)), "empty")
    assert "empty" not in gmem.describe()


def test_errors_name_the_nearest_region():
    array = aligned(256)
    base = array.ctypes.data
    gmem = GlobalMemory()
    with pytest.raises(IllegalAccess, match="nearest: none is registered"):
        gmem.view(base, 1)
    gmem.register_tensor(array, "weight")
    with pytest.raises(IllegalAccess, match=r"load of 4 bytes .* nearest: weight .*256 bytes after its start.*is 256"):
        gmem.view(base + 256, 4)
    with pytest.raises(IllegalAccess, match="64 bytes before its start"):
        gmem.view(base - 64, 4, write=True)
    with pytest.raises(IllegalAccess, match="outside every registered region"):
        gmem.view(base + 250, 7)


def test_what_cannot_be_registered():
    gmem = GlobalMemory()
    with pytest.raises(ValueError, match="meta"):
        gmem.register_tensor(torch.zeros(4, device="meta"), "x")
    with pytest.raises(TypeError, match="list"):
        gmem.register_tensor([1, 2], "x")
    for address, nbytes in ((0, 4), (16, -1)):
        with pytest.raises(ValueError, match="cannot register"):
            gmem.register(address, nbytes)


def test_an_overflow_below_the_first_address_is_one_modulo_2_to_the_64() -> None:
    """A region at a low address, as the heap of some programs is: 2^32 less is a high one."""
    gmem = GlobalMemory()
    gmem.register(0x2000, 128, "low")
    error = gmem.refusal((0x2000 + 60 - (1 << 32)) % (1 << 64), 4, write=False)
    assert error.facts.sentence.endswith("+4,294,967,296 bytes, 1 times 2^32, it would be inside of one")
    assert gmem.refusal(0x3000, 4, write=False).kind == "out-of-bounds"
