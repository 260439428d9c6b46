"""Mutants of the kernels that a program launched, judged here and in processes, of every size."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.checking.mutation import campaign
from cute_kernels.emulator.checking.mutation.mutants import mutants, mutants_of_kernel
from cute_kernels.emulator.programs import capture
from cute_kernels.emulator.programs.program_run import run_program
from cute_kernels.emulator.programs.recorded import Recorder
from tests import processes
from tests.emulator.checking.planted import EXAMPLE


@pytest.fixture(scope="module")
def recorded() -> Iterator[list]:
    """The launches of the example."""
    recorder = Recorder()
    with capture("sm_90a", Options(), recorder=recorder) as session:
        assert run_program(str(EXAMPLE), [], session, pytest.fail) == 0
    yield recorder.launches


def test_processes_judge_the_same(recorded: list) -> None:
    """What a mutant does is the same where its memory lies elsewhere, in another process."""
    (kernel,) = campaign.kernels(recorded, 3)
    numbers = list(range(0, len(kernel.mutants), 12))
    shown = []
    here = campaign.judge_mutants(kernel, numbers, {})
    with processes.pool(2) as pool:
        there = campaign.judge_mutants(kernel, numbers, {}, executor=pool, done=shown.append)
    with ThreadPoolExecutor(2) as pool:
        threads = campaign.judge_mutants(kernel, numbers, {}, executor=pool)
    for others in (there, threads):
        assert [(v.key, v.killer, v.schedule, v.line) for v in here] == [
            (v.key, v.killer, v.schedule, v.line) for v in others
        ]
    assert sorted(v.key for v in shown) == sorted(v.key for v in there) and any(v.killed for v in here)


SIZES = """
if __name__ == "__main__":
    bias = torch.randn(COLUMNS, device="cuda")
    for m in (32, 112, 112):  # a tile for each CTA: no stage is used twice; then four
        x = torch.randn(m, COLUMNS, device="cuda")
        torch.testing.assert_close(bias_add(x, bias), x + bias)
"""


def test_every_size_is_judged(tmp_path: Path) -> None:
    """Launches of one grid: what lets a stage be used again is needed by the second size alone."""
    program = tmp_path / "sizes.py"
    program.write_text(EXAMPLE.read_text().partition('if __name__ == "__main__":')[0] + SIZES)
    recorder = Recorder()
    with capture("sm_90a", Options(), recorder=recorder) as session:
        assert run_program(str(program), [], session, pytest.fail) == 0
    (kernel,), (first,) = campaign.kernels(recorder.launches), campaign.kernels(recorder.launches, 1)
    assert [each.number for each in kernel.launches] == [1, 2] and len(first.launches) == 1
    waits = [n for n, mutant in enumerate(kernel.mutants) if mutant.mutation == "drop" and "try_wait" in mutant.opcode]
    killed = [[v.killed for v in campaign.judge_mutants(each, waits, {})] for each in (kernel, first)]
    assert all(killed[0]) and not all(killed[1])


IN_MEMORY = """
import cutlass, cutlass.cute as cute, torch
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def turned(x: cute.Tensor, y: cute.Tensor, turns: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    shared = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, 64), cute.make_layout(64))
    value = x[thread]
    for _ in cutlass.range(turns[0], unroll=1):
        shared[thread] = value
        cute.arch.barrier()
        value = shared[(thread + 32) % 64]
        cute.arch.barrier()
    y[thread] = value

@cute.kernel
def permuted(x: cute.Tensor, y: cute.Tensor, index: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    shared = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, 64), cute.make_layout(64))
    shared[index[thread]] = x[thread]
    cute.arch.barrier()
    y[thread] = shared[thread]

@cute.jit
def call(x: cute.Tensor, y: cute.Tensor, integers: cute.Tensor, turn: cutlass.Constexpr):
    if cutlass.const_expr(turn):
        turned(x, y, integers).launch(grid=(1, 1, 1), block=(64, 1, 1))
    else:
        permuted(x, y, integers).launch(grid=(1, 1, 1), block=(64, 1, 1))

places = torch.arange(64, dtype=torch.int32)
for turn, integers in [
    (True, torch.tensor([turns], dtype=torch.int32)) for turns in (0, 1, 3, 3)
] + [(False, index) for index in (places, places.flip(0), places.flip(0))]:
    x, y = torch.randn(64, device="cuda"), torch.full((64,), torch.nan, device="cuda")
    call(*map(from_dlpack, (x, y, integers.cuda())), turn)
    wanted = x.roll(32 * int(integers[0])) if turn else torch.empty_like(x).index_copy_(0, integers.cuda().long(), x)
    assert torch.equal(y, wanted)
"""


@pytest.mark.parametrize(("name", "numbers"), [("turned", [1, 2, 3]), ("permuted", [5, 6])])
def test_sizes_and_indices_in_memory_are_judged(name: str, numbers: list[int], tmp_path: Path) -> None:
    """The first launch needs no barrier; other numbers to compute with, as of the last one, change nothing."""
    program = tmp_path / "in_memory.py"
    program.write_text(IN_MEMORY)
    recorder = Recorder()
    with capture("sm_90a", Options(), recorder=recorder) as session:
        assert run_program(str(program), [], session, pytest.fail) == 0
    (kernel,) = (each for each in campaign.kernels(recorder.launches) if name in each.name)
    assert [each.number for each in kernel.launches] == numbers
    dropped = [n for n, mutant in enumerate(kernel.mutants) if mutant.mutation == "drop"]
    assert dropped and all(verdict.killed for verdict in campaign.judge_mutants(kernel, dropped, {}))


def test_launches_of_one_shape_run_once(recorded: list) -> None:
    """Of two equal shapes the one that may overlap another launch, so that griddepcontrol.wait is needed."""
    assert len(recorded) == 2
    (kernel,) = campaign.kernels(recorded, 3)
    assert [each.number for each in kernel.launches] == [2]
    (number,) = [n for n, mutant in enumerate(kernel.mutants) if mutant.opcode == "griddepcontrol.wait"]
    (verdict,) = campaign.judge_mutants(kernel, [number], {})
    assert verdict.killer == "launch-overlap"


def test_mutants_of_one_kernel_of_a_module() -> None:
    text = """.visible .entry one(.param .u64 p) {
bar.sync 0;
}
.visible .entry two(
.param .u64 p
) .reqntid 1 {
bar.sync 0;
membar.gl;
}
"""
    assert [(m.line, m.opcode) for m in mutants(text)] == [(2, "bar.sync"), (7, "bar.sync"), (8, "membar.gl")]
    assert [m.line for m in mutants_of_kernel(text, "one")] == [2]
    assert [m.line for m in mutants_of_kernel(text, "two")] == [7, 8]
