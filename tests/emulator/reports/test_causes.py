"""The first report of a planted fault names its cause and the line to mend, and of two causes the right one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cute_kernels.emulator.errors import Race
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.testing.ptx import module
from tests.emulator.ptx_launch import launch
from tests.emulator.reports.planted_causes import ARCHITECTURES, FAULTS, report, source_of
from tests.nightly import by_day

DAILY = (
    "pipeline: consumer's wrong phase", "pipeline: wrong stage read", "pipeline: copy signals another stage",
    "pipeline: copy not issued", "pipeline: count too high", "pipeline: early release",
    "pipeline: release before the wait", "bias_add: release before the wait",
    "gemm_sm90: wgmma reads another stage of a", "gemm_sm90: mask of own CTA", "gemm_sm90: count of one CTA",
    "gemm_sm90: b not loaded",
    "gemm_sm100: commit of stages not multicast", "gemm_sm100: half of the pair's bytes announced",
    "gemm_sm100: no commit of stages", "gemm_sm100: no commit of sums", "gemm_sm100: commit to the wrong barrier",
    "gemm_sm100: no wait for full", "gemm_sm100: release before the loads",
    "pipelines_sm90: consumer does not advance", "one_array_sm100: commit of another stage",
    "one_array_sm100: epilogue waits for sums_empty", "named_barriers: adding warps do not arrive",
    "gemm_sm80: arrival at another named barrier", "gemm_sm80: no commit in the loop",
    "linear_sm90: consumer's parity stays",
)  # fmt: skip


@pytest.mark.parametrize("program", by_day(ARCHITECTURES, [*ARCHITECTURES][:7]))
def test_programs_without_a_fault(program: str, tmp_path: Path) -> None:
    assert report(source_of(program), program, tmp_path) is None


@pytest.mark.parametrize("name", by_day(FAULTS, DAILY))
def test_causes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # reports name files relative to the current folder
    fault = FAULTS[name]
    found = report(fault.source, fault.program, tmp_path)
    assert found is not None and found.kind == fault.kind
    assert [words for words in fault.expected() if words not in found.help] == [], found.help


def test_a_lane_that_arrives_for_its_warp_waits_for_the_other_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = source_of("pipeline").replace("(empty + stage, THREADS - LOADERS)", "(empty + stage, 1)")
    arrival = "            cute.arch.mbarrier_arrive(empty + stage)\n"
    fence = '            cute.arch.fence_proxy("async.shared", space="cta")\n'
    elected = "            with cute.arch.elect_one():\n    " + arrival
    right = source.replace(arrival, fence + "            cute.arch.sync_warp()\n" + elected)
    assert report(right, "pipeline", tmp_path, strict=True) is None
    found = report(source.replace(arrival, fence + elected), "pipeline", tmp_path, strict=True)
    assert found is not None and found.kind == "shared-race"
    assert found.help.startswith("a warp's barrier is missing: the lane of warp 1 that arrives at empty[0]")


def in_shared_memory(threads: int, body: str) -> str:
    """A program of one CTA that has 128 ``cells`` in shared memory."""
    lines = "\n    ".join(body.strip().splitlines())
    return f"""
import cutlass, torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def kernel(y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    cells = cute.make_tensor(cute.arch.alloc_smem(cutlass.Int32, 128), cute.make_layout(128))
    {lines}

@cute.jit
def host(y: cute.Tensor):
    kernel(y).launch(grid=(1, 1, 1), block=({threads}, 1, 1))

def main():
    host(from_dlpack(torch.zeros(64, dtype=torch.int32, device="cuda")))
"""


#: The first half of the threads reads what the second has written, writes its own, and half of these read again.
STEPS = """
cells[thread] = thread
cute.arch.sync_threads()
if thread < 64:
    mine = cells[thread + 64]
    cells[thread] = mine + 1
    {behind}
    if thread < 32:
        y[thread] = cells[thread + 32]
"""
MEET = "cute.arch.barrier(barrier_id=1, number_of_threads=64)"


def test_a_barrier_between_a_write_and_one_of_several_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = report(in_shared_memory(128, STEPS.format(behind="")), "pipeline", tmp_path)
    assert found is not None and found.kind == "shared-race"
    assert found.help.startswith("a barrier is missing between the write at pipeline.py:14 and the read at "
                                 "pipeline.py:17"), found.help  # fmt: skip
    assert report(in_shared_memory(128, STEPS.format(behind=MEET)), "pipeline", tmp_path) is None


#: Each thread stores to the first of two cells of its own, and reads the second.
SINGLE = """
first = 2 * thread + y[thread]
cells[first] = 7
y[thread] = cells[first + 1]
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_thread_that_is_alone_waits_for_nobody(threads: int, tmp_path: Path) -> None:
    found = report(in_shared_memory(threads, SINGLE), "pipeline", tmp_path)
    assert found is not None and found.kind == "uninitialised-read"
    words = "the CTA has one thread" if threads == 1 else "a barrier is missing between"
    assert found.help.startswith(words), found.help


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("values", "same"), [("7", True), ("%tid.x", False)])
def test_races_of_equal_values_are_said_to_be_such(space: str, values: str, same: bool) -> None:
    """Each lane of two warps stores to the place of its lane."""
    base = {"global": "add.u64 %d1, %d0, %d1;", "shared": "mov.u64 %d2, cells; add.u64 %d1, %d2, %d1;"}[space]
    body = f"""
    .shared .align 4 .b8 cells[128];
    ld.param.u64 %d0, [p0];
    mov.u32 %r0, %tid.x;
    and.b32 %r1, %r0, 31;
    mul.wide.u32 %d1, %r1, 4;
    {base}
    mov.u32 %r2, {values};
    st.{space}.u32 [%d1], %r2;
    ret;
    """
    out = np.zeros(32, np.uint32)
    with pytest.raises(Race) as info:
        launch(module(body, parameters=1), out, block=64)
    notes = " ".join(diagnose(info.value).notes)
    assert ("both write the same value, 0x7 in the first place" in notes) == same, notes
