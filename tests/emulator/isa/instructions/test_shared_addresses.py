"""Addresses of shared and local memory: sums of 32 bits, and the CTA whose memory a form may name."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import IllegalAccess, Options
from cute_kernels.testing.ptx import aligned, launch, module

#: Instructions at ``{}``, shared memory with a row of 16 bytes for each lane, filled with its number; results in %r10.
FORMS = {
    "ld.shared": "ld.shared.u32 %r10, [{}];",
    "ld.shared of 64 bits": "ld.shared.u64 %d5, [{}]; cvt.u32.u64 %r10, %d5;",
    "ld.shared of vectors": "ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [{}];",
    "ld.shared::cluster": "ld.shared::cluster.u32 %r10, [{}];",
    "ld.volatile.shared": "ld.volatile.shared.u32 %r10, [{}];",
    "st.shared": "st.shared.u32 [{}], %r9; ld.shared.u32 %r10, [%r3]; xor.b32 %r10, %r10, 64;",
    "st.shared::cluster of vectors": "st.shared::cluster.v2.u32 [{}], {{%r9, %r9}}; ld.shared.u32 %r10, [%r3]; "
    "xor.b32 %r10, %r10, 64;",
    "ld of one address": "ld.shared.u32 %r10, [{uniform}]; add.u32 %r10, %r10, %r1;",
    "ld.local": "st.local.u32 [depot], %r1; ld.local.u32 %r10, [{local}];",
    "st.local": "st.local.u32 [{local}], %r1; ld.local.u32 %r10, [depot];",
    "atom.shared": "atom.shared.add.u32 %r10, [{}], 1;",
    "red.shared": "red.shared.add.u32 [{}], 0; ld.shared.u32 %r10, [%r3];",
    # Lane l holds of row l / 4 of each matrix, and so of every row of memory, the word l % 4.
    "ldmatrix": "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [{}]; and.b32 %r11, %r1, 3; "
    "mad.lo.u32 %r10, %r10, 4, %r11;",
    "stmatrix": "shr.u32 %r10, %r9, 2; or.b32 %r10, %r10, 64; and.b32 %r10, %r10, 71; add.u32 %r11, %r10, 8; "
    "add.u32 %r12, %r10, 16; add.u32 %r13, %r10, 24; stmatrix.sync.aligned.m8n8.x4.shared.b16 [{}], "
    "{{%r10, %r11, %r12, %r13}}; bar.warp.sync -1; ld.shared.u32 %r10, [%r3]; xor.b32 %r10, %r10, 64;",
    "cp.async": "cp.async.ca.shared.global [{}], [%d1], 4; cp.async.wait_all; ld.shared.u32 %r10, [%r3]; "
    "sub.u32 %r10, %r10, 100;",
    "mbarrier": "bar.warp.sync -1; @%p1 mbarrier.init.shared.b64 [{}], 1; @%p1 mbarrier.inval.shared.b64 [{}]; "
    "mov.u32 %r10, %r1;",
    "cp.async.bulk": "bar.warp.sync -1; fence.proxy.async; "
    "cp.async.bulk.global.shared::cta.bulk_group [%d2], [{}], 16; cp.async.bulk.commit_group; "
    "cp.async.bulk.wait_group 0; ld.global.u32 %r10, [%d2];",
}


def text(form: str, address: str, uniform: str = "dynamic", local: str = "depot") -> str:
    """%r3: where the lane's row is; %r5, %r6: 4,096 below it and below the first one; %r7: likewise of local memory."""
    return module(
        f""".local .align 16 .b8 depot[16];
        mov.u32 %r1, %tid.x; ld.param.u64 %d0, [p0]; mad.wide.u32 %d1, %r1, 4, %d0; ld.param.u64 %d2, [p1];
        mad.wide.u32 %d2, %r1, 16, %d2; mov.u32 %r2, dynamic; mad.lo.u32 %r3, %r1, 16, %r2; setp.eq.u32 %p1, %r1, 3;
        st.shared.v4.u32 [%r3], {{%r1, %r1, %r1, %r1}}; xor.b32 %r9, %r1, 64; bar.warp.sync -1;
        sub.u32 %r5, %r3, 4096; sub.u32 %r6, %r2, 4096; mov.u64 %d6, depot; cvt.u32.u64 %r7, %d6;
        sub.u32 %r7, %r7, 4096; cvt.u64.u32 %d7, %r3; or.b64 %d7, %d7, 0x700000000;
        {FORMS[form].format(address, address, uniform=uniform, local=local)}
        st.global.u32 [%d1], %r10; ret;""",
        parameters=2,
        target="sm_90a",
    )


@pytest.mark.parametrize("form", FORMS)
def test_sums_have_32_bits(form: str) -> None:
    """A base below address 0 and an offset, as nvcc writes them, are the address that their sum is modulo 2^32."""
    found = {}
    for name, places in {
        "plain": ("%r3",), "wrapped": ("%r5+4096", "%r6+4096", "%r7+4096"), "in 64 bits": ("%d7",),
    }.items():  # fmt: skip
        out = aligned(np.arange(100, 132, dtype=np.uint32))
        launch(text(form, *places), out, aligned(np.zeros((32, 4), np.uint32)))
        found[name] = out.tolist()
    assert found == dict.fromkeys(found, list(range(32)))


