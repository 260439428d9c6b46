"""Reports name the operation that is meant, among several with the same operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.machine.units.copies.tensor_map import TensorMap
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

READY = "bar.warp.sync -1; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
#: The first copy goes to both CTAs; the second, with the same operands, to one: it races with a store.
MULTICAST = module(
    f"""
    ld.param.u64 %d1, [p0]; mov.u32 %r1, dynamic; mov.u32 %r2, %tid.x; mov.u32 %r3, %cluster_ctarank; mov.u16 %h1, 3;
    setp.ne.u32 %p1, %r2, 0; setp.ne.u32 %p2, %r3, 0; or.pred %p3, %p1, %p2; add.s32 %r4, %r1, 1024; mov.u32 %r5, 0;
    @%p1 bra INITIALISED;
    mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 2048;
INITIALISED:
    {READY}
    @%p3 bra LOADED;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r4], [%d1, {{0, 0}}], [%r1], %h1;
LOADED:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p9, [%r1], 0;
    @!%p9 bra LOADED;
    {READY}
    @%p3 bra DONE;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 2048;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%d1, {{0, 0}}], [%r1];
    st.shared.u32 [%r4], 7;
DONE:
    {READY}
    ret;
    """
)
#: In every group a store that the core repeats and then one of another place, which is new; nobody waits.
UNOBSERVED = module(
    """
    ld.param.u64 %d1, [p0]; mov.u32 %r1, dynamic; mov.u32 %r2, %tid.x; setp.ne.u32 %p1, %r2, 0; mov.u32 %r7, 0;
    add.s32 %r4, %r1, 1024; mov.u32 %r5, 0;
FILL:
    shl.b32 %r6, %r2, 4; add.s32 %r6, %r6, %r4; mad.lo.s32 %r6, %r5, 512, %r6;
    st.shared.v4.u32 [%r6], {%r5, %r5, %r2, %r2};
    add.s32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 60;
    @%p2 bra FILL;
    fence.proxy.async.shared::cta; bar.warp.sync -1; add.s32 %r10, %r4, 2048;
    @%p1 bra END;
NEXT:
    mul.lo.s32 %r11, %r7, 64; cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {0, %r11}], [%r4];
    add.s32 %r11, %r11, 16; cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {0, %r11}], [%r10];
    cp.async.bulk.commit_group;
    add.s32 %r10, %r10, 2048; add.s32 %r7, %r7, 1; setp.lt.u32 %p3, %r7, 4;
    @%p3 bra NEXT;
END:
    bar.warp.sync -1;
    ret;
    """
)
#: Two warps that end at different times.
def tensor(rows: int) -> tuple[np.ndarray, TensorMap]:
    memory = aligned(np.arange(rows * 128, dtype=np.uint32).astype(np.uint8).reshape(rows, 128), 1024)
    return memory, TensorMap(memory.ctypes.data, "u8", (128, rows), (128,), (128, 16), (1, 1), "128B")


def error(text: str, rows: int, **shape: Any) -> str:
    memory, tensor_map = tensor(rows)
    with pytest.raises(EmulatorError) as caught:
        launch(text, tensor_map, 0, reachable=[memory], **shape)
    return str(caught.value)


def test_copy_after_a_multicast_with_the_same_operands() -> None:
    shape = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "dynamic_smem": 8192}
    words = error(MULTICAST, 16, **shape)
    assert "TMA load of 2048 bytes to shared offset 2048 of CTA 0 for the mbarrier at offset 1024 of CTA 0" in words


def test_latest_store_that_nobody_waited_for() -> None:
    assert "from shared offset 10240 of CTA 0" in error(UNOBSERVED, 512, dynamic_smem=40960)
