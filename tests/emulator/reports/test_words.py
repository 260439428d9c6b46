"""What reports call the cause: overflows of offsets, groups of copies, bytes of a phase, barriers of a pipeline."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cute_kernels.emulator import EmulatorError, Options
from cute_kernels.emulator.errors import Race
from cute_kernels.emulator.facts import Side
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.reports.barriers import pipeline_in_call, variable_in_call
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.emulator.reports.reporter import Reporter
from cute_kernels.emulator.reports.text import render
from cute_kernels.emulator.reports.words import noun
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch
from tests.processes import run_python


def report(text: str, *arguments: object, **keywords: object):
    with pytest.raises(EmulatorError) as caught:
        launch(text, *arguments, **keywords)
    return diagnose(caught.value)


@pytest.mark.parametrize(
    ("turns", "within", "kind"),
    [(1, 0, "offset-overflow"), (-1, 60, "offset-overflow"), (3, 8, "offset-overflow"), (1, 128, "out-of-bounds"),
     (5, 0, "out-of-bounds"), (0, 128, "out-of-bounds")],
)  # fmt: skip
def test_an_offset_of_two_to_the_32_is_an_overflow(turns: int, within: int, kind: str) -> None:
    """An access inside of the array but for a multiple of 2^32 bytes; up to four of them are looked for."""
    body = "ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; add.s64 %d1, %d1, %d2; ld.global.u32 %r1, [%d1];\nret;"
    found = report(module(body), aligned(np.zeros(32, np.int32)), turns * (1 << 32) + within, block=(1, 1, 1))
    assert found.kind == kind
    assert ("64 bits" in found.help) == (kind == "offset-overflow")


COPIES = """
    ld.param.u64 %d1, [p0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %d2, %r1, 16;
    add.s64 %d3, %d1, %d2;
    shl.b32 %r2, %r1, 4;
    mov.u32 %r9, dynamic;
    add.u32 %r2, %r2, %r9;
    cp.async.cg.shared.global [%r2], [%d3], 16;
    cp.async.commit_group;
    add.u32 %r3, %r2, 1024;
    cp.async.cg.shared.global [%r3], [%d3], 16;
    cp.async.commit_group;
    WAIT
    BARRIER
    xor.b32 %r4, %r1, 32;
    shl.b32 %r4, %r4, 4;
    add.u32 %r4, %r4, %r9;
    ld.shared.u32 %r5, [%r4];
    ret;
"""


@pytest.mark.parametrize(
    ("wait", "barrier", "kind"),
    [("cp.async.wait_group 2;", "bar.sync 0;", "copy-in-flight"), ("", "bar.sync 0;", "copy-in-flight"),
     ("cp.async.wait_group 1;", "", "uninitialised-read"), ("cp.async.wait_group 1;", "bar.sync 0;", None)],
)  # fmt: skip
def test_a_copy_that_nobody_waited_for_is_a_matter_of_groups(wait: str, barrier: str, kind: str | None) -> None:
    text = module(COPIES.replace("WAIT", wait).replace("BARRIER", barrier), parameters=1)
    given = aligned(np.zeros(256, np.int32)),
    if kind is None:
        launch(text, *given, block=(64, 1, 1))
        return
    found = report(text, *given, block=(64, 1, 1))
    assert found.kind == kind and ("cp_async_wait_group(N)" in found.help) == (kind == "copy-in-flight")


EXCHANGE = """
    mov.u32 %r1, %tid.x;
    mov.u32 %r9, dynamic;
    setp.eq.u32 %p2, %r1, 0;
    @%p2 mbarrier.init.shared.b64 [%r9], 64;
    bar.sync 0;
    mbarrier.arrive.shared.b64 %d1, [%r9];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r9], 0;
    @!%p1 bra WAIT;
    shl.b32 %r2, %r1, 2;
    add.u32 %r2, %r2, %r9;
    st.shared.u32 [%r2+64], %r1;
    BARRIER
    xor.b32 %r4, %r1, 32;
    shl.b32 %r4, %r4, 2;
    add.u32 %r4, %r4, %r9;
    ld.shared.u32 %r5, [%r4+64];
    ret;
