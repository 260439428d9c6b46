"""Kernels of CUB, compiled by nvcc, against NumPy: for ``cute-kernels emulate``.

    pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-cccl nvidia-cuda-runtime
    cute-kernels emulate --arch sm_90a tests/public_programs/cub_blocks.py sort

A C++ compiler is needed besides, for nvcc. Without arguments all kernels are run; all results are exact.
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from comparison import Comparison, main

from cute_kernels.emulator import Options, run
from cute_kernels.emulator.errors import EmulatorError, UnsupportedPTX

THREADS, ITEMS = 128, 4
TILE = THREADS * ITEMS

reported: list[EmulatorError] = []


@functools.cache
def ptx() -> str:
    """PTX of cub_blocks.cu for the device."""
    folders = importlib.util.find_spec("nvidia").submodule_search_locations
    toolkit = next(path for folder in folders for path in Path(folder).glob("cu*") if (path / "bin/nvcc").exists())
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    include = toolkit / "include"
    command = [toolkit / "bin/nvcc", "-ptx", f"-arch={arch}", "-std=c++17", "-I", include / "cccl", "-I", include]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "cub_blocks.ptx"
        subprocess.run([*command, "-o", made, Path(__file__).with_suffix(".cu")], check=True)
        return made.read_text()


def launch(kernel: str, x: torch.Tensor, y: torch.Tensor, blocks: int) -> None:
    """Runs one kernel on x and y. What a detector reports is kept, to be raised when the results have been compared."""
    shape = {"grid": (blocks,), "block": (THREADS,), "args": [x, y, x.numel()]}
    try:
        run(ptx(), kernel, **shape)
    except EmulatorError as error:
        if isinstance(error, UnsupportedPTX):
            raise
        reported.append(error)
        y.zero_()
        run(ptx(), kernel, **shape, options=Options(detectors=False))


def integers(count: int, limit: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(-limit if dtype == torch.int32 else 0, limit, (count,)).to(dtype)


def run_reduce(to: Comparison) -> None:
    """1,000 items by two blocks, which add to one place."""
    x, y = integers(1000, 2**20), torch.zeros(1, dtype=torch.int32)
    launch("reduce", x, y, 2)
    to.equal("reduce", y, x.sum().reshape(1).int())


def run_scan(to: Comparison) -> None:
    """Of each block's items."""
    x, y = integers(2 * TILE, 2**20), torch.zeros(2 * TILE, dtype=torch.int32)
    launch("scan", x, y, 2)
    to.equal("scan", y, x.view(2, TILE).cumsum(1).flatten().int())


def run_sort(to: Comparison) -> None:
    """Floats, of each block."""
    x = torch.randn(2 * TILE)
    y = torch.zeros_like(x)
    launch("sort", x, y, 2)
    to.equal("sort", y, x.view(2, TILE).sort(1).values.flatten())


def run_histogram(to: Comparison) -> None:
    """Of bytes, by two blocks."""
    x, y = integers(2 * TILE, 256, torch.uint8), torch.zeros(256, dtype=torch.int32)
    launch("histogram", x, y, 2)
    to.equal("histogram", y, torch.bincount(x.long(), minlength=256).int())


def run_merge(to: Comparison) -> None:
    """Merge sort of each warp's items."""
    x, y = integers(2 * TILE, 1000), torch.zeros(2 * TILE, dtype=torch.int32)
    launch("merge", x, y, 2)
    to.equal("merge", y, x.view(-1, 32 * ITEMS).sort(1).values.flatten())


OPERATORS: dict[str, Callable[[Comparison], None]] = {
    "reduce": run_reduce,
    "scan": run_scan,
    "sort": run_sort,
    "histogram": run_histogram,
    "merge": run_merge,
}


if __name__ == "__main__":
    main(__doc__, OPERATORS)
    if reported:
        raise reported[0]
