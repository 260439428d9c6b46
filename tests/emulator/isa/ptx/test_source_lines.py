"""Source lines of inline assembly: PTX that CuTe DSL made of the kernels here, whose lines `inspect` finds."""

from __future__ import annotations

import inspect
import re

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.config import PatchEmbedProblem
from cute_kernels.emulator import Hang
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.programs import capture
from cute_kernels.kernels import pipes, ptx
from cute_kernels.operations.compile import compile_plan
from cute_kernels.plan import make_plan
from cute_kernels.testing.ptx import module

LABELS = """{
    .reg .pred again;
    AGAIN:
    add.s32 {$w0}, {$r0}, 1001;
    setp.eq.s32 again, {$r0}, {$w0};
    @again bra AGAIN;
    {
        .reg .b32 inner;
        mov.b32 inner, {$w0};
        add.s32 {$w0}, inner, 1002;
    }
    add.s32 {$w0}, {$w0}, 1003;
}"""
BARE = "add.s32 {$w0}, {$r0}, 1004;\n\tadd.s32 {$w0}, {$w0}, 1005;\n\tadd.s32 {$w0}, {$w0}, 1006;"


@dsl_user_op
def asm(text: str, value: Int32, *, loc=None, ip=None) -> Int32:
    """Inline assembly of one input and one output, with the line of the call."""
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[value], loc=loc, ip=ip)


@cute.kernel
def assembly(y: cute.Tensor):
    """Every shape that inline assembly takes; each line below is found again by its comment."""
    thread, _, _ = cute.arch.thread_idx()
    a = y[thread]
    a = asm(LABELS, a)  # labels
    a = asm(LABELS, a)  # labels again
    a = asm(BARE, a)  # bare
    a = asm("add.s32 {$w0}, {$r0}, 1007;", a)  # one line
    a, b = asm(BARE, a), asm("{\n\tadd.s32 {$w0}, {$r0}, 1008;\n}", a)  # two on a line
    y[thread + 32] = b  # store behind
    y[thread] = a  # last


@cute.kernel
def waiting(y: cute.Tensor, phase: Int32):
    """The last wait does not end with phase 0."""
    thread, _, _ = cute.arch.thread_idx()
    barrier = cute.arch.alloc_smem(cutlass.Int64, 1)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.sync_threads()
    cute.arch.mbarrier_wait(barrier, 1)  # passes
    cute.arch.mbarrier_wait(barrier, phase)  # waits
    y[thread] = phase  # behind the wait


@cute.kernel
def overrun(y: cute.Tensor):
    """The wait is in order, the store behind it is out of bounds."""
    thread, _, _ = cute.arch.thread_idx()
    barrier = cute.arch.alloc_smem(cutlass.Int64, 1)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.sync_threads()
    ptx.mbarrier_try_wait_acquire_cluster(barrier, Int32(1))
    y[thread + (1 << 20)] = thread  # out of bounds


@cute.jit
def launch_assembly(y: cute.Tensor):
    assembly(y).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.jit
def launch_waiting(y: cute.Tensor, phase: Int32):
    waiting(y, phase).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.jit
def launch_overrun(y: cute.Tensor):
    overrun(y).launch(grid=(1, 1, 1), block=(32, 1, 1))


def line_of(function: object, mark: str) -> str:
    """``file:line`` of the only line of a function that contains ``mark``."""
    lines, first = inspect.getsourcelines(inspect.unwrap(function))
    (number,) = (first + i for i, line in enumerate(lines) if mark in line)
    return f"{inspect.getsourcefile(inspect.unwrap(function)).rsplit('/', 1)[-1]}:{number}"


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def instructions(request):
    with capture(request.param) as session:
        y = torch.arange(64, dtype=torch.int32, device="cuda")
        launch_assembly(from_dlpack(y))
    labels, bare = 1001 + 1002 + 1003, 1004 + 1005 + 1006
    assert y.tolist() == [i + 2 * labels + bare + 1007 + bare for i in range(32)] + [
        i + 2 * labels + bare + 1007 + 1008 for i in range(32)
    ]
    (kernel,) = parse(session.launches[0].launch.ptx).kernels.values()
    return kernel.instructions


