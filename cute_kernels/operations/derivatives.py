"""Pieces of the derivatives of operations, in plain torch, so that compilers fuse them and autograd follows them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

_QUICK = 1.702
"""Factor of the sigmoid's argument in ``quick_gelu``."""


class Fact(NamedTuple):
    """Shape and element type of a tensor of a call."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Facts:
    """A call that is differentiated. ``tensors``: of the call, by argument; ``wanted``: names of the arguments to
    differentiate for."""

    tensors: Mapping[str, Fact]
    wanted: frozenset[str]

    def __getitem__(self, name: str) -> Fact:
        return self.tensors[name]


def activation_gradient(name: str, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``grad * activation'(x)``, of the exact activation, which kernels approximate; the activation is not ``"none"``.
    """
    if name in ("gelu", "gelu_tanh"):
        approximate = "tanh" if name == "gelu_tanh" else "none"
        return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    if name == "silu":
        return torch.ops.aten.silu_backward(grad, x)
    if name == "quick_gelu":
        return torch.ops.aten.silu_backward(grad, _QUICK * x)
    slope = 2 * x.relu() if name == "relu_squared" else x > 0
    return grad * slope


def scaled(grad: torch.Tensor, *scales: float | torch.Tensor | None) -> torch.Tensor:
    """``grad``, ``[.., M, N]``, multiplied by numbers, and by numbers of rows and features as operations take them."""
    for scale in scales:
        if isinstance(scale, torch.Tensor) and scale.numel() == 1:
            scale = scale.reshape(())
        elif isinstance(scale, torch.Tensor) and scale.shape[-1] == 1:
            scale = scale.reshape(*grad.shape[:-1], 1)
        grad = grad if scale is None else grad * scale
    return grad


def position_gradient(grad: torch.Tensor, index: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """``[S, N]`` FP32, of this shape: sums of the rows of ``grad`` ``[.., N]`` that got each position, in turn or as
    the index ``[..]`` says; numbers in it that are no positions gave NaN, and count for none."""
    rows = grad.reshape(-1, shape[1])
    if index is None:
        return rows.view(-1, *shape).sum(0, dtype=torch.float32)
    index = index.reshape(-1).long()
    index = torch.where((index < 0) | (index >= shape[0]), shape[0], index)
    return rows.new_zeros(shape[0] + 1, shape[1], dtype=torch.float32).index_add(0, index, rows.float())[:-1]


def image_gradient(rows: torch.Tensor, shape: torch.Size, patch: int) -> torch.Tensor:
    """``[B, C, H, W]``, this shape, of ``[B * S, C * p * p]``: the inverse of `reference.patch_rows`."""
    batch, channels, height, width = shape
    split = rows.view(batch, height // patch, width // patch, channels, patch, patch)
    return split.permute(0, 3, 1, 4, 2, 5).reshape(shape)
