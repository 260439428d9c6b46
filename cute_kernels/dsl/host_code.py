"""Host functions as machine code: as object files, linked into this process, how they take their arguments.

Also how the emulator takes the place of the CUDA runtime: the methods of CuTe DSL through which it does.
"""

import ctypes
import functools
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from cute_kernels.common.forks import awaited_lock
from cute_kernels.dsl.allocations import Allocations, of_module
from cute_kernels.dsl.compiling import EMULATOR_VERSIONS, default_settings, ptx, require
from cute_kernels.dsl.linking import Linked, LinkError

_LIBRARY = "libcute_dsl_runtime.so"

_LOADING = awaited_lock()
"""Held while a kernel is loaded."""


def export_object(function: Any, prefix: str) -> bytes:
    """The host function and its cubin as a relocatable object, of which `HostFunction` makes a function again.

    CuTe DSL resolves the object's references to its runtime library while it writes the object, and finds them only if
    the library's symbols are visible to the whole process.
    """
    import cutlass.cutlass_dsl

    for library in cutlass.cutlass_dsl.CuTeDSL._get_dsl().get_shared_libs():
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    with default_settings():
        return function.dump_to_object(prefix)


class HostFunction:
    """The machine code of a host function, from an object that `export_object` made. CuTe DSL is not imported for it.

    ``call`` takes the address of an array of pointers, one to each argument and a last one to the CUDA status (int32)
    that it writes; `load` was called before.
    """

    def __init__(
        self, code: bytes, prefix: str, stand_ins: Mapping[str, int] | None = None, recorder: "Recorder | None" = None
    ) -> None:
        """Links the object, made with this prefix; ``stand_ins``: addresses of functions that it calls in place of the
        CUDA runtime's; ``recorder``: whose these are. Raises LinkError: it cannot be linked, or is none of a host
        function."""
        self._outside = (lambda name: _symbol(_runtime(), name)) if stand_ins is None else stand_ins.get
        self._linked = Linked(code, lambda name: self._outside(name) or _symbol(ctypes.CDLL(None), name))
        self._prefix = f"_mlir_{prefix}_"
        entries = [name for name in self._linked.symbols if name.startswith(f"{self._prefix}_mlir_ciface_")]
        if len(entries) != 1:
            raise LinkError(f"it has {len(entries)} host functions with the prefix {prefix}")
        self.call = self._function(entries[0])
        self._recorder = recorder
        if recorder is not None:
            set_recorder(self, recorder)
        self._loaded = False

    def __call__(self, arguments: Any) -> None:
        """Launches. ``arguments``: of one call; their ``current`` has the values, the address of an array of pointers
        to them, and the status that the machine code writes. Raises RuntimeError: the CUDA runtime refused."""
        self.load()
        self._run(self._launch, *arguments.current)

    def load(self) -> None:
        """Loads the kernel into every device; it stays there. Raises RuntimeError: the CUDA runtime refused."""
        if not self._loaded:
            with _LOADING:
                if not self._loaded:
                    self._run(self._load)
                    self._loaded = True

    def _launch(self, _: Any, address: int, status: ctypes.c_int32) -> None:
        self.call(address)
        if status.value:
            fail("launch", status.value)

    def _load(self) -> None:
        library, device, status, count = ctypes.c_void_p(), ctypes.c_int32(), ctypes.c_int32(), ctypes.c_int()
        where = ctypes.c_void_p(ctypes.addressof(library))
        self._invoke("cuda_init", where, status)
        number = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._outside("_cudaGetDeviceCount"))
        status.value = number(ctypes.addressof(count))
        self._check(status)
        for device.value in range(count.value):
            self._invoke("cuda_load_to_device", where, device, status)

    def _invoke(self, name: str, *arguments: Any) -> None:
        """Calls a function of the object by pointers to its arguments, of which the last is its status."""
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._function(self._prefix + name)(ctypes.addressof(pointers))
        self._check(arguments[-1])

    @staticmethod
    def _check(status: ctypes.c_int32) -> None:
        if status.value:
            fail("loading a kernel", status.value)

    def _function(self, name: str) -> Callable[[int], None]:
        if name not in self._linked.symbols:
            raise LinkError(f"it has no function {name}")
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._linked.symbols[name])

    def _run(self, function: Callable[..., Any], *arguments: Any) -> None:
        """A recorder raises what went wrong in its stand-ins, of which the machine code has a status alone."""
        if self._recorder is None:
            function(*arguments)
        else:
            self._recorder.call(function, *arguments)


