"""Programs that never end: each must be found, and the report must name what is missing.

Every program here is also run with its fault repaired, so that a report cannot be a false alarm.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import Hang
from cute_kernels.emulator.machine.units.copies.tensor_map import TensorMap
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

ROLES = ("producer", "consumer")
SCHEDULES = [
    Options(roles=ROLES),
    Options(roles=ROLES, completion="lazy"),
    Options(roles=ROLES, completion="random", interleave="random", seed=7, spurious_try_wait_failures=True),
]


def hang(text: str, *arrays: object, **more: object) -> Hang:
    with pytest.raises(Hang) as caught:
        launch(text, *arrays, **more)
    return caught.value


def line_of(report: str, warp: str) -> str:
    (line,) = [line for line in report.splitlines() if line.startswith(warp)]
    return line


MISSING_ARRIVE = """
.loc 1 10 1
mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
mbarrier.init.shared.b64 [dynamic+8], 3; READY: bar.sync 0; setp.ne.u32 %p2, %r2, 0; @%p2 bra CONSUMER;
.loc 1 20 1
elect.sync _|%p3, -1; @!%p3 bra END; mbarrier.arrive.shared.b64 %d1, [dynamic+8];
    mbarrier.arrive.shared.b64 %d1, [dynamic+8];
ARRIVE
END: ret;
CONSUMER:
.loc 1 33 7
W: mbarrier.try_wait.parity.shared.b64 %p4, [dynamic+8], 0; @!%p4 bra W; ret;
"""


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_missing_arrive(options: Options):
    text = module(MISSING_ARRIVE) + '.file 1 "/src/pipeline.py"\n'
    repaired = text.replace("ARRIVE\n", "mbarrier.arrive.shared.b64 %d1, [dynamic+8];\n")
    launch(repaired, 0, 0, block=(64, 1, 1), options=options)
    broken = text.replace("ARRIVE\n", "\n")
    report = hang(broken, 0, 0, block=(64, 1, 1), options=options).report
    line = next(i for i, each in enumerate(broken.splitlines(), 1) if each.startswith("W: "))
    waiting = line_of(report, "CTA 0 warp 1 (consumer)")
    assert "waits for parity 0" in waiting
    assert "shared offset 1032" in waiting
    assert "phase 0 (parity 0) incomplete" in waiting
    assert "1 of 3 arrivals pending" in waiting
    assert "0 transaction bytes pending" in waiting
    assert "initialised by CTA 0 warp 0 (producer)" in waiting
    assert f"at PTX line {line} `mbarrier.try_wait.parity.shared.b64 %p4, [dynamic+8], 0` (pipeline.py:33)" in waiting
    assert "exited: CTA 0 warp 0 (producer)" in report
    assert "pending asynchronous work: none" in report


MISSING_BYTES = """
mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
mbarrier.init.shared.b64 [dynamic], 1; READY: bar.sync 0; @%p1 bra W;
ld.param.u64 %d1, [p0];
mbarrier.arrive.expect_tx.shared.b64 %d3, [dynamic], EXPECTED;
cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [dynamic+128], [%d1, {0}], [dynamic];
W: mbarrier.try_wait.parity.shared.b64 %p2, [dynamic], 0; @!%p2 bra W; ret;
"""


@pytest.mark.parametrize("options", SCHEDULES)
def test_expected_bytes_that_never_come(options: Options):
    data = np.zeros(64, np.uint32)
    base = data.ctypes.data + -data.ctypes.data % 16
    tensor_map = TensorMap(base, "u32", (32,), (), (32,), (1,))
    text = module(MISSING_BYTES)
    launch(text.replace("EXPECTED", "128"), tensor_map, data, options=options)
    report = hang(text.replace("EXPECTED", "160"), tensor_map, data, options=options).report
    assert "0 of 1 arrivals pending, 32 transaction bytes pending" in report


NAMED = "mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; setp.eq.u32 %p1, %r2, 2; @%p1 ret;\nbar.sync 3, THREADS; ret;"


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_named_barrier_with_too_few_threads(options: Options):
    text = module(NAMED)
    launch(text.replace("THREADS", "64"), 0, 0, block=(96, 1, 1), options=options)
    report = hang(text.replace("THREADS", "96"), 0, 0, block=(96, 1, 1), options=options).report
    for warp, role in ((0, "producer"), (1, "consumer")):
        line = line_of(report, f"CTA 0 warp {warp} ({role})")
        assert "waits at named barrier 3 of CTA 0: 64 of 96 threads arrived" in line
        assert "`bar.sync 3, 96`" in line
    assert "exited: CTA 0 warp 2" in report


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_cluster_barrier_that_one_cta_skips(options: Options):
    body = """mov.u32 %r1, %cluster_ctarank; setp.eq.u32 %p1, %r1, 1; SKIP
    barrier.cluster.arrive; barrier.cluster.wait; ret;
    OTHER: mbarrier.try_wait.parity.shared.b64 %p2, [dynamic], 0; @!%p2 bra OTHER; ret;"""
    init = """mov.u32 %r2, %tid.x; setp.ne.u32 %p3, %r2, 0; @%p3 bra READY; mbarrier.init.shared.b64 [dynamic], 1;
    READY: bar.sync 0;"""
    shape = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "options": options}
    launch(module(init + body.replace("SKIP", "")), 0, 0, **shape)
    report = hang(module(init + body.replace("SKIP", "@%p1 bra OTHER;")), 0, 0, **shape).report
    assert "waits at the cluster barrier; not arrived: CTA 1 warp 0 (producer)" in line_of(report, "CTA 0 warp 0")
    assert "waits for parity 0" in line_of(report, "CTA 1 warp 0")


def test_both_phases_of_a_barrier_swapped():
    """A consumer that starts with the producer's parity waits for a phase that comes only after its own arrival."""
    body = """mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
    mbarrier.init.shared.b64 [dynamic], 1; mbarrier.init.shared.b64 [dynamic+8], 1; READY: bar.sync 0;
    setp.ne.u32 %p2, %r2, 0; @%p2 bra CONSUMER;
    W1: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic+8], PARITY; @!%p3 bra W1;
    elect.sync _|%p4, -1; @%p4 mbarrier.arrive.shared.b64 %d1, [dynamic]; ret;
    CONSUMER: W2: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra W2; elect.sync _|%p4, -1;
    @%p4 mbarrier.arrive.shared.b64 %d1, [dynamic+8]; ret;"""
    launch(module(body.replace("PARITY", "1")), 0, 0, block=(64, 1, 1))
    report = hang(module(body.replace("PARITY", "0")), 0, 0, block=(64, 1, 1)).report
    assert re.search(r"CTA 0 warp 0 waits for parity 0 of mbarrier at shared offset 1032", report)
    assert re.search(r"CTA 0 warp 1 waits for parity 0 of mbarrier at shared offset 1024", report)


