"""``torch._scaled_mm`` with scales of blocks, which torch computes on CUDA alone: programs use it as their reference.

The scales lie as cuBLAS wants them: tiles of 128 rows and 4 scales, in a tile rows r, r + 32, r + 64, r + 96 side by
side.
"""

from __future__ import annotations

import torch

_ELEMENTS_OF_SCALE = {torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TILE_ROWS, _TILE_SCALES = 128, 4


def has_block_scales(a: torch.Tensor, scale_a: torch.Tensor) -> bool:
    """Whether arguments of torch._scaled_mm mean a scale for each 16 or 32 elements."""
    rows, columns = a.shape[0], a.shape[1] * (2 if a.dtype == torch.float4_e2m1fn_x2 else 1)
    length = _ELEMENTS_OF_SCALE.get(scale_a.dtype)
    return length is not None and scale_a.numel() == _padded_scales(rows, columns, length)


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The product of the scaled operands, computed in float64 and rounded once.

    Args:
        a: [M, K] of 8-bit floats, or [M, K / 2] of pairs of E2M1.
        b: [K, N] or [K / 2, N] likewise, column-major.
        scale_a, scale_b: of 32 elements along K each (E8M0), or of 16 (E4M3).
        out_dtype: of the result; None: bfloat16.
    """
    product = _scaled(a, scale_a) @ _scaled(b.transpose(0, 1), scale_b).T
    return product.to(torch.bfloat16 if out_dtype is None else out_dtype)


def _scaled(operand: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = _values(operand.contiguous())
    length = _ELEMENTS_OF_SCALE[scales.dtype]
    rows, columns = values.shape
    tiles = scales.contiguous().view(-1).to(torch.float64)
    tiles = tiles.view(-(-rows // _TILE_ROWS), -(-columns // (length * _TILE_SCALES)), 32, 4, _TILE_SCALES)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(tiles.shape[0] * _TILE_ROWS, tiles.shape[1] * _TILE_SCALES)
    return values * plain.repeat_interleave(length, 1)[:rows, :columns]


def _values(operand: torch.Tensor) -> torch.Tensor:
    if operand.dtype != torch.float4_e2m1fn_x2:
        return operand.to(torch.float64)
    pairs = operand.view(torch.uint8)
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64)
    return table[codes.int()]


def _padded_scales(rows: int, columns: int, length: int) -> int:
    tiles = -(-rows // _TILE_ROWS) * -(-columns // (length * _TILE_SCALES))
    return tiles * _TILE_ROWS * _TILE_SCALES