#: Instructions of the form for the CTA's own memory at ``{}``; what is written has 2,048 bytes of its own.
OWN = {
    "mbarrier.arrive": "@%p1 mbarrier.arrive{own}.b64 _, [{}+512];",
    "mbarrier.arrive with a state": "@%p1 mbarrier.arrive{own}.b64 %d4, [{}+512];",
    "mbarrier.arrive.expect_tx": "@%p1 mbarrier.arrive.expect_tx{own}.b64 _, [{}+512], 0;",
    "mbarrier.arrive_drop": "@%p1 mbarrier.arrive_drop{own}.b64 _, [{}+512];",
    "mbarrier.expect_tx": "@%p1 mbarrier.expect_tx.relaxed.cta{own}.b64 [{}+512], 0;",
    "mbarrier.test_wait": "@%p1 mbarrier.test_wait.parity{own}.b64 %p2, [{}+512], 1;",
    "mbarrier.try_wait": "@%p1 mbarrier.try_wait.parity{own}.b64 %p2, [{}+512], 1;",
    "mbarrier.init": "@%p1 mbarrier.init{own}.b64 [{}+520], 1;",
    "mbarrier.inval": "@%p1 mbarrier.inval{own}.b64 [{}+512];",
    "ld": "ld{own}.u32 %r4, [{}];",
    "ld of each lane": "ld{own}.u32 %r4, [{lanes}];",
    "st": "st{own}.u32 [{lanes}+256], %r1;",
    "atom": "atom{own}.add.u32 %r4, [{lanes}], 1;",
    "red": "red{own}.add.u32 [{lanes}], 1;",
    "cp.async": "cp.async.ca{own}.global [{lanes}+256], [%d3], 4; cp.async.wait_all;",
    "cp.async.mbarrier.arrive": "@%p1 cp.async.mbarrier.arrive.noinc{own}.b64 [{}+512];",
    "ldmatrix": "ldmatrix.sync.aligned.m8n8.x1{own}.b16 {{%r4}}, [{}];",
    "stmatrix": "stmatrix.sync.aligned.m8n8.x1{own}.b16 [{}], {{%r1}};",
    "wmma.load": "wmma.load.a.sync.aligned.row.m16n16k16{own}.f16 "
    "{{%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27}}, [{}];",
    "cp.async.bulk to global memory": "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%d3], [{}], 128; "
    "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
    "cp.async.bulk to a CTA": "@%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
    "[%r9+1024], [{}], 128, [%r9+512];",
    "cp.async.bulk to the CTA": "@%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes "
    "[{}+1024], [%d3], 128, [{}+512];",
}


def cluster(body: str) -> str:
    """%r2, %r3: the memory of the CTA and, filled, the lane's word of it; %r9, %r10: those of the other CTA."""
    return module(
        f"""mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; shl.b32 %r6, %r1, 2; setp.eq.u32 %p1, %r1, 0;
        @%p1 mbarrier.init.shared.b64 [%r2+512], 2; fence.mbarrier_init.release.cluster; add.u32 %r3, %r2, %r6;
        ld.param.u64 %d0, [p0]; mad.wide.u32 %d1, %r1, 4, %d0; ld.param.u64 %d3, [p1]; mov.u32 %r4, 0; mov.u32 %r5, 0;
        L: add.u32 %r7, %r3, %r5; st.shared.u32 [%r7], %r1; add.u32 %r5, %r5, 128; setp.lt.u32 %p2, %r5, 512;
        @%p2 bra L;
        mov.u32 %r8, %cluster_ctarank; xor.b32 %r8, %r8, 1; mapa.shared::cluster.u32 %r9, %r2, %r8;
        mapa.shared::cluster.u32 %r10, %r3, %r8; fence.proxy.async;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        {body}
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; st.global.u32 [%d1], %r4; ret;""",
        parameters=2,
        target="sm_90a",
    )


def run(body: str) -> None:
    options = Options(without=("races", "exits"))
    data = aligned(np.zeros(32, np.uint32)), aligned(np.zeros(64, np.uint32))
    launch(cluster(body), *data, grid=2, cluster=2, options=options)


@pytest.mark.parametrize("form", OWN)
@pytest.mark.parametrize("own", [".shared", ".shared::cta"])
def test_forms_of_the_own_cta(form: str, own: str) -> None:
    """They are reported at addresses of the other CTA, and at those of their own they are not."""
    run(OWN[form].format("%r2", "%r2", lanes="%r3", own=own))
    with pytest.raises(IllegalAccess, match="which is in the shared memory of CTA") as error:
        run(OWN[form].format("%r9", "%r9", lanes="%r10", own=own))
    assert error.value.kind == "other-cta"


@pytest.mark.parametrize("body", [
    "ld.shared::cluster.u32 %r4, [%r10];", "st.shared::cluster.u32 [%r10+256], %r1;",
    "atom.shared::cluster.add.u32 %r4, [%r10], 1;",
    "@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r9+512];",
    "cvta.shared::cluster.u64 %d5, %d5; cvt.u64.u32 %d5, %r10; cvta.shared::cluster.u64 %d5, %d5; ld.u32 %r4, [%d5];",
])  # fmt: skip
def test_forms_of_the_cluster(body: str) -> None:
    run(body)