def test_lanes_of_one_warp_that_wait_for_each_other_in_a_circle():
    body = """mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY; mbarrier.init.shared.b64 [dynamic], 16;
    mbarrier.init.shared.b64 [dynamic+8], 16; READY: bar.sync 0; setp.lt.u32 %p2, %r1, 16; @%p2 bra LOW;
    EARLY W1: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra W1; LATE bra END;
    LOW: W2: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic+8], 0; @!%p3 bra W2;
    mbarrier.arrive.shared.b64 %d1, [dynamic]; END: ret;"""
    arrive = "mbarrier.arrive.shared.b64 %d1, [dynamic+8];"
    launch(module(body.replace("EARLY", arrive).replace("LATE", "")), 0, 0)
    report = hang(module(body.replace("EARLY", "").replace("LATE", arrive)), 0, 0).report
    assert "is diverged" in report
    assert "shared offset 1024" in report and "shared offset 1032" in report


@pytest.mark.parametrize(
    "spin",
    [
        "L: ld.volatile.global.b32 %r2, [%d1]; setp.eq.b32 %p1, %r2, 0; @%p1 bra L;",
        "L: nanosleep.u32 50; ld.volatile.global.b32 %r2, [%d1]; setp.eq.b32 %p1, %r2, 0; @%p1 bra L;",
        "L: bra L;",
    ],
)
def test_spinning_for_something_that_never_happens(spin: str):
    data = np.zeros(4, np.uint32)
    report = hang(module(f"ld.param.u64 %d1, [p0]; {spin} ret;"), data, 0).report
    assert "CTA 0 warp 0" in report and "PTX line" in report


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_long_computation_without_effects_is_no_hang(options: Options):
    """300,000 rounds of a linear congruential generator in registers, then one store."""
    body = """ld.param.u64 %d1, [p0]; mov.b32 %r1, 0; mov.b32 %r2, 1;
    L: mad.lo.u32 %r2, %r2, 1664525, 1013904223; add.s32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 300000; @%p1 bra L;
    st.global.b32 [%d1], %r2; ret;"""
    data = np.zeros(4, np.uint32)
    launch(module(body), data, 0, options=options)
    expected = 1
    for _ in range(300_000):
        expected = (expected * 1664525 + 1013904223) % (1 << 32)
    assert data.tolist() == [expected, 0, 0, 0]


