"""Raw pixels on their way through code that casts them before it calls a converted layer.

A model's forward often begins with ``layer(pixels.to(layer.weight.dtype))``. Given a stand-in of that type, it casts
nothing, and the layer finds the pixels. Where a stand-in arrives elsewhere, the result is NaN.
"""

from __future__ import annotations

import torch

_NAME = "_cute_kernels_raw"


def stand_in(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the shape of ``pixels`` and of this type: one NaN, and ``pixels`` for `pixels_of`."""
    out = torch.full((), torch.nan, dtype=dtype, device=pixels.device).expand(pixels.shape)
    setattr(out, _NAME, pixels)
    return out


def pixels_of(tensor: torch.Tensor) -> torch.Tensor:
    """The pixels that ``tensor`` stands for, or itself."""
    if torch.compiler.is_compiling():  # in which there are no stand-ins
        return tensor
    return getattr(tensor, _NAME, tensor)
