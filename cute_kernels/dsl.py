"""What this package relies on inside CuTe DSL (``nvidia-cutlass-dsl``), beyond what its documentation promises.

Another version of CuTe DSL is a matter of this module: compile options and what a compilation leaves behind, the
machine code of host functions and how they take their arguments, host functions as object files, and the methods
through which the emulator takes the place of the CUDA runtime. What differs between versions is decided here too.

Of the package `dsl_allocations` alone is imported here, so that the emulator can be used by itself, and CuTe DSL is
imported by the functions that need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from unittest import mock

from cute_kernels import dsl_allocations

DISTRIBUTION = "nvidia-cutlass-dsl"

KERNEL_VERSIONS = ("4.8.0", "4.8.1")
"""Versions that the kernels of this package are tested with, oldest first: ``make dsl-versions``."""

EMULATOR_VERSIONS = ("4.6.0", "4.6.1", "4.6.2", "4.6.3", "4.7.0", "4.7.1", *KERNEL_VERSIONS)
"""Versions whose programs the emulator is tested with, likewise."""

_PARTS = tuple(f"{DISTRIBUTION}-libs-{part}" for part in ("base", "core", "cu12", "cu13"))


class UnsupportedVersion(ImportError):
    """A version of CuTe DSL that is not tested, or parts of several."""


def require(versions: tuple[str, ...] = KERNEL_VERSIONS) -> None:
    """Imports CuTe DSL and checks its version. An untested version might compile a kernel to something else.

    Args:
        versions: those allowed, `KERNEL_VERSIONS` or `EMULATOR_VERSIONS`.

    Raises:
        ModuleNotFoundError: CuTe DSL is not installed.
        UnsupportedVersion: it has another version, or its distributions differ in theirs.
    """
    install = f"pip install '{DISTRIBUTION}=={KERNEL_VERSIONS[-1]}'"
    try:
        import cutlass
    except ModuleNotFoundError as error:
        if error.name != "cutlass":
            raise
        raise ModuleNotFoundError(f"CuTe DSL is not installed: {install}", name="cutlass") from error
    found = getattr(cutlass, "__version__", "of unknown version")
    if found not in versions:
        raise UnsupportedVersion(
            f"CuTe DSL ({DISTRIBUTION}) {found} is installed; allowed are the tested versions "
            f"{', '.join(versions)}: {install}"
        )
    for name in _PARTS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            part = importlib.metadata.version(name)
            if part != found:
                forced = install.replace("install", "install --force-reinstall")
                raise UnsupportedVersion(f"{name} {part} is installed beside CuTe DSL {found}: {forced}")


#: Name -> (module, attribute or None for the module itself): what kernels use that CuTe DSL does not document.
_FOR_KERNELS = {
    "dsl_user_op": ("cutlass.cutlass_dsl", "dsl_user_op"),
    "nvvm": ("cutlass._mlir.dialects.nvvm", None),
    "cute_ir": ("cutlass._mlir.dialects.cute", None),
    "mlir_types": ("cutlass.cutlass_dsl", "T"),
    "tensor_of": ("cutlass.cute.tensor", "_Tensor"),
}


def __getattr__(name: str) -> Any:
    """``from cute_kernels.dsl import dsl_user_op``: the decorator of operations; MLIR dialects, types and values."""
    if name not in _FOR_KERNELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _FOR_KERNELS[name]
    found = importlib.import_module(module)
    return found if attribute is None else getattr(found, attribute)


def name_kernel(kernel: Any, name: str) -> None:
    """Gives a kernel the name that profilers and PTX show, without what CuTe DSL would add of its own.

    Kernels are named where their modules are imported, with every version that the emulator supports. Before 4.8 there
    is no leaving out; `compile_function` then refuses the kernel anyway.

    Args:
        kernel: a function or method decorated with ``cute.kernel``.
        name: unique among all kernels of the package.
    """
    options = {"remove_cutlass_symbol": True, "keep_mangled_name": False}
    known = inspect.signature(kernel.set_name_prefix).parameters
    kernel.set_name_prefix(name, **{option: value for option, value in options.items() if option in known})


# --- compiling -------------------------------------------------------------------------------------------------------


def compile_function(function: Any, arguments: tuple, arch: str) -> Any:
    """`cute.compile` for an architecture, needing neither a GPU nor a driver; `ptx` and `cubin` are of the result.

    Args:
        function: a function or method decorated with ``cute.jit``.
        arguments: examples of its arguments; their values do not reach the generated code.
        arch: as PTX names it, e.g. ``"sm_90a"``.

    Raises:
        ModuleNotFoundError, UnsupportedVersion: as `require`.
    """
    require()
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory() as directory, _fast_source_lines():
        # Line tables cost nothing at run time and let profilers and the emulator name the DSL source line.
        options = f"--gpu-arch={arch} --generate-line-info --keep-ptx --keep-cubin --dump-dir={directory}"
        return cute.compile(function, *arguments, options=options)


def _fast_source_lines() -> contextlib.AbstractContextManager:
    """For every operation CuTe DSL walks a function's source positions from the first on: a sixth of a compilation."""
    import cutlass._mlir_helpers.op as locations

    if getattr(locations, "_CO_POSITIONS", None) is None:  # Python 3.10, other versions
        return contextlib.nullcontext()
    return mock.patch.object(locations, "_CO_POSITIONS", _source_positions)


