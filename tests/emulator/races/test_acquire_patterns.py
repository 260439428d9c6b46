"""Order between CTAs by flags in global memory: which reads, fences and threads make an acquire or a release pattern.

What is right follows the axioms of the PTX ISA's memory model: the operation and its fence are of one thread, and two
fence.sc are ordered by what is observed between them, whichever threads execute them.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import GlobalMemoryRace
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

THREADS = 64
READS = {
    "relaxed": "ld.relaxed.gpu.global.u32 %r4, [%d0];",
    "volatile": "ld.volatile.global.u32 %r4, [%d0];",
    "atomic": "atom.global.add.u32 %r4, [%d0], 0;",
    "acquire": "ld.acquire.gpu.global.u32 %r4, [%d0];",
}
FENCES = {"none": "", "acq_rel": "fence.acq_rel.gpu;", "sc": "fence.sc.gpu;", "membar": "membar.gl;"}
SEQUENTIAL = ("sc", "membar")
WRITE = "st.relaxed.gpu.global.u32 [%d0], 1;"
#: Thread 0 reads the flag; {} is the fence, by the thread or threads that are named.
READERS = {
    "the same thread": "@%p1 bra R; {read} {fence} R: bar.sync 0;",
    "the same thread, behind the barrier": "@%p1 bra R; {read} R: bar.sync 0; @%p1 bra S; {fence} S: bar.sync 0;",
    "another lane": "@%p1 bra R; {read} R: bar.sync 0; setp.ne.u32 %p2, %r1, 1; @%p2 bra S; {fence} S: bar.sync 0;",
    "another warp": "@%p1 bra R; {read} R: bar.sync 0; setp.ne.u32 %p2, %r1, 40; @%p2 bra S; {fence} S: bar.sync 0;",
    "all, behind the barrier": "@%p1 bra R; {read} R: bar.sync 0; {fence}",
}
#: All have written; thread 0 writes the flag.
WRITERS = {
    "the same thread": "bar.sync 0; @%p1 bra W; {fence} {write} W:",
    "another lane": "bar.sync 0; setp.ne.u32 %p2, %r1, 1; @%p2 bra V; {fence} V: bar.sync 0; @%p1 bra W; {write} W:",
    "another warp": "bar.sync 0; setp.ne.u32 %p2, %r1, 40; @%p2 bra V; {fence} V: bar.sync 0; @%p1 bra W; {write} W:",
    "all, before the barrier": "{fence} bar.sync 0; @%p1 bra W; {write} W:",
}


def program(writer: str, reader: str) -> str:
    """CTA 0 writes data and flag, CTA 1 reads the flag and then what threads of the other warp have written."""
    return f"""
        ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; ld.param.u64 %d5, [p2];
        mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; mul.wide.u32 %d2, %r1, 4; add.s64 %d3, %d1, %d2;
        xor.b32 %r2, %r1, 32; mul.wide.u32 %d4, %r2, 4; add.s64 %d4, %d1, %d4; add.s64 %d5, %d5, %d2;
        mov.u32 %r3, %ctaid.x; setp.ne.u32 %p3, %r3, 0; @%p3 bra READER;
        add.u32 %r5, %r1, 100; st.global.u32 [%d3], %r5; {writer} ret;
        READER: {reader} ld.global.u32 %r6, [%d4]; st.global.u32 [%d5], %r6; ret;
    """


def is_clean(writer: str, reader: str, cluster: int = 1, options: Options | None = None) -> bool:
    flag, data, out = (aligned(np.zeros(n, np.uint32)) for n in (1, THREADS, THREADS))
    shape = {"grid": (2, 1, 1), "cluster": (cluster, 1, 1), "block": (THREADS, 1, 1), "options": options}
    try:
        launch(module(program(writer, reader), parameters=3), flag, data, out, hardware="CTA 1 does not wait", **shape)
    except GlobalMemoryRace:
        return False
    assert out.tolist() == [100 + (thread ^ 32) for thread in range(THREADS)]
    return True


@pytest.mark.parametrize("who", READERS)
@pytest.mark.parametrize("fence", FENCES)
@pytest.mark.parametrize("read", READS)
def test_who_reads_and_who_fences(read: str, fence: str, who: str) -> None:
    writer = WRITERS["the same thread"].format(fence=FENCES[fence] or FENCES["acq_rel"], write=WRITE)
    reader = READERS[who].format(read=READS[read], fence=FENCES[fence])
    by_itself = fence != "none" and who.startswith("the same thread")
    assert is_clean(writer, reader) == (read == "acquire" or by_itself or fence in SEQUENTIAL)


@pytest.mark.parametrize("who", WRITERS)
@pytest.mark.parametrize("reads", ["the same thread", "all, behind the barrier"])
@pytest.mark.parametrize(("fence", "other"), itertools.product(["acq_rel", "sc", "membar"], repeat=2))
def test_who_writes_and_who_fences(fence: str, other: str, reads: str, who: str) -> None:
    writer = WRITERS[who].format(fence=FENCES[fence], write=WRITE)
    reader = READERS[reads].format(read=READS["relaxed"], fence=FENCES[other])
    patterns = who == reads == "the same thread"
    assert is_clean(writer, reader) == (patterns or fence in SEQUENTIAL and other in SEQUENTIAL)


@pytest.mark.parametrize(
    ("write", "fence", "read", "clean"),
    [
        ("fence.acq_rel.gpu; st.relaxed.gpu", "fence.acq_rel.gpu;", "ld.relaxed.gpu.global.u32 %r4, [%d0];", True),
        ("fence.acq_rel.sys; st.volatile", "fence.acq_rel.sys;", "ld.relaxed.sys.global.u32 %r4, [%d0];", True),
        ("st.release.gpu", "fence.gpu;", "ld.volatile.global.u32 %r4, [%d0];", True),
        ("st.release.gpu", "fence.acquire.gpu;", "ld.relaxed.gpu.global.u32 %r4, [%d0];", True),
        ("st.release.gpu", "fence.release.gpu;", "ld.relaxed.gpu.global.u32 %r4, [%d0];", False),
        ("fence.acquire.gpu; st.relaxed.gpu", "fence.acq_rel.gpu;", "ld.relaxed.gpu.global.u32 %r4, [%d0];", False),
        ("fence.release.gpu; st.relaxed.gpu", "fence.acq_rel.gpu;", "ld.relaxed.gpu.global.u32 %r4, [%d0];", True),
        ("st.release.gpu", "membar.sys;", "atom.relaxed.gpu.global.or.b32 %r4, [%d0], 0;", True),
        ("st.release.gpu", "membar.gl;", "atom.global.cas.b32 %r4, [%d0], 7, 7;", True),
        ("st.release.gpu", "membar.gl;", "red.global.add.u32 [%d0], 1;", False),  # reads nothing
        ("st.release.gpu", "fence.acq_rel.cta;", "ld.relaxed.gpu.global.u32 %r4, [%d0];", False),
        ("st.release.gpu", "fence.acq_rel.cluster;", "ld.relaxed.gpu.global.u32 %r4, [%d0];", False),
        ("st.release.gpu", "membar.cta;", "ld.relaxed.gpu.global.u32 %r4, [%d0];", False),
        ("st.release.gpu", "fence.acq_rel.gpu;", "ld.relaxed.cta.global.u32 %r4, [%d0];", False),
        ("st.release.gpu", "fence.acq_rel.gpu;", "ld.relaxed.cluster.global.u32 %r4, [%d0];", False),
        ("st.release.cta", "fence.acq_rel.gpu;", "ld.relaxed.gpu.global.u32 %r4, [%d0];", False),
        ("st.release.cluster", "fence.acq_rel.gpu;", "ld.relaxed.gpu.global.u32 %r4, [%d0];", False),
        ("fence.acq_rel.cta; st.relaxed.gpu", "fence.acq_rel.gpu;", "ld.relaxed.gpu.global.u32 %r4, [%d0];", False),
        ("fence.acq_rel.cluster; st.relaxed.gpu", "", "ld.acquire.gpu.global.u32 %r4, [%d0];", False),
        ("fence.acq_rel.gpu; fence.acq_rel.cta; st.relaxed.gpu", "", "ld.acquire.gpu.global.u32 %r4, [%d0];", True),
        ("st.relaxed.gpu", "fence.sc.gpu;", "ld.relaxed.gpu.global.u32 %r4, [%d0];", False),
        ("st.release.gpu", "fence.acq_rel.gpu;", "ld.global.u32 %r4, [%d0];", False),  # weak: a race by itself
        ("fence.acq_rel.gpu; st", "", "ld.acquire.gpu.global.u32 %r4, [%d0];", False),
        ("st.release.gpu", "fence.proxy.async;", "ld.relaxed.gpu.global.u32 %r4, [%d0];", False),
    ],
)
def test_scopes_and_kinds(write: str, fence: str, read: str, clean: bool) -> None:
    """Both sides are by thread 0."""
    writer = WRITERS["the same thread"].format(fence="", write=f"{write}.global.u32 [%d0], 1;")
    assert is_clean(writer, READERS["the same thread"].format(read=read, fence=fence)) == clean


@pytest.mark.parametrize("fence", ["acq_rel", "sc"])
def test_a_fence_before_the_read_acquires_nothing(fence: str) -> None:
    writer = WRITERS["the same thread"].format(fence=FENCES["acq_rel"], write=WRITE)
    reader = f"@%p1 bra R; {FENCES[fence]} {READS['relaxed']} R: bar.sync 0;"
    assert not is_clean(writer, reader)


def test_what_one_thread_acquired_reaches_others_through_a_barrier_only() -> None:
    writer = WRITERS["the same thread"].format(fence=FENCES["acq_rel"], write=WRITE)
    for read in (READS["acquire"], READS["relaxed"] + FENCES["acq_rel"]):
        assert not is_clean(writer, f"bar.sync 0; @%p1 bra R; {read} R:")
        assert is_clean(writer, f"@%p1 bra R; {read} R: bar.sync 0;")


#: Each block adds to a counter; the last one adds up what all have stored, and other threads of it than stored it.
LAST_BLOCK = """
    ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; ld.param.u64 %d5, [p2]; mov.u32 %r1, %tid.x; mov.u32 %r3, %ctaid.x;
    setp.ne.u32 %p1, %r1, 0; mad.lo.u32 %r4, %r3, 64, %r1; mul.wide.u32 %d2, %r4, 4; add.s64 %d2, %d1, %d2;
    st.global.u32 [%d2], %r4; {all_before} bar.sync 0; @%p1 bra L;
    {before} atom.global.add.u32 %r5, [%d0], 1; st.shared.u32 [dynamic], %r5; {after}
    L: bar.sync 0; ld.shared.u32 %r5, [dynamic]; setp.ne.u32 %p2, %r5, 3; @%p2 bra E; {all_after}
    xor.b32 %r6, %r1, 33; mul.wide.u32 %d3, %r6, 4; add.s64 %d3, %d1, %d3; mov.u32 %r7, 0; mov.u32 %r8, 0;
    LOOP: ld.global.u32 %r9, [%d3]; add.u32 %r7, %r7, %r9; add.s64 %d3, %d3, 256; add.u32 %r8, %r8, 1;
    setp.lt.u32 %p3, %r8, 4; @%p3 bra LOOP; mul.wide.u32 %d4, %r1, 4; add.s64 %d4, %d5, %d4; st.global.u32 [%d4], %r7;
    E: ret;
