"""The patch embed and the LayerNorm of rows: one function per rounding contract.

The accumulation is the granularity that the kernel's contract states. Of floating-point rows, products and sums are
exact within one MMA (32 bytes of K), and the FP32 accumulator is rounded once per MMA, in ascending k. Sums of integers
are exact, and rounded to FP32 once.
"""

import functools
from collections.abc import Callable

import torch

from cute_kernels.common.float_environment import default_environment
from cute_kernels.operations.reference.products import gemm
from cute_kernels.operations.reference.rounding import fma32

# Bounds the float64 temporaries of one row chunk, in elements.
_CHUNK_ELEMENTS = 1 << 22


@default_environment()
def accumulate(x: torch.Tensor, weight: torch.Tensor, arithmetic: str = "exact") -> torch.Tensor:
    """``x @ weight.T`` with one FP32 rounding per 32 bytes of K, ascending, starting from +0; of integers with one.

    Args:
        x: ``[rows, K]`` float8_e4m3fn, bfloat16, float16, uint8 or int8.
        weight: ``[N, K]`` of the same type, int8 for integers.
        arithmetic: how floats add: ``"exact"`` as above, or as the tensor cores of ``"sm_90a"`` or ``"sm_100a"``
            (`cute_kernels.operations.reference.tensor_cores`).

    Returns:
        ``[rows, N]`` float32. NaN inputs give NaN.

    Raises:
        ValueError: another ``arithmetic``.
    """
    return gemm(x, weight, None, torch.float32, arithmetic=arithmetic)


def _table_rows(
    bias: torch.Tensor | None, pos_embed: torch.Tensor | None, positions: torch.Tensor
) -> torch.Tensor | None:
    """FP32 ``bias + pos`` at positions, NaN at what is none, broadcastable to ``[rows, N]``; None if both are absent.
    """
    if pos_embed is None:
        return None if bias is None else bias.to(torch.float32)[None, :]
    legal = (positions >= 0) & (positions < pos_embed.shape[0])
    pos = pos_embed.to(torch.float32)[torch.where(legal, positions, 0)]
    pos = torch.where(legal[:, None], pos, torch.nan)
    return pos if bias is None else bias.to(torch.float32) + pos


def _rounded_once(acc: torch.Tensor, scale: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    fused = acc * scale if table is None else fma32(acc, scale.expand_as(acc), table.expand_as(acc))
    return fused.to(torch.bfloat16)


def _rounded_twice(acc: torch.Tensor, scale: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    rounded = (acc * scale).to(torch.bfloat16)
    # torch adds BF16 through FP32, whose 24 bits are more than 2 * 8 + 2: the sum is rounded to BF16 correctly.
    return rounded if table is None else rounded + table.to(torch.bfloat16)


@default_environment()
def patch_embed_f32(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pos_embed: torch.Tensor | None,
    scale: float | torch.Tensor = 1.0,
    pos_index: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    arithmetic: str = "exact",
    *,
    finish: Callable[..., torch.Tensor] = _rounded_once,
) -> torch.Tensor:
    """The default contract: ``bf16(fma32(acc, scale, bias + pos))``, one FP32 rounding and one rounding to BF16.

    Args:
        x: ``[rows, K]`` as for `accumulate`, row r at position ``r % positions``.
        weight: ``[N, K]`` likewise.
        bias: ``[N]`` or None.
        pos_embed: ``[positions, N]`` or None; ``bias + pos`` is summed in FP32.
        scale: dequantisation multiplier: a number, an FP32 tensor of one element, or ``[1, N]`` FP32.
        pos_index: ``[rows]`` int32 or int64, the position of every row instead; a number that is none gives NaN.
        row_scale: ``[rows, 1]`` FP32 or None: the multiplier of row m is then ``fp32(row_scale[m] * scale)``.
        arithmetic: see `accumulate`.
        finish: rounds accumulators, with their multiplier and the rows of ``bias + pos``: another contract.

    Returns:
        ``[rows, N]`` bfloat16. Without bias and pos, ``bf16(fp32(acc * scale))``.
    """
    rows, n = x.shape[0], weight.shape[0]
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    scale = scale.reshape(()) if scale.numel() == 1 else scale.reshape(1, n)
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device)
    step = max(1, _CHUNK_ELEMENTS // n)
    for start in range(0, rows, step):
        if pos_index is not None:
            positions = pos_index[start : start + step].to(torch.int64)
        else:
            positions = torch.arange(start, min(start + step, rows), device=x.device)
            positions %= 1 if pos_embed is None else pos_embed.shape[0]
        acc = accumulate(x[start : start + step], weight, arithmetic)
        factor = scale if row_scale is None else row_scale.reshape(rows, 1)[start : start + step] * scale
        out[start : start + step] = finish(acc, factor, _table_rows(bias, pos_embed, positions))
    return out


patch_embed_bf16x2 = functools.partial(patch_embed_f32, finish=_rounded_twice)
"""The CUDA original's contract: ``bf16(bf16(acc * scale) + bf16(bias + pos))``, arguments as `patch_embed_f32`."""


@default_environment()
def layer_norm_scale(rows: torch.Tensor, eps: float) -> torch.Tensor:
    """``1 / sqrt(variance + eps)`` of each row, within ``3.5 * 2**-24`` of it.

    Sum S and sum of squares Q are exact integers, and so is ``K * Q - S * S``, which is K squared times the variance.
    It is rounded to FP32 once; ``fp32(K * K * eps)`` is added, the square root is taken, and K is divided by that, each
    with one rounding to nearest even.

    Args:
        rows: ``[rows, K]`` uint8, K at most 65,792.
        eps: in units of squared elements.

    Returns:
        ``[rows, 1]`` float32.
    """
    k = rows.shape[1]
    addend = torch.tensor(k * k * eps, dtype=torch.float32, device=rows.device)
    out = torch.empty(rows.shape[0], 1, dtype=torch.float32, device=rows.device)
    step = max(1, _CHUNK_ELEMENTS // k)
    for start in range(0, rows.shape[0], step):
        values = rows[start : start + step].to(torch.int32)
        total, squares = (each.sum(1, keepdim=True, dtype=torch.int64) for each in (values, values * values))
        spread = (squares * k - total * total).to(torch.float32)
        # torch's square roots in FP32 miss the nearest number at times; float64 has bits enough to find it.
        deviation = (spread + addend).to(torch.float64).sqrt().to(torch.float32)
        out[start : start + step] = torch.full_like(deviation, k) / deviation
    return out