def lines_of_constant(instructions: tuple, constant: int) -> list[str]:
    """Source lines of the instructions with this literal, in order."""
    return [i.source for i in instructions if re.search(rf"\b{constant}$", i.text)]


@pytest.mark.parametrize(
    "constants, marks",
    [
        ((1001, 1002, 1003), ("# labels\n", "# labels again")),
        ((1004, 1005, 1006), ("# bare", "# two on a line")),
        ((1007,), ("# one line",)),
        ((1008,), ("# two on a line",)),
    ],
)
def test_inline_assembly_has_the_line_of_its_call(instructions, constants, marks) -> None:
    for constant in constants:
        assert lines_of_constant(instructions, constant) == [line_of(assembly, mark) for mark in marks]


def test_labels_and_branches_of_inline_assembly_have_its_line(instructions) -> None:
    inside = [i.source for i in instructions if i.opcode in ("setp.eq.s32", "bra")]
    assert inside == [line_of(assembly, mark) for mark in ("# labels\n",) * 2 + ("# labels again",) * 2]


def test_code_behind_inline_assembly_has_its_own_line(instructions) -> None:
    stores = [i.source for i in instructions if i.parts[:2] == ("st", "global")]
    assert stores == [line_of(assembly, "# store behind"), line_of(assembly, "# last")]


def test_the_report_of_a_wait_names_its_line() -> None:
    with capture("sm_90a"):
        y = torch.zeros(32, dtype=torch.int32, device="cuda")
        launch_waiting(from_dlpack(y), 1)
        assert y.tolist() == [1] * 32
        with pytest.raises(Hang) as caught:
            launch_waiting(from_dlpack(y), 0)
    assert set(re.findall(r"test_source_lines\.py:\d+", caught.value.report)) == {line_of(waiting, "# waits")}


def test_the_report_of_what_follows_a_wait_names_its_line() -> None:
    with capture("sm_90a"):
        y = torch.zeros(32, dtype=torch.int32, device="cuda")
        with pytest.raises(Exception, match="outside every registered region") as caught:
            launch_overrun(from_dlpack(y))
    assert caught.value.source == line_of(overrun, "# out of bounds")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_waits_of_this_package_s_pipes(arch: str) -> None:
    """Each architecture's kernel waits through `pipes._wait` and `Pipe` only."""
    artifact = compile_plan(make_plan(PatchEmbedProblem(m=256, n=768, k=768), None, arch))
    (kernel,) = parse(artifact.ptx).kernels.values()
    waits = {i.source for i in kernel.instructions if i.parts[:2] == ("mbarrier", "try_wait")}
    lines, first = inspect.getsourcelines(pipes._wait)
    calls = {f"pipes.py:{first + i}" for i, line in enumerate(lines) if "wait" in line and i}
    own = {line_of(ptx._mbarrier_try_wait, "cute.arch.inline_ptx")}
    assert waits and waits <= calls | own, (waits, calls, own)


@pytest.mark.parametrize("comments", [True, False])
def test_without_comments_a_brace_level_is_inline_assembly(comments: bool) -> None:
    """PTX from which a tool took the comments; with them a scope that is no inline assembly has lines of its own."""
    scope = "{ // callseq 0, 0\n.loc 1 20 1\nmov.b32 %r1, 2;\n}\nmov.b32 %r1, 3;\n"
    marks = ("// begin inline asm\n", "// end inline asm\n") if comments else ("", "")
    body = f".loc 1 10 1\n{marks[0]}{{\n.loc 1 11 1\nmov.b32 %r1, 1;\n}}\n{marks[1]}{scope}"
    (kernel,) = parse(module(body, registers=".reg .b32 %r<2>;") + '\n.file 1 "/a/x.py"\n').kernels.values()
    numbers = [int(i.source.rsplit(":", 1)[1]) for i in kernel.instructions if i.parts[0] == "mov"]
    assert numbers == ([10, 20, 20] if comments else [10, 10, 10])
