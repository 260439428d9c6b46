"""The dense GEMM by its rounding contract."""

import itertools
from typing import Any

import torch

from cute_kernels.common.float_environment import default_environment
from cute_kernels.operations.reference.activations import ACTIVATIONS, NARROW, gated_e4m3
from cute_kernels.operations.reference.rounding import fma32, granularity, round_exactly, round_tf32
from cute_kernels.operations.reference.tensor_cores import accumulate_as, check_arithmetic

# Bounds the float64 temporaries of one row chunk, in elements.
_CHUNK_ELEMENTS = 1 << 22

GEMM_MMA_BYTES = 32
"""K of one tensor-core instruction: 32 elements of 8 bits, 16 of 16, 8 of TF32."""


GEMM_BLOCK_BYTES = 128
"""K of one operand stage, the unit in which a split of K is dealt out: 128 elements of 8 bits, 64 of 16, 32 of TF32."""

LARGEST_E4M3 = 448.0
"""Largest finite float8_e4m3fn."""

MOST_EXACT_K = 1 << 17
"""Elements of E4M3 whose products float64 adds exactly."""



def integer_sums(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``[rows, K]`` uint8 or int8 ``@ values.T``, ``[N, K]`` int8, as ``[rows, N]`` float64 integers. Raises
    ValueError: K of 2^38 or more, whose sums float64 cannot hold."""
    if rows.shape[1] >= 1 << 38:
        raise ValueError(f"K = {rows.shape[1]}: sums of 2^15 each are exact in float64 below K = 2^38")
    return rows.to(torch.float64) @ values.to(torch.float64).T


@default_environment()
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    split_k: int = 1,
    activation: str = "none",
    arithmetic: str = "exact",
    *,
    scale_a: float | torch.Tensor | None = None,
    scale_b: float | torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_scale: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """``activation(scale * (a @ b.T) + bias) + residual`` by the contract of `cute_kernels.gemm`.

    The FP32 accumulator starts from +0 and is rounded once per 32 bytes of K, in ascending k; of integers it is exact,
    and rounded to FP32 once. float32 operands are rounded to TF32 first. Then, each with one rounding to FP32:

    1. ``scale = scale_a * scale_b``, and ``fma32(accumulator, scale, bias)``; without a bias the product alone, without
       scales the sum with the bias alone;
    2. the activation, as `cute_kernels.operations.reference.activations` defines it;
    3. the sum with the residual.

    The result is rounded once more to ``out_dtype``. For float8_e4m3fn it is multiplied by ``fp32(1 / out_scale)``
    first, one more rounding to FP32, and what is beyond 448 becomes 448, with its sign; NaN stays NaN. Without a
    residual, GELU and SiLU are `gated_e4m3` there, whose product is rounded to FP16 before.

    With ``split_k`` s > 1 and c blocks of 128 bytes of K, slice i of s has blocks ``i * c // s`` to
    ``(i + 1) * c // s - 1``. Each has an accumulator of its own; before the scale, slices 0 and 1 are added, 2 and 3,
    and so on, then their sums likewise, every addition rounded to FP32.

    Args:
        a: ``[.., M, K]`` bfloat16, float16, float32, float8_e4m3fn, int8 or uint8.
        b: ``[.., N, K]`` of the same element type, int8 for integers, and batch.
        bias: ``[N]`` or None.
        out_dtype: bfloat16, float16, float32 or float8_e4m3fn; when None the type of ``a``, of 8 bits bfloat16.
        split_k: 1, 2, 4 or 8, `cute_kernels.Sm90GemmConfig.split_k`.
        activation: a key of `cute_kernels.operations.reference.activations.ACTIVATIONS`.
        arithmetic: how accumulators add: ``"exact"`` as above, or as the tensor cores of ``"sm_90a"`` or ``"sm_100a"``
            (`cute_kernels.operations.reference.tensor_cores`).
        scale_a: a number, an FP32 tensor of one element or of shape ``[.., M, 1]``, or None, which is 1.
        scale_b: likewise ``[.., 1, N]``. Where both are None nothing is multiplied.
        residual: ``[.., M, N]`` or None.
        out_scale: what an element of float8_e4m3fn is multiplied by to mean the result, a number or an FP32 tensor of
            one element; 1 when None.

    Returns:
        ``[.., M, N]`` in ``out_dtype``.

    Raises:
        ValueError: ``split_k`` is no such number, or larger than the number of blocks; another ``arithmetic``.
    """
    check_arithmetic(arithmetic)
    block = GEMM_BLOCK_BYTES // a.itemsize
    blocks = -(-a.shape[-1] // block)
    if split_k not in (1, 2, 4, 8) or split_k > max(1, blocks):
        raise ValueError(f"split_k = {split_k}: must be 1, 2, 4 or 8, at most the {blocks} blocks of K")
    bounds = [i * blocks // split_k * block for i in range(split_k + 1)]
    shape = (*a.shape[:-1], b.shape[-2])
    out_dtype = out_dtype or (a.dtype if a.itemsize > 1 else torch.bfloat16)
    out = torch.empty(shape, dtype=out_dtype, device=a.device)
    scale = _product(scale_a, scale_b, shape, a.device)
    if not isinstance(out_scale, torch.Tensor):  # filled on the device: a copy from the host would wait for it
        out_scale = torch.full((), 1.0 if out_scale is None else out_scale, dtype=torch.float32, device=a.device)
    out_factor = 1.0 / out_scale.to(a.device, torch.float32).reshape(())
    rows = max(1, _CHUNK_ELEMENTS // b.shape[-2])
    dtype = a.dtype
    if dtype is torch.float32:
        a, b = round_tf32(a), round_tf32(b)
    for index in itertools.product(*map(range, a.shape[:-2])):
        for start in range(0, a.shape[-2], rows):
            part = slice(start, start + rows)
            acc = _sums(a[index][part], b[index], bounds, arithmetic, dtype)
            addend = None if bias is None else bias.to(torch.float32).expand_as(acc)
            if scale is not None:
                factor = scale[index][part]
                acc = acc * factor if addend is None else fma32(acc, factor, addend)
            elif addend is not None:
                acc = acc + addend
            if out_dtype is torch.float8_e4m3fn and activation in NARROW and residual is None:
                out[index][part] = _to_e4m3(gated_e4m3(activation, acc, out_factor))
                continue
            acc = ACTIVATIONS[activation](acc, out_dtype)
            if residual is not None:
                acc = acc + residual[index][part].to(torch.float32)
            narrow = out_dtype is torch.float8_e4m3fn
            out[index][part] = _to_e4m3(acc * out_factor) if narrow else acc.to(out_dtype)
    return out


def _product(
    scale_a: float | torch.Tensor | None, scale_b: float | torch.Tensor | None, shape: tuple[int, ...], device: Any
) -> torch.Tensor | None:
    """``fp32(scale_a * scale_b)`` of every element of the result; None without either."""
    if scale_a is None and scale_b is None:
        return None
    factors = [
        torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=device)
        for scale in (scale_a, scale_b)
    ]
    factors = [factor.reshape(()) if factor.numel() == 1 else factor for factor in factors]
    return (factors[0] * factors[1]).expand(shape)


def _sums(
    a: torch.Tensor, b: torch.Tensor, bounds: list[int], arithmetic: str, dtype: torch.dtype
) -> torch.Tensor:
    """FP32 ``a @ b.T`` of matrices of ``dtype``: slices of K between ``bounds``, added as a balanced tree."""
    if not dtype.is_floating_point:
        return integer_sums(a, b).to(torch.float32)
    step = GEMM_MMA_BYTES // dtype.itemsize
    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
    slices = [
        _accumulate_dense(wide_a[:, i:j], wide_b[:, i:j].T.contiguous(), step, exact=dtype.itemsize == 1)
        if arithmetic == "exact"
        else accumulate_as(wide_a[:, i:j], wide_b[:, i:j], step, arithmetic, dtype)
        for i, j in itertools.pairwise(bounds)
    ]
    while len(slices) > 1:
        slices = [x + y for x, y in zip(slices[::2], slices[1::2], strict=True)]
    return slices[0]


def _to_e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)


def _accumulate_dense(a: torch.Tensor, b: torch.Tensor, step: int, exact: bool) -> torch.Tensor:
    """FP32 ``a @ b`` of ``[rows, K]`` and ``[K, N]`` float64 values that have at most 11 significant bits.

    The sum is rounded once per ``step`` elements of K. With ``exact`` every sum is known to fit float64: products of
    E4M3 are multiples of 2^-18 and at most 2^17.7, so that sums of 2^17 of them have 53 bits.
    """
    exact = exact and a.shape[1] <= MOST_EXACT_K
    acc = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], step):
        rows, columns = a[:, start : start + step], b[start : start + step]
        wide = acc.to(torch.float64)
        total = wide + rows @ columns
        if exact:
            acc = total.to(torch.float32)
            continue
        magnitude = rows.abs() @ columns.abs() + wide.abs()
        # All summands are multiples of this. Sums that need no more than 53 bits above it are exact in any order.
        products = granularity(rows, 11).amin(1)[:, None] * granularity(columns, 11).amin(0)
        unit = torch.minimum(products, granularity(wide, 24))
        doubt = torch.where(magnitude < unit * 2.0**52, 0.0, magnitude * (2 * step * 2.0**-53))
        before, acc = acc, total.to(torch.float32)
        # Where the exact sum may lie on the other side of a boundary between two FP32 numbers, it is computed.
        unsure = ((total - doubt).to(torch.float32) != (total + doubt).to(torch.float32)) & torch.isfinite(total)
        for row, column in unsure.nonzero().tolist():
            acc[row, column] = round_exactly(before[row, column], rows[row], columns[:, column])
    return acc
