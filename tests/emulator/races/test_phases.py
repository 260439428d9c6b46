"""Which phase an arrival, a copy's bytes or a lane's wait belongs to must not depend on the schedule.

Each fault beside a sound twin, among them public bugs that no schedule of the emulator shows: it runs the lanes of a
warp together, and copies early or late.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import BarrierMisuse, EmulatorError
from cute_kernels.emulator.races.certificate import Certificate
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch
from tests.emulator.public_bugs import BARRIERS, wait

SCHEDULES = [Options(), Options(completion="lazy"), *(Options(seed=seed, interleave="starve") for seed in range(3))]
MARK = re.compile(r"<<(.*?)(?:\|(.*?))?>>", re.S)
END = "END: ret;"
SETUP = f"{BARRIERS} bar.sync 0; @%p1 bra OTHER;"  # warp 0 goes on, warp 1 is OTHER
ARRIVE = "mbarrier.arrive.shared.b64 _, [{}];"
COPY = """cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [%d0], 128, [dynamic];"""
FULL, EMPTY = "dynamic", "dynamic+8"


def one(text: str, label: str) -> str:
    """What one lane of its warp does."""
    return f"@%p8 bra {label}; {text} {label}:"


def turns(count: int, text: str) -> str:
    """As often, with the turn for %t, and its parity and the other one."""
    values = ({"%t": t, "%q": t & 1, "%o": t & 1 ^ 1} for t in range(count))
    return " ".join(re.sub("%[tqo]", lambda match, each=each: str(each[match[0]]), text) for each in values)


#: The other warp goes on meanwhile, under these schedules.
LATER = "mov.u32 %r20, 30000; SPIN: sub.u32 %r20, %r20, 1; setp.ne.u32 %p3, %r20, 0; @%p3 bra SPIN;"
FILL = one(f"mbarrier.arrive.expect_tx.shared.b64 _, [{FULL}], 128; {COPY.format('dynamic+1024')}", "FILLED%t")
DRAIN = f"""{wait("FULL%t", FULL, "%q")} ld.shared.u32 %r20, [%r5+-128]; bar.warp.sync -1;
    {one(ARRIVE.format(EMPTY), "DRAINED%t")}"""
PASS = f"""{wait("GATE%t", FULL, "%o")} <<bar.warp.sync -1; {one(ARRIVE.format(EMPTY), "PASSED%t")}>>"""
OPEN = f"""<<{wait("LOADED%t", EMPTY, "%q")} bar.warp.sync -1;>> {one(ARRIVE.format(FULL), "OPEN%t")}"""
#: Per fault: its kind, what the report says, the kernel: the sound form and the faulty one between marks.
FAULTS = {
    # flashinfer #3700: a group arrives for the next tile although the other has not taken the one before.
    "flashinfer#3700": (
        "arrival-early",
        r"arrival by CTA 0 warp 0 for phase 1 of named barrier 1 of CTA 0 may be counted in phase 0: nothing orders it "
        r"after that CTA 0 warp 1 arrives at PTX line \d+",
        f"""{SETUP} bar.arrive 1, 64; bar.arrive <<2|1>>, 64; bra END;
        OTHER: bar.sync 1, 64; bar.sync <<2|1>>, 64; {END}""",
    ),
    # cutlass #3654: the lane that was elected before the wait goes on and loads, whether the others have waited or not.
    "cutlass#3654": (
        "lanes-overtaken",
        r"phase 0 of the mbarrier at shared offset 1032 .* some lanes of CTA 0 warp 0, which another lane of it",
        f"""{SETUP} {turns(2, f'{wait("EMPTY%t", EMPTY, "%o")} <<bar.warp.sync -1;>> {FILL}')} bra END;
        OTHER: {turns(2, DRAIN)} {END}""",
    ),
    # cudnn-frontend #575: without tiles nothing orders the arrivals at the gate behind the waits for it.
    "cudnn-frontend#575": (
        "phase-ambiguous",
        "CTA 0 warp 0 waits for phase 1 of the mbarrier .* nothing orders that after phase 0",
        f"""{SETUP} {turns(3, PASS)} bra END; OTHER: {turns(2, OPEN)} {END}""",
    ),
    # A second arrival, by a warp that does not know that the first phase is complete.
    "arrival at an mbarrier": (
        "arrival-early",
        r"arrival by CTA 0 warp . for phase 1 of the mbarrier at .* may be counted in phase 0: .* CTA 0 warp . arrives",
        f"""{SETUP} {one(ARRIVE.format(FULL), "FIRST")} {one(ARRIVE.format(EMPTY), "TOLD")} bra END;
        OTHER: <<{wait("TELLS", EMPTY)} bar.warp.sync -1;>> {one(ARRIVE.format(FULL), "SECOND")} {END}""",
    ),
    # A copy and its announcement by a warp that does not wait for the phase before.
    "bytes of a copy": (
        "bytes-early",
        r"expect_tx by CTA 0 warp 0 for phase 1 .* may be counted in phase 0: .* CTA 0 warp 1",
        f"""{SETUP} <<bar.sync 1, 64;|{LATER}>>
        {one(f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{FULL}], 128; {COPY.format('dynamic+1024')} "
             + ARRIVE.format(FULL), "SENT")} bra END;
        OTHER: {one(ARRIVE.format(FULL), "FIRST")} <<bar.sync 1, 64;>> {wait("SEEN", FULL, 1)} {END}""",
    ),
    # One warp announces bytes, the other makes the only arrival.
    "an announcement by itself": (
        "announced-late",
        "CTA 0 warp 0 announces what phase 0 of the mbarrier at .* no arrival in the phase is ordered after that",
        f"""{SETUP} {one(f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{FULL}], 128; "
             f"{COPY.format('dynamic+1024')}", "SENT")} <<bar.sync 1, 64;>> {wait("SEEN", FULL)} bra END;
        OTHER: <<bar.sync 1, 64;|{LATER}>> {one(ARRIVE.format(FULL), "FIRST")} {END}""",
    ),
    # mbarrier.inval while the other warp still waits, or before it does.
    "inval": (
        "inval-order",
        "CTA 0 warp 0 invalidates the mbarrier at .* nothing orders that after that CTA 0 warp 1 waits",
        f"""{SETUP} {one(ARRIVE.format(FULL), "FIRST")} bar.sync 1, 64; <<bar.sync 2, 64;>>
        {one(f"mbarrier.inval.shared.b64 [{FULL}];", "GONE")} bra END;
        OTHER: {wait("SEEN", FULL)} bar.sync 1, 64; <<|{wait("AGAIN", FULL)}>> <<bar.sync 2, 64;>> {END}""",
    ),
    "init after inval": (
        "inval-order",
        "CTA 0 warp 1 initialises the mbarrier at .* again, but nothing orders that after the mbarrier.inval",
        f"""{SETUP} {one(f"mbarrier.inval.shared.b64 [{FULL}];", "GONE")} <<bar.sync 1, 64;>> bra END;
        OTHER: <<bar.sync 1, 64;|{LATER}>> {one(f"mbarrier.init.shared.b64 [{FULL}], 1;", "AGAIN")} {END}""",
    ),
}  # fmt: skip


def run(name: str, options: Options, *, faulty: bool) -> Certificate:
    body = MARK.sub(lambda m: (m[2] or "") if faulty else m[1], FAULTS[name][2])
    words = aligned(np.zeros(64, np.uint32))
    return launch(module(body, parameters=1), words, block=(64, 1, 1), options=options).certificate


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported_by_name_and_its_sound_twin_has_a_certificate(name: str):
    kind, message, _ = FAULTS[name]
    for options in SCHEDULES:
        assert run(name, options, faulty=False).given == (options.completion == "eager"), options
    with pytest.raises(BarrierMisuse, match=re.compile(message, re.S)) as raised:
        run(name, Options(), faulty=True)
    report = diagnose(raised.value)
    assert report.kind == kind and report.help


#: flashinfer #3700 with a ring: warps 0 and 1 fill a stage in each turn and arrive, warp 2 takes what both have filled.
FILLS, DRAINS = (
    " ".join(text.format(barrier=f"<<{1 + turn}|1>>", own=256 * turn) for turn in (0, 1))
    for text in ("st.shared.u32 [%r5+{own}], 7; bar.arrive {barrier}, 96;",
                 "bar.sync {barrier}, 96; ld.shared.v2.u32 {{%r21, %r22}}, [%r6+{own}];")
)  # fmt: skip
RING = f"""{BARRIERS} bar.sync 0; setp.eq.u32 %p2, %r2, 2; @%p2 bra OTHER; {FILLS} bra END;
    OTHER: add.u32 %r6, %r5, %r3; sub.u32 %r6, %r6, 512; {DRAINS} {END}"""


@pytest.mark.parametrize("options", [Options(), *(Options(seed=seed, interleave="random") for seed in range(6))])
def test_two_arrivals_of_a_warp_in_one_phase_are_named(options: Options):
    """They complete it in place of another warp, and what shows is a race, memory that nobody wrote, or a hang."""
    words = aligned(np.zeros(64, np.uint32))
    sound, faulty = (module(MARK.sub(lambda m, side=side: m[side], RING), parameters=1) for side in (1, 2))
    assert launch(sound, words, block=(96, 1, 1), options=options).certificate.given
    with pytest.raises(EmulatorError) as raised:
        launch(faulty, words, block=(96, 1, 1), options=options)
    report = diagnose(raised.value)
    assert report.kind in ("shared-race", "uninitialised-read", "hang"), report
    absent = "warp [012]|another warp"
    words = f"counted two arrivals of warp [01] in one phase, the second at PTX line .* in place of one by ({absent}),"
    assert re.match(f"named barrier 1 {words}", report.help), report.help


def test_memory_that_nobody_writes_is_not_laid_to_a_barrier():
    """Warp 0 arrives three times, warp 1 reads, and nobody who comes to the barrier writes."""
    body = f"""{BARRIERS} bar.sync 0; @%p1 bra OTHER; bar.arrive 1, 96; bar.arrive 1, 96; bra END;
        OTHER: bar.sync 1, 96; ld.shared.u32 %r21, [%r5]; {END}"""
    with pytest.raises(EmulatorError) as raised:
        launch(module(body, parameters=1), aligned(np.zeros(64, np.uint32)), block=(64, 1, 1))
    report = diagnose(raised.value)
    assert report.kind == "uninitialised-read" and "counted two arrivals" not in report.help, report


def test_another_fault_of_the_run_is_reported_first_and_says_what_came_before():
    body = MARK.sub(lambda m: m[2] or "", FAULTS["arrival at an mbarrier"][2])
    body = body.replace("END: ret;", "mov.u32 %r9, 1; st.global.u32 [%d0+4096], %r9; END: ret;")
    body = body.replace("OTHER: ", f"OTHER: {LATER}")
    with pytest.raises(EmulatorError) as raised:
        launch(module(body, parameters=1), aligned(np.zeros(64, np.uint32)), block=(64, 1, 1))
    report = diagnose(raised.value)
    assert report.kind == "out-of-bounds", report
    assert [note for note in report.notes if "may be counted in phase 0" in note and "(arrival-early)" in note]


@pytest.mark.parametrize("load", ("ld.shared", "ld.volatile.shared", "ld.relaxed.cta.shared::cta", "ld"))
def test_lanes_that_load_before_one_hands_over_are_relied_on(load: str):
    """As NVIDIA's dense_gemm_alpha_beta_persistent.py: no fault, and no certificate either."""
    body = MARK.sub(lambda m: m[2] or "", FAULTS["cutlass#3654"][2])
    place = "dynamic" if "shared" in load else "%d9"
    body = body.replace("@%p8 bra FILLED", f"{load}.u32 %r20, [{place}+512]; @%p8 bra FILLED")
    body = body.replace("bar.sync 0;", "mov.u64 %d8, dynamic; cvta.shared.u64 %d9, %d8; bar.sync 0;", 1)
    body = body.replace("bar.sync 0;", "mov.u32 %r20, 0; @!%p9 st.shared.u32 [dynamic+512], %r20; bar.sync 0;", 1)
    words = aligned(np.zeros(64, np.uint32))
    found = launch(module(body, parameters=1), words, block=(64, 1, 1)).certificate
    assert {place.kind for place in found.places} - {"draw"} == {"lanes-overtaken"}, "strong loads are draws, too"


