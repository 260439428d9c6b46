"""Candidates of bugs that a public list names for SM100, and that nobody has seen on a chip, as kernels of our own."""

from __future__ import annotations

from tests.emulator.public_bugs import BARRIERS, BEFORE, MEET, SETUP, Bug, wait

LIST = "tile-ai/tilelang"
FOUR = {"grid": (4, 1, 1), "cluster": (4, 1, 1), "block": (32, 1, 1)}

CANDIDATES = {
    "bytes of a cluster": Bug(
        LIST, 2644,
        "a barrier that two CTAs of a pair load at is announced the bytes of all CTAs of a larger cluster",
        f"""{BARRIERS} mov.u32 %r20, %cluster_ctarank; and.b32 %r21, %r20, 1; and.b32 %r22, %r20, 2;
        setp.ne.u32 %p2, %r21, 0; shl.b32 %r23, %r21, 7; add.u32 %r23, %r23, %r4; add.u32 %r23, %r23, 1024;
        mapa.shared::cluster.u32 %r24, %r23, %r22; mapa.shared::cluster.u32 %r25, %r4, %r22;
        @%p9 bra TOLD; @%p2 bra TOLD; mbarrier.arrive.expect_tx.shared.b64 _, [dynamic], <<256|512>>; TOLD:
        {MEET} @%p9 bra LOADED;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r24], [%d0], 128, [%r25]; LOADED:
        @%p2 bra DONE; {wait("FULL", "dynamic")} DONE: {MEET}""",
        ("transaction-bytes",), "256 transaction bytes pending", BEFORE, FOUR,
    ),
    "allocation of a pair": Bug(
        LIST, 2644,
        "tensor memory of a pair is allocated without a barrier of the cluster before",
        f"""{SETUP} <<{MEET}>> tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [dynamic], 32;
        bar.sync 0; ld.shared.u32 %r20, [dynamic]; tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
        {MEET} tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r20, 32; {MEET}""",
        (), "", BEFORE, {"grid": (2, 1, 1), "cluster": (2, 1, 1), "block": (32, 1, 1)},
    ),
}  # fmt: skip