"""


def test_the_help_of_an_array_that_is_written_in_part_names_both_causes() -> None:
    """A barrier between threads that exchange numbers is missing, in a kernel with mbarriers for something else."""
    launch(module(EXCHANGE.replace("BARRIER", "bar.sync 0;"), parameters=0), block=(64, 1, 1))
    found = report(module(EXCHANGE.replace("BARRIER", ""), parameters=0), block=(64, 1, 1))
    assert found.kind == "uninitialised-read" and "have been written, and not these" in found.help
    assert "a barrier is missing" in found.help and "sync_threads" in found.help and "index" in found.help


BYTES = """
    mov.u32 %r9, dynamic;
    mbarrier.init.shared.b64 [%r9], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 64;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r9], 0;
    @!%p1 bra WAIT;
    ret;
"""


def test_missing_bytes_lead_the_help_of_a_hang() -> None:
    found = report(module(BYTES, parameters=0), block=(1, 1, 1))
    assert found.kind == "transaction-bytes" and "64 bytes are announced at PTX line" in found.help
    arrivals = BYTES.replace(".arrive.expect_tx.shared.b64 _, [%r9], 64", ".arrive.noComplete.shared.b64 %d1, [%r9], 0")
    other = report(module(arrivals.replace("[%r9], 1;", "[%r9], 2;").replace(
        "mbarrier.arrive.noComplete.shared.b64 %d1, [%r9], 0;", "mbarrier.arrive.shared.b64 %d1, [%r9];"
    ), parameters=0), block=(1, 1, 1), options=Options())  # fmt: skip
    assert other.kind == "hang"


PROGRAM = """
import cuda.bindings.driver as cuda, cutlass, cutlass.cute as cute, cutlass.pipeline as pipeline, torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack
ROWS, COLUMNS, STAGES = 16, 64, 3

@cute.struct
class Storage:
    barriers: cute.struct.MemRange[cutlass.Int64, STAGES * 2]
    x: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, ROWS * COLUMNS * STAGES], 128]

@cute.kernel
def read(load: cute.CopyAtom, mx: cute.Tensor, layout: cute.Layout, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // 32)
    storage = cutlass.utils.SmemAllocator().allocate(Storage)
    tiles = storage.x.get_tensor(layout)
    incoming = pipeline.PipelineTmaAsync.create(
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
        tx_count=ROWS * COLUMNS * 8, barrier_storage=storage.barriers.data_ptr(),
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    )
    gx = cute.group_modes(cute.local_tile(mx, (ROWS, COLUMNS), (None, 0)), 0, 2)
    sx, gx = cpasync.tma_partition(load, 0, cute.make_layout(1), cute.group_modes(tiles, 0, 2), gx)
    if warp == 1:
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        incoming.producer_acquire(state)
        cute.copy(load, gx[None, 0], sx[None, state.index], tma_bar_ptr=incoming.producer_get_barrier(state))
        incoming.producer_commit(state)
    if warp == 0:
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        incoming.consumer_wait(state)
        out[thread] = tiles[0, thread, state.index]
        incoming.consumer_release(state)

@cute.jit
def launch(x: cute.Tensor, out: cute.Tensor):
    tile = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
    load, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, tile, (ROWS, COLUMNS))
    layout = cute.append(tile, cute.make_layout(STAGES, stride=ROWS * COLUMNS))
    read(load, tensor, layout, out).launch(grid=(1, 1, 1), block=(64, 1, 1))

x, out = torch.randn(ROWS, COLUMNS, device="cuda"), torch.zeros(32, device="cuda")
launch(from_dlpack(x, assumed_align=16), from_dlpack(out))
"""


def test_barriers_of_a_pipeline_have_its_name(tmp_path: Path) -> None:
    """Twice as many bytes are announced as come."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_python("-m", "cute_kernels", "emulate", "--arch", "sm_90a", "program.py", cwd=tmp_path)
    assert done.returncode == 3
    assert "error[transaction-bytes]" in done.stderr and "pipeline.Agent" not in done.stderr.split("help:")[0]
    assert re.search(r"waits? for incoming\.full\[0\]", done.stderr)
    assert re.search(r"of incoming\.full\[0\]: 4096 bytes missing", done.stderr)


