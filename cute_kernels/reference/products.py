"""The dense GEMM by its rounding contract."""

from __future__ import annotations

import itertools

import torch

from cute_kernels.reference.activations import ACTIVATIONS
from cute_kernels.reference.rounding import granularity, round_exactly, round_tf32
from cute_kernels.reference.tensor_cores import accumulate_as, check_arithmetic

# Bounds the float64 temporaries of one row chunk, in elements.
_CHUNK_ELEMENTS = 1 << 22

GEMM_MMA_BYTES = 32
"""K of one tensor-core instruction: 16 elements of 16 bits, 8 of TF32."""


GEMM_BLOCK_BYTES = 128
"""K of one operand stage, the unit in which a split of K is dealt out: 64 elements of 16 bits, 32 of TF32."""


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    split_k: int = 1,
    activation: str = "none",
    arithmetic: str = "exact",
) -> torch.Tensor:
    """``activation(a @ b.T + bias)`` by the contract of `cute_kernels.gemm`.

    The FP32 accumulator starts from +0 and is rounded once per 32 bytes of K, in ascending k; FP32 ``bias`` is added
    with one rounding, the activation follows in FP32, and the result is rounded once more to ``out_dtype``. float32
    operands are rounded to TF32 first.

    With ``split_k`` s > 1 and c blocks of 128 bytes of K, slice i of s has blocks ``i * c // s`` to
    ``(i + 1) * c // s - 1``. Each has an accumulator of its own; before the bias, slices 0 and 1 are added, 2 and 3,
    and so on, then their sums likewise, every addition rounded to FP32.

    Args:
        a: ``[.., M, K]`` bfloat16, float16 or float32.
        b: ``[.., N, K]`` of the same element type and batch.
        bias: ``[N]`` or None.
        out_dtype: bfloat16, float16 or float32; the type of ``a`` when None.
        split_k: 1, 2, 4 or 8, `cute_kernels.Sm90GemmConfig.split_k`.
        activation: a key of `cute_kernels.reference.activations.ACTIVATIONS`.
        arithmetic: how accumulators add: ``"exact"`` as above, or as the tensor cores of ``"sm_90a"`` or ``"sm_100a"``
            (`cute_kernels.reference.tensor_cores`).

    Returns:
        ``[.., M, N]`` in ``out_dtype``.

    Raises:
        ValueError: ``split_k`` is no such number, or larger than the number of blocks; another ``arithmetic``.
    """
    check_arithmetic(arithmetic)
    block, step = GEMM_BLOCK_BYTES // a.itemsize, GEMM_MMA_BYTES // a.itemsize
    blocks = -(-a.shape[-1] // block)
    if split_k not in (1, 2, 4, 8) or split_k > max(1, blocks):
        raise ValueError(f"split_k = {split_k}, allowed: 1, 2, 4 or 8, at most the {blocks} blocks of K")
    bounds = [i * blocks // split_k * block for i in range(split_k + 1)]
    out = torch.empty(*a.shape[:-1], b.shape[-2], dtype=out_dtype or a.dtype, device=a.device)
    rows = max(1, _CHUNK_ELEMENTS // b.shape[-2])
    if a.dtype is torch.float32:
        a, b = round_tf32(a), round_tf32(b)
    for index in itertools.product(*map(range, a.shape[:-2])):
        wide = b[index].to(torch.float64).T.contiguous()
        for start in range(0, a.shape[-2], rows):
            chunk = a[index][start : start + rows].to(torch.float64)
            slices = [
                _accumulate_dense(chunk[:, i:j], wide[i:j], step)
                if arithmetic == "exact"
                else accumulate_as(chunk[:, i:j], wide[i:j].T, step, arithmetic, a.dtype)
                for i, j in itertools.pairwise(bounds)
            ]
            while len(slices) > 1:
                slices = [x + y for x, y in zip(slices[::2], slices[1::2], strict=True)]
            (acc,) = slices
            acc = acc if bias is None else acc + bias.to(torch.float32)
            out[index][start : start + rows] = ACTIVATIONS[activation](acc, out.dtype)
    return out


def _accumulate_dense(a: torch.Tensor, b: torch.Tensor, step: int) -> torch.Tensor:
    """FP32 ``a @ b`` of ``[rows, K]`` and ``[K, N]`` float64 values that have at most 11 significant bits.

    The sum is rounded once per ``step`` elements of K.
    """
    acc = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], step):
        rows, columns = a[:, start : start + step], b[start : start + step]
        wide = acc.to(torch.float64)
        total = wide + rows @ columns
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
