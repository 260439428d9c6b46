"""Triton's launches executed by `cute_kernels.emulator.run`: for programs that ``cute-kernels emulate`` runs.

Triton compiles for the architecture that torch names, as it does with a GPU; ``install()`` puts the emulator where
Triton would load the result and launch it.
"""

from __future__ import annotations

import ctypes
import inspect
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from cute_kernels.emulator import run


def install() -> None:
    """From now on every launch of a Triton kernel runs in the emulator."""
    major, minor = torch.cuda.get_device_capability()
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        )
    )
    compile_only = JITFunction.run

    def launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = compile_only(self, *args, grid=grid, warmup=True, **options)
        if not warmup:
            named = {name: value for name, value in options.items() if name in self.arg_names}
            bound = inspect.signature(self.fn).bind(*args, **named)
            bound.apply_defaults()
            _execute(kernel, bound.arguments, grid(bound.arguments) if callable(grid) else grid)
        return kernel

    JITFunction.run = launch


def _execute(kernel: Any, bound: dict[str, Any], grid: tuple[int, ...]) -> None:
    ptx = kernel.asm["ptx"]
    given = [_argument(bound[name]) for name, type_ in kernel.src.signature.items() if type_ != "constexpr"]
    scratch = [0, 0]  # what Triton appends: memory of its own and of its profiler, of which these kernels have none
    threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])
    run(
        ptx, kernel.metadata.name, grid=tuple(grid), block=threads, cluster=kernel.metadata.num_ctas,
        dynamic_smem=kernel.metadata.shared, args=[*given, *scratch],
    )  # fmt: skip


def _argument(value: Any) -> Any:
    """A tensor as the host memory from its first element to the end of its storage."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage()
    length = storage.data_ptr() + storage.nbytes() - value.data_ptr()
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(value.data_ptr()))
