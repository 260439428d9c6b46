"""A patch embedding with the constructor, the attributes and the parameter names of timm's, without timm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.models.nn.layers import convert_layer
from cute_kernels.models.nn.options import PatchOptions
from cute_kernels.models.nn.positions import two_integers


class TimmPatchEmbed(torch.nn.Module):
    """Images ``[B, C, H, W]`` to ``[B, S, N]``, or ``[B, N, H / p, W / p]`` with ``flatten=False``.

    For models written for ``timm.layers.PatchEmbed``, ``VisionTransformer(embed_layer=..)`` among them: checkpoints
    have ``proj.weight`` and ``proj.bias`` as they do there. The layer ``proj`` is one of `convert_layer`.

    Args:
        img_size, patch_size: side, or (height, width), of images and patches; an ``img_size`` of None allows any.
        in_chans, embed_dim: C, and N, a multiple of 8.
        norm_layer: makes from N what the embeddings pass through.
        flatten, bias: whether patches become one dimension, and whether the layer has a bias.
        strict_img_size: refuses images of another size than ``img_size``.
        options: how the layer is run; its channels are ``in_chans``.
        others: ``device`` and ``dtype`` of the parameters; ``output_fmt`` and ``dynamic_img_pad`` are None and False.

    Raises:
        TypeError, ValueError: a size that is not allowed, features that are no multiple of 8; others with a value that
            is timm's alone: `cute_kernels.models.timm.convert` keeps what timm does with it.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] | None = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        norm_layer: Callable[..., torch.nn.Module] | None = None,
        flatten: bool = True,
        *,
        bias: bool = True,
        strict_img_size: bool = True,
        options: PatchOptions | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        where = {name: others.pop(name) for name in ("device", "dtype") if name in others}
        timms = "output_fmt", "dynamic_img_pad"
        if wrong := {name: value for name, value in others.items() if value or name not in timms}:
            given = " and ".join(f"{name} = {value!r}" for name, value in wrong.items())
            raise ValueError(f"{given}: must be left out; cute_kernels.models.timm.convert keeps what timm does")
        self.patch_size, self.img_size = _pair("patch_size", patch_size), None
        if img_size is not None:
            self.img_size = _pair("img_size", img_size)
        self.grid_size = None if self.img_size is None else self.dynamic_feat_size(self.img_size)
        self.num_patches = None if self.grid_size is None else self.grid_size[0] * self.grid_size[1]
        self.flatten, self.strict_img_size, self.dynamic_img_pad = flatten, strict_img_size, False
        layer = torch.nn.Conv2d(in_chans, embed_dim, self.patch_size, stride=self.patch_size, bias=bias, **where)
        self.proj = convert_layer(layer, PatchOptions() if options is None else options)
        self.norm = torch.nn.Identity() if norm_layer is None else norm_layer(embed_dim, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The embeddings of images.

        Raises:
            ValueError: images of another size, or without whole patches where the size is open.
        """
        size = tuple(x.shape[-2:])
        if self.img_size is not None and self.strict_img_size and size != self.img_size:
            raise ValueError(f"x has H x W = {list(size)}: must be {list(self.img_size)}, or strict_img_size=False")
        if self.img_size is not None and any(side % patch for side, patch in zip(size, self.patch_size)):
            raise ValueError(f"x has H x W = {list(size)}: must be multiples of {list(self.patch_size)}")
        out = self.proj(x)
        return self.norm(out.flatten(2).transpose(1, 2) if self.flatten else out)

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        """Pixels to a position, along a side."""
        return max(self.patch_size) if as_scalar else self.patch_size

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Grid of positions of an image."""
        return img_size[0] // self.patch_size[0], img_size[1] // self.patch_size[1]


def _pair(name: str, value: int | tuple[int, int]) -> tuple[int, int]:
    return two_integers(name, (value, value) if isinstance(value, int) else value)
