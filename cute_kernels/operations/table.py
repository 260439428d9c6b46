"""The table that the epilogue adds: bias and position embedding, summed once and laid out for one warp's loads.

``"row_major"`` (SM100): ``[positions, n]``. Where all rows of a warp have one position, nothing else is needed.

``"interleaved"`` (SM100): the 32 lanes of a warp hold 32 consecutive rows, so that in a row-major table one 16-byte
load per lane would touch 32 different cache lines. This layout puts the same 16-byte column chunk of 32 consecutive
positions side by side: the warp then reads 512 consecutive bytes.

``"paired"`` (SM90): a thread holds columns c and c + 8 of every 16, by the accumulator layout of WGMMA. They stand side
by side, so that one load brings both.

``"quads"`` (SM100, weight on chip): a thread holds columns c + 8 i of every 32, by ``tcgen05.ld.16x256b``. Likewise.

`fragment_table` (SM90's kernels of images): as accumulators lie in registers whose columns are patches.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.operations.runtime.constants import DERIVED, Sources, outside_of_pools
from cute_kernels.plan.base import LANES
from cute_kernels.plan.patch_embed import PatchEmbedPlan, TableLayout

Addends = tuple["torch.Tensor | None", "torch.Tensor | None"]

_FRAGMENT_VALUES = 4


def _summed(
    bias: torch.Tensor | None, pos_embed: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``[rows, N]``: ``fp32(bias) + fp32(pos)``, one FP32 addition, or the one that is there; one row of a bias."""
    if bias is not None and pos_embed is not None:
        return torch.add(pos_embed.to(torch.float32), bias, out=out)  # which converts the bias, too
    given = pos_embed if bias is None else bias[None]
    return given.to(torch.float32) if out is None else out.copy_(given)


def build_table(
    bias: torch.Tensor | None,
    pos_embed: torch.Tensor | None,
    shape: tuple[int, ...],
    layout: TableLayout = "row_major",
    dtype: torch.dtype = torch.float32,
    *,
    nan_row: bool = False,
) -> torch.Tensor:
    """Sums ``bias`` and ``pos_embed`` in FP32 and lays the sum out as the epilogue reads it.

    Args:
        bias: ``[n]`` BF16, FP16 or FP32, or None.
        pos_embed: ``[positions, n]`` BF16, FP16 or FP32, or None. At least one of the two is given.
        shape, layout: `PatchEmbedPlan.table_shape` and `PatchEmbedPlan.table_layout`.
        dtype: ``torch.float32`` (rounded once, when summed) or ``torch.bfloat16`` (the FP32 sum rounded once more).
        nan_row: one more row after the last, of NaN: what an index outside the positions gives.

    Returns:
        A contiguous tensor of this shape. The value of (position p, column c) stands at ``[p, c]`` if row-major, at
        ``[p // 32, c // V, p % 32, c % V]`` with V = elements per 16 bytes if interleaved, at
        ``[p, c // 16, c % 8, c % 16 // 8]`` if paired, at ``[p, c // 32, c % 8, c % 32 // 8]`` if quads. Everything
        outside the rows and the n columns is zero.
    """
    given = bias[None] if pos_embed is None else pos_embed
    rows, n = given.shape
    height = shape[0] * (LANES if layout == "interleaved" else 1)
    extents = (height, math.prod(shape) // height)
    filled = extents == (rows, n)
    padded = (torch.empty if filled else torch.zeros)(extents, dtype=dtype, device=given.device)
    _summed(bias, pos_embed, padded if filled else padded[:rows, :n])
    if nan_row:
        padded[rows] = float("nan")
    if layout == "row_major":
        return padded
    if layout == "interleaved":
        return padded.view(shape[0], LANES, shape[1], shape[3]).transpose(1, 2).contiguous()
    return padded.view(shape[0], shape[1], shape[3], shape[2]).transpose(2, 3).contiguous()


def rows_table(plan: PatchEmbedPlan, sources: Sources, addends: Callable[[], Addends]) -> torch.Tensor | None:
    """The bias + position table as the plan lays it out, kept while the constants it is made from live unchanged.

    ``addends`` gives bias ``[N]`` and positions ``[S, N]``, either of which may be None.
    """
    problem = plan.problem
    if not problem.table_rows:
        return None
    dtype, layout, shape = getattr(torch, plan.table_dtype), plan.table_layout, plan.table_shape
    key = ("table", layout, shape, dtype, problem.table_index)
    return DERIVED.get(key, sources, lambda: build_table(*addends(), shape, layout, dtype, nan_row=problem.table_index))


def fragment_table(
    bias: torch.Tensor | None,
    pos_embed: torch.Tensor | None,
    shape: tuple[int, int, int, int, int],
    grid_width: int,
    tile_patches: int,
) -> torch.Tensor:
    """``fp32(bias) + fp32(pos)``, one FP32 addition, for 16 features and 8 columns at a time.

    ``shape``: ``[position tiles, blocks of 16 features, period, 32, 4]``, `StripsPlan.table_shape`. Of the float32
    result ``[t, b, j, l, r]`` belongs to feature ``16 b + l / 4 + 8 (r / 2)`` and to patch ``(8 j + 2 (l % 4) + r % 2)
    % tile_patches`` of position tile t; zero beyond the features and the grid row.
    """
    values = _summed(bias, pos_embed)
    if pos_embed is None:
        grid_width = tile_patches = 1
    tiles, blocks, period, _, _ = shape
    n, row_tiles = values.shape[1], -(-grid_width // tile_patches)
    padding = (0, blocks * 16 - n, 0, row_tiles * tile_patches - grid_width)
    values = values.view(-1, grid_width, n)
    if any(padding):
        values = torch.nn.functional.pad(values, padding)
    facts = tiles, blocks, period, tile_patches, values.device
    capturing = values.is_cuda and torch.cuda.is_current_stream_capturing()  # whose memory nobody may keep
    return values.view(tiles, tile_patches, blocks, 2, 8)[_places(*facts) if capturing else _kept_places(*facts)]


def _places(tiles: int, blocks: int, period: int, tile_patches: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Indices that make fragments of padded values."""
    with torch.inference_mode(False):
        extents = tiles, blocks, period, LANES, _FRAGMENT_VALUES
        tile, block, group, lane, value = (
            torch.arange(extent, device=device).view(-1, *(1,) * (4 - place)) for place, extent in enumerate(extents)
        )
        return tile, (8 * group + 2 * (lane % 4) + value % 2) % tile_patches, block, value // 2, lane // 4


@functools.lru_cache(maxsize=256)
def _kept_places(*facts: Any) -> tuple[torch.Tensor, ...]:
    """`_places`, made once: that takes 20 launches, and the rest of a table 6, in every step of a training."""
    return outside_of_pools(lambda: _places(*facts), torch.empty(0, device=facts[-1]))


# --- positions of two axes, each with a table of its own, as one table and one index ----------------------------------


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
