"""`patch_embed_images` by its contract, for CPU tensors only, until the operation is there."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import reference
from cute_kernels.operations.patch_weight import PatchWeight


def patch_embed_images(
    images: torch.Tensor,
    weight: PatchWeight,
    bias: torch.Tensor | None = None,
    pos_embed: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    config: Any = None,
    backend: str = "auto",
) -> torch.Tensor:
    """See `cute_kernels.reference.patch_embed_images`."""
    if images.device.type != "cpu" or backend == "emulator" or config is not None:
        raise NotImplementedError("patch_embed_images has no kernel yet")
    raw = images.dtype == torch.uint8
    if weight.scale is not None and not raw:
        raise TypeError(f"images has dtype {images.dtype}, allowed: torch.uint8")
    if raw:
        bias = weight.offset if bias is None else bias.float() + weight.offset
    values, low = (weight.raw, weight.raw_low) if raw else (weight.normalised, None)
    return reference.patch_embed_images(images, values, low, weight.scale, bias, pos_embed, weight.patch, out_dtype)
