"""`cute_kernels.dsl.programs`: source lines of programs that are compiled for the emulator."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.runtime import make_fake_compact_tensor

import cute_kernels
from cute_kernels.dsl import compiling, programs


@cute.kernel
def stages_kernel(out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    state = pipeline.PipelineState(3, thread, thread, thread)
    state.advance(thread)  # sums and remainders say nothing of who called it
    out[thread] = state.index + state.phase


@cute.jit
def stages(out: cute.Tensor):
    stages_kernel(out).launch(grid=(1, 1, 1), block=(2, 1, 1))


def test_what_cute_dsl_s_library_makes_has_the_line_that_calls_the_library() -> None:
    with programs.compiling_for("sm_90a"):
        ptx = compiling.ptx(cute.compile(stages, make_fake_compact_tensor(cutlass.Int32, (2,))))
    files = dict(re.findall(r'\.file\s+(\d+) "([^"]*)"', ptx))
    marks = re.findall(r"^\s*\.loc\s+(\d+) (\d+)", ptx, re.MULTILINE)
    places = {(Path(files[file]), int(line)) for file, line in marks}
    package = Path(cute_kernels.__file__).parent
    assert [path for path, _ in places if path.is_relative_to(package)] == []

    lines, first = inspect.getsourcelines(inspect.unwrap(stages_kernel))
    (call,) = (first + number for number, line in enumerate(lines) if "state.advance(" in line)
    assert (Path(__file__), call) in places
