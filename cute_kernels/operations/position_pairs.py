"""Positions of two axes, each with a table of its own, as one table and one index, which kernels of rows read."""

import torch

from cute_kernels.operations.runtime.constants import DERIVED


def one_table(
    pos_embed: torch.Tensor, pos_index: torch.Tensor, rows: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of the pairs of positions that occur, and which of them each row gets: ``[U, N]`` float32,
    ``fp32(pos_embed[0, i]) + fp32(pos_embed[1, j])``, NaN for a number that is no position, and ``[*rows]`` int32.

    Both are kept while the tensors live unchanged. Which pairs occur is read back from a GPU once. ``pos_embed``: ``[2,
    S, N]``; ``pos_index``: ``[*rows, 2]``, -1 for no position; ``rows``: extents of ``x`` without K. Raises TypeError:
    positions of no floating-point type, indices that are no int32 or int64; ValueError: other shapes; in CPU memory
    numbers that are no positions.
    """
    if not pos_embed.is_floating_point() or pos_index.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"pos_embed has dtype {pos_embed.dtype} and pos_index {pos_index.dtype}: must be floating-point types and "
            "torch.int32 or torch.int64"
        )
    if pos_embed.shape[0] != 2 or not pos_embed.shape[1]:
        raise ValueError(f"pos_embed has shape {list(pos_embed.shape)}: must be [S, N], or [2, S, N] with S >= 1")
    if tuple(pos_index.shape) != (*rows, 2):
        raise ValueError(
            f"pos_index has shape {list(pos_index.shape)} with pos_embed of two tables: must be {[*rows, 2]}, two "
            "positions for each of x's rows"
        )
    positions, sources = pos_embed.shape[1], (pos_embed, pos_index)
    if pos_index.device.type == "cpu" and pos_index.numel():
        low, high = int(pos_index.min()), int(pos_index.max())
        if low < -1 or high >= positions:
            raise ValueError(f"pos_index has numbers from {low} to {high}: must be -1 to {positions - 1}")
    codes = DERIVED.get(("position pairs", positions), (pos_index,), lambda: torch.unique(_codes(pos_index, positions)))
    if pos_embed.requires_grad and torch.is_grad_enabled():
        table = _sums(pos_embed, codes)  # not kept: gradients flow through it, once
    else:
        table = DERIVED.get(("sums of pairs",), sources, lambda: _sums(pos_embed, codes))
    index = DERIVED.get(("index of pairs", positions), (pos_index,), lambda: _index(pos_index, positions, codes))
    return table, index.view(rows)


def _codes(pos_index: torch.Tensor, positions: int) -> torch.Tensor:
    """One number for each pair, -1 counted as 0; what is no position is the last number of its axis."""
    pairs = pos_index.reshape(-1, 2).to(torch.int64)
    pairs = torch.where((pairs < -1) | (pairs > positions), positions, pairs) + 1
    return pairs[:, 0] * (positions + 2) + pairs[:, 1]


def _index(pos_index: torch.Tensor, positions: int, codes: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(codes, _codes(pos_index, positions)).to(torch.int32)


def _sums(pos_embed: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    positions = pos_embed.shape[1]
    known = torch.zeros(2, positions + 2, pos_embed.shape[2], dtype=torch.float32, device=pos_embed.device)
    known[:, 1:-1], known[:, -1] = pos_embed, torch.nan
    return known[0, codes // (positions + 2)] + known[1, codes % (positions + 2)]