@functools.lru_cache(maxsize=1024)
def _source_positions(code: types.CodeType) -> tuple:
    return tuple(code.co_positions())


def ptx(function: Any) -> str | None:
    """PTX of a compiled function; None if it was compiled without keeping it."""
    return function.__ptx__


def cubin(function: Any) -> bytes:
    """Cubin of a function from `compile_function`."""
    return bytes(function.__cubin__)


# --- host functions as machine code ----------------------------------------------------------------------------------


def export_object(function: Any, prefix: str) -> bytes:
    """The host function and its cubin as a relocatable object, which `load_object` loads without tracing.

    CuTe DSL resolves the object's references to its runtime library while it writes the object, and finds them only if
    the library's symbols are visible to the whole process.
    """
    import cutlass.cutlass_dsl

    for library in cutlass.cutlass_dsl.CuTeDSL._get_dsl().get_shared_libs():
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    return function.dump_to_object(prefix)


def load_object(code: bytes, prefix: str, recorder: Recorder | None = None) -> Any:
    """The host function in an object that `export_object` made with this ``prefix``, linked into this process.

    Args:
        code: the object; what it does not define is taken from the CUDA runtime and CuTe DSL's library.
        recorder: what the object calls in place of the runtime, if it does; `hook_runtime` was called then.

    Raises:
        ModuleNotFoundError, UnsupportedVersion: as `require`.
    """
    require()
    import cutlass.cute as cute

    with tempfile.NamedTemporaryFile(suffix=".o") as file:
        file.write(code)
        file.flush()
        module = cute.runtime.load_module(file.name)
    if recorder is not None:
        module.engine = _RecordedEngine(module.engine)
        set_recorder(module.engine, recorder)
    return getattr(module, prefix)


class _RecordedEngine:
    """CuTe DSL's engine of an object, which has no place for a recorder."""

    def __init__(self, engine: Any) -> None:
        self.lookup = engine.lookup


def load_on_devices(function: Any) -> tuple[Any, Callable[[int], None]]:
    """Loads the kernel into every device and gives the machine code of its host function.

    The machine code takes the address of an array of pointers, one to each argument and a last one to the CUDA status
    (int32) that it writes.

    Returns:
        The owner of the loaded kernel, which has to live as long as calls are made, and the machine code.

    Raises:
        RuntimeError: the host function returns no status.
    """
    executor = function.to(None)
    if not executor._has_cuda_result:
        raise RuntimeError("the compiled host function returns no CUDA status, as that of every tested CuTe DSL does")
    return executor, executor.capi_func


def argument_pointers(function: Any, arguments: tuple) -> tuple[list[int], Any]:
    """Addresses of a call's arguments as CuTe DSL itself would pass them, and what keeps their memory alive."""
    pointers, keep_alive = function.execution_args.generate_execution_args(arguments, {})
    return [getattr(pointer, "value", pointer) for pointer in pointers], keep_alive


# --- the emulator in place of the CUDA runtime -----------------------------------------------------------------------

_RECORDER = "_cute_kernels_recorder"
_HOOK_LOCK = threading.Lock()
_COMPILING = threading.local()
"""tvm_ffi: whether the innermost compilation under `compiling_for` asked for TVM-FFI; lowered: the module that is
compiled, and its allocations."""


