"""The two dequantisation multipliers of a call, and their product, which is what a kernel applies."""

from __future__ import annotations

import functools

import numpy as np
import torch


def split_scale(name: str, scale: float | torch.Tensor | None) -> tuple[float, torch.Tensor | None]:
    """``(number, tensor)`` of a scale as the operator takes it; the number is 1 beside a tensor.

    Raises:
        TypeError: neither number nor tensor.
        ValueError: not finite or not greater than 0.
    """
    if scale is None:
        return 1.0, None
    if isinstance(scale, torch.Tensor):
        return 1.0, scale
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"{name} is {type(scale).__name__}, expected a number, an FP32 tensor of one element, or None")
    if not 0.0 < scale < float("inf"):  # false for NaN too
        raise ValueError(f"{name} = {scale}, allowed: finite and greater than 0")
    return float(scale), None


def join_scale(number: float, tensor: torch.Tensor | None) -> float | torch.Tensor:
    """The inverse of `split_scale`."""
    return number if tensor is None else tensor


def combine_scales(scale_a: float | torch.Tensor | None, scale_b: float | torch.Tensor | None) -> float | torch.Tensor:
    """``fp32(scale_a) * fp32(scale_b)`` in FP32: on the device if either is a tensor, so that nothing synchronises.

    Raises:
        TypeError, ValueError: as `split_scale`; ValueError if the product of two numbers leaves FP32's range.
    """
    if not isinstance(scale_a, torch.Tensor) and not isinstance(scale_b, torch.Tensor):
        return combine_numbers(scale_a, scale_b)
    number_a, tensor_a = split_scale("scale_a", scale_a)
    number_b, tensor_b = split_scale("scale_b", scale_b)
    # One needs no multiplication, and so no kernel.
    if tensor_b is None and number_b == 1.0:
        return tensor_a
    if tensor_a is None and number_a == 1.0:
        return tensor_b
    # A Python number does not promote an FP32 tensor: torch rounds it to FP32 before it multiplies.
    a = number_a if tensor_a is None else tensor_a.reshape(1)
    b = number_b if tensor_b is None else tensor_b.reshape(1)
    return a * b


@functools.lru_cache(maxsize=1024, typed=True)  # True is 1.0 to an untyped cache, and is refused
def combine_numbers(scale_a: float | None, scale_b: float | None) -> float:
    """As `combine_scales`, of two numbers."""
    number_a, _ = split_scale("scale_a", scale_a)
    number_b, _ = split_scale("scale_b", scale_b)
    with np.errstate(over="ignore", under="ignore"):
        scale = float(np.float32(number_a) * np.float32(number_b))
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"scale_a * scale_b = {number_a} * {number_b} is {scale} in FP32, allowed: finite and > 0")
    return scale
