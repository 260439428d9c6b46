"""`Options.strict`: kernels that rely on more than the PTX ISA promises are reported with it, and run without it.

As in `test_races`, ``<<a|b>>`` stands for ``a`` in the sound kernel and ``b`` (often nothing) in the faulty one.
"""

from __future__ import annotations

import dataclasses

import pytest

from cute_kernels.emulator.errors import IllegalAccess, ProxyFenceMissing, SharedMemoryRace, TensorMemoryRace
from tests.emulator.races.test_races import (
    BARRIERS,
    END,
    FIVE_WARPS,
    MARK,
    SCHEDULES,
    TENSOR,
    TWO_WARPS,
    WORDS,
    Twin,
    run,
)

PAIR = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}
STRICT = [dataclasses.replace(options, strict=True) for options in SCHEDULES]

#: CTA 1 arrives at two mbarriers of CTA 0, one after the other.
TWO_ARRIVALS = f"""{BARRIERS} mov.u32 %r10, %cluster_ctarank; mapa.shared::cluster.u32 %r11, %r4, 0;
    barrier.cluster.arrive; barrier.cluster.wait; setp.eq.u32 %p2, %r10, 0; @%p2 bra W0; @%p9 bra LAST;
    mbarrier.arrive.shared::cluster.b64 _, [%r11]; mbarrier.arrive.SCOPE.shared::cluster.b64 _, [%r11+8]; bra LAST;
    W0: <<mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra W0;>>
    W1: mbarrier.try_wait.parity.WAIT.shared.b64 %p3, [dynamic+8], 0; @!%p3 bra W1; LAST: ret;"""

#: A thread fills the words of the first warp with p0.
FILL = """mbarrier.arrive.expect_tx.shared.b64 _, [dynamic], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [dynamic+64], [%d0], 128, [dynamic];"""

RELIANT = {
    "tensor memory handed over by release and acquire": Twin(
        TENSOR.replace("arrive.relaxed", "arrive.release")
        .replace("parity.relaxed", "parity.acquire")
        .replace("<<tcgen05.wait::st.sync.aligned;>>", "tcgen05.wait::st.sync.aligned;")
        .replace("<<tcgen05.wait::ld.sync.aligned;>>", "tcgen05.wait::ld.sync.aligned;"),
        TensorMemoryRace,
        r"tcgen05\.(ld|st) of .* TMEM column 0.* not known to be complete",
        list(range(32)),
        FIVE_WARPS,
    ),
    "tensor memory handed back when what was read there has been used": Twin(
        MARK.sub(lambda mark: mark[1], TENSOR).replace(
            "{%r9}, [%r20]; tcgen05.wait::ld.sync.aligned;",
            "{%r9}, [%r20]; <<tcgen05.wait::ld.sync.aligned;>> add.s32 %r10, %r9, 0;",
        ),
        TensorMemoryRace,
        r"tcgen05\.st of .* TMEM column 0.* which the tcgen05\.ld of CTA 0 warp 4 read .*: it is not known to be",
        list(range(32)),
        FIVE_WARPS,
    ),
    "arrival by one lane for loads of its warp": Twin(
        f"""{BARRIERS} @%p1 bra WRITE; ld.shared.b32 %r9, [%r5+128]; <<bar.warp.sync -1;>> @%p9 bra END;
        mbarrier.arrive.shared.b64 %d3, [dynamic]; bra END;
        WRITE: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra WRITE;
        st.shared.b32 [%r5], %r1; {END}""",
        SharedMemoryRace,
        "writes .* which the load of CTA 0 warp 0 read",
        [0] * 64,
        TWO_WARPS,
    ),
    "arrival by one lane for volatile loads of one word": Twin(
        f"""{BARRIERS} @%p1 bra WRITE; ld.volatile.shared.b32 %r9, [dynamic+192]; <<bar.warp.sync -1;>> @%p9 bra END;
        mbarrier.arrive.shared.b64 %d3, [dynamic]; bra END;
        WRITE: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra WRITE;
        st.shared.b32 [%r5], %r1; {END}""",
        SharedMemoryRace,
        "writes .* which the load of CTA 0 warp 0 read",
        [0] * 64,
        TWO_WARPS,
    ),
    # The second load is of one lane alone, and handed over by it; the first one was handed over by all lanes before.
    "lanes that arrive in two parts for their loads, and one lane for its own": Twin(
        f"""{WORDS} setp.lt.u32 %p4, %r1, 16; @%p9 bra READY; mbarrier.init.shared.b64 [dynamic], 32;
        mbarrier.init.shared.b64 [dynamic+8], 1; READY: bar.sync 0; @%p1 bra WRITE; ld.shared.b32 %r9, [%r5+128];
        @%p4 mbarrier.arrive.shared.b64 %d3, [dynamic]; @!%p4 mbarrier.arrive.shared.b64 %d3, [dynamic];
        <<@!%p9|>> ld.shared.b32 %r9, [%r5]; @!%p9 mbarrier.arrive.shared.b64 %d3, [dynamic+8]; bra END;
        WRITE: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra WRITE; st.shared.b32 [%r5], %r1;
        AGAIN: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic+8], 0; @!%p3 bra AGAIN;
        st.shared.b32 [%r5+-128], %r1; {END}""",
        SharedMemoryRace,
        "writes .* which the load of CTA 0 warp 0 read",
        [0] * 64,
        TWO_WARPS,
    ),
    "a stage that was read, and is filled again": Twin(
        f"""{BARRIERS} fence.proxy.async.shared::cta; bar.sync 0; @%p9 bra W; {FILL}
        W: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra W; ld.shared.b32 %r9, [%r5];
        <<fence.proxy.async.shared::cta;>> bar.sync 0; @%p9 bra V; {FILL}
        V: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 1; @!%p3 bra V; ld.shared.b32 %r8, [%r5];
        add.s32 %r9, %r9, %r8; st.global.b32 [%d1+128], %r9; ret;""",
        ProxyFenceMissing,
        "bulk copy .* writes .* which the load of CTA 0 warp 0 read through the generic proxy",
        [*range(7, 39), *range(14, 78, 2)],
    ),
    "a stage that was written, and is filled": Twin(
        f"""{BARRIERS} <<fence.proxy.async.shared::cta;>> bar.sync 0; @%p9 bra W; {FILL}
        W: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra W; ld.shared.b32 %r9, [%r5];
        st.global.b32 [%d1+128], %r9; ret;""",
        ProxyFenceMissing,
        "bulk copy .* writes .* which the store of CTA 0 warp 0 wrote through the generic proxy",
        [*range(7, 39), *range(7, 39)],
    ),
    "the later of two arrivals": Twin(
        TWO_ARRIVALS.replace("SCOPE", "release.cta").replace("WAIT", "acquire.cta"),
        IllegalAccess,
        "CTA 0 may exit before an arrival by CTA 1 warp 0 is over",
        list(range(7, 39)),
        PAIR,
    ),
    "the later of two commits": Twin(
        f"""{BARRIERS} @%p9 bra LAST;
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [dynamic];
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [dynamic+8];
        W0: <<mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra W0;>>
        W1: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic+8], 0; @!%p3 bra W1; LAST: ret;""",
        IllegalAccess,
        r"CTA 0 may exit before tcgen05\.commit by CTA 0 warp 0 is over",
        list(range(7, 39)),
    ),
    "a relaxed barrier before the exit": Twin(
        f"""{BARRIERS} barrier.cluster.arrive; barrier.cluster.wait; mov.u32 %r10, %cluster_ctarank;
        xor.b32 %r10, %r10, 1; mapa.shared::cluster.u32 %r11, %r5, %r10; st.shared::cluster.b32 [%r11], %r1;
        barrier.cluster.arrive.<<release|relaxed>>; barrier.cluster.wait; ret;""",
        IllegalAccess,
        r"CTA \d may exit before an access by CTA \d warp 0 is over",
        list(range(7, 39)),
        PAIR,
    ),
}
CASES = [(name, i) for name, twin in RELIANT.items() for i in range(1, len(twin.variants()))]


