"""The emulator in place of the CUDA runtime: the methods of CuTe DSL through which it takes that place."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

from cute_kernels.dsl.allocations import Allocations, of_module
from cute_kernels.dsl.compiling import ptx
from cute_kernels.dsl.versions import EMULATOR_VERSIONS, require

_RECORDER = "_cute_kernels_recorder"

_HOOK_LOCK = threading.RLock()
# A fork waits until all five methods are replaced.
os.register_at_fork(before=_HOOK_LOCK.acquire, after_in_parent=_HOOK_LOCK.release, after_in_child=_HOOK_LOCK.release)

_COMPILING = threading.local()
"""lowered: the module that this thread compiles, and its allocations."""


class Recorder(Protocol):
    """Stand-in for the CUDA runtime of one compiled host function: see `hook_runtime`.

    Attributes:
        ptx: set to the text of the compiled module, None if it was not kept, before its library is loaded.
        parameters: set then to the number of the host function's parameters, None if it is not known.
        allocations: set to what the kernels allocate in shared memory, where this process compiled them.
    """

    ptx: str | None
    parameters: int | None
    allocations: tuple[Allocations, ...]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls something of CuTe DSL that calls into the machine code."""


def hook_runtime(recording: Callable[[], bool], make: Callable[[Any], Recorder]) -> None:
    """Once per process: makes five methods of CuTe DSL look for a recorder; without one they do what they did.

    Args:
        recording: whether what this thread compiles now is to be recorded.
        make: makes the recorder of a JIT engine, with which `register_symbol` registers its entry points.

    Raises:
        ModuleNotFoundError, UnsupportedVersion: as `require`, of the versions that the emulator supports.
    """
    require(EMULATOR_VERSIONS)
    import cutlass.base_dsl.compiler
    import cutlass.base_dsl.jit_executor
    import cutlass.cutlass_dsl
    import cutlass.cutlass_dsl.cuda_jit_executor

    compiler, executor = cutlass.base_dsl.compiler.Compiler, cutlass.base_dsl.jit_executor.JitExecutor
    compiled = cutlass.cutlass_dsl.cuda_jit_executor.CudaDialectJitCompiledFunction
    dsl = cutlass.cutlass_dsl.CuTeDSL
    with _HOOK_LOCK:
        if hasattr(compiler.jit, "__wrapped__"):
            return
        create, load, run = compiler.jit, compiled._load_cuda_library, executor.run_compiled_program
        lower = compiler.compile
        can_run = dsl._runtime_can_run_compiled

        @functools.wraps(can_run)
        def runtime_can_run_compiled(self: Any, *arguments: Any, **keywords: Any) -> bool:
            # CuTe DSL builds no engine for an architecture that the present GPU cannot run; the recorder runs them all.
            return recording() or can_run(self, *arguments, **keywords)

        @functools.wraps(lower)
        def compile_module(self: Any, module: Any, *arguments: Any, **keywords: Any) -> Any:
            _COMPILING.lowered = (module, of_module(module)) if recording() else None
            return lower(self, module, *arguments, **keywords)

        @functools.wraps(create)
        def jit(self: Any, module: Any, *arguments: Any, **keywords: Any) -> Any:
            engine = create(self, module, *arguments, **keywords)
            if recording():
                recorder = make(engine)
                lowered, _COMPILING.lowered = getattr(_COMPILING, "lowered", None), None
                if lowered is not None and lowered[0] is module:
                    recorder.allocations = lowered[1]
                set_recorder(engine, recorder)
            return engine

        @functools.wraps(load)
        def load_cuda_library(self: Any) -> list[Any]:
            recorder = getattr(self.engine, _RECORDER, None)
            if recorder is None:
                return load(self)
            recorder.ptx = ptx(self)
            recorder.parameters = _host_parameters(self)
            self.__dict__["num_devices"] = 1  # a cached property, otherwise filled by asking the driver
            recorder.call(load, self)
            return []  # there is no library that the driver would have to unload

        @functools.wraps(run)
        def run_compiled_program(self: Any, exe_args: list[Any]) -> Any:
            recorder = getattr(self.jit_module.engine, _RECORDER, None)
            if recorder is None:
                return run(self, exe_args)
            if recorder.parameters not in (None, len(exe_args)):
                # The machine code would take for addresses what happens to lie behind those of the arguments.
                raise TypeError(
                    f"the call passes {len(exe_args)} values to host code compiled for {recorder.parameters}: there "
                    "are too few or too many arguments, or one is of a type that CuTe DSL passes over, such as a "
                    "Python number in a tuple"
                )
            return recorder.call(run, _of_this_thread(self), exe_args)

        compiler.compile = compile_module
        compiler.jit, compiled._load_cuda_library = jit, load_cuda_library
        executor.run_compiled_program = run_compiled_program
        dsl._runtime_can_run_compiled = runtime_can_run_compiled


def _of_this_thread(executor: Any) -> Any:
    """An executor with a status of its own: CuTe DSL has one for the calls of all threads, which read each other's."""
    threads = executor.__dict__.setdefault("_cute_kernels_threads", threading.local())
    if not hasattr(threads, "own"):
        threads.own = type(executor)(executor.jit_module, executor.exec_context, False)
    return threads.own


def _host_parameters(function: Any) -> int | None:
    """Number of the parameters of a compiled host function, that is of addresses that a call passes."""
    if function.ir_module is None:
        return None
    for operation in function.ir_module.body.operations:
        name = operation.attributes["sym_name"].value if "sym_name" in operation.attributes else None
        if name == function.function_name and operation.regions[0].blocks:
            return len(operation.regions[0].blocks[0].arguments)
    return None


def set_recorder(engine: Any, recorder: Recorder) -> None:
    """Functions of this engine are recorded, once `hook_runtime` was called; or of this function, which is its own."""
    setattr(engine, _RECORDER, recorder)


def recorder_of(function: Any) -> Recorder | None:
    """The recorder of a compiled function; None for one that calls the CUDA runtime."""
    return getattr(getattr(function, "engine", function), _RECORDER, None)


def register_symbol(engine: Any, name: str, address: Any) -> None:
    """Gives a JIT engine a symbol of its own, which it takes before that of any library."""
    engine.raw_register_runtime(name, ctypes.cast(address, ctypes.c_void_p))