def test_execution_goes_on_behind_it():
    """With a suppression, as behind any detector's report."""
    found = run("flashinfer#3700", Options(going_on=lambda error: error.kind == "arrival-early"), faulty=True)
    assert {place.kind for place in found.places} == {"arrival-early"}


def test_one_that_is_passed_over_does_not_hide_another():
    """Of two faults the first is suppressed."""
    arrive, wait_for = (
        " ".join(f"bar.{what} {number}, 64; bar.{what} {number}, 64; bar.sync 0;" for number in (1, 3))
        for what in ("arrive", "sync")
    )
    text = module(f"{SETUP} {arrive} bra END; OTHER: {wait_for} {END}", parameters=1)
    words = aligned(np.zeros(64, np.uint32))
    with pytest.raises(BarrierMisuse, match="of named barrier 1"):
        launch(text, words, block=(64, 1, 1))
    with pytest.raises(BarrierMisuse, match="of named barrier 3"):
        launch(text, words, block=(64, 1, 1), options=Options(going_on=lambda error: "barrier 1" in error.message))


@pytest.mark.parametrize("waits", ("by two warps for one phase", "by one warp for two mbarriers"))
def test_lanes_that_are_relied_on_do_not_hide_others(waits: str):
    """One instruction completes the phases of both waits; behind the first of them all lanes load what it is for."""
    excused = f"{wait('EXCUSED', EMPTY, 1)} ld.shared.u32 %r21, [dynamic+512]; {one(ARRIVE.format(FULL), 'TOLD')}"
    if waits.startswith("by two warps"):
        threads, second, hand = 96, EMPTY, ""
        others = f"{excused} bra END; OTHER: @%p4 bra THIRD; {wait('FOUND', second, 1)}"
    else:
        threads, second = 64, "dynamic+16"
        hand = "add.u32 %r20, %r20, 8; setp.le.u32 %p3, %r20, %r22; @%p3 bra HAND;"
        others = f"{excused} {wait('FOUND', second, 1)}"
    others += f" {one(ARRIVE.format(FULL), 'ALSO')} bra END; {'THIRD' if threads > 64 else 'OTHER'}:"
    text = f"""{BARRIERS.replace("[dynamic], 1", "[dynamic], 2")} mov.u32 %r20, 0; st.shared.u32 [%r5], %r20;
        @!%p9 st.shared.u32 [dynamic+512], %r20; setp.gt.u32 %p4, %r1, 63; bar.sync 0; @%p1 bra OTHER; {others}
        {wait("SEEN", FULL)} mov.u32 %r20, {EMPTY}; mov.u32 %r22, {second};
        {one(f"HAND: {ARRIVE.format('%r20')} {hand}", "HANDED")} {END}"""
    text = module(text.replace("FOUND:", "\nFOUND:"), parameters=1)
    with pytest.raises(BarrierMisuse, match="overtakes") as raised:
        launch(text, aligned(np.zeros(64, np.uint32)), block=(threads, 1, 1))
    (found,) = raised.value.facts.other.instructions
    assert raised.value.kind == "lanes-overtaken" and text.splitlines()[found.line - 1].startswith("FOUND:")
