"""What `cute_kernels.patch_embed` must return, in plain torch: one function per rounding contract.

The accumulation is the granularity that the kernel's contract states: products and sums are exact within one MMA
(K = 32), and the FP32 accumulator is rounded once per MMA, in ascending k. NVIDIA documents neither the order nor the
intermediate precision of the silicon, so agreement with a real B200 beyond this contract is not claimed.

Everything here is independent of the kernel, its plan and the emulator.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import torch

MMA_K = 32
# E4M3 products are multiples of 2^-18 and at most 2^17.7, so float64 sums of this many of them are exact.
_MAX_EXACT_K = 1 << 17
# Bounds the float64 temporaries of one row chunk, in elements.
_CHUNK_ELEMENTS = 1 << 22


def accumulate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` with one FP32 rounding per 32 elements of K, ascending, starting from +0.

    Args:
        x: ``[rows, K]`` float8_e4m3fn.
        weight: ``[N, K]`` float8_e4m3fn.

    Returns:
        ``[rows, N]`` float32. NaN inputs give NaN.

    Raises:
        ValueError: K is too large for float64 to hold a block sum exactly.
    """
    k = x.shape[1]
    if k > _MAX_EXACT_K:
        raise ValueError(f"K = {k}: the reference is exact up to K = {_MAX_EXACT_K}")
    wide_x, wide_w = x.to(torch.float64), weight.to(torch.float64)
    acc = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    for start in range(0, k, MMA_K):
        block = wide_x[:, start : start + MMA_K] @ wide_w[:, start : start + MMA_K].T
        acc = (acc.to(torch.float64) + block).to(torch.float32)
    return acc