SOURCE = """
first, second = pipeline.PipelineAsync.create(a), PipelineTmaUmma.create(
    barrier_storage=storage.data_ptr(), group=CooperativeGroup(Agent.Thread, 3))
self.order = pipeline.PipelineOrder.create(length=len(x))
mbarrier_init(full + stage, Count(Agent.Thread))
return PipelineTmaStore.create(num_stages=f(3))
"""


def test_a_note_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Of an error that is reported again, by one schedule after the other."""
    error, reporter = EmulatorError("a fault"), Reporter()
    for notes in (["one"], ["one", "two"]):
        found = reporter.report(Schedule(), error, *notes)
        assert list(found.notes) == notes and capsys.readouterr().err.count("one") == 1


def test_variables_of_calls(tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text("def function(self):\n" + SOURCE.replace("\n", "\n    "))
    assert [pipeline_in_call(str(path), line) for line in (4, 5, 6, 7)] == [
        ("second", "PipelineTmaUmma"), ("order", "PipelineOrder"), ("", ""), ("", "PipelineTmaStore"),
    ]  # fmt: skip
    assert [variable_in_call(str(path), line) for line in (4, 5, 6)] == ["second", "order", "full"]
    path.write_text("def function(self):\n    init(bars[1], 2)\n    init(at=full + 1, count=2)\n    init(bars[i], 2)\n")
    assert [variable_in_call(str(path), line) for line in (2, 3, 4)] == ["bars[1]", "full", "bars"]


SHOWN = """
import torch, cutlass, cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack, make_ptr

def test_shown(emulated):
    x = torch.zeros(4, 4, dtype=torch.int32, device="cuda")
    plain, dynamic = from_dlpack(x), from_dlpack(x).mark_layout_dynamic()
    compact, pointer = from_dlpack(x).mark_compact_shape_dynamic(mode=0), make_ptr(cute.Float32, 16)
    assert [plain, dynamic, compact, pointer] == []
"""


def test_a_failing_test_shows_tensors_of_the_dsl(tmp_path: Path) -> None:
    (tmp_path / "test_shown.py").write_text(SHOWN)
    words = ["-m", "pytest", "-q", "-vv", "--showlocals", "-p", "cute_kernels.pytest_plugin", "test_shown.py"]
    done = run_python(*words, cwd=tmp_path, env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    assert done.returncode == 1 and "1 failed" in done.stdout
    assert re.search(r"compact += Tensor<0x[0-9a-f]+@gmem o \(\?,4\)", done.stdout)


def test_lines_that_are_left_out_are_counted() -> None:
    """Of an access that many lines of an unrolled loop may have made."""
    stores = tuple(SimpleNamespace(parts=("st",), line=line, source="", text="st;") for line in range(10, 19))
    found = diagnose(Race("a race").know("shared-race", side=Side("reads"), other=Side("wrote", stores)))
    shown = len(re.findall("PTX line 1[0-8]", render(found)))
    assert f"or {9 - shown} more lines" in render(found) and 0 < shown < 9
    assert "more lines" not in render(found, verbose=True)


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [("tcgen05.ld.sync", "tcgen05.ld"), ("tcgen05.mma", "MMA"), ("cp.async.ca.shared.global", "cp.async"),
     ("cp.async.bulk.tensor.2d.shared::cluster.global", "TMA load"), ("cp.async.bulk.global.shared::cta", "bulk store"),
     ("st.shared", "store"), ("prefetch.global", "prefetch")],
)  # fmt: skip
def test_what_an_instruction_is_called(opcode: str, expected: str) -> None:
    assert noun(SimpleNamespace(parts=tuple(opcode.split(".")))) == expected
