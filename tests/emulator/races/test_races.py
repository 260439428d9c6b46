"""Each fault of synchronisation in a small kernel that has it, found under every schedule, and in one that has not.

A kernel is written once: ``<<a|b>>`` stands for ``a`` in the sound kernel and ``b`` (often nothing) in the faulty one.
Several marks give several faulty kernels, each with one of them broken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import (
    BarrierMisuse,
    EmulatorError,
    GlobalMemoryRace,
    IllegalAccess,
    ProxyFenceMissing,
    SharedMemoryRace,
    TensorMemoryRace,
)
from cute_kernels.testing.ptx import THREAD_OUTPUT, module
from tests.emulator.ptx_launch import launch

SCHEDULES = [
    Options(),
    Options(completion="lazy"),
    Options(seed=1, completion="random", interleave="random"),
    Options(seed=2, completion="random", interleave="starve"),
    Options(),
]
MARK = re.compile(r"<<(.*?)(?:\|(.*?))?>>", re.S)


@dataclass(frozen=True)
class Twin:
    """A kernel with marks: what the faults raise, how to launch it, and what the sound one writes to p0."""

    body: str
    error: type[EmulatorError]
    message: str
    expected: list[int] | None = None
    shape: dict = field(default_factory=dict)

    def variants(self) -> list[str]:
        """The sound kernel, and one for each mark broken."""
        count = len(MARK.findall(self.body))
        return [self._resolve(broken) for broken in (None, *range(count))]

    def _resolve(self, broken: int | None) -> str:
        number = iter(range(100))
        return MARK.sub(lambda m: (m[2] or "") if next(number) == broken else m[1], self.body)


#: %r5 = address of this thread's word in shared memory (from dynamic + 64 on), %r2 = warp; all words are 0 or p0's.
WORDS = f"""{THREAD_OUTPUT} shl.b32 %r3, %r1, 2; mov.b32 %r4, dynamic; add.s32 %r5, %r4, %r3; add.s32 %r5, %r5, 64;
    shr.u32 %r2, %r1, 5; setp.ne.u32 %p1, %r2, 0; setp.ne.u32 %p9, %r1, 0; mov.b32 %r9, 0;
    st.shared.b32 [%r5], %r9;"""
#: As WORDS, with mbarriers at dynamic (1 arrival) and dynamic + 8 (1 arrival).
BARRIERS = f"""{WORDS} @%p9 bra READY; mbarrier.init.shared.b64 [dynamic], 1; mbarrier.init.shared.b64 [dynamic+8], 1;
    READY: bar.sync 0;"""
END = "END: st.global.b32 [%d1], %r9; ret;"
TWO_WARPS = {"block": (64, 1, 1)}
SECOND_READS = [0] * 32 + list(range(32))

TWINS = {
    "write then read, named barrier": Twin(
        f"""{WORDS} bar.sync 0; @%p1 bra READ; st.shared.b32 [%r5+128], %r1; bar.arrive 1, 64; bra END;
        READ: <<bar.sync 1, 64;>> ld.shared.b32 %r9, [%r5]; {END}""",
        SharedMemoryRace,
        r"load of CTA 0 warp 1 reads the 128 bytes at shared offset 1216 .* store of CTA 0 warp 0 wrote .* no synchro|"
        r"store of CTA 0 warp 0 writes the 128 bytes at shared offset 1216 .* which the load of CTA 0 warp 1 read",
        SECOND_READS,
        TWO_WARPS,
    ),
    "read then write": Twin(
        f"""{WORDS} bar.sync 0; @%p1 bra READ; <<bar.sync 1, 64;>> st.shared.b32 [%r5+128], %r1; bra END;
        READ: ld.shared.b32 %r9, [%r5]; bar.arrive 1, 64; {END}""",
        SharedMemoryRace,
        r"writes .* which the load of CTA 0 warp 1 read|reads .* which the store of CTA 0 warp 0 wrote",
        [0] * 64,
        TWO_WARPS,
    ),
    "lanes of one warp": Twin(
        f"""{WORDS} st.shared.b32 [%r5], %r1; <<bar.warp.sync -1;>> xor.b32 %r6, %r3, 4; add.s32 %r6, %r6, %r4;
        ld.shared.b32 %r9, [%r6+64]; {END}""",
        SharedMemoryRace,
        "load of CTA 0 warp 0 reads .* which the store of CTA 0 warp 0 wrote",
        [n ^ 1 for n in range(32)],
    ),
    "arrival by one lane for its warp": Twin(
        f"""{BARRIERS} @%p1 bra READ; st.shared.b32 [%r5+128], %r1; <<bar.warp.sync -1;>> @%p9 bra END;
        mbarrier.arrive.shared.b64 %d3, [dynamic]; bra END;
        READ: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra READ; ld.shared.b32 %r9, [%r5]; {END}""",
        SharedMemoryRace,
        "reads .* which the store of CTA 0 warp 0 wrote",
        SECOND_READS,
        TWO_WARPS,
    ),
    "relaxed arrival, relaxed wait": Twin(
        f"""{BARRIERS} @%p1 bra READ; st.shared.b32 [%r5+128], %r1; bar.warp.sync -1; @%p9 bra END;
        mbarrier.arrive.<<release|relaxed>>.cta.shared.b64 %d3, [dynamic]; bra END;
        READ: mbarrier.try_wait.parity.<<acquire|relaxed>>.cta.shared.b64 %p3, [dynamic], 0; @!%p3 bra READ;
        ld.shared.b32 %r9, [%r5]; {END}""",
        SharedMemoryRace,
        "wrote before .*, and nothing orders the two: the synchronisation between them is relaxed",
        SECOND_READS,
        TWO_WARPS,
    ),
    "a weak read before a strong one of the same warp": Twin(
        f"""{WORDS} @!%p9 st.shared.b32 [dynamic], %r9; bar.sync 0; @%p1 bra WRITE;
        ld.<<relaxed.cta.|>>shared.b32 %r6, [dynamic+64]; ld.relaxed.cta.shared.b32 %r7, [dynamic+64];
        @!%p9 st.relaxed.cta.shared.b32 [dynamic], 1; bra END;
        WRITE: ld.relaxed.cta.shared.b32 %r8, [dynamic]; setp.ne.b32 %p3, %r8, 1; @%p3 bra WRITE;
        st.relaxed.cta.shared.b32 [dynamic+64], %r2;
        END: bar.sync 0; st.global.b32 [%d1], %r9;""",
        SharedMemoryRace,
        "shared offset .* of CTA 0.*nothing orders the two",
        [0] * 64,
        TWO_WARPS,
    ),
    "fences around relaxed operations": Twin(
        f"""{BARRIERS} @%p1 bra READ; st.shared.b32 [%r5+128], %r1; bar.warp.sync -1;
        <<fence.acq_rel.cta;>> @%p9 bra END;
        mbarrier.arrive.relaxed.cta.shared.b64 %d3, [dynamic]; bra END;
        READ: mbarrier.try_wait.parity.relaxed.cta.shared.b64 %p3, [dynamic], 0; @!%p3 bra READ; <<fence.acq_rel.cta;>>
        ld.shared.b32 %r9, [%r5]; {END}""",
        SharedMemoryRace,
        "the synchronisation between them is relaxed",
        SECOND_READS,
        TWO_WARPS,
    ),
    "scope of the cluster": Twin(
        f"""{BARRIERS} mov.u32 %r10, %cluster_ctarank; mapa.shared::cluster.u32 %r11, %r4, 0;
        barrier.cluster.arrive; barrier.cluster.wait; setp.eq.u32 %p2, %r10, 0; @%p2 bra READ;
        mad.lo.u32 %r12, %r1, 4, %r11;
        st.shared::cluster.b32 [%r12+64], %r1; bar.warp.sync -1; @%p9 bra DONE;
        mbarrier.arrive.release.<<cluster|cta>>.shared::cluster.b64 _, [%r11]; bra DONE;
        READ: mbarrier.try_wait.parity.acquire.<<cluster|cta>>.shared.b64 %p3, [dynamic], 0; @!%p3 bra READ;
        ld.shared.b32 %r9, [%r5]; st.global.b32 [%d1], %r9;
        DONE: barrier.cluster.arrive; barrier.cluster.wait; ret;""",
        SharedMemoryRace,
        "store of CTA 1 warp 0 wrote before .* or its scope does not include both",
        list(range(32)),
        {"grid": (2, 1, 1), "cluster": (2, 1, 1)},
    ),
    "mbarrier.init and other CTAs": Twin(
        f"""{WORDS} @%p9 bra READY; mbarrier.init.shared.b64 [dynamic], 1; <<fence.mbarrier_init.release.cluster;>>
        READY: barrier.cluster.arrive.relaxed; barrier.cluster.wait; mov.u32 %r10, %cluster_ctarank;
        mapa.shared::cluster.u32 %r11, %r4, 0; setp.eq.u32 %p2, %r10, 0; @%p2 bra WAIT; @%p9 bra DONE;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11]; bra DONE;
        WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra WAIT;
        DONE: barrier.cluster.arrive; barrier.cluster.wait; ret;""",
        BarrierMisuse,
        r"an arrival of CTA 1 warp 0 uses the mbarrier .* of CTA 0, whose mbarrier\.init is not ordered before",
        list(range(7, 39)),
        {"grid": (2, 1, 1), "cluster": (2, 1, 1)},
    ),
    "a CTA that others still access": Twin(
        f"""{WORDS} barrier.cluster.arrive; barrier.cluster.wait; mov.u32 %r10, %cluster_ctarank; xor.b32 %r10, %r10, 1;
        mapa.shared::cluster.u32 %r11, %r5, %r10; st.shared::cluster.b32 [%r11], %r1;
        <<barrier.cluster.arrive; barrier.cluster.wait;>> ret;""",
        IllegalAccess,
        r"CTA \d may exit before an access by CTA \d warp 0 is over|shared memory of CTA \d, which has exited",
        list(range(7, 39)),
        {"grid": (2, 1, 1), "cluster": (2, 1, 1)},
    ),
    "phases that nobody waits for": Twin(
        f"""{BARRIERS} mov.b32 %r7, 0; mov.b32 %r6, 0; @%p1 bra CONSUMER; @%p9 bra END;
        PRODUCE: mbarrier.arrive.shared.b64 %d3, [dynamic];
        W1: <<mbarrier.try_wait.parity.shared.b64 %p3, [dynamic+8], %r6;
        @!%p3 bra W1;>> xor.b32 %r6, %r6, 1; add.s32 %r7, %r7, 1; setp.lt.u32 %p4, %r7, 2; @%p4 bra PRODUCE; bra END;
        CONSUMER: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], %r6; @!%p3 bra CONSUMER; add.s32 %r9, %r9, 1;
        setp.ne.u32 %p5, %r1, 32; bar.warp.sync -1; @%p5 bra NEXT; mbarrier.arrive.shared.b64 %d3, [dynamic+8];
        NEXT: xor.b32 %r6, %r6, 1; add.s32 %r7, %r7, 1; setp.lt.u32 %p4, %r7, 2; @%p4 bra CONSUMER; {END}""",
        EmulatorError,
        "run ahead of the wait by two phases|has missed it|no warp can run",
        [0] * 32 + [2] * 32,
        TWO_WARPS,
    ),
    "an mbarrier in the middle of a phase": Twin(
        f"""{BARRIERS} @%p9 bra END; mbarrier.arrive.shared.b64 %d3, [dynamic];
        <<|mbarrier.expect_tx.shared.b64 [dynamic],
        16;>> {END}""",
        BarrierMisuse,
        "ends in the middle of a phase: .* 16 transaction bytes pending",
        [0] * 32,
    ),
}

COPY_IN = """mbarrier.arrive.expect_tx.shared.b64 %d3, [dynamic], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [dynamic+64], [%d0], 128, [dynamic];"""
WAIT = "mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0;"
COPY_OUT = "cp.async.bulk.global.shared::cta.bulk_group [%d0], [dynamic+64], 128; cp.async.bulk.commit_group;"

TWINS |= {
    "bulk copy: read before it is complete": Twin(
        f"""{BARRIERS} @%p9 bra W; {COPY_IN} W: <<{WAIT} @!%p3 bra W;>> ld.shared.b32 %r9, [%r5]; add.s32 %r9, %r9, 1;
        V: {WAIT} @!%p3 bra V; {END}""",
        SharedMemoryRace,
        "load of CTA 0 warp 0 reads .* which the bulk copy of 128 bytes issued by CTA 0 warp 0 wrote",
        [n + 8 for n in range(32)],
    ),
    "bulk copy: nobody waits for it": Twin(
        f"""{BARRIERS} @%p9 bra W; {COPY_IN} W: <<{WAIT} @!%p3 bra W;>> bra LAST; LAST: ret;""",
        IllegalAccess,
        "CTA 0 may exit before bulk copy of 128 bytes",
        [n + 7 for n in range(32)],
    ),
    "bulk store: fence.proxy.async by the writers": Twin(
        f"""{WORDS} st.shared.b32 [%r5], %r1; <<fence.proxy.async.shared::cta;>> bar.sync 0; @%p9 bra LAST; {COPY_OUT}
        cp.async.bulk.wait_group 0; LAST: ret;""",
        ProxyFenceMissing,
        r"bulk store .* which the store of CTA 0 warp 0 wrote through the generic proxy .*, with no fence\.proxy",
        list(range(32)),
    ),
    "bulk store: fence.proxy.async by the issuing thread": Twin(
        f"""{WORDS} bar.sync 0; @!%p1 bra ISSUE; st.shared.b32 [%r5+-128], %r1; bar.sync 1, 64; bra LAST;
        ISSUE: bar.sync 1, 64; @%p9 bra LAST; <<fence.proxy.async.shared::cta;>> {COPY_OUT} cp.async.bulk.wait_group 0;
        LAST: ret;""",
        ProxyFenceMissing,
        "which the store of CTA 0 warp 1 wrote through the generic proxy",
        list(range(32, 64)),
        TWO_WARPS,
    ),
    "bulk store: a fence of one lane for all": Twin(
        f"""{WORDS} st.shared.b32 [%r5], %r1; <<fence.proxy.async.shared::cta;|@!%p9 fence.proxy.async.shared::cta;>>
        bar.warp.sync -1; @%p9 bra LAST; {COPY_OUT} cp.async.bulk.wait_group 0; LAST: ret;""",
        ProxyFenceMissing,
        "fence.proxy.async",
        list(range(32)),
    ),
    "bulk store: a fence of another state space": Twin(
        f"""{WORDS} st.shared.b32 [%r5], %r1; fence.proxy.async<<|.global>>; bar.warp.sync -1; @%p9 bra LAST; {COPY_OUT}
        cp.async.bulk.wait_group 0; LAST: ret;""",
        ProxyFenceMissing,
        "bulk store .* reads .* at shared offset .* which the store of CTA 0 warp 0 wrote",
        list(range(32)),
    ),
    "bulk copy: a fence of another state space": Twin(
        f"""{BARRIERS} st.global.b32 [%d1], %r1; fence.proxy.async.<<global|shared::cta>>; bar.warp.sync -1; @%p9 bra W;
        {COPY_IN} W: {WAIT} @!%p3 bra W; ld.shared.b32 %r9, [%r5]; add.s32 %r9, %r9, 1; {END}""",
        ProxyFenceMissing,
        r"bulk copy .* reads .* at byte 0 of array 0 \(256 bytes\), which the store of CTA 0 warp 0 wrote",
        list(range(1, 33)),
    ),
    "bulk store: issued before the lanes agree": Twin(
        f"""{WORDS} st.shared.b32 [%r5], %r1; fence.proxy.async.shared::cta; <<bar.warp.sync -1;>> @%p9 bra LAST;
        {COPY_OUT}
        cp.async.bulk.wait_group 0; LAST: ret;""",
        SharedMemoryRace,
        "bulk store .* reads .* which the store of CTA 0 warp 0 wrote",
        list(range(32)),
    ),
    "bulk store: source written again": Twin(
        f"""{WORDS} st.shared.b32 [%r5], %r1; fence.proxy.async.shared::cta; bar.warp.sync -1; @%p9 bra AGAIN;
        {COPY_OUT}
        <<cp.async.bulk.wait_group.read 0;>> AGAIN: bar.warp.sync -1; st.shared.b32 [%r5], %r9; @%p9 bra LAST;
        cp.async.bulk.wait_group 0; LAST: ret;""",
        SharedMemoryRace,
        "store of CTA 0 warp 0 writes .* which the bulk store of 128 bytes .* read",
        list(range(32)),
    ),
    "bulk store: one lane has waited for it": Twin(
        f"""{WORDS} st.shared.b32 [%r5], %r1; fence.proxy.async.shared::cta; bar.warp.sync -1; @%p9 bra AGAIN;
        {COPY_OUT} cp.async.bulk.wait_group.read 0; st.shared.b32 [%r5], %r9;
        AGAIN: <<bar.warp.sync -1;>> st.shared.b32 [%r5], %r1; @%p9 bra LAST; cp.async.bulk.wait_group 0; LAST: ret;""",
        SharedMemoryRace,
        "store of CTA 0 warp 0 writes .* which the bulk store of 128 bytes .* read",
        list(range(32)),
    ),
    "bulk copy over what a bulk store read": Twin(
        f"""{BARRIERS} @%p1 bra CONSUMER; @%p9 bra LAST; {COPY_IN} FIRST: {WAIT} @!%p3 bra FIRST;
        EMPTY: mbarrier.try_wait.parity.<<acquire|relaxed>>.cta.shared.b64 %p3, [dynamic+8], 0; @!%p3 bra EMPTY;
        {COPY_IN} FULL: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 1; @!%p3 bra FULL; bra LAST;
        CONSUMER: {WAIT} @!%p3 bra CONSUMER; bar.warp.sync -1; setp.ne.u32 %p5, %r1, 32; @%p5 bra LAST;
        cp.async.bulk.global.shared::cta.bulk_group [%d0+128], [dynamic+64], 128; cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0; mbarrier.arrive.<<release|relaxed>>.cta.shared.b64 %d3, [dynamic+8];
        LAST: ret;""",
        SharedMemoryRace,
        r"bulk copy .* writes .* which the bulk store .* read before .* is relaxed",
        list(range(7, 39)) * 2,
        TWO_WARPS,
    ),
    "bulk copy over what a thread read": Twin(
        f"""{BARRIERS} @%p1 bra CONSUMER; @%p9 bra LAST; {COPY_IN} FIRST: {WAIT} @!%p3 bra FIRST;
        EMPTY: mbarrier.try_wait.parity.<<acquire|relaxed>>.cta.shared.b64 %p3, [dynamic+8], 0; @!%p3 bra EMPTY;
        {COPY_IN} FULL: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 1; @!%p3 bra FULL; bra LAST;
        CONSUMER: {WAIT} @!%p3 bra CONSUMER; ld.shared.b32 %r9, [%r5-128]; st.global.b32 [%d1], %r9; bar.warp.sync -1;
        setp.ne.u32 %p5, %r1, 32; @%p5 bra LAST;
        mbarrier.arrive.<<release|relaxed>>.cta.shared.b64 %d3, [dynamic+8]; LAST: ret;""",
        SharedMemoryRace,
        r"bulk copy .* writes .* which the load of CTA 0 warp 1 read before .* is relaxed",
        list(range(7, 39)) * 2,
        TWO_WARPS,
    ),
    "bulk store: destination read through the generic proxy": Twin(
        f"""{WORDS} st.shared.b32 [%r5], %r1; fence.proxy.async.shared::cta; bar.warp.sync -1; @%p9 bra READ; {COPY_OUT}
        cp.async.bulk.wait_group.read 0; <<cp.async.bulk.wait_group 0;>> READ: bar.warp.sync -1;
        ld.global.b32 %r9, [%d1];
        add.s32 %r9, %r9, 1; @%p9 bra OUT; cp.async.bulk.wait_group 0; OUT: bar.warp.sync -1; {END}""",
        GlobalMemoryRace,
        "load of CTA 0 warp 0 reads .* which the bulk store .* wrote",
        [n + 1 for n in range(32)],
    ),
    "cp.async: read before wait_group": Twin(
        f"""{WORDS} bar.warp.sync -1; cp.async.ca.shared.global [%r5], [%d1], 4; cp.async.commit_group;
        <<cp.async.wait_group 0;>> ld.shared.b32 %r9, [%r5]; add.s32 %r9, %r9, 1; cp.async.wait_group 0; {END}""",
        SharedMemoryRace,
        "reads .* which the cp.async of CTA 0 warp 0 wrote",
        [n + 8 for n in range(32)],
    ),
    "two CTAs write one place": Twin(
        f"""{THREAD_OUTPUT} <<atom.global.add.u32 %r2, [%d1], 1;|ld.global.b32 %r2, [%d1]; add.s32 %r2, %r2, 1;
        st.global.b32 [%d1], %r2;>> ret;""",
        GlobalMemoryRace,
        r"of array 0 \(256 bytes\), which the .* of cluster [01], CTA 0 warp 0 .*: it belongs to another cluster",
        [n + 9 for n in range(32)],
        {"grid": (2, 1, 1)},
    ),
    "a flag between clusters": Twin(
        f"""{THREAD_OUTPUT} mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %r2, 0; @%p1 bra READ; mov.b32 %r3, 5;
        st.global.b32 [%d1], %r1; bar.warp.sync -1; st.<<release|relaxed>>.<<gpu|cta>>.global.b32 [%d0+128], %r3;
        bra LAST;
        READ: ld.<<acquire|relaxed>>.gpu.global.b32 %r4, [%d0+128]; setp.ne.u32 %p2, %r4, 5; @%p2 bra READ;
        ld.global.b32 %r9, [%d1]; add.s32 %r9, %r9, 3; st.global.b32 [%d1], %r9; LAST: ret;""",
        GlobalMemoryRace,
        "reads .* of array 0 .*, which the store of cluster 0, CTA 0 warp 0 wrote before",
        [n + 3 for n in range(32)],
        {"grid": (2, 1, 1)},
    ),
    "read by two clusters, then written by one": Twin(
        f"""{THREAD_OUTPUT} mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %r2, 0; mov.b32 %r3, 5; @%p1 bra READ;
        ld.global.b32 %r9, [%d1]; bar.warp.sync -1;
        st.<<release|relaxed>>.<<gpu|cta>>.global.b32 [%d0+128], %r3; bra LAST;
        READ: ld.<<acquire|relaxed>>.gpu.global.b32 %r4, [%d0+128]; setp.ne.u32 %p2, %r4, 5; @%p2 bra READ;
        ld.global.b32 %r9, [%d1]; add.s32 %r9, %r9, 3; st.global.b32 [%d1], %r9; LAST: ret;""",
        GlobalMemoryRace,
        "store of cluster 1, CTA 0 warp 0 writes .* which the load of cluster 0, CTA 0 warp 0 read before.* it belongs",
        [n + 10 for n in range(32)],
        {"grid": (2, 1, 1)},
    ),
    "copied by two clusters, then written by one": Twin(
        f"""{BARRIERS} @%p9 bra W; {COPY_IN} W: {WAIT} @!%p3 bra W; ld.shared.b32 %r9, [%r5]; mov.u32 %r10, %ctaid.x;
        setp.ne.u32 %p4, %r10, 0; mov.b32 %r11, 5; @%p4 bra POLL;
        st.<<release|relaxed>>.gpu.global.b32 [%d0+128], %r11; bra LAST;
        POLL: ld.acquire.gpu.global.b32 %r12, [%d0+128]; setp.ne.u32 %p5, %r12, 5; @%p5 bra POLL;
        add.s32 %r9, %r9, 1; st.global.b32 [%d1], %r9; LAST: ret;""",
        GlobalMemoryRace,
        "store of cluster 1, .* writes .* which the bulk copy of 128 bytes issued by cluster 0, .* read before",
        [n + 8 for n in range(32)],
        {"grid": (2, 1, 1)},
    ),
    "a flag between warps": Twin(
        f"""{WORDS} @!%p9 st.shared.b32 [dynamic+32], %r9; bar.sync 0; @%p1 bra READ; st.shared.b32 [%r5+128], %r1;
        mov.b32 %r6, 1; bar.warp.sync -1;
        <<fence.acq_rel.cta;>> st.<<relaxed.cta|weak>>.shared.b32 [dynamic+32], %r6; bra END;
        READ: nanosleep.u32 20; ld.relaxed.cta.shared.b32 %r6, [dynamic+32]; setp.ne.u32 %p2, %r6, 1; @%p2 bra READ;
        <<fence.acq_rel.cta;>>
        ld.shared.b32 %r9, [%r5]; {END}""",
        SharedMemoryRace,
        "nothing orders the two",
        SECOND_READS,
        TWO_WARPS,
    ),
}

#: Warps 0 and 4 share a quarter of tensor memory: 0 writes, 4 reads and hands back, 0 writes again.
TENSOR = f"""{BARRIERS} setp.eq.u32 %p2, %r2, 0; setp.eq.u32 %p3, %r2, 4; and.b32 %r12, %r1, 31;
    setp.eq.u32 %p4, %r12, 0; @!%p2 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic+48], 32;
    ALLOCATED: bar.sync 0; ld.shared.b32 %r20, [dynamic+48]; @%p2 bra WRITER; @%p3 bra READER; bra DONE;
    WRITER: tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {{%r1}}; <<tcgen05.wait::st.sync.aligned;>>
    <<tcgen05.fence::before_thread_sync;>> @!%p4 bra W1;
    mbarrier.arrive.relaxed.cta.shared.b64 %d3, [dynamic];
    W1: mbarrier.try_wait.parity.relaxed.cta.shared.b64 %p5, [dynamic+8], 0; @!%p5 bra W1;
    <<tcgen05.fence::after_thread_sync;>>
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {{%r2}}; tcgen05.wait::st.sync.aligned; bra DONE;
    READER: mbarrier.try_wait.parity.relaxed.cta.shared.b64 %p5, [dynamic], 0; @!%p5 bra READER;
    <<tcgen05.fence::after_thread_sync;>>
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r9}}, [%r20]; <<tcgen05.wait::ld.sync.aligned;>>
    <<tcgen05.fence::before_thread_sync;>> @!%p4 bra RELEASED;
    mbarrier.arrive.relaxed.cta.shared.b64 %d3, [dynamic+8];
    RELEASED: tcgen05.wait::ld.sync.aligned; mad.wide.u32 %d4, %r12, 4, %d0; st.global.b32 [%d4], %r9;
    DONE: bar.sync 0; @!%p2 bra LAST; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; LAST: ret;"""
FIVE_WARPS = {"block": (160, 1, 1)}

TWINS |= {
    "tensor memory handed over and back": Twin(
        TENSOR, TensorMemoryRace, r"tcgen05\.(ld|st) of .* TMEM column 0.* not known to be complete", list(range(32)),
        FIVE_WARPS,
    ),
    "tensor memory freed before it was read": Twin(
        MARK.sub(lambda m: m[1], TENSOR)
        .replace("RELEASED: tcgen05.wait::ld.sync.aligned;", "RELEASED:")
        .replace("tcgen05.wait::ld.sync.aligned;", "<<tcgen05.wait::ld.sync.aligned;>>")
        .replace("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {%r2}; tcgen05.wait::st.sync.aligned;", "")
        .replace("st.global.b32 [%d4], %r9", "st.global.b32 [%d4], %r12"),
        TensorMemoryRace, "tcgen05.dealloc frees TMEM column 0", list(range(32)), FIVE_WARPS,
    ),
    # What is used has been read; a copy is no use.
    "tensor memory handed back when what was read there has been used": Twin(
        MARK.sub(lambda m: m[1], TENSOR)
        .replace("{%r9}, [%r20]; tcgen05.wait::ld.sync.aligned;", "{%r9}, [%r20]; mov.b32 %r8, %r9; "
                 "<<add.s32 %r10, %r8, 0;|mov.b32 %r10, %r8;>>")
        .replace("RELEASED: tcgen05.wait::ld.sync.aligned;", "RELEASED:"),
        TensorMemoryRace, r"tcgen05\.st of .* TMEM column 0.* not known to be complete", list(range(32)), FIVE_WARPS,
    ),
    "a later load is not over when an earlier one is": Twin(
        MARK.sub(lambda m: m[1], TENSOR)
        .replace("{%r9}, [%r20]; tcgen05.wait::ld.sync.aligned;", "{%r9}, [%r20]; "
                 "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r8}, [%r20]; add.s32 %r10, %r9, <<%r8|1>>;")
        .replace("RELEASED: tcgen05.wait::ld.sync.aligned;", "RELEASED:"),
        TensorMemoryRace, r"tcgen05\.st of .* TMEM column 0.* not known to be complete", list(range(32)), FIVE_WARPS,
    ),
}  # fmt: skip


def run(twin: Twin, text: str, options: Options) -> np.ndarray:
    out = np.zeros(64, np.uint32)
    out[:32] = np.arange(7, 39)
    aligned = np.zeros(64 + 32, np.uint32)
    start = -aligned.ctypes.data % 128 // 4
    aligned[start : start + 64] = out
    launch(module(text, parameters=1), aligned[start : start + 64], options=options, **twin.shape)
    return aligned[start : start + 64]


CASES = [(name, i) for name, twin in TWINS.items() for i in range(1, len(twin.variants()))]


@pytest.mark.parametrize("name", TWINS)
def test_the_sound_kernel_is_clean(name: str):
    twin = TWINS[name]
    for options in SCHEDULES:
        out = run(twin, twin.variants()[0], options)
        assert out[: len(twin.expected)].tolist() == twin.expected


@pytest.mark.parametrize(("name", "broken"), CASES)
def test_the_faulty_kernel_is_caught(name: str, broken: int):
    twin = TWINS[name]
    for options in SCHEDULES:
        with pytest.raises(twin.error, match=twin.message):
            run(twin, twin.variants()[broken], options)
