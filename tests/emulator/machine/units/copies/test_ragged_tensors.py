"""Tensor maps whose strides cancel modulo 2^64, by which Triton and quack bound the rows of ragged tensors."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import IllegalAccess, run
from cute_kernels.emulator.machine.units.copies.tensor_map import TensorMap
from cute_kernels.testing.ptx import aligned, launch, module

BIG, ROW = 1 << 30, 128  # rows; bytes
LOAD = """
    .shared .align 1024 .b8 rows[512]; .shared .align 8 .b64 full;
    mov.u32 %r1, %tid.x; ld.param.u64 %d0, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r2, rows; mov.u32 %r3, full;
    ld.param.u32 %r4, [p2]; ld.param.u32 %r5, [p3]; mov.u32 %r6, 0; setp.ne.u32 %p1, %r1, 0; @%p1 bra WAIT;
    mbarrier.init.shared.b64 [%r3], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 512;
    cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r2], [%d0, {%r6, %r4, %r7, %r5}], [%r3];
    WAIT: bar.sync 0;
    L: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra L;
    mad.lo.u32 %r9, %r1, 16, %r2; ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r9];
    mad.wide.u32 %d3, %r1, 16, %d2; st.global.v4.u32 [%d3], {%r10, %r11, %r12, %r13}; ret;
"""
STORE = """
    .shared .align 1024 .b8 rows[512];
    mov.u32 %r1, %tid.x; ld.param.u64 %d0, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r2, rows;
    mad.lo.u32 %r9, %r1, 16, %r2; ld.param.u32 %r4, [p2]; ld.param.u32 %r5, [p3]; mov.u32 %r6, 0;
    mad.wide.u32 %d3, %r1, 16, %d2;
    ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d3]; st.shared.v4.u32 [%r9], {%r10, %r11, %r12, %r13};
    fence.proxy.async; bar.sync 0; setp.ne.u32 %p1, %r1, 0; @%p1 bra END;
    cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%d0, {%r6, %r4, %r7, %r5}], [%r2];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    END: ret;
"""


def text(body: str) -> str:
    return module(f"mov.u32 %r7, {BIG}; {body}", parameters=4, target="sm_90a")


def ragged(tensor: np.ndarray) -> TensorMap:
    """Rows from ``BIG`` on do not exist; (BIG - length) * ROW + BIG * (2^34 - ROW) + (offset + length) * ROW wraps."""
    extents, strides = (64, BIG, (1 << 31) - 1, (1 << 31) - 1), (ROW, (1 << 34) - ROW, ROW)
    return TensorMap(tensor.ctypes.data, "u16", extents, strides, (64, 4, 1, 1), (1,) * 4)


@pytest.mark.parametrize(("offset", "length"), [(3, 4), (0, 1), (14, 2), (5, 3)])
def test_rows_of_a_ragged_tensor(offset: int, length: int) -> None:
    """Of a box of four rows those behind the length do not exist: they are zeros, and no store writes them."""
    tensor = aligned(np.arange(1, 16 * 64 + 1, dtype=np.uint16).reshape(16, 64), 1024)
    before, box = tensor.copy(), aligned(np.full((4, 64), 7, np.uint16), 1024)
    where = BIG - length, offset + length
    launch(text(LOAD), ragged(tensor), box, *where, reachable=[tensor])
    kept = min(length, 4)
    assert np.array_equal(box[:kept], before[offset : offset + kept]) and not box[kept:].any()
    box[:] = 9
    launch(text(STORE), ragged(tensor), box, *where, reachable=[tensor])
    before[offset : offset + kept] = 9
    assert np.array_equal(tensor, before)


def test_a_map_of_an_address_reaches_the_array_that_a_variable_of_the_caller_holds() -> None:
    ptx = text(LOAD).replace(".param .u64 p0", ".param .align 64 .b8 p0[128]")
    ptx = ptx.replace("ld.param.u64 %d0, [p0]", "mov.b64 %d0, p0")
    tensor = aligned(np.arange(16 * 64, dtype=np.uint16).reshape(16, 64), 1024)
    part, box = tensor[:2], np.zeros((4, 64), np.uint16)  # of the two arrays the larger one counts
    run(ptx, grid=1, block=32, args=[ragged(part), box, BIG - 4, 7])
    assert np.array_equal(box, tensor[3:7])
    with pytest.raises(IllegalAccess, match="outside every registered region; nearest: the tensor behind argument p0"):
        run(ptx, grid=1, block=32, args=[ragged(tensor), box, BIG - 4, 18])
    kept = [tensor]
    del tensor, part
    with pytest.raises(IllegalAccess, match="outside every registered region; nearest: argument p1"):
        run(ptx, grid=1, block=32, args=[ragged(kept[0]), box, BIG - 4, 7])


def test_rows_outside_of_the_tensor_are_reported() -> None:
    tensor = aligned(np.zeros((16, 64), np.uint16), 1024)
    with pytest.raises(IllegalAccess, match="outside every registered region"):
        launch(text(LOAD), ragged(tensor), aligned(np.zeros((4, 64), np.uint16)), BIG - 4, 18, reachable=[tensor])
