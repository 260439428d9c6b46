"""Shared memory that belongs to no array: from the last static one to the dynamic memory, and behind that."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

TILE = "_ZZ6kernelvE4tile"
ARRAY = f".shared .align 16 .b8 {TILE}[36];"  # at offset 1024; the dynamic memory begins at 2048
ACCESSES = {  # with the bytes of each
    "st.shared.u32 [%r1], %r3;": 4,
    "ld.shared.u32 %r2, [%r1];": 4,
    "st.shared.v4.u32 [%r1], {%r3, %r3, %r3, %r3};": 16,
    "mbarrier.init.shared.b64 [%r1], 1;": 8,
    "cp.async.ca.shared.global [%r1], [%d0], 16; cp.async.wait_all;": 16,
    "atom.shared.add.u32 %r2, [%r1], 1;": 4,
    "mbarrier.init.shared.b64 [dynamic+64], 1; fence.proxy.async; mbarrier.arrive.expect_tx.shared.b64 %d3, "
    "[dynamic+64], 32; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 32, "
    "[dynamic+64]; L: mbarrier.try_wait.parity.shared.b64 %p1, [dynamic+64], 0; @!%p1 bra L;": 32,
}


def run(access: str, symbol: str, offset: int, options: Options) -> None:
    """One thread accesses a place; 128 bytes of dynamic shared memory."""
    address = f"mov.u32 %r1, {symbol}; add.s32 %r1, %r1, {offset};"
    body = f"{ARRAY} ld.param.u64 %d0, [p0]; mov.b32 %r3, 7; {address} {access} ret;"
    data = aligned(np.zeros(64, np.uint8))
    launch(module(body), data, data, block=(1, 1, 1), dynamic_smem=128, options=options)


@pytest.mark.parametrize("access", ACCESSES)
def test_what_is_behind_the_arrays_is_reported(access: str) -> None:
    """What nobody has written may be read here: that is another fault. So is a barrier that is left over."""
    options = Options(without=("uninitialised", "exits"))
    nbytes = ACCESSES[access]
    end = -(-36 // nbytes) * nbytes
    for symbol, offset in (TILE, end), ("dynamic", -32), ("dynamic", 128):
        with pytest.raises(IllegalAccess) as raised:
            run(access, symbol, offset, options)
        report = diagnose(raised.value)
        assert raised.value.kind == "out-of-bounds" and report.place.ptx_line is not None
        behind = end - 36 if symbol == TILE else 1024 + offset - 36
        assert report.memory.startswith(f"{nbytes} bytes at offset {1060 + behind} of the shared memory of CTA 0, ")
        assert report.memory.endswith(f", {behind} bytes behind the end of tile")
    for symbol, offset in (TILE, 0), (TILE, 36 // nbytes * nbytes - nbytes), ("dynamic", 0), ("dynamic", 96):
        run(access, symbol, offset, options)


def test_a_part_of_an_access() -> None:
    """The last word of an access of 16 bytes is behind the array."""
    with pytest.raises(IllegalAccess, match="bytes 1060 to 1071 of CTA 0") as raised:
        run("st.shared.v4.u32 [%r1], {%r3, %r3, %r3, %r3};", TILE, 32, Options())
    where = "12 bytes at offset 1060 of the shared memory of CTA 0, 0 bytes behind the end of tile"
    assert diagnose(raised.value).memory == where


def test_without_detectors_padding_is_memory() -> None:
    run("st.shared.u32 [%r1], %r3;", TILE, 36, Options(detectors=False))


def test_dynamic_memory_without_an_array_is_all_that_there_is() -> None:
    """A kernel that computes addresses of its own has no array to be behind of."""
    body = f"{ARRAY} mov.b32 %r3, 7; mov.u32 %r1, 1500; st.shared.u32 [%r1], %r3; ret;"
    text = module(body).replace(".extern .shared .align 1024 .b8 dynamic[];", "")
    data = np.zeros(4, np.uint32)
    launch(text, data, data, block=(1, 1, 1), dynamic_smem=600)
    with pytest.raises(IllegalAccess, match="no array"):
        launch(text, data, data, block=(1, 1, 1), dynamic_smem=0)
