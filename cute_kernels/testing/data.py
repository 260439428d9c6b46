"""Data that shows mistakes: outputs full of poison, sums that are exact, values of many magnitudes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

POISON = {
    torch.bfloat16: 0x7FC1,
    torch.float16: 0x7E01,
    torch.float32: 0x7FC00001,
    torch.float64: 0x7FF8000000000001,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7D,
    torch.int8: -77,
    torch.uint8: 177,
    torch.int16: -30877,
    torch.int32: -1234567877,
    torch.int64: -1234567890123456877,
}
"""dtype -> bits that mark an element as never written: of floats of 16 bits or more a NaN that no rounding produces."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integers that its bits are looked at as."""

_EXACT_INTEGERS = {
    torch.float8_e4m3fn: 16, torch.float8_e5m2: 8, torch.bfloat16: 256, torch.float16: 2048, torch.float32: 1 << 24,
    torch.float64: 1 << 24, torch.int8: 127, torch.uint8: 127, torch.int16: 1 << 14, torch.int32: 1 << 24,
}  # fmt: skip
"""dtype -> all integers up to this, of both signs, are values of it (of uint8 the positive ones)."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of its elements, as integers of the same size."""
    return tensor.view(BITS[tensor.element_size()])


def poisoned(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    stride: Sequence[int] | None = None,
    device: str | torch.device = "cuda",
) -> torch.Tensor:
    """An output whose elements all say that nobody has written them; `assert_matches` tells which still do.

    Args:
        shape, dtype: of the output; a dtype of `POISON`.
        stride: in elements; compact if None. Gaps are poisoned too.
        device: where it lies.

    Raises:
        TypeError: a dtype without a poison.
    """
    _known(dtype, POISON)
    tensor = _strided(shape, dtype, stride, device)
    whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    bits_of(whole).fill_(POISON[dtype])
    return tensor


def exact(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    terms: int,
    seed: int = 0,
    stride: Sequence[int] | None = None,
    device: str | torch.device = "cuda",
) -> torch.Tensor:
    """Random integers, so small that FP32 adds products of two such tensors exactly, in any order.

    Args:
        shape, dtype: of the tensor; a float of 8 bits or more, or an integer.
        terms: products in a sum: ``terms`` times the square of the largest magnitude stays within 2**24.
        seed: of the values.
        stride, device: as for `poisoned`.

    Raises:
        TypeError: another dtype.
        ValueError: ``terms`` is not from 1 to 2**24.
    """
    _known(dtype, _EXACT_INTEGERS)
    if not 1 <= terms <= 1 << 24:
        raise ValueError(f"terms {terms}: 1 to {1 << 24} are possible, since FP32 has 24 significant bits")
    most = min(_EXACT_INTEGERS[dtype], math.isqrt((1 << 24) // terms))
    least = 0 if dtype is torch.uint8 else -most
    values = torch.randint(least, most + 1, tuple(shape), generator=torch.Generator("cpu").manual_seed(seed))
    return _filled(values, dtype, stride, device)


def varied(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    seed: int = 0,
    stride: Sequence[int] | None = None,
    device: str | torch.device = "cuda",
) -> torch.Tensor:
    """Random floats of both signs whose magnitudes go over ten powers of two, with zeros among them.

    Unlike ones or a ramp, they show elements that are exchanged, used twice or rounded elsewhere.

    Args:
        shape, dtype: of the tensor, of floats.
        seed, stride, device: as for `exact`.

    Raises:
        TypeError: no float.
    """
    if not dtype.is_floating_point:
        raise TypeError(f"dtype {dtype}: a floating-point type is needed; for integers there is exact()")
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randn(tuple(shape), generator=generator)
    values *= 2.0 ** torch.randint(-6, 4, tuple(shape), generator=generator)
    values[torch.rand(tuple(shape), generator=generator) < 0.05] = 0.0
    return _filled(values, dtype, stride, device)


def _known(dtype: torch.dtype, table: dict[torch.dtype, int]) -> None:
    if dtype not in table:
        raise TypeError(f"dtype {dtype}; allowed are {', '.join(str(each).removeprefix('torch.') for each in table)}")


def _strided(
    shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None, device: str | torch.device
) -> torch.Tensor:
    if stride is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)


def _filled(
    values: torch.Tensor, dtype: torch.dtype, stride: Sequence[int] | None, device: str | torch.device
) -> torch.Tensor:
    tensor = _strided(values.shape, dtype, stride, device)
    tensor.copy_(values.to(dtype))
    return tensor
