"""Launches that overlap by programmatic dependent launch: what the second accesses before its wait is reported."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from cute_kernels.emulator import GlobalMemory, Options, run
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.errors import GlobalMemoryRace
from cute_kernels.emulator.programs.capturing import capture
from cute_kernels.emulator.programs.recorded import Recorder, Replay
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module

CTAS, OLD, DONE = 3, 7, 100
#: %d1: this thread's item of p0; %d2: of p1. 32 threads per CTA.
HEAD = f"""{THREAD_OUTPUT} mov.u32 %r3, %ctaid.x; mad.lo.u32 %r4, %r3, 32, %r1; mul.wide.u32 %d3, %r4, 4;
    ld.param.u64 %d4, [p1]; add.s64 %d1, %d0, %d3; add.s64 %d2, %d4, %d3;"""
LET, WAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"
#: The first launch makes every item of p0 100.
FIRST = f"{HEAD} {LET} st.global.b32 [%d1], 100; ret;"
#: The second takes items of p0 to p1, those of another CTA: of the last one for CTA 0.
READER = f"""{HEAD} sub.u32 %r5, 2, %r3; mad.lo.u32 %r5, %r5, 32, %r1; mul.wide.u32 %d5, %r5, 4; add.s64 %d5, %d0, %d5;
    BEFORE ld.global.b32 %r6, [%d5]; AFTER st.global.b32 [%d2], %r6; ret;"""
#: It makes them 5.
WRITER = f"{HEAD} BEFORE st.global.b32 [%d1], 5; AFTER ret;"


def text(body: str, before: str = "", after: str = "") -> str:
    return module(body.replace("BEFORE", before).replace("AFTER", after), parameters=2)


def captured(ptx: str, addresses: Sequence[int]) -> CapturedLaunch:
    params = tuple(address.to_bytes(8, "little") for address in addresses)
    return CapturedLaunch("k", (CTAS, 1, 1), (32, 1, 1), (1, 1, 1), 1024, params, ptx, programmatic=True)


def reported(fault: bool) -> contextlib.AbstractContextManager:
    message = "the launch before this one"
    return pytest.raises(GlobalMemoryRace, match=message) if fault else contextlib.nullcontext()


@pytest.mark.parametrize("sound", [False, True])
@pytest.mark.parametrize("body", [READER, WRITER])
def test_a_replay_shows_the_fault(body: str, sound: bool) -> None:
    arrays = [aligned(np.full(32 * CTAS, value, np.uint32)) for value in (OLD, 0)]
    recorder, memory = Recorder(), GlobalMemory()
    for array in arrays:
        memory.register_tensor(array)
    regions = [(array.ctypes.data, array.nbytes) for array in arrays]
    second = text(body, before=WAIT) if sound else text(body, after=WAIT)
    for number, ptx in enumerate((text(FIRST), second)):
        launch = captured(ptx, [array.ctypes.data for array in arrays])
        recorder.take(launch, regions, overlaps=number == 1)
        run(ptx, grid=CTAS, block=32, dynamic_smem=1024, params=launch.params, memory=memory, options=Options())
    replay = Replay(recorder.launches[-1])
    alone = replay.run(Options()).memory
    with reported(not sound):
        both = replay.run(Options(), overlap=True).memory
        assert all(np.array_equal(*pair) for pair in zip(alone, both, strict=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_launches_of_a_program_overlap_where_it_is_asked_for(overlap: bool) -> None:
    with capture("sm_100a", overlap=overlap) as session:
        p0, p1, p2 = (torch.full((32 * CTAS,), value, dtype=torch.int32, device="cuda") for value in (OLD, 0, 0))

        def launch(ptx: str, *tensors: torch.Tensor) -> None:
            session.launch(captured(ptx, [each.data_ptr() for each in tensors]))

        launch(text(FIRST), p0, p1)
        launch(text(READER, before=WAIT), p0, p1)
        p0.fill_(OLD)  # a kernel of torch's, which the next launch is behind
        launch(text(READER, after=WAIT), p0, p1)
        assert set(p1.tolist()) == {OLD}
        with reported(overlap):
            launch(text(READER, after=WAIT), p1, p2)
