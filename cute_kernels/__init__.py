"""GPU kernels in CuTe DSL, with an emulator that runs their PTX on a machine without a GPU.

>>> import torch, cute_kernels
>>> x = torch.randn(2, 196, 768).to(torch.float8_e4m3fn)
>>> weight = torch.randn(768, 768).to(torch.float8_e4m3fn)
>>> cute_kernels.patch_embed(x, weight, torch.zeros(768), torch.zeros(196, 768), scale_a=0.01, scale_b=0.02).shape
torch.Size([2, 196, 768])
"""

from __future__ import annotations

from cute_kernels.config import GemmProblem, Problem, Sm90Config, Sm90GemmConfig, Sm100GemmConfig, TileConfig
from cute_kernels.derived import clear_cache, frozen_constants
from cute_kernels.gemm_op import gemm
from cute_kernels.ops import patch_embed
from cute_kernels.tune import tune_gemm

__version__ = "0.1.0"
__all__ = [
    "GemmProblem",
    "Problem",
    "Sm90Config",
    "Sm90GemmConfig",
    "Sm100GemmConfig",
    "TileConfig",
    "clear_cache",
    "frozen_constants",
    "gemm",
    "patch_embed",
    "tune_gemm",
]
