"""Programs of others, compiled for the emulator: for which architecture, and what their calls pass."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from cute_kernels.common.interrupts import deferred
from cute_kernels.dsl.allocations import call_sites
from cute_kernels.dsl.compiling import EMULATOR_VERSIONS, instances, require

_COMPILING = threading.local()
"""tvm_ffi: whether the innermost compilation under `compiling_for` asked for TVM-FFI."""


@contextlib.contextmanager
def compiling_for(
    arch: str, unsupported: type[Exception] = NotImplementedError, note: Callable[[dict[str, int]], None] | None = None
) -> Iterator[None]:
    """Every DSL of the cutlass package compiles for ``arch``, without TVM-FFI, and keeps its PTX with source lines.

    ``note`` is as of `adapting_calls`, for calls of functions that are compiled as they are called.

    Object files hold no PTX, and those that were made inside could not be called with TVM-FFI: writing one, and calling
    a function of one, raises ``unsupported``. Caches of such files stay as they are. Raises ModuleNotFoundError,
    UnsupportedVersion: as `require`, of the versions that the emulator supports."""
    require(EMULATOR_VERSIONS)
    import cutlass.base_dsl.compiler
    import cutlass.cute.runtime

    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Cache is disabled as user wants to generate PTX")
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        settings = {"arch": arch, "keep_ptx": True, "dump_dir": folder, "lineinfo": True, "enable_tvm_ffi": False}
        everywhere = False
        for dsl in instances():
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
        base = importlib.import_module("cutlass.base_dsl.dsl").BaseDSL
        translate = base._func  # of `cute.compile`, and of calls of functions that are not compiled

        def without_interrupts(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            if note is not None:
                names = inspect.signature(function).parameters
                note(_addresses(names, args, {each: kwargs[each] for each in names if each in kwargs}))
            with deferred(), call_sites():
                return translate(self, function, *args, **kwargs)

        stack.enter_context(mock.patch.object(base, "_func", without_interrupts))
        # CuTe DSL's own functions call others through it: what those make has the line of the program that called them.
        op = importlib.import_module("cutlass._mlir_helpers.op")
        framework = (*getattr(op, "_FRAMEWORK_MODULE_PREFIXES", ()), __package__)
        stack.enter_context(mock.patch.object(op, "_FRAMEWORK_MODULE_PREFIXES", framework, create=True))
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


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@contextlib.contextmanager
def adapting_calls(
    remember: Callable[[tuple[Any, ...], dict[str, Any], bool], Any],
    adapt: Callable[[Any, list[str], tuple[Any, ...], dict[str, Any]], _Arguments],
    note: Callable[[dict[str, int]], None],
) -> Iterator[None]:
    """Calls of functions that are compiled inside, made inside, pass other arguments than they were given.
    ``remember``: (args, kwargs of `cute.compile`, whether it was asked for TVM-FFI) -> what ``adapt`` needs to know,
    false if calls stay as they are. ``adapt``: (what was remembered, names of the run-time parameters, args, kwargs of
    the call) -> the args and kwargs that are passed, objects that CuTe DSL converts or that have ``__c_pointers__``.
    ``note``: told before each call the addresses of tensors and pointers by the names of their parameters."""
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
        note(_addresses(self._meta.all_names, args, kwargs))
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


def _addresses(names: Iterable[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
    """Addresses of those arguments of a call that stand for one."""
    given = {**dict(zip(names, args)), **kwargs}
    return {each: at for each, value in given.items() if isinstance(at := _address_of(value), int)}


def _address_of(value: Any) -> Any:
    """Address that an argument of a call stands for: a torch tensor, a tensor or a pointer of CuTe DSL."""
    found = getattr(value, "data_ptr", None) or getattr(value, "_pointer", None)
    return found() if callable(found) else found


def context_initialisers() -> Iterator[tuple[Any, str]]:
    """Public functions of CuTe DSL that make a CUDA context, which needs a driver: (module, name)."""
    if importlib.util.find_spec("cutlass.cuda") is not None:  # since 4.8
        yield importlib.import_module("cutlass.cuda"), "initialize_cuda_context"


# --- arguments of `cute.compile`, and of calls of what it has compiled -----------------------------------------------


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
