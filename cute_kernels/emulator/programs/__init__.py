"""Whole programs of the host, whose launches and "cuda" tensors are the emulator's.

`capture` runs a CuTe DSL program; `host` gets launches out of CuTe DSL without a GPU.
"""

from cute_kernels.emulator.programs import host
from cute_kernels.emulator.programs.capturing import capture

__all__ = ["capture", "host"]