def test_polling_with_test_wait():
    body = """mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY; mbarrier.init.shared.b64 [dynamic], 1;
    READY: bar.sync 0; L: mbarrier.test_wait.parity.shared.b64 %p2, [dynamic], 0; @!%p2 bra L; ret;"""
    assert "mbarrier.test_wait" in hang(module(body), 0, 0).report


@pytest.mark.parametrize("state", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 - 1, 2**40, 2**63, 2**64 - 1])
@pytest.mark.parametrize("instruction", ["try_wait", "test_wait"])
def test_waits_by_states_that_no_arrival_gave(instruction: str, state: int):
    """A wait ends; that of a loop for a phase that never comes is a hang."""
    body = f"""mbarrier.init.shared.b64 [dynamic], 1; mov.u64 %d1, {state};
    L: mbarrier.{instruction}.shared.b64 %p2, [dynamic], %d1; @!%p2 bra L; ret;"""
    assert f"mbarrier.{instruction}" in hang(module(body), 0, 0, block=(1, 1, 1)).report
    launch(module(body.replace("@!%p2 bra L;", "")), 0, 0, block=(1, 1, 1))


def test_a_limit_on_instructions():
    counting = """mov.b32 %r1, 0; L: add.s32 %r1, %r1, 1; st.shared.b32 [dynamic], %r1; setp.lt.u32 %p1, %r1, N;
    @%p1 bra L; ret;"""
    options = Options(max_warp_instructions=20_000)
    launch(module(counting.replace("N", "4000")), 0, 0, options=options)
    error = hang(module(counting.replace("N", "2000000000")), 0, 0, options=options)
    assert "max_warp_instructions = 20000" in str(error)


ENDLESS = {
    "a flag that nobody sets": "ld.relaxed.gpu.global.b32 %r2, [%d0]; setp.eq.u32 %p2, %r2, 0;",
    "a flag in shared memory": "ld.volatile.shared.b32 %r2, [dynamic]; setp.eq.u32 %p2, %r2, 0;",
    "a lock that is never released": "atom.global.cas.b32 %r2, [%d0+4], 0, 1; setp.ne.u32 %p2, %r2, 0;",
    "a clock that does not stand still": "mov.u64 %d3, %globaltimer; setp.ne.u64 %p2, %d3, 0;",
}


