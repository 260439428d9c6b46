"""The floating-point environment of a thread: rounding mode, flushed denormals, exceptions.

Programs change it (`fesetround`, `torch.set_flush_denormal`), and C, NumPy and torch on a CPU compute by it. Emulated
kernels, and the references that they are compared with, are computed in the default environment.
"""

import contextlib
import ctypes
from collections.abc import Iterator

_BYTES = 256  # room for an fenv_t, which has 32 bytes on x86-64 and 8 on ARM
_DEFAULT = ctypes.c_void_p(-1)  # FE_DFL_ENV of the C libraries of Linux
_LIBRARY = ctypes.CDLL(None)  # Python itself, which is linked with the mathematical functions


@contextlib.contextmanager
def default_environment() -> Iterator[None]:
    """The thread computes in the default environment; then it has the one of the caller again. Also a decorator."""
    callers = ctypes.create_string_buffer(_BYTES)
    _LIBRARY.fegetenv(callers)
    _LIBRARY.fesetenv(_DEFAULT)
    try:
        yield
    finally:
        _LIBRARY.fesetenv(callers)
