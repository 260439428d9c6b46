"""Host functions as machine code: as object files, linked into this process, and how they take their arguments."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from cute_kernels.dsl.compiling import default_settings
from cute_kernels.dsl.linking import Linked, LinkError
from cute_kernels.dsl.recording import Recorder, set_recorder

_LIBRARY = "libcute_dsl_runtime.so"

_LOADING = threading.RLock()
# A fork waits for a thread that loads a kernel: the child has not that thread, and would wait for ever.
os.register_at_fork(before=_LOADING.acquire, after_in_parent=_LOADING.release, after_in_child=_LOADING.release)


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


class Arguments(Protocol):
    """Values of one call.

    Attributes:
        current: the values, the address of an array of pointers to them, and the status that the machine code writes.
    """

    current: tuple[Any, int, ctypes.c_int32]


class HostFunction:
    """The machine code of a host function, from an object that `export_object` made. CuTe DSL is not imported for it.

    Attributes:
        call: the machine code. It takes the address of an array of pointers, one to each argument and a last one to the
            CUDA status (int32) that it writes; `load` was called before.
    """

    def __init__(
        self, code: bytes, prefix: str, stand_ins: Mapping[str, int] | None = None, recorder: Recorder | None = None
    ) -> None:
        """Links the object.

        Args:
            code, prefix: the object, and what it was made with.
            stand_ins: addresses of functions that the object calls in place of the CUDA runtime's.
            recorder: whose stand-ins these are.

        Raises:
            LinkError: the object cannot be linked, or is none of a host function.
        """
        self._outside = _runtime_symbol if stand_ins is None else stand_ins.get
        self._linked = Linked(code, lambda name: self._outside(name) or _process_symbol(name))
        self._prefix = f"_mlir_{prefix}_"
        entries = [name for name in self._linked.symbols if name.startswith(f"{self._prefix}_mlir_ciface_")]
        if len(entries) != 1:
            raise LinkError(f"it has {len(entries)} host functions with the prefix {prefix}")
        self.call = self._function(entries[0])
        self._recorder = recorder
        if recorder is not None:
            set_recorder(self, recorder)
        self._loaded = False

    def __call__(self, arguments: Arguments) -> None:
        """Launches.

        Raises:
            RuntimeError: the CUDA runtime refused.
        """
        self.load()
        self._run(self._launch, *arguments.current)

    def load(self) -> None:
        """Loads the kernel into every device; it stays there.

        Raises:
            RuntimeError: the CUDA runtime refused.
        """
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


def _runtime_symbol(name: str) -> int | None:
    return _symbol(_runtime(), name)


def _process_symbol(name: str) -> int | None:
    """Address of a symbol of the process: the C library and its like."""
    return _symbol(ctypes.CDLL(None), name)


def _symbol(library: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value if hasattr(library, name) else None


def argument_pointers(function: Any, arguments: tuple) -> tuple[list[int], Any]:
    """Addresses of a call's arguments as CuTe DSL itself would pass them, and what keeps their memory alive."""
    pointers, keep_alive = function.execution_args.generate_execution_args(arguments, {})
    return [getattr(pointer, "value", pointer) for pointer in pointers], keep_alive
