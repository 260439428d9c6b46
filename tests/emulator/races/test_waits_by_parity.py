"""A wait by parity must not depend on whether the phase before the one it waits for is complete when it looks.

Parity tells two neighbouring phases apart. A wait that may look before or after the phase between completes passes at
once in one case and waits for a whole phase more in the other: it is reported under every schedule.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import BarrierMisuse
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.testing.ptx import THREAD_OUTPUT, module
from tests.emulator.ptx_launch import launch

SCHEDULES = [
    Options(),
    *(Options(seed=seed, completion="random", interleave="starve") for seed in range(4)),
]
#: mbarriers at dynamic (full) and dynamic + 8 (empty), one arrival each; warps 0 and 1; lane 0 of each is elected.
SETUP = f"""{THREAD_OUTPUT} setp.ne.u32 %p9, %r1, 0; and.b32 %r2, %r1, 31; setp.ne.u32 %p8, %r2, 0;
    setp.ge.u32 %p1, %r1, 32; mov.b32 %r9, 0; @%p9 bra READY; mbarrier.init.shared.b64 [dynamic], 1;
    mbarrier.init.shared.b64 [dynamic+8], 1; READY: bar.sync 0;"""
END = "END: st.global.b32 [%d1], %r1; ret;"
FAST_FIRST_PHASE, NOT_KNOWN = "phase 0 of the mbarrier .* completes", "waits for phase 1 .* nothing orders that after"


def wait(label: str, barrier: str, parity: int) -> str:
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p3, [{barrier}], {parity}; @!%p3 bra {label};"


def arrive(barrier: str) -> str:
    return f"@!%p8 mbarrier.arrive.shared.b64 %d3, [{barrier}];"


#: A kernel with its fault between marks, as in test_races, and what the report says.
FAULTS = {
    # Warp 0 waits for the phase before the first of "empty" and fills; warp 1 frees, with or without waiting for that.
    "the first wait of a producer": (
        f"""{SETUP} @%p1 bra CONSUMER; {wait("EMPTY", "dynamic+8", 1)} bar.warp.sync -1; {arrive("dynamic")} bra END;
        CONSUMER: <<{wait("FULL", "dynamic", 0)}>> {arrive("dynamic+8")} {END}""",
        f"{FAST_FIRST_PHASE}.*the phase before the first|{NOT_KNOWN}",
    ),
    # Warp 0 waits for phase 0 and tells warp 1, by bar.sync, that it may wait for phase 1.
    "a second warp takes over": (
        f"""{SETUP} @%p1 bra SECOND; {arrive("dynamic")} {wait("FIRST", "dynamic", 0)} bar.sync 1, 64;
        {arrive("dynamic")} bra END;
        SECOND: <<bar.sync 1, 64;>> {wait("TAKEN", "dynamic", 1)} <<|bar.sync 1, 64;>> {END}""",
        NOT_KNOWN + f"|{FAST_FIRST_PHASE}",
    ),
    # Warp 1 has made the only arrival of phase 0 itself, or leaves it to warp 0.
    "who arrives knows that the phase is complete": (
        f"""{SETUP} @%p1 bra SECOND; <<|{arrive("dynamic")}>> bar.sync 1, 64; {arrive("dynamic")} bra END;
        SECOND: <<{arrive("dynamic")}|>> <<bar.sync 1, 64;>> {wait("NEXT", "dynamic", 1)} <<|bar.sync 1, 64;>> {END}""",
        NOT_KNOWN + f"|{FAST_FIRST_PHASE}",
    ),
}  # fmt: skip
MARK = re.compile(r"<<(.*?)(?:\|(.*?))?>>", re.S)


def resolve(body: str, broken: bool) -> str:
    return MARK.sub(lambda m: (m[2] or "") if broken else m[1], body)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("options", SCHEDULES)
def test_faults_and_their_sound_twins(name: str, options: Options):
    body, message = FAULTS[name]
    out = np.zeros(64, np.uint32)
    shape = {"block": (64, 1, 1), "options": options}
    launch(module(resolve(body, False), parameters=1), out, **shape)
    assert out.tolist() == list(range(64))
    with pytest.raises(BarrierMisuse, match=message):
        launch(module(resolve(body, True), parameters=1), np.zeros(64, np.uint32), **shape)


@pytest.mark.parametrize("seen", [True, False])
def test_bytes_that_arrive_complete_a_phase_that_nobody_knows(seen: bool):
    """The thread that expects a copy's bytes does not know by that alone that they have come."""
    copy = """mbarrier.arrive.expect_tx.shared.b64 %d3, [dynamic], 16;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [dynamic+16], [%d0], 16, [dynamic];"""
    body = f"""{SETUP} @%p9 bra END; {copy} {wait("FIRST", "dynamic", 0) if seen else ""}
        mbarrier.arrive.shared.b64 %d3, [dynamic]; {wait("SECOND", "dynamic", 1)} {END}"""
    body = body.replace("@%p9 bra END;", "@%p9 bra END; fence.proxy.async.global;", 1)
    text, out = module(body, parameters=1), np.zeros(64, np.uint32)
    start = -out.ctypes.data % 16 // 4
    array, options = out[start : start + 32], Options()
    if seen:
        launch(text, array, options=options)
        assert array.tolist() == list(range(32))
    else:
        with pytest.raises(BarrierMisuse, match=NOT_KNOWN):
            launch(text, array, options=options)


def test_the_wait_that_a_phase_overtakes_is_reported_at_its_line():
    """Of several waits of a warp for one barrier it is the one for the phase before; the core executes them too."""
    # The other warp goes on meanwhile.
    later = "AGAIN: add.u32 %r9, %r9, 1; setp.lt.u32 %p4, %r9, 20000; @%p4 bra AGAIN;"
    body = f"""{SETUP} @%p1 bra CONSUMER;
        {arrive("dynamic")} {wait("SEEN", "dynamic+8", 0)} {arrive("dynamic")} {later} {arrive("dynamic")} bra END;
        CONSUMER: {wait("EARLIER", "dynamic", 0)} {arrive("dynamic+8")}
        {wait("OVERTAKEN", "dynamic", 1)}
        {END}"""
    text = module(body, parameters=1)
    with pytest.raises(BarrierMisuse, match="phase 2 of the mbarrier .* completes, .* wait of CTA 0 warp 1") as raised:
        launch(text, np.zeros(64, np.uint32), block=(64, 1, 1), options=Options())
    (related,) = diagnose(raised.value).related
    (place,) = related.places
    assert raised.value.kind == "phase-overrun" and related.relation == "waits at"
    assert text.splitlines()[place.ptx_line - 1].strip().startswith("OVERTAKEN:") and place.warps[0].index == 1
    assert place.instruction.startswith("mbarrier.try_wait.parity")
