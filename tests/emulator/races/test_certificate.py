"""The certificate: what it says is so, by brute force; what stands against it is named; each condition is needed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.races import meetings
from cute_kernels.emulator.races.certificate import ASSUMPTIONS
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module
from tests.emulator.ptx_launch import launch
from tests.emulator.races.interleavings import BYTES, Machine, Program, drawn, ptx_of
from tests.nightly import examples

STATES = 20_000


def run(program: Program, machine: Machine, options: Options) -> tuple[bool, tuple[int, ...]] | None:
    """Whether the launch has a certificate, and its result; None: something is reported."""
    words = aligned(np.zeros(1024 // 4 + BYTES // 4 * len(machine.codes), np.uint32))
    for number in range(len(machine.codes)):
        words[(1024 + BYTES * number) // 4] = number
    block = (32 * machine.warps, 1, 1)
    try:
        report = launch(module(ptx_of(program, machine), parameters=1), words, block=block, options=options)
    except EmulatorError:
        return None
    return report.certificate.given, tuple(words[: machine.warps].tolist())


def judged(seed: int) -> str:
    """What becomes of a program; asserts that no certificate is wrong, and that it does not depend on the run."""
    program = drawn(seed)
    machine = Machine(program)
    truth = machine.explore(STATES)
    if truth is None:
        return "too large"
    found = run(program, machine, Options())
    given = found is not None and found[0]
    if given:
        assert truth.sound and truth.results == {found[1]}, (seed, program, truth)
    if truth.sound and found is not None:
        assert found[1] in truth.results, (seed, program)
    for options in (Options(seed=seed, interleave="random"), Options(seed=seed, interleave="starve")):
        other = run(program, machine, options)
        assert (other is not None and other[0]) == given, (seed, program, options)
    hidden = not truth.sound and found is not None
    return "certified" if given else "sound, refused" if truth.sound else "hidden fault" if hidden else "fault"


@settings(max_examples=examples(140, 10_000), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_certificate_is_wrong(seed: int):
    judged(seed)


def test_the_programs_are_of_every_kind():
    """So that the test above says something: most sound programs have a certificate, and faults hide from one run."""
    counts = Counter(map(judged, range(60)))
    assert counts["certified"] >= 15 and counts["fault"] >= 10, counts
    assert counts["sound, refused"] <= counts["certified"] // 5, counts


def certificate(body: str, options: Options | None = None, **shape: object):
    words = aligned(np.zeros(256, np.uint32))
    body = f"{THREAD_OUTPUT} setp.ne.u32 %p9, %r1, 0; {body} END: ret;"
    return launch(module(body, parameters=1), words, options=options or Options(), **shape).certificate


IDLE = """mov.u32 %r8, %clock; IDLE: mov.u32 %r9, %clock; sub.u32 %r10, %r9, %r8; setp.lt.u32 %p3, %r10, 4;
    @%p3 bra IDLE;"""
INIT = "@%p9 bra READY; mbarrier.init.shared.b64 [dynamic], 1; READY: bar.sync 0;"
ARRIVE = "@%p9 bra SENT; mbarrier.arrive.shared.b64 {}, [dynamic]; SENT: bar.warp.sync -1;"
#: Bodies, and kinds of what stands against a certificate.
LOOK = INIT + ARRIVE.format("_") + "W: mbarrier.try_wait.parity.shared.b64 %p2, [dynamic], 0; "
JUDGED = {
    "nothing but arithmetic": ("st.global.u32 [%d1], %r1;", []),
    "a loop that waits for time": (IDLE, []),
    "a loop that counts how often it waits": (IDLE.replace("sub.u32", "add.u32 %r11, %r11, 1; sub.u32")
        + "st.global.u32 [%d1], %r11;", ["draw", "draw"]),
    "time that is stored": ("mov.u32 %r8, %clock; st.global.u32 [%d1], %r8;", ["draw"]),
    "time that a store reads": ("st.global.u32 [%d1], %clock;", ["draw"]),
    "a loop without a way out, which time chooses": ("mov.u32 %r8, %clock; setp.ne.u32 %p3, %r8, 0; @%p3 bra END; "
        "L: bra L;", ["draw"]),
    "a loop that looks at the time once": (
        "mov.u32 %r8, %clock; L: setp.gt.u32 %p3, %r8, 100000; @%p3 bra L;", ["draw"]),
    "a loop that may come too late": (IDLE.replace("setp.lt", "setp.gt").replace("10, 4", "10, 4000"), ["draw"] * 2),
    "a loop until a time before": (IDLE.replace("%r9, %r8", "%r8, %r9"), ["draw", "draw"]),
    "a loop that changes how long it waits": (IDLE.replace("setp.lt.u32", "add.u32 %r11, %r11, 1; setp.lt.u32").replace(
        "%r10, 4", "%r10, %r11"), ["draw", "draw"]),
    "a branch by the time of day": ("mov.u64 %d8, %globaltimer; mov.u32 %r9, 0; setp.gt.u64 %p3, %d8, 5; @%p3 bra A; "
        "mov.u32 %r9, 1; A: st.global.u32 [%d1], %r9;", ["draw"]),
    "an exit by time": ("mov.u32 %r8, %clock; setp.lt.u32 %p3, %r8, 30; @%p3 exit; st.global.u32 [%d1], 7;", ["draw"]),
    "a loop until a time of day": ("mov.u64 %d8, %globaltimer; add.u64 %d8, %d8, 9; L: mov.u64 %d9, %globaltimer; "
        "setp.le.u64 %p3, %d8, %d9; @!%p3 bra L;", []),
    "a wait whose way back may not end": (INIT + ARRIVE.format("_") + "mov.u32 %r8, 0; W: mbarrier.test_wait.parity"
        ".shared.b64 %p2, [dynamic], 0; @%p2 bra DONE; L: setp.eq.u32 %p3, %r8, 0; @%p3 bra L; bra W; DONE:",
        ["answer"]),
    "which multiprocessor it is": ("mov.u32 %r8, %smid; st.global.u32 [%d1], %r8;", ["draw"]),
    "a sum": ("red.global.add.f32 [%d0], 0f3F800000;", ["draw"]),
    "a ticket": ("atom.global.add.u32 %r8, [%d0], 1; st.global.u32 [%d1+128], %r8;", ["draw"]),
    "a strong load": ("ld.relaxed.gpu.global.u32 %r8, [%d0];", ["draw"]),
    "which lanes are together": ("activemask.b32 %r8; st.global.u32 [%d1], %r8;", ["draw"]),
    "a wait": (INIT + ARRIVE.format("_") +
        "W: mbarrier.try_wait.parity.shared.b64 %p2, [dynamic], 0; @!%p2 bra W;", []),
    "a wait that polls and sleeps": (INIT + ARRIVE.format("_") + "W: mbarrier.test_wait.parity.shared.b64 %p2, "
        "[dynamic], 0; @%p2 bra DONE; nanosleep.u32 20; bra W; DONE:", []),
    "a wait that a function of CUDA C++ makes": (
        LOOK + "selp.u32 %r8, 1, 0, %p2; setp.eq.s32 %p3, %r8, 0; @%p3 bra W; st.global.u32 [%d1], %r8;", []),
    "a wait by bits of its answer": (LOOK + "not.pred %p3, %p2; selp.b32 %r8, 3, 4, %p3; and.b32 %r8, %r8, 1; "
        "setp.ne.u32 %p3, %r8, 1; @!%p3 bra W;", []),
    "a wait for the other answer": (LOOK.replace(", 0;", ", 1;") + "selp.u32 %r8, 1, 0, %p2; setp.ne.s32 %p3, %r8, 0; "
        "@!%p3 bra D; setp.ne.u32 %p4, %r8, %r8; @%p4 bra W; D:", ["answer"]),
    "a wait whose answer is not looked at": (
        LOOK + "selp.u32 %r8, 1, 1, %p2; setp.eq.s32 %p3, %r8, 0; @%p3 bra W;", ["answer"]),
    "a wait by an answer that is not a number": (
        LOOK + "selp.f32 %r8, 0f3F800000, 0f7FC00000, %p2; setp.neu.f32 %p3, %r8, %r8; @%p3 bra W;", ["answer"]),
    "a wait by a predicate that is always false": (
        LOOK + "mov.pred %p3, -1; not.pred %p4, %p3; selp.u32 %r8, 1, 0, %p2; "
        "selp.u32 %r9, %r8, 1, %p4; setp.eq.s32 %p5, %r9, 0; @%p5 bra W;", ["answer"]),
    "a wait by the other side of such a one": (LOOK + "mov.pred %p3, -1; selp.u32 %r8, 1, 0, %p2; "
        "selp.u32 %r9, %r8, 1, !%p3; setp.eq.s32 %p5, %r9, 0; @%p5 bra W;", ["answer"]),
    "a wait by a decimal": (
        LOOK + "selp.f32 %r8, 0f3F800000, 1.0, %p2; setp.eq.b32 %p3, %r8, 0; @%p3 bra W;", ["answer"]),
    "a wait that counts in its block": ("mov.u32 %r9, 0; " + LOOK + "selp.u32 %r8, 1, 0, %p2; add.u32 %r9, %r9, 1; "
        "setp.eq.s32 %p3, %r8, 0; @%p3 bra W; st.global.u32 [%d1], %r9;", ["answer"]),
    "a wait that looks at the time": (LOOK + "selp.u32 %r8, 1, 0, %p2; mov.u32 %r9, %clock; setp.eq.s32 %p3, %r8, 0; "
        "@%p3 bra W; st.global.u32 [%d1], %r9;", ["answer", "draw"]),
    "a wait that counts": (INIT + ARRIVE.format("_") + "mov.u32 %r8, 0; W: mbarrier.try_wait.parity.shared.b64 %p2, "
        "[dynamic], 0; @%p2 bra DONE; add.u32 %r8, %r8, 1; bra W; DONE: st.global.u32 [%d1], %r8;", ["answer"]),
    "a wait that gives up": (INIT + ARRIVE.format("_") + "mov.u32 %r8, 0; W: mbarrier.try_wait.parity.shared.b64 %p2, "
        "[dynamic], 0; @%p2 bra END; add.u32 %r8, %r8, 1; setp.lt.u32 %p3, %r8, 9; @%p3 bra W;", ["answer"]),
    "a look": (INIT + ARRIVE.format("_") + "mbarrier.test_wait.parity.shared.b64 %p2, [dynamic], 0;", ["answer"]),
    "a state that is waited for": (INIT + "@%p9 bra END; mbarrier.arrive.shared.b64 %d4, [dynamic]; "
        "W: mbarrier.try_wait.shared.b64 %p2, [dynamic], %d4; @!%p2 bra W;", []),
    "a state that is stored": (INIT + "@%p9 bra END; mbarrier.arrive.shared.b64 %d4, [dynamic]; "
        "st.global.u64 [%d0], %d4;", ["answer"]),
    "what nobody classified": ("discard.global.L2 [%d0], 128;", ["unknown"]),
    "three of many at one line": ("red.global.inc.u32 [%d0], 1; red.global.inc.u32 [%d0], 2; "
        "red.global.inc.u32 [%d0], 3; red.global.inc.u32 [%d0], 4;", ["draw"] * 3),
    "what is not executed": ("setp.gt.u32 %p2, %r1, 99; @!%p2 bra END; red.global.inc.u32 [%d0], 1;", []),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGED)
def test_what_stands_against_it_is_named(name: str):
    body, kinds = JUDGED[name]
    found = certificate(body, block=(32, 1, 1))
    assert [place.kind for place in found.places] == kinds, found.lines()
    assert found.given == (not kinds) and found.for_draws == (set(kinds) == {"draw"})
    assert tuple(found.lines()[-2:]) == ASSUMPTIONS and all(place.line and place.instruction for place in found.places)


def test_a_run_that_cannot_be_judged_has_none():
    body = "st.global.u32 [%d1], %r1;"
    assert certificate(body, Options(detectors=False)) is None
    for options in (Options(without=("exits",)), Options(completion="lazy"), Options(clusters=(0,))):
        (place,) = certificate(body, options).places
        assert place.kind == "schedule"
    race = """setp.ge.u32 %p2, %r1, 32; @%p2 bra OTHER; st.global.u32 [%d0], %r1; bra END;
        OTHER: ld.global.u32 %r8, [%d0];"""
    (place,) = certificate(race, Options(going_on=lambda error: True), block=(64, 1, 1)).places
    assert (place.kind, place.text) == ("reported", "global-race was reported, and execution went on")


def test_registers_that_may_have_to_be_waited_for():
    """Who gives registers must not wait for who takes some."""
    entry = ".maxnreg 64 .reqntid 256"
    take, give = "setmaxnreg.inc.sync.aligned.u32 88;", "setmaxnreg.dec.sync.aligned.u32 40;"
    halves = "setp.ge.u32 %p2, %r1, 128; @%p2 bra OTHER; {} bra END; OTHER: {}"
    for first, other, kinds in (
        (take, give, []),
        (f"{take} bar.arrive 1, 256;", f"{give} bar.sync 1, 256;", []),
        (f"{give} {take.replace('88', '64')}", give, ["pool"] * 1),
    ):
        body = f"{THREAD_OUTPUT} {halves.format(first, other)} END: ret;"
        words = aligned(np.zeros(256, np.uint32))
        text = module(body, parameters=1, entry=entry, target="sm_90a")
        found = launch(text, words, block=(256, 1, 1)).certificate
        assert [place.kind for place in found.places] == kinds, found.lines()


SUMS = "setp.ge.u32 %p2, %r1, 32; @%p2 bra OTHER; {} bra MEET; OTHER: {} MEET: bar.sync 0; {}"
ADD = "red.relaxed.gpu.global.add.u32 [%d0], 5;"
#: What warp 0 does, warp 1, and all behind a barrier; whether their order decides nothing.
COMMUTING = {
    "sums": (ADD, ADD.replace("u32", "s32"), "", True),
    "sums of which the results are not used": (ADD, "atom.relaxed.gpu.global.add.u32 %r9, [%d0], 7;", "", True),
    "and what they come to": (ADD, ADD, "ld.global.u32 %r8, [%d0]; st.global.u32 [%d1+128], %r8;", True),
    "at other places": (ADD, "red.relaxed.gpu.global.max.u32 [%d0+4], 7;", "", True),
    "a result that is used": (
        ADD, "atom.relaxed.gpu.global.add.u32 %r9, [%d0], 7; st.global.u32 [%d1], %r9;", "", False),
    "a sum and a maximum": (ADD, "red.relaxed.gpu.global.max.u32 [%d0], 7;", "", False),
    "maxima of two types": (
        "red.relaxed.gpu.global.max.u32 [%d0], 8;", "red.relaxed.gpu.global.max.s32 [%d0], 7;", "", False),
    "a sum and what it goes on in": (ADD.replace("[%d0]", "[%d0+4]"), ADD.replace("u32", "u64"), "", False),
    "a strong load beside a sum": (ADD, "ld.relaxed.gpu.global.u32 %r8, [%d0]; st.global.u32 [%d1], %r8;", "", False),
    "a strong store behind a sum": (ADD, ADD, "st.relaxed.gpu.global.u32 [%d0], 1;", False),
    "sums of floats": (ADD.replace("u32", "f32").replace("5", "0f3F800000"), "", "", False),
    "counts that wrap": ("red.relaxed.gpu.global.inc.u32 [%d0], 5;", "", "", False),
    "a sum of a time": ("mov.u32 %r8, %clock; red.relaxed.gpu.global.add.u32 [%d0], %r8;", "", "", False),
}  # fmt: skip


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("name", COMMUTING)
def test_atomic_operations_whose_order_decides_nothing_are_no_draws(name: str, space: str):
    *parts, commute = COMMUTING[name]
    body = SUMS.format(*parts)
    if space == "shared":
        body = body.replace("gpu.global", "cta.shared").replace("ld.global", "ld.shared").replace("[%d0", "[dynamic")
        made = "setp.ne.u32 %p3, %r1, 0; @!%p3 st.shared.v2.u32 [dynamic], {%r1, %r1}; bar.sync 0;"
        body = f"{made} {body}"
    for how in ("round_robin", "starve"):
        options = Options(interleave=how)
        found = certificate(f"add.u64 %d1, %d1, 256; {body}", options, block=(64, 1, 1), dynamic_smem=4096)
        assert found.given == commute, found.lines()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("body, commute", [
    (ADD, True),
    (f"""mov.u32 %r4, %ctaid.x; setp.ne.u32 %p2, %r4, 3; {ADD}
     @!%p2 ld.relaxed.gpu.global.u32 %r8, [%d0]; @!%p2 st.global.u32 [%d1+128], %r8;""", False),
])  # fmt: skip
def test_atomic_operations_of_clusters(body: str, commute: bool, processes: int):
    """Of all of them, whichever process executes them, and one that comes last."""
    assert certificate(body, Options(processes=processes), grid=(4, 1, 1)).given == commute


def test_more_places_than_are_kept_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meetings, "_MOST_CELLS", 31)
    body = "red.relaxed.gpu.global.add.u32 [%d1], 1;"
    for threads, commute in ((31, True), (32, False)):
        assert certificate(body, block=(threads, 1, 1)).given == commute
