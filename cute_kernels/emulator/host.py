"""Runs the host code that CuTe DSL generated, and records its kernel launches instead of executing them.

CuTe DSL's host code (descriptor encoding, grid arithmetic, launch) is compiled machine code that calls a small runtime
library. `recording_runtime` makes CuTe DSL link a replacement of that library for what is compiled inside it; nothing
else in the process changes, so kernels compiled outside it keep launching on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CapturedLaunch:
    """One kernel launch.

    Attributes:
        kernel_name: entry point in the PTX.
        grid, block, cluster: (x, y, z).
        dynamic_smem: bytes.
        params: one byte string per kernel parameter, of the sizes that the PTX declares.
    """

    kernel_name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int
    params: tuple[bytes, ...]


@contextmanager
def recording_runtime() -> Iterator[None]:
    """Functions that `cute.compile` compiles inside record their launches (`record`) and need no driver."""
    raise NotImplementedError
    yield


def record(function: Callable[..., Any], *arguments: Any) -> CapturedLaunch:
    """Calls a function compiled under `recording_runtime` and returns its one launch.

    Raises:
        EmulatorError: the function launched no kernel or several, or was compiled for the real runtime.
    """
    raise NotImplementedError


def capture() -> Any:
    """Context manager that yields a list; launches of recorded functions called inside are appended to it."""
    raise NotImplementedError
