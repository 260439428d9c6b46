"""Instructions that lanes execute together and come to on several paths: PTX has them wait for each other there.

Compilers thread branches so: ``if (lane == 0) f(); if (warp == 0) sync();`` becomes two branches to one instruction,
which is not where all ways of the first branch meet.
"""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import BarrierMisuse, EmulatorError, Options
from cute_kernels.testing.ptx import aligned, launch, module

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#: An instruction that writes %r10, for each of 32 lanes, with the target that has it.
TOGETHER = {
    "shfl": ("sm_90a", "shfl.sync.bfly.b32 %r10, %r1, 1, 0x1f, -1;"),
    "shfl of one lane": ("sm_90a", "shfl.sync.idx.b32 %r10, %r1, 3, 0x1f, -1;"),
    "vote": ("sm_90a", "vote.sync.ballot.b32 %r10, %p5, -1;"),
    "match": ("sm_90a", "match.any.sync.b32 %r10, %r5, -1;"),
    "redux": ("sm_90a", "redux.sync.add.u32 %r10, %r1, -1;"),
    "elect": ("sm_90a", "elect.sync %r10|%p6, -1;"),
    "with member masks": ("sm_90a", "shfl.sync.bfly.b32 %r10, %r1, 1, 0x1f, %r6;"),
    "bar.warp.sync": ("sm_90a", "st.shared.u32 [%r3], %r1; bar.warp.sync -1; ld.shared.u32 %r10, [%r4];"),
    "bar.sync": ("sm_90a", "bar.sync 0; mov.u32 %r10, %r1;"),
    "bar.red": ("sm_90a", "bar.red.popc.u32 %r10, 0, %p5;"),
    "bar.arrive": ("sm_90a", "bar.arrive 1, 64; mov.u32 %r10, %r1;"),
    "barrier.cluster": ("sm_90a", "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; mov.u32 %r10, %r1;"),
    "ldmatrix": ("sm_90a", "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [%r3];"),
    "stmatrix": ("sm_90a", "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {%r1}; mov.u32 %r10, %r1;"),
    "movmatrix": ("sm_90a", "movmatrix.sync.aligned.m8n8.trans.b16 %r10, %r1;"),
    "mma": ("sm_90a", MMA + " {%r10, %r11, %r12, %r13}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%r2, %r2, %r2, %r2};"),
    "guarded": ("sm_90a", "mov.u32 %r10, 0; @%p5 shfl.sync.bfly.b32 %r10, %r1, 2, 0x1f, %r7;"),
    "tcgen05": (
        "sm_100a",
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32; bar.warp.sync -1; "
        "ld.shared.u32 %r8, [%r2]; "
        "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r1}; tcgen05.wait::st.sync.aligned; "
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r8]; tcgen05.wait::ld.sync.aligned; "
        "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;",
    ),
}
#: How lanes come to the instruction, behind ``DO:``; behind ``SKIP:`` all of them meet. In %r20 each notes its way.
WAYS = {
    "at once": "{note}",
    "on two paths": "@%p1 bra OTHER; {note} bra DO; OTHER: @%p2 bra SKIP;",
    "on three paths": "@%p1 bra OTHER; {note} bra DO; OTHER: @%p3 bra THIRD; @%p2 bra SKIP; bra DO; THIRD: {note}",
    "from branches inside": "@%p1 bra OTHER; @%p4 bra INNER; {note} @%p2 bra SKIP; bra DO; "
    "INNER: @%p2 bra SKIP; bra DO; OTHER: @%p3 bra MORE; {note} @%p2 bra SKIP; bra DO; MORE: {note} @%p2 bra SKIP;",
    "after a loop": "@%p1 bra OTHER; {note} bra DO; OTHER: mov.u32 %r21, %r1; "
    "AGAIN: sub.u32 %r21, %r21, 1; setp.gt.s32 %p7, %r21, 0; @%p7 bra AGAIN; @%p2 bra SKIP;",
    "once lanes have left": "@%p1 bra OTHER; @%p3 bra DO; {note} bra DO; OTHER: @%p2 bra SKIP; {note}",
}
HEAD = """
    mov.u32 %r1, %tid.x; ld.param.u64 %d0, [p0]; mad.wide.u32 %d1, %r1, 4, %d0; mov.u32 %r2, dynamic; mov.u32 %r20, 0;
    shl.b32 %r22, %r1, 4; add.u32 %r3, %r2, %r22; add.u32 %r3, %r3, 64; xor.b32 %r22, %r22, 16; add.u32 %r4, %r2, %r22;
    add.u32 %r4, %r4, 64; st.shared.v4.u32 [%r3], {%r1, %r1, %r1, %r1}; bar.warp.sync -1; shr.u32 %r5, %r1, 3;
    and.b32 %r6, %r1, 1; setp.eq.u32 %p5, %r6, 1; and.b32 %r6, %r1, 16; mov.u32 %r7, 0xffff; shl.b32 %r6, %r7, %r6;
    mov.u32 %r7, 0xaaaaaaaa; setp.ne.u32 %p1, %r1, 0; setp.gt.u32 %p2, %r1, 127; setp.gt.u32 %p3, %r1, 20;
    setp.lt.u32 %p4, %r1, 11; mov.u32 %r10, 77;
"""


