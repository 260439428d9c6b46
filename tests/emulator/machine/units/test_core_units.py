"""Kernels of barriers and tensor copies under every schedule."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.machine.units.copies.tensor_map import TensorMap
from cute_kernels.testing.ptx import module
from tests.emulator.machine.units.copies.test_tma import noise
from tests.emulator.ptx_launch import launch

# --- in a kernel ----------------------------------------------------------------------------------------------------

COPY = module(
    """
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r1, dynamic; add.s32 %r2, %r1, 1024; mov.u32 %r9, %tid.x;
    setp.ne.u32 %p1, %r9, 0;
    @%p1 bra WAIT;
    mbarrier.init.shared.b64 [%r1], 1;
WAIT:
    bar.sync 0; mov.u32 %r3, 0; mov.u32 %r5, 0;
NEXT:
    @%p1 bra POLL;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 2048;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1, {0, %r3}], [%r1];
POLL:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r1], %r5;
    @!%p2 bra POLL;
    @%p1 bra AFTER;
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d2, {0, %r3}], [%r2];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
AFTER:
    bar.sync 0;
    add.s32 %r3, %r3, 16; xor.b32 %r5, %r5, 1; setp.lt.u32 %p3, %r3, 100;
    @%p3 bra NEXT;
    ret;
    """
)


@pytest.mark.parametrize("spurious", [False, True])
def test_kernel_of_copies(spurious: bool) -> None:
    """100 rows in boxes of 16: the last box is partly out of bounds. Results and counts are those of any schedule."""
    results = []
    for completion in ("eager", "lazy", "random"):
        source = noise(1, 12800).reshape(100, 128)
        out = np.zeros((100, 128), np.uint8)
        maps = [
            TensorMap(x.ctypes.data, "u8", (128, 100), (128,), (128, 16), (1, 1), swizzle)
            for x, swizzle in ((source, "128B"), (out, "128B"))
        ]
        options = Options(detectors=False, completion=completion, spurious_try_wait_failures=spurious, seed=5)
        report = launch(COPY, *maps, block=(96, 1, 1), dynamic_smem=8192, reachable=(source, out), options=options)
        assert out.tobytes() == source.tobytes()
        polls = {"mbarrier.try_wait", "bra"}  # as often as the schedule has it
        counted = {name: n for name, n in report.by_opcode.items() if not name.startswith(tuple(polls))}
        results.append((counted, report.tma_bytes_loaded, report.tma_bytes_stored))
    assert results[0] == results[1] == results[2]


MISSED = module(
    """
    ld.param.u64 %d1, [p0]; mov.u32 %r1, dynamic; mov.u32 %r9, %tid.x; setp.ne.u32 %p1, %r9, 0; mov.u32 %r3, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1], 4;
READY:
    bar.sync 0; setp.lt.u32 %p4, %r9, 2;
    @!%p4 bra DONE;
NEXT:
    mbarrier.arrive.shared.b64 _, [%r1]; add.s32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 2;
    @%p3 bra NEXT;
DONE:
    ret;
    """
)


def test_too_many_arrivals():
    """Two lanes arrive twice at a barrier for four; with four arrivals each they are too many."""
    out = np.zeros(4, np.uint8)
    launch(MISSED, out, 0, dynamic_smem=4096, options=Options(detectors=False))
    text = MISSED.replace("mbarrier.arrive.shared.b64 _, [%r1];", "mbarrier.arrive.shared.b64 _, [%r1], 4;")
    with pytest.raises(EmulatorError, match="arrive"):
        launch(text, out, 0, dynamic_smem=4096, options=Options(detectors=False))


TIME_OUTS = module(
    """
    ld.param.u64 %d1, [p0]; mov.u32 %r1, dynamic; mov.u32 %r9, %tid.x; setp.ne.u32 %p1, %r9, 0; mov.u32 %r3, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r1+8], 32; mbarrier.init.shared.b64 [%r1+16], 32;
READY:
    bar.sync 0; setp.lt.u32 %p4, %r9, 32;
    @!%p4 bra SECOND;
    mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
    mbarrier.arrive.shared.b64 _, [%r1+8];
    mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
    mbarrier.arrive.shared.b64 _, [%r1+16];
    ret;
SECOND:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r1+8], 0;
    @!%p2 bra SECOND;
THIRD:
    add.s32 %r3, %r3, 1;
    mbarrier.try_wait.parity.shared.b64 %p2, [%r1+16], 0;
    @!%p2 bra THIRD;
    st.global.u32 [%d1], %r3;
    ret;
    """
)


def test_time_limit_that_passes_while_the_phase_completes():
    """Both warps time out at once; the first one then arrives. The second one's next wait has a limit of its own."""
    out = np.zeros(1, np.uint32)
    launch(TIME_OUTS, out, 0, block=(64, 1, 1), options=Options(detectors=False))
    assert out[0] == 1, "its second wait did not fail"
