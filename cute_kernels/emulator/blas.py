"""One BLAS thread while the emulator runs.

Its matrix products take a fraction of a millisecond each. OpenBLAS's worker threads spin between them, which makes the
emulator ten times slower as soon as anything else (another test process) uses the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator

import numpy as np

# Names that NumPy's wheels have used for the function of their bundled OpenBLAS.
_PATTERNS = ("scipy_openblas_{}64_", "openblas_{}64_", "scipy_openblas_{}", "openblas_{}")


@functools.cache
def _functions() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """(get, set) of the thread count of NumPy's OpenBLAS; None when NumPy uses another BLAS."""
    core = getattr(np, "_core", None) or np.core
    try:
        library = ctypes.CDLL(core._multiarray_umath.__file__)  # a symbol is found in the libraries it links, too
    except (OSError, AttributeError):
        return None
    for pattern in _PATTERNS:
        try:
            read = getattr(library, pattern.format("get_num_threads"))
            write = getattr(library, pattern.format("set_num_threads"))
        except AttributeError:
            continue
        read.restype, read.argtypes = ctypes.c_int, []
        write.restype, write.argtypes = None, [ctypes.c_int]
        return read, write
    return None


_LOCK = threading.Lock()
_inside = 0  # threads of this process that are in the block
_before = 0  # BLAS threads when the first of them entered


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limits NumPy's BLAS to one thread inside the block; does nothing for another BLAS than OpenBLAS.

    The limit is the process's: it holds until the last of the threads that are in the block leaves it.
    """
    global _inside, _before
    functions = _functions()
    if functions is None:
        yield
        return
    read, write = functions
    with _LOCK:
        if _inside == 0:
            _before = read()
            write(1)
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if _inside == 0:
                write(_before)