"""
_ACQ_REL, _MEMBAR = FENCES["acq_rel"], FENCES["membar"]


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("schedule", [{}, {"interleave": "random", "completion": "random", "seed": 2}], ids=str)
@pytest.mark.parametrize(
    ("fences", "clean"),
    [
        ({"before": _MEMBAR, "after": _MEMBAR}, True),
        ({"before": _ACQ_REL, "after": _ACQ_REL}, True),
        ({"all_before": _MEMBAR, "all_after": _MEMBAR}, True),  # by Fence-SC order
        ({"all_before": _MEMBAR, "after": _MEMBAR}, True),
        ({"before": _MEMBAR, "all_after": _MEMBAR}, True),
        ({"all_before": _ACQ_REL, "all_after": _ACQ_REL}, False),
        ({"all_before": _MEMBAR, "all_after": _ACQ_REL}, False),
        ({"before": _MEMBAR}, False),
        ({"after": _MEMBAR}, False),
        ({"all_before": _MEMBAR}, False),
        ({}, False),
    ],
)
def test_reduction_by_the_last_block(fences: dict[str, str], clean: bool, schedule: dict, cluster: int) -> None:
    names = ("all_before", "before", "after", "all_after")
    text = module(LAST_BLOCK.format(**{name: fences.get(name, "") for name in names}), parameters=3)
    arrays = [aligned(np.zeros(n, np.uint32)) for n in (1, 256, 64)]
    shape = {"grid": (4, 1, 1), "cluster": (cluster, 1, 1), "block": (64, 1, 1), "options": Options(**schedule)}
    if not clean:
        with pytest.raises(GlobalMemoryRace):
            launch(text, *arrays, **shape)
        return
    launch(text, *arrays, **shape)
    stored = np.arange(256).reshape(4, 64).sum(axis=0)
    assert arrays[2].tolist() == stored[np.arange(64) ^ 33].tolist()
