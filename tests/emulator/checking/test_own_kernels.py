"""Emulated launches of this package's kernels: arrays and tiles have names, and `debug` runs them."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import cute_kernels
from cute_kernels.config import GemmProblem, Sm90GemmConfig, Sm100GemmConfig, Sm100PatchEmbedConfig, Sm100ResidentConfig
from cute_kernels.emulator import EmulatorError, Options
from cute_kernels.emulator.checking.debug_shell import Shell
from cute_kernels.emulator.checking.debugger import Debugger
from cute_kernels.emulator.programs import capture
from cute_kernels.emulator.programs.recorded import RecordedLaunch, Recorder
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.operations.compile import compile_plan
from cute_kernels.operations.runtime import emulated
from cute_kernels.plan import make_plan
from tests.emulator.gemm_inputs import make_gemm_case
from tests.emulator.kernel_inputs import make_case

GENERATOR = torch.Generator().manual_seed(0)
A, B = (torch.randn(rows, 160, generator=GENERATOR).to(torch.bfloat16) for rows in (300, 136))
PRODUCT = np.pad((A.float() @ B.float().T).numpy(), ((0, 128), (0, 128)))
GEMMS = {"sm_100a": Sm100GemmConfig(stages=2), "sm_90a": Sm90GemmConfig(stages=2)}


def recorded(run: Callable[[], torch.Tensor], arch: str) -> RecordedLaunch:
    """The launch of an operation."""
    recorder = Recorder()
    with capture(arch, Options(), recorder=recorder) as session:
        run()
    assert len(session.launches) == len(recorder.launches) == 1
    return recorder.launches[0]


def gemm(arch: str) -> RecordedLaunch:
    return recorded(lambda: cute_kernels.gemm(A, B, config=GEMMS[arch], backend="emulator"), arch)


def at_instruction(debugger: Debugger, *parts: str, warp: str) -> None:
    """Goes on until a warp is at the first instruction of this name."""
    names = ((each.parts[: len(parts)], each.line) for each in debugger.kernel.instructions)
    made = debugger.break_at(next(line for name, line in names if name == parts), warp)
    assert debugger.go().reason == f"breakpoint {made.number}"
    debugger.delete(made.number)


def test_accumulators_and_stages_of_a_gemm() -> None:
    """In front of the first tcgen05.ld, each CTA of a pair has 128 rows of the product, of the operands it loaded."""
    with Debugger(gemm("sm_100a")) as debugger:
        for warp, first in (("0.0.2", 0), ("0.1.2", 128), ("1.0.2", 256)):
            at_instruction(debugger, "tcgen05", "ld", warp=warp)
            found = debugger.tile("accumulators[:, :, stage 0]", warp=warp)
            rows = PRODUCT[first : first + 128, :128]
            assert found.shape == (128, 128) and np.allclose(found[: 300 - first], rows[: 300 - first], atol=1e-4)
            last = debugger.tile("a[stage 0]", warp=warp)  # columns 128 to 159 of the operand, and zeros behind them
            assert np.array_equal(last[:44, :32].astype(np.float32), A[first : first + 44, 128:].float().numpy())
        assert not debugger.watch("barrier operands_full[1]", "1.0.2").watch.change()


def test_stages_of_a_gemm_of_hopper() -> None:
    """In front of its wgmma, a warp has both operands of a stage."""
    with Debugger(gemm("sm_90a")) as debugger:
        at_instruction(debugger, "wgmma", "mma_async", warp="0.0.4")
        for name, operand in (("a", A), ("b", B)):
            tile = debugger.tile(f"{name}[0:64, :, stage 0]").astype(np.float32)
            assert np.array_equal(tile, operand[:64, :64].float().numpy())


@pytest.mark.parametrize("transposed", [False, True])
def test_accumulators_of_patch_embedding(transposed: bool) -> None:
    """Sums of the first tile, of all of K, in both kernels: the second has features in its rows.

    The rows of the first one are 2 positions of 64 images.
    """
    config = Sm100ResidentConfig(weight="tmem") if transposed else Sm100PatchEmbedConfig()
    batch, positions = (1, 256) if transposed else (64, 4)
    case = make_case(batch=batch, positions=positions, n=256, k=256, config=config)
    sums = case.tensors.x.float() @ case.tensors.weight.float().T
    wanted = (sums.T if transposed else sums.view(64, 4, 256).transpose(0, 1).reshape(256, 256)).numpy()
    with Debugger(recorded(lambda: emulated.launch(case.plan, case.tensors), "sm_100a")) as debugger:
        at_instruction(debugger, "tcgen05", "ld", warp="")
        found = debugger.tile("accumulators")[..., 0]
    assert np.allclose(found, wanted[: found.shape[0], : found.shape[1]], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(("row", "column"), [(0, 3), (200, 70), (299, 131)])
def test_the_origin_of_a_result_of_tensor_memory(row: int, column: int, tmp_path: Path) -> None:
    """The accumulator's place, and every K once, whichever CTA of a pair made it; found by its value as well."""
    with Debugger(gemm("sm_100a")) as debugger:
        lines = debugger.origin("out", 2 * (row * 136 + column))
        wanted = (A.float() @ B.float().T).numpy()
        wanted[row, column] += 100
        np.save(tmp_path / "wanted.npy", wanted)
        shell = Shell(debugger, stdout=io.StringIO())
        shell.onecmd(f"origin out expected {tmp_path / 'wanted.npy'}")
        found = shell.stdout.getvalue().splitlines()
        shell.onecmd(f"origin out expected {tmp_path / 'none.npy'}")
        assert "No such file" in shell.stdout.getvalue().splitlines()[-1]
        with pytest.raises(ValueError, match=r"must have the bytes of array out"):
            debugger.origin("out", wanted[:8])
    assert f"to out[0, {row}, {column}], " in lines[1]
    assert f"accumulators[{row % 128}, {column % 128}, stage 0]" in lines[3]
    made = [line.partition(" += ")[2] for line in lines[4:]]
    assert made[:10] == [f"a[0, {row}, {k}:{k + 16}] * b[0, {column}, {k}:{k + 16}]" for k in range(0, 160, 16)]
    assert set(made[10:]) == {"(zeros beyond the tensor) * (zeros beyond the tensor)"}
    assert re.match(rf"out\[{row}, {column}\] is \S+, expected {wanted[row, column]}", found[0]) and found[1:] == lines


WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, [^;]*;"

RELAXED_WAIT = r"mbarrier\.try_wait\.parity\.relaxed\S* complete, [^;]*;"


def faulty(wait: int, pattern: str = WAIT) -> EmulatorError:
    """What is reported of a gemm in which one of the waits is left out, by its number in the PTX."""
    case = make_gemm_case(m=300, n=256, k=160, config=GEMMS["sm_100a"], arch="sm_100a", sm_count=2, bias=False)
    made = compile_plan(case.plan, emulated=True)
    start, end = list(re.finditer(pattern, made.ptx))[wait].span()
    ptx = f"{made.ptx[:start]}setp.eq.u32 {pattern.split()[1].strip(',')}, 0, 0;{made.ptx[end:]}"
    with pytest.raises(EmulatorError) as raised:
        emulated.launch(case.plan, case.tensors, artifact=dataclasses.replace(made, ptx=ptx))
    return raised.value


@pytest.mark.parametrize(
    ("kind", "words", "wait"),
    [
        ("uninitialised-read", r"lane (?P<lane>\d+), column (?P<column>\d+) ", (-1,)),
        ("tensor-race", r"column (?P<column>\d+), lanes from (?P<lane>\d+) on", (0, RELAXED_WAIT)),
    ],
)
def test_reports_of_tensor_memory_have_coordinates(kind: str, words: str, wait: tuple) -> None:
    """An epilogue that does not wait for accumulators, and MMAs that do not wait until they are read."""
    error = faulty(*wait)
    assert error.kind == kind
    lane, column = (int(re.search(words, str(error))[name]) for name in ("lane", "column"))
    where = f"column {column} of the tensor memory of CTA 0"
    assert diagnose(error).memory == f"{where}: accumulators[{lane}, {column % 128}, stage {column // 128}]"


def test_reports_of_shared_memory_have_names() -> None:
    """MMAs that do not wait for their operands read what nobody has written, of the plan's region of that name."""
    plan = make_plan(GemmProblem(300, 256, 160), GEMMS["sm_100a"])
    (first,) = (each.offset for each in plan.smem if each.name.startswith("b:"))
    place = f"offset {1024 + first} of the shared memory of CTA 0"
    assert diagnose(faulty(3)).memory == f"16 bytes from byte 0 on of b ({place}): b[0, 0, stage 0] to b[0, 7, stage 0]"
