"""Layers whose forward takes the place of another module's, for ``kernels.kernelize``."""

from __future__ import annotations

import torch

from .models.nn.calls import why_no_patches
from .models.nn.engine import PatchEngine
from .models.nn.options import PatchOptions

__all__ = ["PatchConv2d"]

_ENGINE = PatchEngine(PatchOptions(precision="auto", pixels="normalised"))


class PatchConv2d(torch.nn.Module):
    """A convolution over whole patches of normalised images, such as the first layer of a vision transformer.

    Products in bfloat16 or float16, as the weight is. Another convolution, a float32 weight, and a call that wants
    gradients run plain torch.
    """

    can_torch_compile: bool = True

    in_channels: int
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _convolved(self, input)


def _convolved(layer: torch.nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
    images = _ENGINE.as_said(images)
    weight, bias, patch = layer.weight, layer.bias, layer.weight.shape[-1]
    whole = images.dim() == 4 and images.shape[1] == layer.in_channels and min(images.shape[2:]) >= patch
    gradients = _ENGINE.wants_gradients(images, weight, bias)  # the operator of the graph has no derivative
    takes_over = whole and not gradients and _ENGINE.takes_over(
        why_no_patches("the layer", layer), images, lambda: (weight, bias), training=layer.training
    )
    if not takes_over:
        return layer._conv_forward(images, weight, bias)
    # An operator that keeps what it makes of a weight, since a layer has no state of its own.
    out = torch.ops.cute_kernels.embed_patches(images, weight, bias, None, None, _ENGINE.texts[0])
    return out.transpose(1, 2).unflatten(2, (images.shape[2] // patch, images.shape[3] // patch))