def fma32(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of FP32 tensors with a single rounding to FP32 (IEEE 754 fusedMultiplyAdd, nearest even).

    The product of two FP32 numbers is exact in float64. Its sum with ``c`` may not be, and rounding that sum twice
    (float64, then FP32) can miss the nearest FP32 number by a half. So the float64 sum is rounded to odd, after which
    the second rounding is correct (Boldo and Melquiond, 2008).
    """
    product, addend = a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64)
    total = product + addend
    # TwoSum: `error` is exactly what `total` lost.
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(torch.int64)
    inexact = torch.isfinite(error) & (error != 0) & (bits & 1 == 0)
    step = torch.where((total > 0) == (error > 0), 1, -1)
    return torch.where(inexact, bits + step, bits).view(torch.float64).to(torch.float32)


def _table_rows(
    bias: torch.Tensor | None, pos_embed: torch.Tensor | None, positions: torch.Tensor
) -> torch.Tensor | None:
    """FP32 ``bias + pos`` at the given positions, broadcastable to ``[rows, N]``; None if both are absent.

    A number that is no position gives NaN.
    """
    if pos_embed is None:
        return None if bias is None else bias.to(torch.float32)[None, :]
    legal = (positions >= 0) & (positions < pos_embed.shape[0])
    pos = pos_embed.to(torch.float32)[torch.where(legal, positions, 0)]
    pos = torch.where(legal[:, None], pos, torch.nan)
    return pos if bias is None else bias.to(torch.float32) + pos


def _by_row_chunks(x, weight, bias, pos_embed, scale, pos_index, finish) -> torch.Tensor:
    rows, n = x.shape[0], weight.shape[0]
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device).reshape(())
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device)
    step = max(1, _CHUNK_ELEMENTS // n)
    for start in range(0, rows, step):
        if pos_index is not None:
            positions = pos_index[start : start + step].to(torch.int64)
        else:
            positions = torch.arange(start, min(start + step, rows), device=x.device)
            positions %= 1 if pos_embed is None else pos_embed.shape[0]
        acc = accumulate(x[start : start + step], weight)
        out[start : start + step] = finish(acc, scale, _table_rows(bias, pos_embed, positions))
    return out


def patch_embed_f32(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pos_embed: torch.Tensor | None,
    scale: float | torch.Tensor = 1.0,
    pos_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """The default contract: ``bf16(fma32(acc, scale, bias + pos))``, one FP32 rounding and one rounding to BF16.

    Args:
        x: ``[rows, K]`` float8_e4m3fn, row r at position ``r % positions``.
        weight: ``[N, K]`` float8_e4m3fn.
        bias: ``[N]`` or None.
        pos_embed: ``[positions, N]`` or None; ``bias + pos`` is summed in FP32.
        scale: dequantisation multiplier, a number or an FP32 tensor of one element.
        pos_index: ``[rows]`` int32 or int64, the position of every row instead; a number that is none gives NaN.

    Returns:
        ``[rows, N]`` bfloat16. Without bias and pos, ``bf16(fp32(acc * scale))``.
    """

    def finish(acc, scale, table):
        return (acc * scale if table is None else fma32(acc, scale, table.expand_as(acc))).to(torch.bfloat16)

    return _by_row_chunks(x, weight, bias, pos_embed, scale, pos_index, finish)


def patch_embed_bf16x2(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pos_embed: torch.Tensor | None,
    scale: float | torch.Tensor = 1.0,
    pos_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """The CUDA original's contract: ``bf16(bf16(acc * scale) + bf16(bias + pos))``, arguments as `patch_embed_f32`."""

    def finish(acc, scale, table):
        rounded = (acc * scale).to(torch.bfloat16)
        # torch adds BF16 through FP32, whose 24 bits are more than 2 * 8 + 2: the sum is rounded to BF16 correctly.
        return rounded if table is None else rounded + table.to(torch.bfloat16)

    return _by_row_chunks(x, weight, bias, pos_embed, scale, pos_index, finish)


def patch_embed_conv2d(
    pixels: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pos_embed: torch.Tensor | None,
) -> torch.Tensor:
    """What the model computes before any quantisation: FP32 ``conv2d`` of the image, plus position embedding.

    Args:
        pixels: ``[B, C, H, W]`` preprocessed image.
        weight: ``[N, C, p, p]`` convolution weight, applied with stride p and no padding.
        bias: ``[N]`` or None.
        pos_embed: ``[(H // p) * (W // p), N]`` or None.

    Returns:
        ``[B, S, N]`` float32 with the positions in row-major order of the patch grid.
    """
    bias = None if bias is None else bias.to(torch.float32)
    maps = torch.nn.functional.conv2d(pixels.to(torch.float32), weight.to(torch.float32), bias, stride=weight.shape[-1])
    tokens = maps.flatten(2).transpose(1, 2).contiguous()
    return tokens if pos_embed is None else tokens + pos_embed.to(torch.float32)


GEMM_MMA_BYTES = 32
"""K of one tensor-core instruction: 16 elements of 16 bits, 8 of TF32."""


GEMM_BLOCK_BYTES = 128
"""K of one operand stage, the unit in which a split of K is dealt out: 64 elements of 16 bits, 32 of TF32."""


def round_tf32(values: torch.Tensor) -> torch.Tensor:
    """FP32 numbers rounded to TF32 (FP32's exponent, 10 fraction bits), to nearest, ties to even.

    This is what TMA does to elements of a TF32 tensor map, as recorded on an H200; beyond the largest TF32 number lies
    infinity. (`wgmma` and `tcgen05.mma` by themselves would drop the low 13 bits, and find none here.)

    Args:
        values: float32.

    Returns:
        The same shape, float32 with 13 zero bits at the end.
    """
    bits = values.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    kept = (bits + 0xFFF + (bits >> 13 & 1)) >> 13 << 13
    kept = torch.where(kept >= 2**31, kept - 2**32, kept).to(torch.int32).view(torch.float32)
    return torch.where(values.isnan(), torch.nan, kept)


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    split_k: int = 1,
) -> torch.Tensor:
    """``a @ b.T + bias`` by the contract of `cute_kernels.gemm`.

    The FP32 accumulator starts from +0 and is rounded once per 32 bytes of K, in ascending k; FP32 ``bias`` is added
    with one rounding, and the sum is rounded once more to ``out_dtype``. float32 operands are rounded to TF32 first.

    With ``split_k`` s > 1 and c blocks of 128 bytes of K, slice i of s has blocks ``i * c // s`` to
    ``(i + 1) * c // s - 1``. Each has an accumulator of its own; before the bias, slices 0 and 1 are added, 2 and 3,
    and so on, then their sums likewise, every addition rounded to FP32.

    Args:
        a: ``[.., M, K]`` bfloat16, float16 or float32.
        b: ``[.., N, K]`` of the same element type and batch.
        bias: ``[N]`` or None.
        out_dtype: bfloat16, float16 or float32; the type of ``a`` when None.
        split_k: 1, 2, 4 or 8, `cute_kernels.Sm90GemmConfig.split_k`.

    Returns:
        ``[.., M, N]`` in ``out_dtype``.

    Raises:
        ValueError: ``split_k`` is no such number, or larger than the number of blocks.
    """
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
            slices = [_accumulate_dense(chunk[:, i:j], wide[i:j], step) for i, j in itertools.pairwise(bounds)]
            while len(slices) > 1:
                slices = [x + y for x, y in zip(slices[::2], slices[1::2], strict=True)]
            (acc,) = slices
            out[index][start : start + rows] = acc if bias is None else acc + bias.to(torch.float32)
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
        unit = torch.minimum(_unit(rows, 11).amin(1)[:, None] * _unit(columns, 11).amin(0), _unit(wide, 24))
        doubt = torch.where(magnitude < unit * 2.0**52, 0.0, magnitude * (2 * step * 2.0**-53))
        before, acc = acc, total.to(torch.float32)
        # Where the exact sum may lie on the other side of a boundary between two FP32 numbers, it is computed.
        unsure = ((total - doubt).to(torch.float32) != (total + doubt).to(torch.float32)) & torch.isfinite(total)
        for row, column in unsure.nonzero().tolist():
            acc[row, column] = _round_exactly(before[row, column], rows[row], columns[:, column])
    return acc


def _unit(values: torch.Tensor, bits: int) -> torch.Tensor:
    """A power of two of which each value, of ``bits`` significant bits, is a multiple; infinity for zero."""
    _, exponents = torch.frexp(values)
    return torch.where(values == 0, math.inf, torch.ldexp(torch.ones_like(values), exponents - bits))


def _round_exactly(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """The FP32 number nearest to ``acc + a . b``, ties to even."""
    exact = Fraction(float(acc)) + sum(Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True))
    # Round to odd at 53 bits, then to FP32: two roundings that give the result of one (Boldo and Melquiond, 2008).
    nearest = float(exact)
    rest = exact - Fraction(nearest)
    mantissa, _ = math.frexp(nearest)
    if rest and int(mantissa * 2**53) % 2 == 0:
        nearest = math.nextafter(nearest, math.inf if rest > 0 else -math.inf)
    return float(torch.tensor(nearest, dtype=torch.float64).to(torch.float32))
