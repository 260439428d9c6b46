"""tcgen05.alloc and dealloc with .cta_group::2: an act of both CTAs of a pair."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import Hang, IllegalAccess
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

SCHEDULES = [
    Options(),
    *(Options(seed=seed, interleave="starve") for seed in (1, 2)),
]
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
ALLOC = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [dynamic+8], COLUMNS;"
DEALLOC = "tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r20, COLUMNS;"
#: CTA 0 copies 128 rows of 16 bytes of both CTAs into tensor memory as soon as it has allocated; each CTA's four warps
#: read their rows back. Words of shared memory are 1000 * rank + 4 * row + word; p0 is [2, 128, 4].
COPY = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; shr.u32 %r3, %r1, 5; ld.param.u64 %d0, [p0];
    setp.ne.u32 %p1, %r3, 0; setp.ne.u32 %p2, %r1, 0; mad.lo.u32 %r5, %r2, 1000, 0; mad.lo.u32 %r5, %r1, 4, %r5;
    add.u32 %r6, %r5, 1; add.u32 %r7, %r5, 2; add.u32 %r8, %r5, 3; shl.b32 %r4, %r1, 4; mov.b32 %r9, dynamic;
    add.u32 %r4, %r4, %r9; st.shared.v4.b32 [%r4+1024], {{%r5, %r6, %r7, %r8}}; fence.proxy.async.shared::cta;
    @%p2 bra READY; mbarrier.init.shared.b64 [dynamic], 1; fence.mbarrier_init.release.cluster; READY: {MEET}
    @%p1 bra MEET; setp.eq.u32 %p3, %r2, 0; @%p3 bra ALLOCATE; LATE ALLOCATE: ALLOC
    bar.warp.sync -1; ld.shared.b32 %r20, [dynamic+8]; @%p2 bra MEET; setp.ne.u32 %p3, %r2, 0; @%p3 bra MEET;
    add.u32 %r10, %r9, 1024; shr.u32 %r10, %r10, 4; cvt.u64.u32 %d1, %r10; or.b64 %d1, %d1, 0x0000400800080000;
    tcgen05.cp.cta_group::2.128x128b [%r20], %d1; mov.b16 %h1, 3;
    tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [dynamic], %h1;
    MEET: bar.sync 0; ld.shared.b32 %r20, [dynamic+8];
    W: mbarrier.try_wait.parity.shared.b64 %p5, [dynamic], 0; @!%p5 bra W; tcgen05.fence::after_thread_sync;
    shl.b32 %r6, %r3, 21; add.u32 %r21, %r20, %r6;
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r11, %r12, %r13, %r14}}, [%r21]; tcgen05.wait::ld.sync.aligned;
    mad.lo.u32 %r7, %r2, 128, %r1; mul.wide.u32 %d2, %r7, 16; add.u64 %d2, %d0, %d2;
    st.global.v4.b32 [%d2], {{%r11, %r12, %r13, %r14}}; tcgen05.fence::before_thread_sync; {MEET}
    @%p1 bra END; FREE tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned; END: ret;"""
LATE = "nanosleep.u32 100; nanosleep.u32 100;"


def kernel(late: str = LATE, alloc: str = ALLOC, free: str = DEALLOC, columns: str = "32") -> str:
    body = COPY.replace("LATE", late, 1).replace("ALLOC\n", f"{alloc}\n").replace("FREE ", f"{free} ")
    return module(body.replace("COLUMNS", columns), parameters=1)


def run(text: str, options: Options, ctas: int = 2) -> np.ndarray:
    out = aligned(np.zeros((ctas, 128, 4), np.uint32))
    launch(text, out, grid=(ctas, 1, 1), block=(128, 1, 1), cluster=(ctas, 1, 1), options=options)
    return out


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_cta_does_not_go_on_before_its_peer_has_allocated(options: Options):
    rank, row, word = np.ogrid[:2, :128, :4]
    np.testing.assert_array_equal(run(kernel(), options), 1000 * rank + 4 * row + word)


def test_a_peer_that_does_not_take_part():
    alone = f"""setp.ne.u32 %p6, %r2, 0; mov.b32 %r19, 0; @!%p6 bra TAKE; st.shared.b32 [dynamic+8], %r19; bra SKIP;
        TAKE: {ALLOC} SKIP:"""
    with pytest.raises(Hang, match=r"waits for a warp of CTA 1 to execute tcgen05.alloc.cta_group::2 as well"):
        run(kernel(alloc=alone), Options())
    alone = f"setp.eq.u32 %p6, %r2, 0; @%p6 bra SKIP; {DEALLOC} SKIP:"
    with pytest.raises(Hang, match=r"waits for a warp of CTA 0 to execute tcgen05.dealloc.cta_group::2 as well"):
        run(kernel(free=alone), Options())


def test_operands_of_both():
    for columns in ("16", "1024", "48"):
        with pytest.raises(IllegalAccess, match=f"tcgen05.alloc of {columns} columns"):
            run(kernel(columns=columns), Options())
    differing = f"mad.lo.u32 %r19, %r2, 32, 32; {ALLOC}".replace("COLUMNS", "%r19")
    with pytest.raises(IllegalAccess, match=r"operands \((32|64),\) by CTA [01] warp 0 and \((32|64),\) by CTA [01] w"):
        run(kernel(alloc=differing), Options())
    with pytest.raises(IllegalAccess, match="by CTA 0 of a cluster without CTA 1, its peer"):
        run(kernel(late=""), Options(), ctas=1)


def test_both_wait_for_columns_that_another_warp_frees():
    """Warps 0 of both CTAs have all columns; warps 1 want some."""
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; ld.param.u64 %d0, [p0]; shr.u32 %r3, %r1, 5;
        setp.ne.u32 %p1, %r3, 0; @%p1 bra SECOND; {ALLOC} bar.warp.sync -1; ld.shared.b32 %r20, [dynamic+8];
        bar.arrive 1, 64; nanosleep.u32 20; {DEALLOC} bra END;
        SECOND: bar.sync 1, 64; {ALLOC.replace("+8", "+16")} bar.warp.sync -1; ld.shared.b32 %r20, [dynamic+16];
        add.u32 %r21, %r20, 7; mad.lo.u32 %r4, %r2, 64, %r1; mul.wide.u32 %d1, %r4, 4; add.u64 %d1, %d0, %d1;
        st.global.b32 [%d1], %r21; {DEALLOC} END: ret;"""
    out = np.zeros((2, 64), np.uint32)
    text = module(body.replace("COLUMNS", "512"), parameters=1)
    shape = {"grid": (2, 1, 1), "block": (64, 1, 1), "cluster": (2, 1, 1)}
    launch(text, out, **shape, options=Options())
    assert out[:, 32:].tolist() == [[7] * 32] * 2
    without = text.replace("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r20, 512;", "", 1)
    with pytest.raises(Hang, match="waits for free TMEM columns: tcgen05.alloc.cta_group::2 of 512 columns"):
        launch(without, out, **shape, options=Options())
