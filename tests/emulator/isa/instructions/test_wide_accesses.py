"""Loads and stores of 128 bits: values in every space, what the detectors see of them, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import Options, Report
from cute_kernels.emulator.errors import (
    EmulatorError,
    GlobalMemoryRace,
    IllegalAccess,
    SharedMemoryRace,
    UnsupportedPTX,
)
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

#: %d3 and %d4: this thread's 16 bytes of p0 and of p1; %r3: those of shared memory, %d5 their generic address.
HEAD = """.reg .b128 %q<4>; mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1];
    mul.wide.u32 %d3, %r1, 16; add.s64 %d4, %d2, %d3; add.s64 %d3, %d1, %d3;
    mov.u32 %r2, dynamic; mad.lo.u32 %r3, %r1, 16, %r2; cvt.u64.u32 %d5, %r3; cvta.shared.u64 %d5, %d5;
    setp.lt.u32 %p1, %r1, 20;
"""
LOAD, STORE = "ld.global.b128 %q1, [%d3];", "st.global.b128 [%d4], %q1;"


def moved(body: str, threads: int = 32, options: Options | None = None, head: str = "") -> tuple[np.ndarray, ...]:
    """(16 bytes of each thread before, those after) where ``body`` moves them from p0 to p1."""
    before = aligned(np.random.default_rng(3).integers(0, 1 << 32, (threads, 4), np.uint32))
    after = aligned(np.zeros((threads, 4), np.uint32))
    text = module(HEAD + body + " ret;", head=head)
    launch(text, before, after, block=(threads, 1, 1), dynamic_smem=2048, options=options or Options())
    return before, after


@pytest.mark.parametrize("load", [
    LOAD, "ld.b128 %q1, [%d3];", "ld.global.nc.b128 %q1, [%d3];", "ld.relaxed.gpu.global.b128 %q1, [%d3];",
    "ld.acquire.sys.global.b128 %q1, [%d3];", "ld.volatile.global.b128 %q1, [%d3];", "ldu.global.b128 %q1, [%d3];",
    "ld.global.L1::no_allocate.L2::128B.b128 %q1, [%d3];", "add.s64 %d3, %d3, -64; ld.global.b128 %q1, [%d3+64];",
])  # fmt: skip
@pytest.mark.parametrize("store", [
    STORE, "st.b128 [%d4], %q1;", "st.release.gpu.global.b128 [%d4], {%q1};", "st.volatile.global.b128 [%d4], %q1;",
    "mov.b128 {%r4, %r5, %r6, %r7}, %q1; mov.b64 %d6, {%r4, %r5}; mov.b64 %d7, {%r6, %r7}; mov.b128 %q2, {%d6, %d7};"
    "mov.b128 %q3, %q2; st.global.b128 [%d4], %q3;",
])  # fmt: skip
def test_global_memory(load: str, store: str) -> None:
    before, after = moved(load + store)
    assert np.array_equal(before, after)


@pytest.mark.parametrize("through", [
    "st.shared.b128 [%r3], %q1; ld.shared.b128 %q2, [%r3];",
    "st.b128 [%d5], %q1; ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3];"
    "mov.b64 %d6, {%r4, %r5}; mov.b64 %d7, {%r6, %r7}; mov.b128 %q2, {%d6, %d7};",
    "st.shared::cluster.b128 [%r3], %q1; ld.b128 %q2, [%d5];",
    ".local .align 16 .b8 own[64]; mov.u64 %d6, own; st.local.b128 [%d6+16], %q1; ld.local.b128 %q2, [own+16];",
])  # fmt: skip
def test_shared_and_local_memory(through: str) -> None:
    before, after = moved(LOAD + through + "st.global.b128 [%d4], %q2;", 64)
    assert np.array_equal(before, after)


def test_lanes_that_are_off_keep_their_registers() -> None:
    body = LOAD + "mov.b128 %q2, %q1; @%p1 ld.global.b128 %q2, [%d1]; st.global.b128 [%d4], %q2;"
    before, after = moved(body)
    assert np.array_equal(after, np.concatenate((np.repeat(before[:1], 20, 0), before[20:])))


@pytest.mark.parametrize(("load", "source"), [
    ("ld.global.b128 %q1, [%d1+32];", "p0"), ("ld.const.b128 %q1, [table+16];", "table"),
    ("ld.global.b128 %q1, [%d1+32]; @%p1 st.shared.b128 [dynamic], %q1; bar.warp.sync -1;"
     "ld.shared.b128 %q1, [dynamic];", "p0"),
])  # fmt: skip
def test_one_address_of_all_lanes(load: str, source: str) -> None:
    table = np.arange(8, dtype=np.uint32)
    head = f".const .align 16 .u32 table[8] = {{{', '.join(map(str, table))}}};\n"
    before, after = moved(load + STORE, head=head)
    assert (after == (before[2] if source == "p0" else table[4:])).all()


def test_parameters() -> None:
    given, out = np.arange(4, dtype=np.uint32), aligned(np.zeros((32, 4), np.uint32))
    text = module(HEAD.replace("ld.param.u64 %d1, [p0]", "ld.param.b128 %q1, [p0]") + STORE + " ret;")
    launch(text.replace(".param .u64 p0", ".param .align 16 .b8 p0[16]"), given.tobytes(), out)
    assert (out == given).all()


@pytest.mark.parametrize(("body", "kind", "words"), [
    ("ld.global.b128 %q1, [%d3+8];", IllegalAccess, "misaligned"),
    ("ld.global.b128 %q1, [%d1+8];", IllegalAccess, "misaligned"),
    (LOAD + "st.global.b128 [%d4+4], %q1;", IllegalAccess, "misaligned"),
    (LOAD + "st.shared.b128 [%r3+8], %q1;", IllegalAccess, "misaligned"),
    ("ld.shared.b128 %q1, [%r3];", IllegalAccess, "uninitialised"),
    (LOAD + "st.shared.b128 [%r3+4096], %q1;", IllegalAccess, "leaves its"),
    ("mov.b128 %q1, {%d1, %d2}; mov.u32 %r9, 3; shr.u32 %r8, %r1, 5; shl.b32 %r8, %r8, 3; add.u32 %r4, %r2, %r8;"
     "st.shared.b128 [dynamic], %q1; setp.ge.u32 %p2, %r1, 32; @%p2 st.shared.u32 [dynamic+12], %r9;",
     SharedMemoryRace, "st.shared"),
    ("mov.b128 %q1, {%d1, %d2}; setp.ge.u32 %p2, %r1, 32; @%p2 ld.global.u32 %r9, [%d2+12];"
     "@!%p2 st.global.b128 [%d2], %q1;",
     GlobalMemoryRace, "b128"),
])  # fmt: skip
def test_faults_are_reported(body: str, kind: type[EmulatorError], words: str) -> None:
    with pytest.raises(kind, match=words):
        moved(body, 64)


@pytest.mark.parametrize("body", ["ld.global.v2.b128 {%q1, %q2}, [%d3];", "st.global.v2.b128 [%d3], {%q1, %q2};"])
def test_there_are_no_vectors_of_128_bits(body: str) -> None:
    with pytest.raises(UnsupportedPTX, match="qualifier .v2 does not exist here"):
        moved(body)


def test_a_load_into_braces_is_refused() -> None:
    """ptxas 13.0 takes it, and an H100 then has the first 8 bytes twice."""
    with pytest.raises(UnsupportedPTX, match="must be a register of type .b128"):
        moved("ld.global.b128 {%q1}, [%d3];" + STORE)


def test_they_cost_what_vectors_of_four_cost() -> None:
    """Bank conflicts and sectors do not depend on how the 16 bytes of a lane are named."""
    wide = LOAD + "mad.lo.u32 %r4, %r1, 32, %r2; st.shared.b128 [%r4], %q1; ld.shared.b128 %q1, [%r4];" + STORE
    vector = wide.replace(".b128", ".v4.u32").replace("%q1", "{%r10, %r11, %r12, %r13}")

    def units(body: str) -> list[object]:
        before, after = (aligned(np.ones((32, 4), np.uint32)) for _ in range(2))
        report: Report = launch(module(HEAD + body + " ret;"), before, after, options=Options(counters=True))
        assert (after == 1).all()
        return [[value for value in row if not (isinstance(value, str) and "128" in value or "v4" in str(value))]
                for row in report.units.rows()]  # fmt: skip

    counted = units(wide)
    assert counted == units(vector) and counted
