"""Bugs of public projects, each rebuilt as a small kernel that has the fault and one that has the published fix.

The kernels are our own. A kernel is written once: ``<<a|b>>`` stands for ``a`` where it is fixed and for ``b`` (often
nothing) where it is faulty.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cute_kernels.testing.ptx import THREAD_OUTPUT, module

MARK = re.compile(r"<<(.*?)(?:\|(.*?))?>>", re.S)


@dataclass(frozen=True)
class Bug:
    """A bug that was fixed in public.

    Attributes:
        project, number: of the issue or pull request on GitHub.
        flaw: what was wrong, as the table in docs/emulator/evidence.md says it.
        body: of the kernel, with marks; its parameter p0 is the address of 1,024 words.
        kinds: of the report on the faulty kernel (`cute_kernels.emulator.reports.kinds`), which may depend on the
            schedule; the first is that of the default one. Empty where nothing is reported.
        message: what the report says, a regular expression.
        expected: what the fixed kernel leaves in the first 64 words of p0, which it finds as 100, 101, ..
        shape: of the launch.
        behind: body of a kernel that is launched before, so that the two may overlap (programmatic dependent launch).
        always: it is reported under every schedule.
        strict: with `Options.strict` alone.
    """

    project: str
    number: int
    flaw: str
    body: str
    kinds: tuple[str, ...]
    message: str
    expected: list[int]
    shape: dict = field(default_factory=dict)
    behind: str = ""
    always: bool = True
    strict: bool = False

    @property
    def url(self) -> str:
        return f"https://github.com/{self.project}/issues/{self.number}"

    def kernel(self, *, fixed: bool) -> str:
        """PTX of one of the two."""
        return module(MARK.sub(lambda m: m[1] if fixed else m[2] or "", self.body), parameters=1)


WARP, TWO_WARPS, THREE_WARPS = ({"block": (32 * n, 1, 1)} for n in (1, 2, 3))
PAIR = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}
PAIR_OF_FOUR_WARPS = PAIR | {"block": (128, 1, 1)}
BEFORE = list(range(100, 164))

#: %r1 = thread, %r2 = warp, %p1 = not of warp 0, %p9 = not thread 0, %d1 = address of the thread's word of p0,
#: %r4 = shared memory, %r5 = the thread's word there, from byte 1024 on. mbarriers of one arrival at bytes 0, 8, 16.
SETUP = f"""{THREAD_OUTPUT} shr.u32 %r2, %r1, 5; setp.ne.u32 %p1, %r2, 0; setp.ne.u32 %p9, %r1, 0;
    and.b32 %r12, %r1, 31; setp.ne.u32 %p8, %r12, 0;
    shl.b32 %r3, %r1, 2; mov.b32 %r4, dynamic; add.s32 %r5, %r4, %r3; add.s32 %r5, %r5, 1024;"""
BARRIERS = f"""{SETUP} @%p9 bra READY; mbarrier.init.shared.b64 [dynamic], 1; mbarrier.init.shared.b64 [dynamic+8], 1;
    mbarrier.init.shared.b64 [dynamic+16], 1; fence.mbarrier_init.release.cluster; READY:"""
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def wait(label: str, barrier: str, parity: int = 0, order: str = "") -> str:
    """Waits for a phase of the mbarrier."""
    return (
        f"{label}: mbarrier.try_wait.parity{order}.shared::cta.b64 %p7, [{barrier}], {parity}; @!%p7 bra {label};"
    )


def load(source: str = "%d0", target: str = "dynamic+1024", barrier: str = "dynamic") -> str:
    """One thread brings 128 bytes of global memory by a bulk copy."""
    return f"""mbarrier.arrive.expect_tx.shared.b64 _, [{barrier}], 128;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{target}], [{source}], 128, [{barrier}];"""


def store(target: str = "%d0", source: str = "dynamic+1024") -> str:
    """One thread takes 128 bytes to global memory by a bulk copy, which it does not wait for."""
    return f"""cp.async.bulk.global.shared::cta.bulk_group [{target}], [{source}], 128;
        cp.async.bulk.commit_group;"""


#: Each CTA brings 128 rows of 16 bytes (copies of p0's first word) into its shared memory; CTA 0's tensor core copies
#: those of both into tensor memory, and warp 0 of each CTA reads its rows and stores their first word.
PAIR_COPY = f"""{BARRIERS} mov.u32 %r10, %cluster_ctarank; setp.ne.u32 %p2, %r10, 0;
    mapa.shared::cluster.u32 %r11, %r4, 0;
    {MEET} @%p1 bra FILL; tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [dynamic+48], 32;
    FILL: shl.b32 %r6, %r1, 4; add.s32 %r6, %r6, %r4; HAND
    @%p1 bra READ; @%p2 bra READ; @%p9 bra READ; AWAIT tcgen05.fence::after_thread_sync;
    ld.shared.b32 %r20, [dynamic+48]; add.u32 %r13, %r4, 1024; shr.u32 %r13, %r13, 4; cvt.u64.u32 %d2, %r13;
    or.b64 %d2, %d2, 0x0000400800080000; tcgen05.cp.cta_group::2.128x128b [%r20], %d2; mov.b16 %h1, 3;
    tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [dynamic+16], %h1;
    READ: bar.sync 0; ld.shared.b32 %r20, [dynamic+48]; {wait("COPIED", "dynamic+16")}
    tcgen05.fence::after_thread_sync; @%p1 bra DONE; tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r9}}, [%r20];
    tcgen05.wait::ld.sync.aligned; mad.lo.u32 %r14, %r10, 32, %r1; mul.wide.u32 %d3, %r14, 4; add.u64 %d3, %d0, %d3;
    st.global.b32 [%d3], %r9; tcgen05.fence::before_thread_sync;
    DONE: {MEET} @%p1 bra LAST; tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r20, 32;
    tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned; LAST: ret;"""
#: All threads store, and one arrives at an mbarrier of CTA 0, from CTA 1 at its second one.
THREADS_FILL = """mov.b32 %r7, 7; st.shared.v4.b32 [%r6+1024], {%r7, %r7, %r7, %r7}; fence.proxy.async.shared::cta;
    bar.sync 0; @%p9 bra ARRIVED; @%p2 bra REMOTE; mbarrier.arrive.shared.b64 _, [dynamic]; bra ARRIVED;
    REMOTE: add.u32 %r15, %r11, 8; mbarrier.arrive.release.<<cluster|cta>>.shared::cluster.b64 _, [%r15]; ARRIVED:"""
#: By the asynchronous proxy, each CTA at its own mbarrier.
COPIES_FILL = f"""@%p9 bra ARRIVED; mbarrier.arrive.expect_tx.shared.b64 _, [dynamic], 2048;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [dynamic+1024], [%d0+256], 2048, [dynamic];
    @!%p2 bra ARRIVED; <<{wait("OWN", "dynamic")} add.u32 %r15, %r11, 8;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r15];>> ARRIVED:"""
#: By cp.async, each CTA at its own mbarrier; a thread of CTA 1 that has waited there arrives at CTA 0's second one.
GATHERED_FILL = f"""mul.wide.u32 %d4, %r1, 16; add.u64 %d4, %d0, %d4;
    cp.async.cg.shared.global [%r6+1024], [%d4+256], 16; cp.async.wait_all; fence.proxy.async.shared::cta; bar.sync 0;
    @%p9 bra ARRIVED; mbarrier.arrive.shared.b64 _, [dynamic]; @!%p2 bra ARRIVED; {wait("OWN", "dynamic")}
    add.u32 %r15, %r11, 8; <<fence.release.sync_restrict::shared::cta.cluster;>>
    mbarrier.arrive.<<relaxed.cluster|release.cta>>.shared::cluster.b64 _, [%r15]; ARRIVED:"""
OWN, PEERS = wait("FIRST", "dynamic"), wait("SECOND", "dynamic+8", order=".acquire.cluster")
#: Warp 0 writes a column of tensor memory, warp 4 (of the same quarter) reads it and hands it back, and then warp 0
#: does what FINALLY says. One lane arrives for a warp.
TENSOR = f"""{BARRIERS} setp.eq.u32 %p2, %r2, 0; setp.eq.u32 %p3, %r2, 4; @!%p2 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic+48], 32;
    ALLOCATED: bar.sync 0; ld.shared.b32 %r20, [dynamic+48]; @%p2 bra WRITE; @%p3 bra READ; bra LAST;
    WRITE: tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {{%r1}}; tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync; @%p9 bra GIVEN; mbarrier.arrive.shared.b64 _, [dynamic]; GIVEN: TAKE_BACK
    tcgen05.fence::after_thread_sync; FINALLY
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32; bra LAST;
    READ: {wait("FULL", "dynamic")} tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r9}}, [%r20]; WAIT_LOAD tcgen05.fence::before_thread_sync;
    @%p8 bra RELEASED; mbarrier.arrive.shared.b64 _, [dynamic+8]; RELEASED: tcgen05.wait::ld.sync.aligned;
    setp.ge.u32 %p5, %r12, 16; @%p5 bra LAST; mul.wide.u32 %d3, %r12, 4; add.u64 %d3, %d0, %d3;
    st.global.b32 [%d3], %r9; LAST: ret;"""
TAKE_BACK, WAIT_LOAD = wait("EMPTY", "dynamic+8"), "tcgen05.wait::ld.sync.aligned;"
OVERWRITE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {%r2}; tcgen05.wait::st.sync.aligned;"
FIVE_WARPS = {"block": (160, 1, 1)}


def tensor(take_back: str = TAKE_BACK, wait_load: str = WAIT_LOAD, finally_: str = "") -> str:
    """TENSOR with its places filled."""
    return TENSOR.replace("TAKE_BACK", take_back).replace("WAIT_LOAD", wait_load).replace("FINALLY", finally_)


def pair_copy(hand: str, await_: str) -> str:
    """PAIR_COPY with its places filled."""
    return PAIR_COPY.replace("HAND", hand).replace("AWAIT", await_)


BUGS = {
    "pair-scope": Bug(
        "NVIDIA/cutlass", 3647,
        "one CTA of a pair hands scales to the tensor core of the other CTA by an arrival of `.cta` scope",
        pair_copy(THREADS_FILL, f"{OWN} {PEERS}"), ("weak-order",),
        r"tcgen05\.cp.* reads .* of CTA 1, which the store of CTA 1 warp \d wrote before",
        [7] * 64, PAIR_OF_FOUR_WARPS,
    ),
    "pair-copy": Bug(
        "NVIDIA/cutlass", 3647,
        "a TMA load into the other CTA completes at an mbarrier that the warp issuing the pair's MMA does not wait "
        "for",
        pair_copy(COPIES_FILL, f"{OWN} <<{PEERS}>>"),
        ("unfinished-copy",),
        r"tcgen05\.cp.* reads .* of CTA 1.* which the bulk copy of 2048 bytes|bulk copy .* which the tcgen05\.cp",
        [164 + 4 * n for n in range(32)] * 2, PAIR_OF_FOUR_WARPS,
    ),
    "gathered-pair": Bug(
        "Dao-AILab/quack", 63,
        "one CTA of a pair announces its cp.async copies to the tensor core of the other CTA by an arrival and a "
        "wait of `.cta` scope",
        pair_copy(GATHERED_FILL, f"{OWN} {wait('SECOND', 'dynamic+8', order='<<.acquire.cluster>>')}"),
        ("weak-order",),
        r"tcgen05\.cp.* reads .* of CTA 1, which the .* of CTA 1 warp \d wrote before",
        [164 + 4 * n for n in range(32)] * 2, PAIR_OF_FOUR_WARPS,
    ),
    "first-read": Bug(
        "Dao-AILab/flash-attention", 2481,
        "a kernel that may overlap the previous launch reads its output without griddepcontrol.wait",
        f"{SETUP} <<griddepcontrol.wait;>> ld.global.b32 %r9, [%d1]; griddepcontrol.launch_dependents; "
        "add.u32 %r9, %r9, %r9; st.global.b32 [%d1+128], %r9; ret;",
        ("launch-overlap",), r"load of .* reads .* which the launch before this one wrote",
        [*range(32), *range(0, 64, 2)], WARP, behind=f"{SETUP} st.global.b32 [%d1], %r1; ret;",
    ),
    "one-path": Bug(
        "Dao-AILab/flash-attention", 2643,
        "on one of two paths, TMA loads of an array that the previous launch writes, and additions to an array "
        "that it clears, do not wait for that launch",
        f"""{BARRIERS} bar.sync 0; @%p9 bra W; <<griddepcontrol.wait;>> {load("%d0")} {wait("W", "dynamic")}
        ld.shared.b32 %r9, [%r5]; red.global.add.u32 [%d1+128], %r9; ret;""",
        ("launch-overlap",), r"bulk copy of 128 bytes .* reads .* which the launch before this one wrote",
        [*range(32)] * 2, WARP,
        behind=f"{SETUP} mov.b32 %r9, 0; st.global.b32 [%d1], %r1; st.global.b32 [%d1+128], %r9; "
        "fence.proxy.async.global; ret;",
    ),
    "barrier-count": Bug(
        "Dao-AILab/quack", 146,
        "a named barrier expects two warps, but a second loading warp makes three",
        f"""{SETUP} setp.eq.u32 %p2, %r2, 2; @%p2 bra LATER; bar.arrive 1, <<96|64>>; bra LAST;
        LATER: bar.sync 1, <<96|64>>; LAST: st.global.b32 [%d1], %r2; ret;""",
        ("hang",), "waits at named barrier 1", [0] * 32 + [1] * 32, THREE_WARPS, always=False,
    ),
    "fence-late": Bug(
        "pytorch/ao", 4278,
        "all writers execute fence.proxy.async behind the barrier, so only the fence of the thread that issues the "
        "TMA store comes before the store",
        f"""{SETUP} st.shared.b32 [%r5], %r1; <<fence.proxy.async.shared::cta; bar.sync 0;|bar.sync 0;
        fence.proxy.async.shared::cta;>> @%p9 bra LAST; {store()} {store("%d0+128", "dynamic+1152")}
        cp.async.bulk.wait_group 0; LAST: ret;""",
        (), "", list(range(64)), TWO_WARPS,
    ),
    "fence-early": Bug(
        "NVIDIA/TransformerEngine", 2695,
        "fence.proxy.async stands before the reads of a stage, not between them and the TMA load that refills it",
        f"""{BARRIERS} bar.sync 0; @%p9 bra W; {load("%d0")} {wait("W", "dynamic")}
        <<|fence.proxy.async.shared::cta;>> ld.shared.b32 %r9, [%r5]; <<fence.proxy.async.shared::cta;>> bar.sync 0;
        @%p9 bra V; {load("%d0+128")} {wait("V", "dynamic", 1)} ld.shared.b32 %r8, [%r5]; add.u32 %r9, %r9, %r8;
        st.global.b32 [%d1+256], %r9; ret;""",
        ("proxy-reuse",), "bulk copy .* writes .* which the load of CTA 0 warp 0 read through the generic proxy",
        BEFORE, WARP, strict=True,
    ),
    "wait-of-one": Bug(
        "NVIDIA/TransformerEngine", 3417,
        "all threads refill the source of a TMA store after cp.async.bulk.wait_group, which waits for the groups of "
        "the thread that executes it only",
        f"""{SETUP} st.shared.b32 [%r5], %r1; fence.proxy.async.shared::cta; bar.sync 0; @%p9 bra AGAIN; {store()}
        {store("%d0+128", "dynamic+1152")} AGAIN: cp.async.bulk.wait_group.read 0; <<bar.sync 0;>>
        mov.b32 %r9, 0; st.shared.b32 [%r5], %r9; @%p9 bra LAST; cp.async.bulk.wait_group 0; LAST: ret;""",
        ("shared-race", "source-in-use"), r"writes .* which the bulk store of 128|bulk store .* which the store of",
        list(range(64)), TWO_WARPS,
    ),
    "alias": Bug(
        "sgl-project/sglang", 37287,
        "partial sums are stored over a stage of operands that other warps may still read",
        f"""{BARRIERS} bar.sync 0; @%p9 bra W; {load("%d0")} {wait("W", "dynamic")} shl.b32 %r6, %r12, 2;
        add.s32 %r6, %r6, %r4; ld.shared.b32 %r9, [%r6+1024]; add.u32 %r9, %r9, %r2; <<bar.sync 1, 64;>>
        setp.eq.u32 %p2, %r2, 1; @%p2 st.shared.b32 [%r6+1024], %r9; @!%p2 st.shared.b32 [%r6+1152], %r9; bar.sync 0;
        ld.shared.b32 %r9, [%r5]; st.global.b32 [%d1], %r9; ret;""",
        ("shared-race",), r"warp 1 writes .* which the load of CTA 0 warp 0 read|load of CTA 0 warp 0 reads",
        [*range(101, 133), *range(100, 132)], TWO_WARPS,
    ),
    "scratch": Bug(
        "NVIDIA/cutlass", 3600,
        "a reduction over the warps of a CTA stores into scratch where other warps may still read the previous "
        "reduction",
        f"""{SETUP} shl.b32 %r6, %r2, 2; add.s32 %r6, %r6, %r4; @!%p8 st.shared.b32 [%r6+1024], %r1; bar.sync 0;
        ld.shared.v2.b32 {{%r7, %r8}}, [dynamic+1024]; add.u32 %r9, %r7, %r8; <<bar.sync 0;>>
        @!%p8 st.shared.b32 [%r6+1024], %r9; bar.sync 0; ld.shared.v2.b32 {{%r7, %r8}}, [dynamic+1024];
        add.u32 %r9, %r7, %r8; st.global.b32 [%d1], %r9; ret;""",
        ("shared-race",), r"store of CTA 0 warp \d writes .* which the load of CTA 0 warp \d read|load of .* reads",
        [64] * 64, TWO_WARPS,
    ),
    "load-then-free": Bug(
        "NVIDIA/cutlass", 3652,
        "a warp lets tensor memory be freed without tcgen05.wait::ld; some of its lanes do not use the values they "
        "read",
        tensor(wait_load=f"<<{WAIT_LOAD}>>"), ("tensor-race",), "tcgen05.dealloc frees TMEM column 0",
        [*range(16), *range(116, 164)], FIVE_WARPS,
    ),
    "load-then-overwrite": Bug(
        "vllm-project/flash-attention", 182,
        "tensor memory is released to its next writer without tcgen05.wait::ld",
        tensor(wait_load=f"<<{WAIT_LOAD}>>", finally_=OVERWRITE), ("tensor-race",),
        r"tcgen05\.st of .* TMEM column 0.* not known to be complete", [*range(16), *range(116, 164)], FIVE_WARPS,
    ),
    "free-unasked": Bug(
        "PaddlePaddle/flash-attention", 138,
        "one warp frees tensor memory while another one may still read it",
        tensor(take_back=f"<<{TAKE_BACK}>>"), ("tensor-memory-place", "tensor-race"), "column 0",
        [*range(16), *range(116, 164)], FIVE_WARPS,
    ),
    "exit": Bug(
        "sgl-project/sglang", 32954,
        "without a cluster barrier at the end, a CTA may exit before the other CTA of its pair arrives at its "
        "mbarrier",
        f"""{BARRIERS} {MEET} mov.u32 %r10, %cluster_ctarank; xor.b32 %r10, %r10, 1; @%p9 bra DONE;
        mapa.shared::cluster.u32 %r11, %r4, %r10; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];
        DONE: <<{MEET}>> ret;""",
        ("exited-cta", "exit-in-use"), r"CTA \d may exit before|has exited", BEFORE, PAIR,
    ),
    "release-then-read": Bug(
        "tile-ai/tilelang", 2420,
        "consumers release a slot of the tile scheduler before they read it",
        f"""{BARRIERS} bar.sync 0; @%p1 bra CONSUME; @%p9 bra LAST; mov.b32 %r9, 5; st.shared.b32 [dynamic+1024], %r9;
        mbarrier.arrive.shared.b64 _, [dynamic]; {wait("FREE", "dynamic+8")} mov.b32 %r9, 6;
        st.shared.b32 [dynamic+1024], %r9; mbarrier.arrive.shared.b64 _, [dynamic]; bra LAST;
        CONSUME: {wait("FIRST", "dynamic")} <<ld.shared.b32 %r9, [dynamic+1024];>> bar.warp.sync -1;
        @!%p8 mbarrier.arrive.shared.b64 _, [dynamic+8]; <<|ld.shared.b32 %r9, [dynamic+1024];>>
        {wait("NEXT", "dynamic", 1)} ld.shared.b32 %r8, [dynamic+1024]; mad.lo.u32 %r9, %r9, 10, %r8;
        st.global.b32 [%d1], %r9; LAST: ret;""",
        ("shared-race",), r"warp 0 writes .* which the load of CTA 0 warp 1 read|load of CTA 0 warp 1 reads",
        [*range(100, 132), *[56] * 32], TWO_WARPS,
    ),
    "no-fence": Bug(
        "MoonshotAI/FlashKDA", 25,
        "shared memory that threads wrote is stored by TMA without fence.proxy.async",
        f"""{SETUP} st.shared.b32 [%r5], %r1; <<fence.proxy.async.shared::cta;>> bar.sync 0; @%p9 bra LAST; {store()}
        {store("%d0+128", "dynamic+1152")} cp.async.bulk.wait_group 0; LAST: ret;""",
        ("proxy-fence",), r"bulk store .* which the store of CTA 0 warp \d wrote through the generic proxy",
        list(range(64)), TWO_WARPS,
    ),
    "barrier-fence": Bug(
        "MoonshotAI/FlashKDA", 25,
        "an mbarrier is initialised without fence.mbarrier_init before TMA completes at it",
        f"""{SETUP} @%p9 bra READY; mbarrier.init.shared.b64 [dynamic], 1; <<fence.mbarrier_init.release.cluster;>>
        READY: bar.sync 0; @%p9 bra W; {load("%d0")} {wait("W", "dynamic")} ld.shared.b32 %r9, [%r5];
        st.global.b32 [%d1+128], %r9; ret;""",
        (), "", [*range(100, 132)] * 2, WARP,
    ),
    "mask": Bug(
        "NVIDIA/cutlass", 3658,
        "tcgen05.commit to several CTAs names one that the cluster does not have",
        f"""{BARRIERS} {MEET} @%p9 bra W; mov.u32 %r10, %cluster_ctarank; setp.ne.u32 %p2, %r10, 0; @%p2 bra W;
        mov.b16 %h1, <<3|7>>;
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [dynamic], %h1;
        {wait("W", "dynamic")} {MEET} ret;""",
        ("illegal-access",), "multicast mask 0x7 in a cluster of 2 CTAs", BEFORE, PAIR,
    ),
}  # fmt: skip
