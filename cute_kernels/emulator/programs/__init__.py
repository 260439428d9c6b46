"""Whole programs in the emulator: their launches run in it, their tensors "on cuda" lie in host memory.

`capture` runs a CuTe DSL program; `host` gets launches out of CuTe DSL without a GPU; `ptx_files` runs PTX and CUDA
files.
"""

from cute_kernels.emulator.programs import host
from cute_kernels.emulator.programs.capturing import capture

__all__ = ["capture", "host"]
