"""Data that shows mistakes: outputs full of poison, sums that are exact, values of many magnitudes."""

import math
from collections.abc import Sequence
from numbers import Integral

import torch

POISON = {
    torch.bfloat16: 0x7FC1,
    torch.float16: 0x7E01,
    torch.float32: 0x7FC00001,
    torch.float64: 0x7FF8000000000001,
    torch.float8_e4m3fn: 0xFF,  # the NaN that `cvt` does not write
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
    torch.float8_e4m3fn: 16,
    torch.float8_e5m2: 8,
    torch.bfloat16: 256,
    torch.float16: 2048,
    torch.float32: 1 << 24,
    torch.float64: 1 << 24,
    torch.int8: 127,
    torch.uint8: 127,
    torch.int16: 1 << 14,
    torch.int32: 1 << 24,
}
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
        TypeError: a dtype without a poison; a shape or strides that are no integers.
        ValueError: a negative extent or stride, or another number of strides than extents.
    """
    _known(dtype, POISON)
    _check_layout(shape, stride)
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
        TypeError: another dtype; an argument that is no integer.
        ValueError: ``terms`` is not from 1 to 2**24; as for `poisoned`, and a stride of 0.
    """
    _known(dtype, _EXACT_INTEGERS)
    _check_integer("terms", terms)
    if not 1 <= terms <= 1 << 24:
        raise ValueError(f"terms = {terms}: must be 1 to {1 << 24}, since FP32 has 24 significant bits")
    _check_layout(shape, stride, written=True)
    _check_integer("seed", seed)
    most = min(_EXACT_INTEGERS[dtype], math.isqrt((1 << 24) // terms))
    least = 0 if dtype is torch.uint8 else -most
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randint(least, most + 1, tuple(shape), generator=generator, device="cpu")
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
        TypeError, ValueError: no float; as for `exact`.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype = {dtype}: must be a floating-point type; for integers there is exact()")
    _check_layout(shape, stride, written=True)
    _check_integer("seed", seed)
    drawn = {"generator": torch.Generator("cpu").manual_seed(seed), "dtype": torch.float32, "device": "cpu"}
    values = torch.randn(tuple(shape), **drawn)
    values *= 2.0 ** torch.randint(-6, 4, tuple(shape), **drawn)
    values[torch.rand(tuple(shape), **drawn) < 0.05] = 0.0
    return _filled(values, dtype, stride, device)


def _known(dtype: torch.dtype, table: dict[torch.dtype, int]) -> None:
    if dtype not in table:
        names = ", ".join(str(each).removeprefix("torch.") for each in table)
        raise TypeError(f"dtype = {dtype}: must be one of {names}")


def _check_integer(name: str, value: object) -> None:
    if not isinstance(value, Integral):
        raise TypeError(f"{name} = {value!r}: must be an int")
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{name} = {value}: must have 64 bits")


def _check_layout(shape: object, stride: object, *, written: bool = False) -> None:
    """``written``: each element gets a value of its own, which elements at one place cannot have."""
    for name, values in (("shape", shape), ("stride", stride)):
        if values is None and name == "stride":
            return
        if not isinstance(values, Sequence) or not all(isinstance(each, Integral) for each in values):
            raise TypeError(f"{name} = {values!r}: must be a sequence of ints")
        if any(each < 0 for each in values):
            raise ValueError(f"{name} = {tuple(values)}: must be 0 or more")
    if len(stride) != len(shape):
        raise ValueError(f"stride {tuple(stride)}: must be one for each of the {len(shape)} dimensions")
    if written and any(step == 0 and extent > 1 for step, extent in zip(stride, shape)):
        raise ValueError(f"stride {tuple(stride)}: elements of shape {tuple(shape)} would lie at one place")


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
