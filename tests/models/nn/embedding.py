"""A converted convolution that keeps positions of its own, as a model around it does."""

from __future__ import annotations

import copy
from typing import Any

import torch

from cute_kernels.models.nn import PatchConv2d, PatchOptions, convert_layer


class Embedding(PatchConv2d):
    """``[B, S, N]`` of images, positions added; made by `embedding`."""

    def forward(self, pixels: torch.Tensor, pos_embed: torch.Tensor | None = None) -> torch.Tensor:
        pos_embed = self.pos_embed if pos_embed is None else pos_embed
        return super().forward(pixels, pos_embed).flatten(2).transpose(1, 2)


def embedding(
    layer: torch.nn.Conv2d, *, pos_embed: torch.Tensor | None = None, interpolation: str = "bicubic", **options: Any
) -> Embedding:
    """The embedding of a convolution, which stays as it is and has the same parameters. ``options``: fields of
    `PatchOptions`."""
    made = copy.copy(layer)
    vars(made).update(_parameters=dict(layer._parameters), _buffers=dict(layer._buffers))
    convert_layer(made, PatchOptions(**options), interpolation=interpolation)
    made.__class__ = Embedding
    if isinstance(pos_embed, torch.nn.Parameter):
        made.register_parameter("pos_embed", pos_embed)
    else:
        made.register_buffer("pos_embed", pos_embed)
    return made