def text(way: str, target: str, instruction: str) -> str:
    path = WAYS[way].replace("{note}", "add.u32 %r20, %r20, 1;")
    return module(
        f"{HEAD} {path} DO: {instruction} SKIP: st.global.u32 [%d1], %r10; ret;", parameters=1, target=target
    )


def run(text: str, **options: object) -> list[int]:
    out = aligned(np.full(32, 99, np.uint32))
    launch(text, out, options=Options(without=("exits",), **options))
    return out.tolist()


@pytest.mark.parametrize("name", TOGETHER)
def test_lanes_wait_for_each_other(name: str) -> None:
    """The results are as if no lane had taken a branch."""
    found = {way: run(text(way, *TOGETHER[name])) for way in WAYS}
    assert found == dict.fromkeys(WAYS, found["at once"])


@pytest.mark.parametrize("name", ["shfl", "bar.sync", "tcgen05", "ldmatrix"])
@pytest.mark.parametrize("seed", range(4))
def test_under_other_schedules(name: str, seed: int) -> None:
    found = {way: run(text(way, *TOGETHER[name]), seed=seed, interleave="random") for way in WAYS}
    assert found == dict.fromkeys(WAYS, found["at once"])


@pytest.mark.parametrize("name", [name for name in TOGETHER if "cluster" not in name])
def test_lanes_that_never_come_are_reported(name: str) -> None:
    """Lane 0 leaves the others on a way of its own."""
    target, instruction = TOGETHER[name]
    path = "@%p1 bra OTHER; @%p5 bra DO; bra SKIP; OTHER: @%p2 bra SKIP;"
    instruction = instruction.replace("%r7;", "-1;").replace("@%p5", "").replace("%r6;", "-1;")
    body = f"{HEAD} {path} DO: {instruction} SKIP: st.global.u32 [%d1], %r10; ret;"
    with pytest.raises(EmulatorError, match="0xfffffffe|reads lane"):
        run(module(body, parameters=1, target=target))


def test_lanes_at_two_instructions_are_reported() -> None:
    """Each of two parts of the warp waits for the other one, at another instruction."""
    body = f"""{HEAD} @%p1 bra OTHER; add.u32 %r20, %r20, 1; @%p2 bra SKIP; bra DO; OTHER: @%p2 bra SKIP; @%p2 bra DO;
        bar.sync 1; bra SKIP; DO: bar.sync 0; SKIP: st.global.u32 [%d1], %r10; ret;"""
    with pytest.raises(BarrierMisuse, match="bar.sync is executed by lanes") as error:
        run(module(body, parameters=1, target="sm_90a"))
    assert error.value.kind == "divergence"


def test_a_lane_that_waits_for_another_warp_comes_later() -> None:
    """Lane 0 comes behind an mbarrier, for which the second warp arrives last of all."""
    body = f"""{HEAD} setp.ge.u32 %p2, %r1, 32; .shared .align 8 .b64 full; mov.u32 %r8, full;
        @!%p1 mbarrier.init.shared.b64 [%r8], 1; bar.sync 0; @%p2 bra ARRIVES; @%p1 bra OTHER;
        WAIT: mbarrier.try_wait.parity.shared.b64 %p7, [%r8], 0; @!%p7 bra WAIT; bra DO;
        OTHER: @%p2 bra SKIP;
        DO: shfl.sync.bfly.b32 %r10, %r1, 31, 0x1f, -1; st.global.u32 [%d1], %r10; bra SKIP;
        ARRIVES: setp.eq.u32 %p3, %r1, 40; bar.warp.sync -1; @%p3 mbarrier.arrive.shared.b64 _, [%r8];
        SKIP: ret;"""
    out = aligned(np.zeros(64, np.uint32))
    launch(module(body, parameters=1, target="sm_90a"), out, block=64)
    assert out[:32].tolist() == [lane ^ 31 for lane in range(32)]
