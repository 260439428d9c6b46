"""The patch embedding of SigLIP and SigLIP2: preprocessing, patches, FP8 quantisation, and where the weights come from.

`models` does without torch, which the command line needs; the other names are imported when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cute_kernels.common import extras
from cute_kernels.models.siglip.models import ARCHITECTURES

if TYPE_CHECKING:
    from cute_kernels.models.siglip.preprocessing import Preprocessing, patchify, to_rgb
    from cute_kernels.models.siglip.weights import (
        PatchEmbedding,
        Quantized,
        load_patch_embedding,
        quantize,
        seeded_patch_embedding,
    )

__all__ = [
    "ARCHITECTURES",
    "PatchEmbedding",
    "Preprocessing",
    "Quantized",
    "load_patch_embedding",
    "patchify",
    "quantize",
    "seeded_patch_embedding",
    "to_rgb",
]

_HOME = dict.fromkeys(("Preprocessing", "patchify", "to_rgb"), "preprocessing")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    extras.require("hf", "cute_kernels.models.siglip", ("numpy", "PIL"))
    return getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'weights')}"), name)
