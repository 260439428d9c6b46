"""Loads of one address by all lanes that execute: values, races, refusals, the same from core and Python."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError, GlobalMemoryRace, IllegalAccess, SharedMemoryRace
from cute_kernels.emulator.programs.recorded import guarded
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

HEAD = """
mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1];
and.b32 %r3, %r1, 31; shr.u32 %r4, %r1, 5; mul.lo.u32 %r5, %r1, 3; add.u32 %r5, %r5, 7;
mov.u32 %r10, 0; mov.u32 %r11, 0; mov.u32 %r12, 0; mov.u32 %r13, 0;
"""
END = """
add.u32 %r10, %r10, %r11; add.u32 %r10, %r10, %r12; add.u32 %r10, %r10, %r13;
mul.wide.u32 %d3, %r1, 4; add.s64 %d3, %d2, %d3; st.global.u32 [%d3], %r10; ret;
"""
#: Warp 1, lane by lane, to 32 words.
STORES = {
    "shared": "setp.eq.u32 %p1, %r4, 1; mad.lo.u32 %r6, %r3, 4, %r2; @%p1 st.shared.u32 [%r6], %r5;\n",
    "global": "setp.eq.u32 %p1, %r4, 1; mul.wide.u32 %d4, %r3, 4; add.s64 %d4, %d1, %d4;\n"
    "@%p1 st.global.u32 [%d4], %r5;\n",
}
PLACE = {"shared": "%r2", "global": "%d1"}
ROWS = [7 + 3 * (32 + lane) for lane in range(32)]  # that warp 1 stores


def outcome(body: str, detectors: bool = True) -> tuple[type | None, str, list[int]]:
    """(kind of the error, its words without addresses, what each thread loaded) of two warps."""
    memory, out = guarded(256, 128).view(np.uint32), aligned(np.zeros(64, np.uint32))  # nothing is 400 bytes behind it
    memory[:] = 0
    options, text = Options(detectors=detectors), module(HEAD + body + END, parameters=2)
    try:
        launch(text, memory, out, block=(64, 1, 1), dynamic_smem=1024, options=options)
    except EmulatorError as error:
        return type(error), re.sub(r"0x[0-9a-f]{6,}", "..", str(error)), []  # which stores were first is left open
    return None, "", out.tolist()


@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize(("load", "registers", "expected"), [
    ("u32", "%r10", ROWS[4]), ("u8", "%r10", ROWS[4] & 255), ("u16", "%r10", ROWS[4] & 0xFFFF),
    ("v2.u32", "{%r10, %r11}", sum(ROWS[4:6])), ("v4.u32", "{%r10, %r11, %r12, %r13}", sum(ROWS[4:8])),
])  # fmt: skip
def test_values_and_races(space: str, load: str, registers: str, expected: int) -> None:
    race = {"shared": SharedMemoryRace, "global": GlobalMemoryRace}[space]
    read = f"ld.{space}.{load} {registers}, [{PLACE[space]}+16];\n"
    assert outcome(STORES[space] + "bar.sync 0;\n" + read) == (None, "", [expected] * 64)
    # Warp 0 has filled the words; warp 1 stores while both load.
    fill = STORES[space].replace("%r4, 1", "%r4, 0") + "bar.sync 0;\n"
    kind, words, _ = outcome(fill + STORES[space] + read)
    assert kind is race and f"ld.{space}.{load}" in words
    kind, words, _ = outcome(fill + read + STORES[space])
    assert kind is race
    assert outcome(fill + read + "bar.sync 0;\n" + STORES[space])[0] is None


@pytest.mark.parametrize("sync", ["", "bar.warp.sync -1;\n"])
@pytest.mark.parametrize(("lanes", "own"), [("eq.u32 %p2, %r3, 4", True), ("eq.u32 %p2, %r3, 5", False)])
def test_a_single_lane_knows_its_own_stores(lanes: str, own: bool, sync: str) -> None:
    """One lane that loads what it stored itself needs no synchronisation; for another lane's store it needs some."""
    read = f"setp.{lanes}; @%p2 ld.shared.u32 %r10, [%r2+16];\n"
    body = STORES["shared"] + sync + "setp.eq.u32 %p3, %r4, 0; @%p3 bra DONE;\n" + read + "DONE:\n"
    kind, _, loaded = outcome(body)
    assert kind is (None if own or sync else SharedMemoryRace)
    if kind is None:
        place = 32 + (4 if own else 5)
        assert loaded == [ROWS[4] if thread == place else 0 for thread in range(64)]


@pytest.mark.parametrize("sync", ["", "bar.warp.sync -1;\n"])
def test_what_one_lane_stored_all_lanes_need_synchronisation_for(sync: str) -> None:
    """Also where the lane is the first of those that load, and the place has been loaded from before."""
    before = STORES["shared"] + "bar.warp.sync -1;\nld.shared.u32 %r11, [%r2];\nbar.warp.sync -1;\nmov.u32 %r11, 0;\n"
    store = "setp.eq.u32 %p2, %r3, 0; @%p2 st.shared.u32 [%r2], %r5;\n"
    body = "setp.eq.u32 %p3, %r4, 0; @%p3 bra DONE;\n" + before + store + sync + "ld.shared.u32 %r10, [%r2];\nDONE:\n"
    kind, _, loaded = outcome(body)
    assert kind is (None if sync else SharedMemoryRace)
    if sync:
        assert loaded == [0] * 32 + [ROWS[0]] * 32


@pytest.mark.parametrize(("read", "words"), [
    ("ld.shared.u32 %r10, [%r2+2000];", "leaves its 2048 bytes"),
    ("ld.shared.v2.u32 {%r10, %r11}, [%r2+4];", "misaligned"),
    ("ld.shared.u32 %r10, [%r2+64];", "uninitialised"), ("ld.global.u32 %r10, [%d1+400];", "outside"),
    ("ld.global.u32 %r10, [%d1+2];", "misaligned"),
])  # fmt: skip
def test_refusals(read: str, words: str) -> None:
    kind, text, _ = outcome(read)
    assert kind is IllegalAccess and words in text
