"""The patch embedding of SigLIP and SigLIP2: preprocessing, and seeded weights.

Names are imported when they are asked for.
"""

import importlib
from typing import Any

from cute_kernels.common import extras

_WEIGHTS = "ARCHITECTURES", "PatchEmbedding", "seeded_patch_embedding"
_HOME = dict.fromkeys(("Preprocessing", "to_rgb"), "preprocessing") | dict.fromkeys(_WEIGHTS, "weights")
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    extras.require("hf", "cute_kernels.models.siglip", ("numpy", "PIL"))
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
