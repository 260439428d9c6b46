"""Clusters that run in one slot leave all that clusters with objects of their own leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cute_kernels.emulator import GlobalMemory, Options, run
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.machine.launch import residents
from cute_kernels.emulator.machine.launch.launch import Launch
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.cluster_launches import plain, told

#: ``%d1``: the item of the thread in p0, ``%r2``: the CTA, whose coordinates are two-dimensional; ``%r13``:
#: the item of the thread in shared memory, ``%r15`` that of the lane in the next warp.
PLACE = """mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r4, %ctaid.y; mad.lo.u32 %r2, %r4, 6, %r2;
    mad.lo.u32 %r3, %r2, 128, %r1; ld.param.u64 %d0, [p0]; mul.wide.u32 %d1, %r3, 4; add.s64 %d1, %d0, %d1;
    setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r2, 13;
    shr.u32 %r11, %r1, 5; setp.eq.u32 %p4, %r11, 1; mul.lo.u32 %r12, %r1, 4; mov.u32 %r13, dynamic;
    add.u32 %r13, %r13, %r12; xor.b32 %r14, %r12, 128; mov.u32 %r15, dynamic; add.u32 %r15, %r15, %r14;"""
STORE = "st.global.b32 [%d1], %r5;"
EXCHANGE = f"st.shared.b32 [%r13], %r3; bar.sync 0; ld.shared.b32 %r5, [%r15]; bar.sync 0; {STORE}"
#: By name: a kernel, and whether nearly all of its clusters need nothing of Python, if they have 128 threads.
BODIES = {
    "items": (f"ld.global.b32 %r5, [%d1]; add.u32 %r5, %r5, %r2; {STORE} ret;", True),
    "shared memory": (f"{EXCHANGE} ret;", True),
    "bytes": (f"mov.u32 %r5, dynamic; add.u32 %r5, %r5, %r1; st.shared.b8 [%r5], %r1; bar.sync 0; "
              f"ld.shared.b8 %r5, [dynamic+3]; {STORE} ret;", True),
    "a local array": (f"st.local.b32 [own], %r3; ld.local.b32 %r5, [own]; {STORE} ret;", True),
    "local memory of a cluster before": (f"@%p2 st.local.b32 [own], %r3; ld.local.b32 %r5, [own]; {STORE} ret;", True),
    "shared memory of a cluster before": (f"setp.eq.u32 %p5, %r2, 20; @!%p5 bra ALL; ld.shared.b32 %r5, [%r13]; "
                                          f"ALL: {EXCHANGE} ret;", True),
    "a race in one": (f"{EXCHANGE} @!%p2 bra OUT; ld.shared.b32 %r5, [%r15]; st.shared.b32 [%r13], %r5; OUT: ret;",
                      True),
    "loop": (f"mov.u32 %r5, 0; HERE: bar.sync 0; add.u32 %r5, %r5, 1; setp.lt.u32 %p5, %r5, 40; @%p5 bra HERE; "
             f"{STORE} ret;", True),
    "votes": (f"bar.red.popc.u32 %r5, 3, %p4; {STORE} ret;", True),
    "producer and consumers": (f"@%p4 bra A; bar.arrive 1, 128; {STORE} ret; A: bar.sync 1, 128; {STORE} ret;", True),
    "one waits for ever": (f"@!%p2 bra OK; @%p4 bra OUT; bar.sync 2, 128; OK: bar.sync 0; {STORE} OUT: ret;", True),
    "a slice ends": (f"mov.u32 %r5, 0; @!%p2 bra OUT; @!%p4 bra OUT; HERE: add.u32 %r5, %r5, 1; "
                     f"setp.lt.u32 %p5, %r5, 30000; @%p5 bra HERE; OUT: {STORE} ret;", True),
    "lanes exit": (f"setp.gt.u32 %p5, %r1, 40; and.pred %p5, %p5, %p2; @%p5 ret; {STORE} ret;", True),
    "outside": (f"@%p2 ld.global.b32 %r5, [%d1+1000000]; {STORE} ret;", True),
    "a race between clusters": (f"{STORE} @%p2 ld.global.b32 %r5, [%d0]; ret;", True),
    "all read one item": (f"ld.global.b32 %r5, [%d0+16384]; {STORE} ret;", True),
    "atomics": ("@%p1 red.global.add.u32 [%d0+16384], %r3; ret;", False),
    "mbarriers in one": (f"@!%p2 bra OUT; @%p1 mbarrier.init.shared.b64 [dynamic], 128; bar.sync 0; "
                         f"mbarrier.arrive.shared.b64 %d3, [dynamic]; W: mbarrier.try_wait.parity.shared.b64 %p5, "
                         f"[dynamic], 0; @!%p5 bra W; OUT: {STORE} ret;", True),
    "copies in one": (f"@!%p2 bra OUT; cp.async.ca.shared.global [%r13], [%d1], 4; cp.async.wait_all; bar.sync 0; "
                      f"ld.shared.b32 %r5, [%r15]; OUT: {STORE} ret;", True),
    "sleeps": (f"@%p1 st.shared.b32 [dynamic], 0; bar.sync 0; nanosleep.u32 20; and.b32 %r6, %r1, 31; "
               f"setp.eq.u32 %p5, %r6, 0; @%p5 atom.shared.add.u32 %r5, [dynamic], 1; {STORE} ret;", False),
    "clock": (f"mov.u32 %r5, %clock; mov.u32 %r6, %smid; add.u32 %r5, %r5, %r6; {STORE} ret;", True),
    "fences": (f"{STORE} membar.gl; bar.sync 0; ld.global.b32 %r5, [%d1]; {STORE} ret;", False),
}  # fmt: skip
OPTIONS = {
    "": Options(),
    "strict": Options(strict=True, completion="lazy", roles=("load", "mma")),
    "no detectors": Options(detectors=False),
    "no race detector": Options(without=("races",)),
    "some clusters": Options(clusters=(20, 3, 13, 7, 1)),
    "limit": Options(max_warp_instructions=400),
    "going on": Options(going_on=lambda error: True),
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Indices of clusters that got objects of their own."""
    indices, make = [], Launch.make_cluster
    monkeypatch.setattr(Launch, "make_cluster", lambda launch, index: indices.append(index) or make(launch, index))
    return indices


