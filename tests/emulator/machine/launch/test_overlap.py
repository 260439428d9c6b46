"""Launches that overlap by programmatic dependent launch: what the second does before its wait shows in the result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from cute_kernels.emulator import GlobalMemory, Options, run
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.errors import GlobalMemoryRace, Hang
from cute_kernels.emulator.machine.launch.overlap import run_overlapping
from cute_kernels.emulator.programs.capturing import capture
from cute_kernels.emulator.programs.recorded import Recorder, Replay
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module

CTAS, OLD, DONE = 3, 7, 100
#: %d1: this thread's item of p0; %d2: of p1. 32 threads per CTA.
HEAD = f"""{THREAD_OUTPUT} mov.u32 %r3, %ctaid.x; mad.lo.u32 %r4, %r3, 32, %r1; mul.wide.u32 %d3, %r4, 4;
    ld.param.u64 %d4, [p1]; add.s64 %d1, %d0, %d3; add.s64 %d2, %d4, %d3;"""
LET, WAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"
#: The first launch makes every item of p0 100.
FIRST = f"{HEAD} BEFORE st.global.b32 [%d1], 100; AFTER ret;"
#: The second takes items of p0 to p1, those of another CTA: of the last one for CTA 0.
READER = f"""{HEAD} sub.u32 %r5, 2, %r3; mad.lo.u32 %r5, %r5, 32, %r1; mul.wide.u32 %d5, %r5, 4; add.s64 %d5, %d0, %d5;
    BEFORE ld.global.b32 %r6, [%d5]; AFTER st.global.b32 [%d2], %r6; ret;"""
#: It makes them 5.
WRITER = f"{HEAD} BEFORE st.global.b32 [%d1], 5; AFTER ret;"


def text(body: str, before: str = "", after: str = "") -> str:
    return module(body.replace("BEFORE", before).replace("AFTER", after), parameters=2)


def captured(ptx: str, arrays: Sequence[np.ndarray], threads: int = 32, ctas: int = CTAS) -> CapturedLaunch:
    params = tuple(array.ctypes.data.to_bytes(8, "little") for array in arrays)
    return CapturedLaunch("k", (ctas, 1, 1), (threads, 1, 1), (1, 1, 1), 1024, params, ptx, programmatic=True)


def overlapped(first: str, second: str, options: Options, threads: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """p0, 7 at first, and p1, 0 at first, behind both launches."""
    arrays = [aligned(np.full(32 * CTAS, value, np.uint32)) for value in (OLD, 0)]
    memory = GlobalMemory()
    for array in arrays:
        memory.register_tensor(array)
    run_overlapping(captured(first, arrays, threads), captured(second, arrays, threads), memory, options)
    return arrays[0], arrays[1]


def test_what_stands_before_the_wait_finds_what_the_first_launch_has_not_done():
    first = text(FIRST, before=LET)
    assert set(overlapped(first, text(READER, after=WAIT), Options())[1]) == {OLD}
    assert set(overlapped(first, text(WRITER, after=WAIT), Options())[0]) == {DONE}  # overwritten
    assert set(overlapped(first, text(READER, before=WAIT), Options())[1]) == {DONE}
    assert set(overlapped(first, text(WRITER, before=WAIT), Options())[0]) == {5}


def test_what_the_first_launch_does_before_it_lets_others_begin_is_done():
    for after in (LET, ""):  # without it, others begin at its end
        assert set(overlapped(text(FIRST, after=after), text(READER, after=WAIT), Options())[1]) == {DONE}
        assert set(overlapped(text(FIRST, after=after), text(WRITER, after=WAIT), Options())[0]) == {5}


def test_all_ctas_let_others_begin_or_have_ended():
    """CTA 0 exits without the instruction, after its store; the others store behind it."""
    body = f"""{HEAD} setp.eq.u32 %p1, %r3, 0; @%p1 bra STORE; {LET}
        STORE: st.global.b32 [%d1], 100; ret;"""
    p1 = overlapped(module(body, parameters=2), text(READER, after=WAIT), Options())[1].reshape(CTAS, 32)
    assert p1.tolist() == [[OLD] * 32, [OLD] * 32, [DONE] * 32]  # CTA 2 reads what CTA 0 has written


def test_one_warp_lets_others_begin_and_the_rest_of_the_cta_goes_on():
    """Warp 0 stores behind a barrier that warp 1, which lets others begin, reaches only after that."""
    body = f"""{HEAD} setp.ge.u32 %p1, %r1, 32; @!%p1 bra MEET; {LET} MEET: bar.sync 0; @%p1 bra LAST;
        st.global.b32 [%d1], 100; LAST: ret;"""
    first, one_warp = module(body, parameters=2), f"setp.ge.u32 %p2, %r1, 32; @%p2 bra LAST; {READER} LAST: ret;"
    reader = text(one_warp.replace(HEAD, "").replace("setp.ge", f"{HEAD} setp.ge", 1), after=WAIT)
    assert set(overlapped(first, reader, Options(), threads=64)[1]) == {OLD}


def test_a_held_warp_goes_on_where_another_needs_it_to_let_others_begin():
    """Of a cluster of two, CTA 1 lets others begin when CTA 0 has stored, behind its own instruction."""
    body = f"""{HEAD} setp.eq.u32 %p1, %r3, 1; @%p1 bra MEET; {LET} st.global.b32 [%d1], 100;
        MEET: barrier.cluster.arrive; barrier.cluster.wait; {LET}
        @!%p1 bra LAST; st.global.b32 [%d1], 100; LAST: ret;"""
    arrays = [aligned(np.full(64, OLD, np.uint32)), aligned(np.zeros(64, np.uint32))]
    memory = GlobalMemory()
    for array in arrays:
        memory.register_tensor(array)
    launches = [
        CapturedLaunch("k", (2, 1, 1), (32, 1, 1), (cluster, 1, 1), 0, captured("", arrays).params, ptx)
        for ptx, cluster in ((module(body, parameters=2), 2), (text(READER.replace("2, %r3", "1, %r3"), after=WAIT), 1))
    ]
    run_overlapping(*launches, memory, Options())
    assert arrays[1].reshape(2, 32).tolist() == [[OLD] * 32, [DONE] * 32]


def test_a_launch_that_looks_for_what_the_first_one_writes_finds_it():
    """It waits in a loop instead of griddepcontrol.wait."""
    poll = f"{HEAD} AGAIN: ld.relaxed.gpu.global.b32 %r6, [%d1]; setp.ne.u32 %p1, %r6, 100; @%p1 bra AGAIN; "
    second = module(f"{poll} st.global.b32 [%d2], %r6; ret;", parameters=2)
    assert set(overlapped(text(FIRST, before=LET), second, Options())[1]) == {DONE}
    with pytest.raises(Hang) as error:
        overlapped(text(FIRST.replace("100", "99"), before=LET), second, Options())
    assert error.value.launch.ptx == second


def test_a_launch_that_waits_for_the_next_one_has_to_let_it_begin() -> None:
    first = f"{HEAD} BEFORE AGAIN: ld.relaxed.gpu.global.b32 %r6, [%d1]; setp.ne.u32 %p1, %r6, 5; @%p1 bra AGAIN; ret;"
    second = text(WRITER, after=WAIT)
    assert set(overlapped(text(first, before=LET), second, Options())[0]) == {5}
    with pytest.raises(Hang) as error:
        overlapped(text(first), second, Options())
    assert error.value.launch.ptx == text(first)


def test_a_seed_draws_how_much_overlaps_and_repeats_it():
    first, second = text(FIRST, before=LET), text(READER, after=WAIT)
    found = []
    for seed in range(24):
        options = Options(seed=seed, interleave="random", completion="random")
        found.append(tuple(overlapped(first, second, options)[1][::32]))
        assert found[-1] == tuple(overlapped(first, second, options)[1][::32])
        assert set(overlapped(first, text(READER, before=WAIT), options)[1]) == {DONE}
    assert {(OLD,) * CTAS, (DONE,) * CTAS} < set(found)  # and some of the sixteen others


@pytest.mark.parametrize("body", [READER, WRITER])
def test_a_replay_shows_the_fault_by_report_and_by_result(body: str):
    for sound in (False, True):
        arrays = [aligned(np.full(32 * CTAS, value, np.uint32)) for value in (OLD, 0)]
        second = text(body, before=WAIT) if sound else text(body, after=WAIT)
        recorder, memory = Recorder(), GlobalMemory()
        for array in arrays:
            memory.register_tensor(array)
        regions = [(array.ctypes.data, array.nbytes) for array in arrays]
        for number, ptx in enumerate((text(FIRST, before=LET), second)):
            launch = captured(ptx, arrays)
            recorder.take(launch, regions, overlaps=number == 1)
            run(ptx, grid=CTAS, block=32, dynamic_smem=1024, params=launch.params, memory=memory, options=Options())
        replay = Replay(recorder.launches[-1])
        unseeing = Options(without=("races",))
        results = [replay.run(unseeing, overlap=overlap).memory for overlap in (False, True)]
        same = all(np.array_equal(*pair) for pair in zip(*results))
        assert same is sound
        if sound:
            replay.run(Options(), overlap=True)
        else:
            with pytest.raises(GlobalMemoryRace, match="the launch before this one"):
                replay.run(Options(), overlap=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_launches_of_a_program_overlap_where_it_is_asked_for(overlap: bool):
    """Behind the reader that found old data, a third launch takes what that one has left."""
    with capture("sm_100a", Options(without=("races",)), overlap=overlap) as session:
        p0, p1, p2 = (torch.full((32 * CTAS,), value, dtype=torch.int32, device="cuda") for value in (OLD, 0, 0))
        session.launch(captured_on_device(text(FIRST, before=LET), p0, p1))
        session.launch(captured_on_device(text(READER, before=LET, after=WAIT), p0, p1))
        assert set(p1.tolist()) == ({OLD} if overlap else {DONE})
        session.launch(captured_on_device(text(READER, before=WAIT), p1, p2))
        assert set(p2.tolist()) == ({OLD} if overlap else {DONE})
        p0.fill_(OLD)  # a kernel of torch's, which the next launch is behind
        session.launch(captured_on_device(text(READER, after=WAIT), p0, p1))
        assert set(p1.tolist()) == {OLD}
    assert len(session.launches) == 4 and set(p0.tolist()) == {OLD}


def captured_on_device(ptx: str, *tensors: torch.Tensor) -> CapturedLaunch:
    params = tuple(tensor.data_ptr().to_bytes(8, "little") for tensor in tensors)
    return CapturedLaunch("k", (CTAS, 1, 1), (32, 1, 1), (1, 1, 1), 1024, params, ptx, programmatic=True)