def endless(loop: str) -> str:
    """A loop that waits and counts, so that its registers never repeat."""
    return module(
        f"""ld.param.u64 %d0, [p0]; mov.u32 %r3, 0; st.shared.b32 [dynamic], %r3;
        L: add.u32 %r3, %r3, 1; {loop} @%p2 bra L; ret;"""
    )


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_loop_that_counts(name: str):
    flags = np.array([0, 1], np.uint32)
    limit = {"a clock that does not stand still": 200_000, "a lock that is never released": 50_000}.get(name, 5_000_000)
    options = Options(detectors=False, max_idle_blocks=limit)
    error = hang(endless(ENDLESS[name]), flags, 0, options=options, block=1)
    assert f"more than max_idle_blocks = {limit} allows" in str(error) and "can run at PTX line" in error.report


#: Loops whose registers at the border of a block repeat, and those that read the clock in between.
LOOPS = {
    "nothing": ("L: bra L;", "livelock: warps go round"),
    "a register that repeats": ("mov.b32 %r1, 0; L: xor.b32 %r1, %r1, 1; bra L;", "livelock: warps go round"),
    "a counter": ("mov.b32 %r1, 0; L: add.u32 %r1, %r1, 1; bra L;", "200000 allows"),
    "the clock": ("L: mov.u32 %r1, %clock; setp.eq.u32 %p1, %r1, 3; @!%p1 bra L; ret;", "200000 allows"),
    "the clock, unused": ("L: mov.u64 %d1, %globaltimer; bra L;", "200000 allows"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_an_endless_loop_is_called_by_what_it_does(name: str):
    body, message = LOOPS[name]
    error = hang(module(body), 0, 0, options=Options(max_idle_blocks=200_000))
    assert message in str(error)


def test_a_loop_that_waits_for_a_time_is_not_endless():
    body = """ld.param.u64 %d0, [p0]; mov.u32 %r1, %clock; L: mov.u32 %r2, %clock; sub.u32 %r3, %r2, %r1;
    setp.lt.u32 %p1, %r3, 8000000; @%p1 bra L;
    mov.u32 %r4, %clock; sub.u32 %r4, %r4, %r1; setp.ge.u32 %p2, %r4, 8000000; selp.u32 %r4, 1, 2, %p2;
    st.global.b32 [%d0], %r4; ret;"""
    out = np.zeros(1, np.uint32)
    launch(module(body), out, 0, options=Options())
    assert out[0] == 1


def test_the_limit_on_idle_blocks_is_no_limit_on_effects_or_on_arithmetic():
    """Each store starts the count anew, and by default a warp may compute for long."""
    storing = """ld.param.u64 %d0, [p0]; mov.u32 %r3, 0; L: ld.relaxed.gpu.global.b32 %r2, [%d0]; add.u32 %r3, %r3, 1;
    and.b32 %r4, %r3, 4095; setp.eq.u32 %p3, %r4, 0; @%p3 st.global.b32 [%d0], %r3; setp.lt.u32 %p2, %r3, 400000;
    @%p2 bra L; ret;"""
    flag = np.zeros(1, np.uint32)
    launch(module(storing), flag, 0, options=Options(detectors=False, max_idle_blocks=3_000_000))
    assert flag[0] == 4096 * (400000 // 4096)
    computing = """ld.param.u64 %d0, [p0]; mov.u32 %r3, 0; mov.u32 %r4, 7; L: mad.lo.u32 %r4, %r4, %r4, %r3;
    add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 3000000; @%p2 bra L; st.global.b32 [%d0], %r4; ret;"""
    launch(module(computing), flag, 0, options=Options())


def test_a_warp_that_polls_for_what_completes_last():
    """Lazy completion: the copy lands only when the polling has lasted long enough."""
    body = """ld.param.u64 %d0, [p0]; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra END;
    mbarrier.init.shared.b64 [dynamic], 1; mov.b32 %r2, 0; st.shared.b32 [dynamic+128], %r2; fence.proxy.async;
    mbarrier.arrive.expect_tx.shared.b64 %d3, [dynamic], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [dynamic+128], [%d0], 16, [dynamic];
    L: ld.volatile.shared.b32 %r2, [dynamic+128]; setp.eq.u32 %p2, %r2, 0; @%p2 bra L;
    W: mbarrier.try_wait.parity.shared.b64 %p4, [dynamic], 0; @!%p4 bra W; END: ret;"""
    data = aligned(np.array([5, 6, 7, 8], np.uint32))
    launch(module(body), data, 0, options=Options(completion="lazy", detectors=False))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_idle_blocks": 0}, ValueError, "max_idle_blocks = 0: must be at least 1"),
        ({"max_warp_instructions": -1}, ValueError, "max_warp_instructions = -1: must be at least 1"),
        ({"max_idle_blocks": 1.5}, TypeError, "max_idle_blocks = 1.5: must be an int or None"),
        ({"max_warp_instructions": True}, TypeError, "max_warp_instructions = True: must be an int or None"),
    ],
)
def test_limits_that_are_none(options: dict, error: type, text: str):
    with pytest.raises(error, match=text):
        Options(**options)


def test_asynchronous_work_in_flight_is_listed():
    """A lazy completion is not a hang: the report is only made when nothing is in flight any more."""
    body = """mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY; mbarrier.init.shared.b64 [dynamic], 1;
    mbarrier.init.shared.b64 [dynamic+8], 1; READY: bar.sync 0; @%p1 bra W; ld.param.u64 %d1, [p0];
    mbarrier.arrive.expect_tx.shared.b64 %d3, [dynamic], 128;
    cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [dynamic+128], [%d1, {0}], [dynamic];
    W: mbarrier.try_wait.parity.shared.b64 %p2, [dynamic+8], 0; @!%p2 bra W; ret;"""
    data = np.zeros(64, np.uint32)
    base = data.ctypes.data + -data.ctypes.data % 16
    tensor_map = TensorMap(base, "u32", (32,), (), (32,), (1,))
    report = hang(module(body), tensor_map, data, options=Options(completion="lazy")).report
    assert "pending asynchronous work: none" in report
    assert "mbarrier at shared offset 1024 (0x400) of CTA 0: phase 1" in report  # the copy did complete


def test_a_wait_for_a_cluster_that_has_no_room_is_named():
    """A cluster spins on a flag in global memory that only a later one would set."""
    body = """ld.param.u64 %d0, [p0]; mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra SET;
    W: ld.relaxed.gpu.global.b32 %r2, [%d0]; setp.eq.u32 %p2, %r2, 0; @%p2 bra W; ret;
    SET: st.relaxed.gpu.global.b32 [%d0], 1; ret;"""
    report = hang(module(body), np.zeros(1, np.uint32), 0, grid=(3, 1, 1), options=Options(resident=1)).report
    assert "2 clusters have not started: 1 are resident at most at the same time" in report
    alone = hang(module(body), np.zeros(1, np.uint32), 0, grid=(1, 1, 1)).report
    assert "have not started" not in alone


SLEEPER = """
mov.u32 %r1, 0; LOOP: nanosleep.u32 100; add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, TIMES; @%p1 bra LOOP;
ld.param.u64 %d1, [p0]; st.global.u32 [%d1], %r1; ret;
"""


def test_a_warp_that_sleeps_often_is_no_hang() -> None:
    """Nothing else happens meanwhile: only the count of its loop goes up."""
    out = np.zeros(1, np.uint32)
    launch(module(SLEEPER.replace("TIMES", "200")), out, 0, options=Options())
    assert out[0] == 200


def test_a_warp_that_sleeps_for_ever_is_one() -> None:
    endless = SLEEPER.replace("add.u32 %r1, %r1, 1;", "")
    assert "nanosleep" in hang(module(endless.replace("TIMES", "200")), np.zeros(1, np.uint32), 0).report
