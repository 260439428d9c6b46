"""Accesses to the shared memory of a CTA of the cluster that has exited."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.testing.ptx import THREAD_OUTPUT, module
from tests.emulator.ptx_launch import launch

#: CTA 1 exits after the cluster barrier; CTA 0 sleeps and then accesses its mbarrier (%r11) or its data (%r11 + 64).
BODY = f"""{THREAD_OUTPUT} mov.u32 %r10, %cluster_ctarank; mov.b32 %r4, dynamic;
    setp.ne.u32 %p9, %r1, 0; @%p9 bra READY;
    mov.b64 %d9, 0; st.shared.b64 [%r4+64], %d9; st.shared.b64 [%r4+72], %d9;
    mbarrier.init.shared.b64 [dynamic], 1; fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;
    READY: barrier.cluster.arrive; barrier.cluster.wait;
    setp.ne.u32 %p2, %r10, 0; @%p2 bra LAST; @%p9 bra DONE; mapa.shared::cluster.u32 %r11, %r4, 1;
    mov.b32 %r3, 0;
    nanosleep.u32 100; nanosleep.u32 100;
    ACCESS
    DONE: MEET LAST: ret;"""
ACCESSES = {
    "load": "ld.shared::cluster.b32 %r9, [%r11+64];",
    "store": "st.shared::cluster.b32 [%r11+64], %r3;",
    "reduction": "red.relaxed.cluster.shared::cluster.add.u32 [%r11+64], 1;",
    "arrival": "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];",
    "st.async": """mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r11], 4;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r11+64], %r3, [%r11];""",
    "bulk copy": """cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
        [%r11+64], [%r4+64], 16, [%r11];""",
}


@pytest.mark.parametrize("access", ACCESSES)
def test_an_access_after_the_exit_is_illegal(access: str):
    body = BODY.replace("ACCESS", ACCESSES[access]).replace("MEET", "")
    with pytest.raises(IllegalAccess, match="the shared memory of CTA 1, which has exited"):
        launch(
            module(body), np.zeros(64, np.uint32), 0,
            grid=(2, 1, 1), cluster=(2, 1, 1), options=Options(),
        )  # fmt: skip


@pytest.mark.parametrize("access", ["load", "store", "reduction"])
def test_the_same_access_before_the_exit_is_legal(access: str):
    meet = "barrier.cluster.arrive; barrier.cluster.wait;"
    body = BODY.replace("ACCESS", ACCESSES[access]).replace("MEET", meet).replace(
        "@%p2 bra LAST;", "@%p2 bra DONE;"
    )
    launch(module(body), np.zeros(64, np.uint32), 0, grid=(2, 1, 1), cluster=(2, 1, 1))