@pytest.mark.parametrize("name", RELIANT)
def test_the_sound_kernel_is_clean(name: str):
    twin = RELIANT[name]
    for options in STRICT:
        assert run(twin, twin.variants()[0], options)[: len(twin.expected)].tolist() == twin.expected


@pytest.mark.parametrize(("name", "broken"), CASES)
def test_the_faulty_kernel_is_caught(name: str, broken: int):
    twin = RELIANT[name]
    for options in STRICT:
        with pytest.raises(twin.error, match=twin.message):
            run(twin, twin.variants()[broken], options)


@pytest.mark.parametrize(("name", "broken"), CASES)
def test_what_kernels_commonly_rely_on_is_accepted_otherwise(name: str, broken: int):
    twin = RELIANT[name]
    for options in SCHEDULES:
        assert run(twin, twin.variants()[broken], options)[: len(twin.expected)].tolist() == twin.expected


def test_a_release_that_both_ctas_are_in_proves_the_arrivals_before_it():
    """Causality order: the arrival at the first mbarrier happens before the one at the second, and before its wait."""
    text = TWO_ARRIVALS.replace("SCOPE", "release.cluster").replace("WAIT", "acquire.cluster")
    twin = Twin(text, IllegalAccess, "", list(range(7, 39)), PAIR)
    for options in STRICT:
        run(twin, twin.variants()[1], options)


def test_arrivals_of_the_own_cta_need_no_wait():
    """Its shared memory outlives its own threads."""
    body = f"""{BARRIERS} @%p9 bra LAST; mbarrier.arrive.shared.b64 %d3, [dynamic]; LAST: ret;"""
    for options in STRICT:
        run(Twin(body, IllegalAccess, "", shape=TWO_WARPS), body, options)


def test_st_async_needs_no_proxy_fence():
    """It writes what was read and written by loads and stores, but through the generic proxy as they do."""
    body = f"""{BARRIERS} ld.shared.b32 %r9, [%r5]; bar.sync 0; @%p9 bra W; add.s32 %r11, %r4, 64;
        mbarrier.arrive.expect_tx.shared.b64 _, [dynamic], 4; mov.b32 %r8, 5;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r11], %r8, [%r4];
        W: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra W; ld.shared.b32 %r8, [%r5];
        add.s32 %r9, %r9, %r8; st.global.b32 [%d1], %r9; ret;"""
    twin = Twin(body, ProxyFenceMissing, "")
    for options in STRICT:
        assert run(twin, body, options)[:32].tolist() == [5] + [0] * 31
