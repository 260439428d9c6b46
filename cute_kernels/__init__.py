"""GPU kernels in CuTe DSL, with an emulator that runs their PTX on a machine without a GPU.

>>> import torch, cute_kernels
>>> x = torch.randn(2, 196, 768).to(torch.float8_e4m3fn)
>>> weight = torch.randn(768, 768).to(torch.float8_e4m3fn)
>>> cute_kernels.patch_embed(x, weight, torch.zeros(768), torch.zeros(196, 768), scale_a=0.01, scale_b=0.02).shape
torch.Size([2, 196, 768])
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from cute_kernels.config import (
    GemmProblem,
    PatchEmbedImagesProblem,
    PatchEmbedProblem,
    Sm80GemmConfig,
    Sm80ImagesConfig,
    Sm80PatchEmbedConfig,
    Sm90GatherConfig,
    Sm90GemmConfig,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    Sm100GemmConfig,
    Sm100ImagesConfig,
    Sm100PatchEmbedConfig,
    Sm100ResidentConfig,
)

if TYPE_CHECKING:
    from cute_kernels import models
    from cute_kernels.explore.tuning.functions import (
        tune_first_calls,
        tune_gemm,
        tune_patch_embed,
        tune_patch_embed_images,
    )
    from cute_kernels.operations.gemm import gemm
    from cute_kernels.operations.layer_norm import layer_norm_linear, prepare_layer_norm_weight
    from cute_kernels.operations.patch_embed import patch_embed
    from cute_kernels.operations.patch_embed_images import patch_embed_images
    from cute_kernels.operations.patch_weight import prepare_patch_weight
    from cute_kernels.operations.reference.rounding import round_tf32
    from cute_kernels.operations.runtime.constants import clear_cache, frozen_constants

__version__ = "0.1.0"

__all__ = [
    "GemmProblem",
    "PatchEmbedImagesProblem",
    "PatchEmbedProblem",
    "Sm80GemmConfig",
    "Sm80ImagesConfig",
    "Sm80PatchEmbedConfig",
    "Sm90GatherConfig",
    "Sm90ImagesConfig",
    "Sm90PatchEmbedConfig",
    "Sm90GemmConfig",
    "Sm100GemmConfig",
    "Sm100ImagesConfig",
    "Sm100PatchEmbedConfig",
    "Sm100ResidentConfig",
    "clear_cache",
    "frozen_constants",
    "gemm",
    "layer_norm_linear",
    "models",
    "patch_embed",
    "patch_embed_images",
    "prepare_layer_norm_weight",
    "prepare_patch_weight",
    "round_tf32",
    "tune_first_calls",
    "tune_gemm",
    "tune_patch_embed",
    "tune_patch_embed_images",
]

#: Public name -> the module that defines it, which needs torch.
_WITH_TORCH = {
    "clear_cache": "operations.runtime.constants",
    "frozen_constants": "operations.runtime.constants",
    "gemm": "operations.gemm",
    "layer_norm_linear": "operations.layer_norm",
    "patch_embed": "operations.patch_embed",
    "patch_embed_images": "operations.patch_embed_images",
    "prepare_layer_norm_weight": "operations.layer_norm",
    "prepare_patch_weight": "operations.patch_weight",
    "round_tf32": "operations.reference.rounding",
    "tune_first_calls": "explore.tuning.functions",
    "tune_gemm": "explore.tuning.functions",
    "tune_patch_embed": "explore.tuning.functions",
    "tune_patch_embed_images": "explore.tuning.functions",
}
#: Packages whose names are not put here: attribute access imports them.
_PACKAGES = ("models",)


def _load() -> None:
    for name, module in _WITH_TORCH.items():
        globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __getattr__(name: str) -> Any:
    """Imports torch when a name is asked for that needs it: that takes a second, and emulator and commands can wait."""
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _load()
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_WITH_TORCH, *_PACKAGES})


if "torch" in sys.modules:  # nothing to wait for: the operators are in torch.ops from the import on
    _load()