def outcome(body: str, options: Options, out: np.ndarray, threads: int) -> tuple[Any, ...]:
    """Everything that a launch of 6 x 4 CTAs leaves."""
    out[...] = np.arange(out.size, dtype=np.uint32)
    memory, past, reported = GlobalMemory(), [], []
    memory.register_tensor(out, "out")
    if options.going_on is not None:
        options = dataclasses.replace(options, going_on=lambda error: reported.append(told(error)) or True)
    options = dataclasses.replace(options, progress=lambda done, of: past.append((done, of)))
    text = module(f".local .align 4 .b8 own[4]; {PLACE} {body}", parameters=1)
    try:
        report = run(text, grid=(6, 4), block=threads, dynamic_smem=1024, args=[out], memory=memory, options=options)
    except EmulatorError as error:
        return told(error), past, reported, out.tobytes()
    return plain(report), past, reported, out.tobytes()


@pytest.mark.parametrize("threads", [128, 33])
@pytest.mark.parametrize("name", BODIES)
def test_clusters_are_those_with_objects_of_their_own(
    name: str, threads: int, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    body, without_python = BODIES[name]
    out = aligned(np.zeros(8192, np.uint32))
    for options in OPTIONS.values():
        made.clear()
        found = outcome(body, options, out, threads)
        ended = found[1][-1][0]
        assert len(made) < max(6, ended // 2) or not without_python or threads < 128
        with monkeypatch.context() as patch:
            patch.setattr(residents, "suits", lambda launch: False)
            made.clear()
            assert outcome(body, options, out, threads) == found
            assert len(made) >= ended
