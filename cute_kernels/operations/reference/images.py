"""The patch embed of images: one function per rounding contract.

Patches are rows ``(channel, row, column)`` of ``C * p * p`` pixels, the positions of an image in row-major order of its
patch grid. A contract is named after what is multiplied:

* ``int8``: uint8 pixels x int8 weight. The sum is an integer, exact in any order.
* ``bf16``, ``fp16``: pixels and weight of that type, FP32 accumulation, rounded once per 16 elements of K in
  ascending k.
"""

import torch

from cute_kernels.common.float_environment import default_environment
from cute_kernels.operations.reference.products import gemm, integer_sums
from cute_kernels.operations.reference.rounding import fma32

# Bounds the float64 temporaries of one chunk of rows, in elements.
_CHUNK_ELEMENTS = 1 << 22


def patch_rows(images: torch.Tensor, patch: int) -> torch.Tensor:
    """``[B, C, H, W]`` -> ``[B * S, C * p * p]``, in the order of a Conv2d weight ``[N, C, p, p]``."""
    batch, channels, height, width = images.shape
    rows, columns = height // patch, width // patch
    split = images.reshape(batch, channels, rows, patch, columns, patch)
    return split.permute(0, 2, 4, 1, 3, 5).reshape(batch * rows * columns, channels * patch * patch)


@default_environment()
def patch_embed_images(
    images: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    pos_embed: torch.Tensor | None,
    patch: int,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``[B, S, N]`` by the contract of the weight's type.

    With ``table = fp32(bias) + fp32(pos)``, one FP32 addition, and ``sum`` as the module says:

    * int8: ``round(fma32(fp32(sum), scale, table))``; ``round`` to ``out_dtype``, ``fp32`` to nearest, ties to even.
    * bfloat16, float16: ``round(accumulator + table)``; pixels of another type are rounded to the weight's type first.

    Without a table, a product takes the place of the last fma32, and nothing is added to the accumulator.

    Args:
        images: ``[B, C, H, W]``; uint8 with integer weights.
        values: ``[N, C * p * p]`` int8, bfloat16 or float16.
        scale: ``[N]`` float32 with integer weights, otherwise None.
        bias: ``[N]`` or None.
        pos_embed: ``[S, N]`` or None.
        patch: side of a patch in pixels; H and W are multiples.
        out_dtype: bfloat16, float16 or float32.
    """
    rows, n = patch_rows(images, patch), values.shape[0]
    positions = images.shape[2] // patch * (images.shape[3] // patch)
    table = None if bias is None else bias.to(torch.float32)[None, :].expand(positions, n)
    if pos_embed is not None:
        pos = pos_embed.to(torch.float32)
        table = pos if table is None else table + pos
    out = torch.empty(rows.shape[0], n, dtype=out_dtype, device=images.device)
    step = max(1, _CHUNK_ELEMENTS // max(n, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        chunk = rows[start : start + step]
        addend = None
        if table is not None:
            addend = table[torch.arange(start, start + chunk.shape[0], device=images.device) % positions]
        if scale is None:
            accumulator = gemm(chunk.to(values.dtype), values, None, torch.float32)
            result = accumulator if addend is None else accumulator + addend
        else:
            accumulator = integer_sums(chunk, values).to(torch.float32)
            wide = scale.to(torch.float32).expand_as(accumulator)
            result = accumulator * wide if addend is None else fma32(accumulator, wide, addend)
        out[start : start + step] = result.to(out_dtype)
    return out.view(images.shape[0], positions, n)


@default_environment()
def patch_embed_conv2d(
    pixels: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pos_embed: torch.Tensor | None,
) -> torch.Tensor:
    """The model's patch embedding before any quantisation: FP32 ``conv2d`` of the image, plus position embedding.

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
