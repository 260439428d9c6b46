"""cp.async: it leaves in memory what the PTX ISA says, or a report names what is wrong, whenever copies take effect.

Two warps: one copies, commits and waits as a drawn script says, then both read all of shared memory. Where the script
is a sound program the result is known by other means.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import Options, Report
from cute_kernels.emulator.errors import EmulatorError, UnsupportedPTX
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch
from tests.nightly import examples

LANES, SLOT, BYTES = 32, 16, 2048  # pieces of shared memory, of which a copy has some
SOURCE = 4096


@dataclass(frozen=True)
class Copy:
    """One instruction: slots that lanes write, offsets that they read from, bytes that they read; who executes."""

    nbytes: int
    slots: tuple[int, ...]
    sources: tuple[int, ...]
    counts: tuple[int, ...]
    mask: int = 2**LANES - 1
    offset: int = 0  # added to every target

    @property
    def lanes(self) -> list[int]:
        return [lane for lane in range(LANES) if self.mask >> lane & 1]


@dataclass(frozen=True)
class Script:
    """Copies, each with whether a group is committed behind it; ``waits``: what stands behind all of them."""

    copies: tuple[tuple[Copy, bool], ...]
    waits: str = "cp.async.wait_all;"
    barrier: bool = True
    store: bool = False  # the copying warp has written its source itself
    options: Options = field(default_factory=lambda: Options(counters=True))

    def text(self) -> str:
        lines = []
        for number, (copy, commit) in enumerate(self.copies):
            lines.append(f"""
            mad.lo.u32 %r5, %r1, 16, {512 * number}; cvt.u64.u32 %d4, %r5; add.s64 %d4, %d2, %d4;
            ld.global.v4.u32 {{%r6, %r7, %r8, %r9}}, [%d4];
            add.u32 %r6, %r6, %r2; cvt.s64.s32 %d5, %r7; add.s64 %d5, %d1, %d5; setp.ne.u32 %p1, %r9, 0;
            @%p1 cp.async.{"cg" if copy.nbytes == 16 else "ca"}.shared.global [%r6], [%d5], {copy.nbytes}, %r8;""")
            lines.append("cp.async.commit_group;" if commit else "")
        store = "mad.lo.u32 %r5, %r1, 4, 0; cvt.u64.u32 %d4, %r5; add.s64 %d4, %d1, %d4; st.global.u32 [%d4], %r1;"
        return module(
            f"""
            mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1];
            ld.param.u64 %d3, [p2]; setp.ge.u32 %p2, %r1, 32;
            shl.b32 %r3, %r1, 5; add.u32 %r4, %r2, %r3; mov.u32 %r5, 0x5a5a5a5a;
            st.shared.v4.u32 [%r4], {{%r5, %r5, %r5, %r5}}; st.shared.v4.u32 [%r4+16], {{%r5, %r5, %r5, %r5}};
            bar.sync 0;
            @%p2 bra READ;
            {store if self.store else ""}{"".join(lines)}
            {self.waits}
            READ:
            {"bar.sync 0;" if self.barrier else ""}
            ld.shared.v4.u32 {{%r5, %r6, %r7, %r8}}, [%r4]; ld.shared.v4.u32 {{%r9, %r10, %r11, %r12}}, [%r4+16];
            cvt.u64.u32 %d4, %r3; add.s64 %d3, %d3, %d4;
            st.global.v4.u32 [%d3], {{%r5, %r6, %r7, %r8}}; st.global.v4.u32 [%d3+16], {{%r9, %r10, %r11, %r12}};
            ret;""",
            parameters=3,
        )

    def tables(self) -> np.ndarray:
        rows = np.zeros((max(len(self.copies), 1), LANES, 4), np.int32)
        for number, (copy, _) in enumerate(self.copies):
            for lane in range(LANES):
                executes = copy.mask >> lane & 1
                target = SLOT * copy.slots[lane] + copy.offset
                rows[number, lane] = target, copy.sources[lane], copy.counts[lane], executes
        return rows

    def expected(self, source: np.ndarray) -> np.ndarray:
        memory = np.full(BYTES, 0x5A, np.uint8)
        for copy, _ in self.copies:
            for lane in copy.lanes:
                start, count = SLOT * copy.slots[lane] + copy.offset, copy.counts[lane]
                memory[start : start + copy.nbytes] = 0
                memory[start : start + count] = source[copy.sources[lane] : copy.sources[lane] + count]
        return memory


SOURCE_BYTES = np.random.default_rng(3).integers(0, 256, SOURCE, np.uint8)


def run(script: Script) -> tuple[np.ndarray | None, str, Any]:
    """What shared memory holds, or the words of the report; counts of the units."""
    out = aligned(np.zeros(BYTES, np.uint8))
    try:
        report: Report = launch(
            script.text(), aligned(SOURCE_BYTES), aligned(script.tables()), out,
            block=(64, 1, 1), dynamic_smem=BYTES, options=script.options,
            hardware="programs with and without races",
        )  # fmt: skip
    except EmulatorError as error:
        return None, re.sub("0x[0-9a-f]+", "an address", str(error)), None
    return out, "", report.units and (report.units.units, report.units.instructions)


@st.composite
def copies(draw: st.DrawFn, slots: range) -> Copy:
    nbytes = draw(st.sampled_from([4, 8, 16]))
    order = draw(st.permutations(slots))[:LANES]
    one = draw(st.booleans())
    sources = [nbytes * i for i in draw(st.lists(st.integers(0, SOURCE // nbytes - 1), min_size=LANES, max_size=LANES))]
    counts = [nbytes] * LANES if one else draw(st.lists(st.integers(0, nbytes), min_size=LANES, max_size=LANES))
    mask = draw(st.sampled_from([2**LANES - 1, 0, 1, 0xFFFF0000]) | st.integers(0, 2**LANES - 1))
    return Copy(nbytes, tuple(order), tuple(sources), tuple(counts), mask)


@settings(max_examples=examples(25, 600), deadline=None)
@given(first=copies(range(0, 48)), second=copies(range(48, 128)), commit=st.booleans())
def test_sound_programs(first: Copy, second: Copy, commit: bool) -> None:
    """Whole and partial copies by any lanes, of which each has a place of its own."""
    waits = "cp.async.wait_group 0;" if commit else "cp.async.wait_all;"
    script = Script(((first, False), (second, commit)), waits)
    out, words, _ = run(script)
    assert not words and np.array_equal(out, script.expected(SOURCE_BYTES))


WHOLE = Copy(16, tuple(range(LANES)), tuple(16 * i for i in range(LANES)), (16,) * LANES)
BEHIND = Copy(16, tuple(range(64, 96)), tuple(16 * i for i in range(LANES)), (16,) * LANES)
NOWHERE = (1 << 30,) * LANES
GROUPS = ((WHOLE, True), (BEHIND, True))


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (Script(GROUPS, "cp.async.wait_group 1;"), "reads .* which the cp.async of CTA 0 warp 0 wrote"),
        (Script(GROUPS, ""), "reads .* which the cp.async of CTA 0 warp 0 wrote"),
        (Script(GROUPS, barrier=False), "cp.async of CTA 0 warp 0|warp 0 writes"),
        (Script(((WHOLE, True), (WHOLE, True))), "writes .* which the cp.async of CTA 0 warp 0 wrote"),
        (Script(((Copy(16, (5,) * LANES, WHOLE.sources, WHOLE.counts), True),)), ""),
        (Script(((Copy(16, WHOLE.slots, WHOLE.sources, (17,) * LANES), True),)), "src-size of 17"),
        (Script(((Copy(16, WHOLE.slots, (8,) * LANES, WHOLE.counts), True),)), "not multiples of 16"),
        (Script(((Copy(8, WHOLE.slots, WHOLE.sources, (8,) * LANES, offset=4), True),)), "not multiples of 8"),
        (Script(((Copy(16, WHOLE.slots, (SOURCE,) * LANES, WHOLE.counts), True),)), "outside every registered region"),
        (Script(((Copy(16, (128,) * LANES, WHOLE.sources, WHOLE.counts), True),)), "leaves|beyond|outside"),
        (Script(((Copy(16, WHOLE.slots, NOWHERE, (0,) * LANES), True),)), ""),
        (Script(((Copy(16, WHOLE.slots, NOWHERE, (0, *[8] * (LANES - 1))), True),)), "global load of 8 bytes"),
        (Script(((WHOLE, True),), store=True), "a load of CTA 0 warp 0 reads .* which the store"),
    ],
)  # fmt: skip
def test_what_is_reported(script: Script, expected: str) -> None:
    """Missing waits and barriers, sizes, places."""
    _, words, _ = run(script)
    assert bool(words) == bool(expected) and re.search(expected, words)


@example(waits="cp.async.wait_group 1;", commits=(True, True), barrier=True, completion="random")
@settings(max_examples=examples(15, 300), deadline=None)
@given(
    waits=st.sampled_from(["cp.async.wait_all;", "cp.async.wait_group 0;", "cp.async.wait_group 1;", ""]),
    commits=st.tuples(st.booleans(), st.booleans()),
    barrier=st.booleans(),
    completion=st.sampled_from(["eager", "lazy", "random"]),
)
def test_any_schedule(waits: str, commits: tuple[bool, bool], barrier: bool, completion: Any) -> None:
    """A race is found whenever copies take effect."""
    script = Script(
        ((WHOLE, commits[0]), (BEHIND, commits[1])), waits, barrier, options=Options(completion=completion, seed=1)
    )
    sound = barrier and (waits == "cp.async.wait_all;" or (waits == "cp.async.wait_group 0;" and commits[1]))
    assert bool(run(script)[1]) != sound


def test_groups_beyond_those_that_are_kept_are_refused() -> None:
    arrays = [aligned(np.zeros(BYTES, np.uint8)) for _ in range(3)]
    with pytest.raises(UnsupportedPTX, match="64 groups"):
        launch(Script(GROUPS, "cp.async.wait_group 64;").text(), *arrays, block=(64, 1, 1), dynamic_smem=BYTES)