def fail(what: str, status: int) -> NoReturn:
    """Raises the RuntimeError of a cudaError_t."""
    import cuda.bindings.runtime as runtime

    _, text = runtime.cudaGetErrorString(runtime.cudaError_t(status))
    raise RuntimeError(f"{what} failed: CUDA error {status}, {text.decode()}")


def runtime_library() -> Path | None:
    """CuTe DSL's library that object files call: of the toolkit that CuTe DSL would choose; None if there is none.

    The newest that the driver takes, of all if there is no driver. ``CUTE_DSL_LIBS`` names another.
    """
    for name in filter(None, os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep)):
        if Path(name).name == _LIBRARY:
            return Path(name)
    package = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = package.submodule_search_locations if package is not None else None
    found = {
        int(match[1]): path
        for root in roots or ()
        for path in Path(root).glob(f"cu*/lib/{_LIBRARY}")
        if (match := re.fullmatch(r"cu(\d+)", path.parents[1].name))
    }
    newest = _driver_toolkit()
    allowed = [toolkit for toolkit in found if newest is None or toolkit <= newest]
    return found[max(allowed)] if allowed else None


def _driver_toolkit() -> int | None:
    """Major version of CUDA that the driver supports; None without a driver."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value // 1000 if status == 0 else None


@functools.cache
def _runtime() -> ctypes.CDLL:
    path = runtime_library()
    if path is None:
        raise LinkError(f"CuTe DSL's {_LIBRARY} is not installed for this driver")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise LinkError(f"{path} cannot be loaded: {error}") from None


def _symbol(library: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value if hasattr(library, name) else None


def argument_pointers(function: Any, arguments: tuple) -> tuple[list[int], Any]:
    """Addresses of a call's arguments as CuTe DSL itself would pass them, and what keeps their memory alive."""
    pointers, keep_alive = function.execution_args.generate_execution_args(arguments, {})
    return [getattr(pointer, "value", pointer) for pointer in pointers], (arguments, pointers, keep_alive)


# --- the emulator in place of the CUDA runtime -----------------------------------------------------------------------

_RECORDER = "_cute_kernels_recorder"

_HOOK_LOCK = awaited_lock()
"""Held until all five methods are replaced."""

_COMPILING = threading.local()
"""lowered: the module that this thread compiles, and its allocations."""


class Recorder(Protocol):
    """Stand-in for the CUDA runtime of one compiled host function: see `hook_runtime`. ``ptx``: set to the text of the
    compiled module, None if it was not kept, before its library is loaded. ``parameters``: set then to the number of
    the host function's parameters, None if it is not known. ``allocations``: set to what the kernels allocate in shared
    memory, where this process compiled them."""

    ptx: str | None
    parameters: int | None
    allocations: tuple[Allocations, ...]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls something of CuTe DSL that calls into the machine code."""


def hook_runtime(recording: Callable[[], bool], make: Callable[[Any], Recorder]) -> None:
    """Once per process: makes five methods of CuTe DSL look for a recorder; without one they do what they did.

    ``recording``: whether what this thread compiles now is to be recorded; ``make``: makes the recorder of a JIT
    engine, with which `register_symbol` registers its entry points. Raises as `require`, of the versions that the
    emulator supports.
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
