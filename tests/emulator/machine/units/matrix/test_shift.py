"""tcgen05.shift: lanes of tensor memory take the row of the next lane, in order with other tcgen05 operations."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError, IllegalAccess, TensorMemoryRace
from cute_kernels.testing.ptx import module
from tests.emulator.ptx_launch import launch

REGISTERS = ", ".join(f"%r{40 + i}" for i in range(16))


def kernel(shift: str, group: int = 1, wait: str = "W", stores: str = "x16") -> str:
    """128 threads write 16 columns of tensor memory (10000 * rank + 16 * lane + column), shift and read them back.

    The leading CTA's thread 0 executes ``shift`` with ``%r20`` = the first column; its commit arrives at the mbarrier
    of every CTA of the group.
    """
    count = int(stores[1:])
    values = " ".join(f"add.u32 %r{40 + i}, %r5, {i};" for i in range(16))
    written = ", ".join(f"%r{40 + i}" for i in range(count))
    out = " ".join(f"st.global.b32 [%d2+{4 * i}], %r{40 + i};" for i in range(16))
    more, mask = (".multicast::cluster", ", %h1") if group == 2 else ("", "")
    meet = "barrier.cluster.arrive; barrier.cluster.wait;"
    return module(
        f"""mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; shr.u32 %r3, %r1, 5; ld.param.u64 %d0, [p0];
        setp.ne.u32 %p1, %r3, 0; setp.ne.u32 %p2, %r1, 0; @%p1 bra ALLOCATED;
        tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [dynamic+8], 32;
        @%p2 bra ALLOCATED; mbarrier.init.shared.b64 [dynamic], 1; fence.mbarrier_init.release.cluster;
        ALLOCATED: {meet} ld.shared.b32 %r20, [dynamic+8];
        mad.lo.u32 %r5, %r2, 10000, 0; mad.lo.u32 %r5, %r1, 16, %r5; {values}
        shl.b32 %r6, %r3, 21; add.u32 %r21, %r20, %r6;
        tcgen05.st.sync.aligned.32x32b.{stores}.b32 [%r21], {{{written}}}; tcgen05.wait::st.sync.aligned;
        tcgen05.fence::before_thread_sync; {meet} tcgen05.fence::after_thread_sync;
        setp.ne.u32 %p3, %r2, 0; or.pred %p4, %p2, %p3; @%p4 bra {wait};
        {shift} mov.b16 %h1, 3;
        tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster{more}.b64 [dynamic]{mask};
        W: mbarrier.try_wait.parity.shared.b64 %p5, [dynamic], 0; @!%p5 bra W;
        LOAD: tcgen05.fence::after_thread_sync;
        tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{REGISTERS}}}, [%r21]; tcgen05.wait::ld.sync.aligned;
        mad.lo.u32 %r7, %r2, 128, %r1; mul.wide.u32 %d1, %r7, 64; add.u64 %d2, %d0, %d1; {out}
        tcgen05.fence::before_thread_sync; {meet} @%p1 bra END;
        tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r20, 32;
        tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned; END: ret;""",
        parameters=1,
    )


def run(text: str, ctas: int = 1, options: Options | None = None) -> np.ndarray:
    out = np.zeros((ctas, 128, 16), np.uint32)
    launch(text, out, grid=(ctas, 1, 1), block=(128, 1, 1), cluster=(ctas, 1, 1), options=options)
    return out


def values(ctas: int = 1) -> np.ndarray:
    rank, lane, column = np.ogrid[:ctas, :128, :16]
    return 10000 * rank + 16 * lane + column


@pytest.mark.parametrize("options", [Options(), Options(completion="lazy"), Options()])
@pytest.mark.parametrize(("lane", "column"), [(0, 0), (32, 8), (96, 4)])
def test_31_lanes_of_a_warp_take_the_next_row(lane: int, column: int, options: Options):
    text = kernel(f"add.u32 %r22, %r20, {lane << 16 | column}; tcgen05.shift.cta_group::1.down [%r22];")
    expected = values()
    expected[0, lane : lane + 31, column : column + 8] = values()[0, lane + 1 : lane + 32, column : column + 8]
    np.testing.assert_array_equal(run(text, options=options), expected)


def test_shifts_take_effect_one_after_the_other():
    twice = "tcgen05.shift.cta_group::1.down [%r20];" * 2
    expected = values()
    expected[0, :30, :8] = values()[0, 2:32, :8]
    expected[0, 30, :8] = values()[0, 31, :8]
    np.testing.assert_array_equal(run(kernel(twice), options=Options(completion="lazy")), expected)


def test_a_pair_shifts_in_both_ctas():
    text = kernel("tcgen05.shift.cta_group::2.down [%r20];", group=2)
    expected = values(2)
    expected[:, :31, :8] = values(2)[:, 1:32, :8]
    np.testing.assert_array_equal(run(text, 2), expected)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (kernel("add.u32 %r22, %r20, 0x100000; tcgen05.shift.cta_group::1.down [%r22];"), IllegalAccess,
         "lane 16, which is no multiple of 32"),
        (kernel("add.u32 %r22, %r20, 28; tcgen05.shift.cta_group::1.down [%r22];"), IllegalAccess, "is not allocated"),
        (kernel("add.u32 %r22, %r20, 4; tcgen05.shift.cta_group::1.down [%r22];", stores="x8"), IllegalAccess,
         "read of uninitialised TMEM"),
        (kernel("tcgen05.shift.cta_group::1 [%r20];"), EmulatorError, "a qualifier is missing, one of .down"),
        # Warp 1 reads its rows without waiting for the shift.
        (kernel("add.u32 %r22, %r20, 0x200000; tcgen05.shift.cta_group::1.down [%r22];", wait="LOAD"),
         TensorMemoryRace, r"tcgen05\.(ld|shift) .* TMEM column 0"),
    ],
)  # fmt: skip
def test_faults_are_named(text: str, error: type, message: str):
    with pytest.raises(error, match=message):
        run(text)
