"""The bias + position table as accumulators lie in registers whose columns are patches."""

from __future__ import annotations

import torch

_LANES, _VALUES = 32, 4


def fragment_table(
    bias: torch.Tensor | None, pos_embed: torch.Tensor | None, shape: tuple[int, int, int, int, int],
    grid_width: int, tile_patches: int,
) -> torch.Tensor:  # fmt: skip
    """``fp32(bias) + fp32(pos)``, one FP32 addition, for 16 features and 8 columns at a time.

    Args:
        bias: ``[N]`` or None, in any floating-point type; not both are None.
        pos_embed: ``[S, N]`` or None, positions in row-major order of the patch grid.
        shape: ``[position tiles, blocks of 16 features, period, 32, 4]``, `StripsPlan.table_shape`.
        grid_width: patches of a grid row.
        tile_patches: neighbouring patches of a tile.

    Returns:
        float32 of that shape. ``[t, b, j, l, r]`` belongs to feature ``16 b + l / 4 + 8 (r / 2)`` and to patch
        ``(8 j + 2 (l % 4) + r % 2) % tile_patches`` of position tile t; zero beyond the features and the grid row.

    Raises:
        ValueError: neither bias nor positions.
    """
    if pos_embed is not None:
        values = pos_embed.to(torch.float32)
        values = values if bias is None else bias.to(torch.float32) + values
    elif bias is not None:
        values, grid_width, tile_patches = bias.to(torch.float32)[None], 1, 1
    else:
        raise ValueError("a table needs bias or pos_embed")
    tiles, blocks, period, _, _ = shape
    n, row_tiles = values.shape[1], -(-grid_width // tile_patches)
    padded = torch.zeros(
        tiles // row_tiles, row_tiles * tile_patches, blocks * 16, dtype=torch.float32, device=values.device
    )
    padded[:, :grid_width, :n] = values.view(-1, grid_width, n)
    lane = torch.arange(_LANES, device=values.device)[:, None]
    value = torch.arange(_VALUES, device=values.device)
    group = torch.arange(period, device=values.device)[:, None, None]
    patch = (8 * group + 2 * (lane % 4) + value % 2) % tile_patches
    by_thread = padded.view(tiles, tile_patches, blocks, 2, 8)[:, patch, :, value // 2, lane // 4]
    return by_thread.permute(3, 4, 0, 1, 2).contiguous()
