"""Host functions as machine code: as object files, loaded into devices, and how they take their arguments."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from typing import Any

from cute_kernels.dsl.recording import Recorder, set_recorder
from cute_kernels.dsl.versions import require


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