class Recorder(Protocol):
    """What takes the place of the CUDA runtime for one compiled host function: see `hook_runtime`.

    Attributes:
        ptx: set to the text of the compiled module, None if it was not kept, before its library is loaded.
        parameters: set then to the number of the host function's parameters, None if it is not known.
        allocations: set to what the kernels allocate in shared memory, where this process compiled them.
    """

    ptx: str | None
    parameters: int | None
    allocations: tuple[dsl_allocations.Allocations, ...]

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
            _COMPILING.lowered = (module, dsl_allocations.of_module(module)) if recording() else None
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
            recorder.ptx = ptx(self) or recorder.ptx  # object files hold none: theirs is known before
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
            return recorder.call(run, self, exe_args)

        compiler.compile = compile_module
        compiler.jit, compiled._load_cuda_library = jit, load_cuda_library
        executor.run_compiled_program = run_compiled_program
        dsl._runtime_can_run_compiled = runtime_can_run_compiled


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
    """Functions of this engine are recorded, once `hook_runtime` was called."""
    setattr(engine, _RECORDER, recorder)


def recorder_of(function: Any) -> Recorder | None:
    """The recorder of a compiled function; None for one that calls the CUDA runtime."""
    return getattr(getattr(function, "engine", None), _RECORDER, None)


def register_symbol(engine: Any, name: str, address: Any) -> None:
    """Gives a JIT engine a symbol of its own, which it takes before that of any library."""
    engine.raw_register_runtime(name, ctypes.cast(address, ctypes.c_void_p))


@contextlib.contextmanager
def compiling_for(arch: str, unsupported: type[Exception] = NotImplementedError) -> Iterator[None]:
    """Every DSL of the cutlass package compiles for ``arch``, without TVM-FFI, and keeps its PTX with source lines.

    Object files hold no PTX, and those that were made inside could not be called with TVM-FFI: writing one, and calling
    a function of one, raises ``unsupported``. Caches of such files stay as they are.

    Raises:
        ModuleNotFoundError, UnsupportedVersion: as `require`, of the versions that the emulator supports.
    """
    require(EMULATOR_VERSIONS)
    import cutlass.base_dsl.compiler
    import cutlass.base_dsl.dsl
    import cutlass.cute.runtime

    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Cache is disabled as user wants to generate PTX")
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        settings = {"arch": arch, "keep_ptx": True, "dump_dir": folder, "lineinfo": True, "enable_tvm_ffi": False}
        kinds = map(_instance, _subclasses(cutlass.base_dsl.dsl.BaseDSL))
        everywhere = False
        for dsl in {id(dsl): dsl for dsl in kinds if dsl is not None}.values():
            everywhere = everywhere or bool(dsl.envar.enable_tvm_ffi)
            for name, value in settings.items():
                stack.enter_context(mock.patch.object(dsl.envar, name, value))
        compiler = cutlass.base_dsl.compiler

        def enable_tvm_ffi(self: Any) -> bool:
            _COMPILING.tvm_ffi = everywhere or bool(self.options[compiler.EnableTVMFFI].value)
            return False

        stack.enter_context(mock.patch.object(compiler.CompileOptions, "enable_tvm_ffi", property(enable_tvm_ffi)))
        tensor = cutlass.cute.runtime._Tensor
        make = tensor.__init__

        def without_tvm_ffi(self: Any, value: Any, *args: Any, enable_tvm_ffi: bool = False, **kwargs: Any) -> None:
            make(self, value, *args, **kwargs)

        def export_to_c(self: Any, *args: Any, **kwargs: Any) -> None:
            raise unsupported("functions that are compiled for the emulator cannot be written to object files")

        load = cutlass.cute.runtime.load_module

        def load_module(path: Any, *args: Any, enable_tvm_ffi: bool = False, **kwargs: Any) -> Any:
            if not enable_tvm_ffi:
                return load(path, *args, enable_tvm_ffi=False, **kwargs)
            return _ObjectFile(str(path), unsupported)

        stack.enter_context(mock.patch.object(tensor, "__init__", without_tvm_ffi))
        function = importlib.import_module("cutlass.base_dsl.jit_executor").JitCompiledFunction
        stack.enter_context(mock.patch.object(function, "export_to_c", export_to_c))
        stack.enter_context(mock.patch.object(cutlass.cute.runtime, "load_module", load_module))
        yield


class _ObjectFile:
    """Compiled functions in a file, of which there is no PTX."""

    def __init__(self, path: str, unsupported: type[Exception]) -> None:
        self._path, self._unsupported = path, unsupported

    def __getitem__(self, name: str) -> Callable[..., None]:
        def function(*_: Any, **__: Any) -> None:
            raise self._unsupported(
                f"{name} was loaded from the object file {self._path}, which holds no PTX; switch the program's cache "
                "of compiled functions off, or give it another folder"
            )

        return function

    __getattr__ = __getitem__


