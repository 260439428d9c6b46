"""`cute_kernels.dsl.allocations`: where tensors of a kernel are made, and who called the function that makes them."""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.cutlass_dsl import CuTeDSL
from cutlass.utils import SmemAllocator

from cute_kernels.dsl import compiling
from cute_kernels.dsl.allocations import _Callers

PLAIN = SimpleNamespace(_is_framework_stack_frame=lambda frame: False)


def test_callers_are_those_of_a_walk_through_all_that_runs() -> None:
    remembering, found = _Callers(PLAIN), []

    def operation() -> None:
        found.append((remembering.of(sys._getframe(1)), _Callers(PLAIN).of(sys._getframe(1))))

    def twice(function: Callable[[], None]) -> None:
        function()
        function()

    def steps() -> Iterator[None]:
        operation()
        yield
        operation()
        yield

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        operation()
        yield
        operation()

    twice(operation)
    twice(lambda: twice(operation))
    resumed = steps()
    next(resumed)
    twice(lambda: next(resumed, None))  # by another function, without an operation in between
    with around():
        pass
    with around():
        twice(operation)
    operation()
    for remembered, walked in found:
        assert remembered == walked
    assert len({walked for _, walked in found}) == len(found) == 15


def test_what_finished_functions_had_is_let_go_at_the_next_operation() -> None:
    remembering, kept = _Callers(PLAIN), []

    def finished() -> None:
        large = {1}
        kept.append(weakref.ref(large))
        remembering.of(sys._getframe())

    finished()
    remembering.of(sys._getframe())
    assert kept[0]() is None


def test_what_the_program_has_is_let_go_after_a_compilation() -> None:
    def compiled() -> weakref.ref:
        large = {1}
        compiling.compile_function(staged_on, (make_fake_compact_tensor(cutlass.Int32, (8,)),), "sm_90a")
        return weakref.ref(large)

    gc.collect()
    gc.disable()
    try:
        assert compiled()() is None
    finally:
        gc.enable()


def test_a_compilation_makes_no_engine_where_a_gpu_could_run_the_code(monkeypatch) -> None:
    monkeypatch.setattr(CuTeDSL, "_runtime_can_run_compiled", lambda *_: True)
    compiled = compiling.compile_function(staged_on, (make_fake_compact_tensor(cutlass.Int32, (8,)),), "sm_90a")
    assert compiled.engine is None and ".entry" in compiling.ptx(compiled)


@cute.kernel
def staged_kernel(out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    whole = cute.make_identity_tensor((64, 64))
    place = cute.make_tensor(whole.iterator, whole.layout)  # a tensor that has no memory
    pointer = SmemAllocator().allocate_array(cutlass.Int32, 64)
    staged = cute.make_tensor(pointer, cute.make_layout((8, 8)))
    halves = cute.make_tensor(pointer, cute.make_layout((8, 2, 4)))
    staged[thread, 0] = place[0, 0][0]
    out[thread] = halves[thread, 0, 0]


@cute.jit
def staged_on(out: cute.Tensor):
    staged_kernel(out).launch(grid=(1, 1, 1), block=(8, 1, 1))


def test_tensors_in_shared_memory_have_the_lines_that_make_them() -> None:
    compiled = compiling.compile_function(staged_on, (make_fake_compact_tensor(cutlass.Int32, (8,)),), "sm_90a")
    (kernel,) = compiling.allocations_of(compiled)
    lines, first = inspect.getsourcelines(inspect.unwrap(staged_kernel))
    made = [(lines[places[-1][1] - first].split()[0], view.layout) for view in kernel.views if (places := view.places)]
    assert made == [("staged", "(8,8):(1,8)"), ("halves", "(8,2,4):(1,8,16)")]
