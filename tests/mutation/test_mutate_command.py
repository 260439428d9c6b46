"""``cute-kernels mutate`` on a kernel that is not this package's, and the mutants of one kernel of several."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cute_kernels.commands import cli, mutate
from cute_kernels.emulator import Options
from cute_kernels.mutation import campaign
from cute_kernels.mutation.mutants import mutants, mutants_of_kernel
from cute_kernels.programs import capture
from cute_kernels.programs.program_run import run_program
from cute_kernels.programs.recorded import Recorder
from tests import processes
from tests.checking.planted import EXAMPLE, planted
from tests.emulator import exit_program

EXITS = str(Path(exit_program.__file__))


def command(*arguments: str) -> int:
    try:
        return cli.main(["mutate", "--arch", "sm_90a", *arguments])
    except SystemExit as end:
        return end.code


@pytest.fixture(scope="module")
def recorded() -> Iterator[list]:
    """The launches of the example."""
    recorder = Recorder()
    with capture("sm_90a", Options(), recorder=recorder) as session:
        assert run_program(str(EXAMPLE), [], session, pytest.fail) == 0
    yield recorder.launches


def test_score_and_survivors_with_their_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two survive for good: barrier.sync orders the initialisation too, and bytes are announced to the own CTA."""
    file = tmp_path / "out.json"
    assert command("--output", str(file), "--fail-under", "90", str(EXAMPLE)) == 0
    out = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert len(result["mutants"]) > 30
    survivors = [entry for entry in result["mutants"] if not entry["killer"]]
    assert {(entry["mutation"], entry["opcode"].partition(".shared")[0]) for entry in survivors} == {
        ("drop", "fence.mbarrier_init.release.cluster"), ("relaxed", "mbarrier.arrive.expect_tx"),
    }  # fmt: skip
    assert result["score"] == 1 - len(survivors) / len(result["mutants"])
    assert f"score {result['score']:.1%}" in out.splitlines()[-1]
    lines = EXAMPLE.read_text().splitlines()
    shown = re.findall(r"^  survives: (.+): PTX line \d+: (.*)\n    bias_add\.py:(\d+) \(add_bias\): (.*)$", out, re.M)
    assert len(shown) == len(survivors)
    for _, _, number, text in shown:
        assert lines[int(number) - 1].strip() == text
    killers = {entry["killer"] for entry in result["mutants"]} - {""}
    assert killers >= {"SharedMemoryRace", "Hang", "BarrierMisuse", "ProxyFenceMissing", "GlobalMemoryRace"}


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
    assert verdict.killer == "GlobalMemoryRace"


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


def test_an_unchanged_kernel_at_fault_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a fault that the program's own run does not show, too: one of the six schedules does."""
    assert command(str(planted("no proxy fence", tmp_path))) == 3
    assert "error[proxy-fence]" in capsys.readouterr().err
    assert command(str(planted("one try to wait", tmp_path))) == 3
    report = capsys.readouterr().err
    assert report.startswith("error[unfinished-copy]: ") and "  note: the kernel is unchanged\n" in report
    assert "  replay: cute-kernels check --arch sm_90a " in report


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([EXITS, "exit-7"], 7, ""),
        ([EXITS, "raise"], 1, "ValueError: the program's own"),
        ([EXITS, "refused"], 4, "opcode 'alloca.u32' is not implemented"),
        ([EXITS, "normal"], 2, "no mutant is there: the kernels' PTX has no such synchronisation"),
        (["--kernel", "gemm", EXITS, "normal"], 2, "no kernel has such a name; the program launched kernel_cutlass_"),
        (["--jobs", "0", EXITS], 2, "'0' is not a positive integer"),
        (["--fail-under", "101", EXITS], 2, "'101' is not a percentage from 0 to 100"),
        (["--output", "no/such/folder.json", EXITS], 2, "no/such to write"),
        (["no such.py"], 2, "no file no such.py"),
    ],
)
def test_exit_status(arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*arguments) == status
    assert words in capsys.readouterr().err


def test_a_score_below_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--match", "fence.mbarrier_init", "--fail-under", "1", str(EXAMPLE)) == mutate.BELOW == 5
    assert "mutated: 1 mutants in" in capsys.readouterr().out