def _subclasses(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)


def _instance(kind: Any) -> Any:
    try:
        return kind._get_dsl()
    except (TypeError, NotImplementedError):
        return None


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@contextlib.contextmanager
def adapting_calls(
    remember: Callable[[tuple[Any, ...], dict[str, Any], bool], Any],
    adapt: Callable[[Any, list[str], tuple[Any, ...], dict[str, Any]], _Arguments],
) -> Iterator[None]:
    """Calls of functions that are compiled inside, made inside, pass other arguments than they were given.

    Args:
        remember: (args, kwargs of `cute.compile`, whether it was asked for TVM-FFI) -> what ``adapt`` needs to know,
            false if calls stay as they are.
        adapt: (what was remembered, names of the run-time parameters, args, kwargs of the call) -> the args and kwargs
            that are passed, objects that CuTe DSL converts or that have ``__c_pointers__``.
    """
    import cutlass.base_dsl.compiler
    import cutlass.base_dsl.jit_executor

    kind, execution_args = cutlass.base_dsl.compiler.CompileCallable, cutlass.base_dsl.jit_executor.ExecutionArgs
    marshals = "_generate_execution_args"
    if not hasattr(execution_args, marshals):  # before CuTe DSL 4.8
        marshals = "generate_execution_args"
    compile_, marshal = kind.__call__, getattr(execution_args, marshals)

    @functools.wraps(compile_)
    def compile_and_remember(self: Any, *args: Any, **kwargs: Any) -> Any:
        _COMPILING.tvm_ffi = False
        function = compile_(self, *args, **kwargs)
        memory = remember(args, kwargs, _COMPILING.tvm_ffi)
        if memory and hasattr(function, "execution_args"):
            function.execution_args._cute_kernels_memory = memory
        return function

    @functools.wraps(marshal)
    def marshal_adapted(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        memory = getattr(self, "_cute_kernels_memory", None)
        if not memory:
            return marshal(self, args, kwargs)
        args, kwargs = adapt(memory, self._meta.all_names, args, kwargs)
        pointers, adapted = marshal(self, args, kwargs)
        return pointers, [*adapted, *args, *kwargs.values()]  # keeps what the pointers lead to until after the call

    with (
        mock.patch.object(kind, "__call__", compile_and_remember),
        mock.patch.object(execution_args, marshals, marshal_adapted),
    ):
        yield


def context_initialisers() -> Iterator[tuple[Any, str]]:
    """Public functions of CuTe DSL that make a CUDA context, which needs a driver: (module, name)."""
    if importlib.util.find_spec("cutlass.cuda") is not None:  # since 4.8
        yield importlib.import_module("cutlass.cuda"), "initialize_cuda_context"


# --- arguments of `cute.compile` and of calls ------------------------------------------------------------------------


def is_fake_tensor(value: Any) -> bool:
    """Whether an argument of `cute.compile` stands for a tensor by its type, extents and strides alone."""
    import cutlass.cute.runtime

    return isinstance(value, cutlass.cute.runtime._FakeTensor)


def is_tensor(value: Any) -> bool:
    """Whether an argument of `cute.compile` is a tensor, fake or of memory."""
    import cutlass.cute.runtime

    return isinstance(value, (cutlass.cute.runtime._FakeTensor, cutlass.cute.runtime._Tensor))


def is_pointer(value: Any) -> bool:
    """Whether an argument of `cute.compile` is a pointer."""
    import cutlass.cute.runtime

    return isinstance(value, cutlass.cute.runtime._Pointer)


def is_constexpr(field: dataclasses.Field) -> bool:
    """Whether a field of a data class is a constant of the compiled function."""
    import cutlass.base_dsl.utils.tree_utils

    return cutlass.base_dsl.utils.tree_utils.is_constexpr_field(field)


def adapted(value: Any) -> Any:
    """An argument as the object that CuTe DSL makes of it, if it has an adapter for its type."""
    import cutlass.base_dsl.runtime.jit_arg_adapters

    if hasattr(value, "__c_pointers__"):
        return value
    adapter = cutlass.base_dsl.runtime.jit_arg_adapters.JitArgAdapterRegistry.get_registered_adapter(value)
    return value if adapter is None else adapter(value)


def c_pointers(value: Any) -> list[Any]:
    """Addresses of what an `adapted` argument is passed by."""
    import cutlass.base_dsl.typing

    return cutlass.base_dsl.typing.get_c_pointers(value)
