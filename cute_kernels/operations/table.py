"""The table that the epilogue adds: bias and position embedding, summed once and laid out for one warp's loads.

``"row_major"`` (SM100): ``[positions, n]``. Where all rows of a warp have one position, nothing else is needed.

``"interleaved"`` (SM100): the 32 lanes of a warp hold 32 consecutive rows, so that in a row-major table one 16-byte
load per lane would touch 32 different cache lines. This layout puts the same 16-byte column chunk of 32 consecutive
positions side by side: the warp then reads 512 consecutive bytes.

``"blocked"`` (SM100): squares of 32 positions x 32 columns, as the CUDA original has it (F13).

``"paired"`` (SM90): a thread holds columns c and c + 8 of every 16, by the accumulator layout of WGMMA. They stand side
by side, so that one load brings both.

``"quads"`` (SM100, weight on chip): a thread holds columns c + 8 i of every 32, by ``tcgen05.ld.16x256b``. Likewise.

`fragment_table` (SM90's kernels of images): as accumulators lie in registers whose columns are patches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch

from cute_kernels.plan import PatchEmbedPlan
from cute_kernels.runtime.constants import DERIVED, Sources

Addends = tuple["torch.Tensor | None", "torch.Tensor | None"]
Layout = Literal["row_major", "blocked", "interleaved", "paired", "quads"]

LANES = 32
LOAD_BYTES = 16
BLOCK_COLUMNS = 32
THREAD_COLUMNS = {"paired": 2, "quads": 4}
"""Columns of a thread, 8 apart, by layouts that put them side by side."""
_FRAGMENT_VALUES = 4


def table_geometry(rows: int, columns: int, dtype: torch.dtype, layout: Layout = "interleaved") -> tuple[int, ...]:
    """Shape of the table.

    Row-major: ``(rows, columns)``; blocked: ``(row blocks, column blocks, 32, 32)``; interleaved: ``(row blocks, column
    chunks, 32, elements per 16-byte load)``; paired: ``(rows, column blocks, 8, 2)``; quads: ``(rows, column blocks, 8,
    4)``.

    Raises:
        ValueError: ``columns`` is not a whole number of 16-byte loads, or of blocks.
    """
    if layout in THREAD_COLUMNS:
        count = THREAD_COLUMNS[layout]
        if columns % (8 * count):
            raise ValueError(f"columns = {columns} do not divide into blocks of {8 * count}")
        return rows, columns // (8 * count), 8, count
    elements = LOAD_BYTES // dtype.itemsize
    if columns % elements:
        raise ValueError(f"columns = {columns} of {dtype} do not divide into {LOAD_BYTES}-byte loads of {elements}")
    if layout == "row_major":
        return rows, columns
    if layout == "blocked":
        elements = BLOCK_COLUMNS
        if columns % elements:
            raise ValueError(f"columns = {columns} do not divide into blocks of {elements}")
    return -(-rows // LANES), columns // elements, LANES, elements


def build_table(
    bias: torch.Tensor | None,
    pos_embed: torch.Tensor | None,
    *,
    positions: int,
    columns: int,
    dtype: torch.dtype,
    layout: Layout = "interleaved",
    nan_row: bool = False,
) -> torch.Tensor:
    """Sum ``bias`` and ``pos_embed`` in FP32 and lay the sum out as the epilogue reads it.

    Args:
        bias: ``[n]`` BF16, FP16 or FP32, or None.
        pos_embed: ``[positions, n]`` BF16, FP16 or FP32, or None. At least one of the two must be given.
        positions: positions per image; without ``pos_embed`` the table has a single row whatever this says.
        columns: ``n`` padded to what the plan reads, a multiple of one 16-byte load, of 16 or of 32.
        layout: which epilogue reads it.
        nan_row: one more row after the last, of NaN: what an index outside the positions gives.
        dtype: ``torch.float32`` (rounded once, when summed) or ``torch.bfloat16`` (the FP32 sum rounded once more).

    Returns:
        A contiguous tensor of shape `table_geometry(rows, columns, dtype, layout)`. The value of (position p, column c)
        stands at ``[p, c]`` if row-major, at ``[p // 32, c // V, p % 32, c % V]`` with V = elements per 16 bytes if
        interleaved and V = 32 if blocked, at ``[p, c // 16, c % 8, c % 16 // 8]`` if paired, at
        ``[p, c // 32, c % 8, c % 32 // 8]`` if quads. Everything outside the rows and the n columns is zero.

    Raises:
        ValueError: neither input given, shapes, ``columns`` or ``dtype`` that do not fit together, unknown layout.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout = {layout!r}, allowed: {', '.join(map(repr, get_args(Layout)))}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype = {dtype}: the epilogue reads torch.float32 or torch.bfloat16")
    if pos_embed is not None and (pos_embed.dim() != 2 or pos_embed.shape[0] != positions):
        raise ValueError(f"pos_embed has shape {list(pos_embed.shape)}, expected [{positions}, n]")
    if bias is not None and (bias.dim() != 1 or (pos_embed is not None and bias.shape[0] != pos_embed.shape[1])):
        raise ValueError(f"bias has shape {list(bias.shape)}, expected [n] with the n of pos_embed")

    if pos_embed is not None:
        values = pos_embed.to(torch.float32)
        if bias is not None:
            values = bias.to(torch.float32) + values
    elif bias is not None:
        values = bias.to(torch.float32)[None, :]
    else:
        raise ValueError("a table needs bias or pos_embed")

    rows, n = values.shape
    if columns < n:
        raise ValueError(f"columns = {columns} cannot hold n = {n}")
    geometry = table_geometry(rows + nan_row, columns, dtype, layout)
    height = geometry[0] * LANES if layout in ("blocked", "interleaved") else geometry[0]
    padded = torch.zeros(height, columns, dtype=dtype, device=values.device)
    padded[:rows, :n] = values.to(dtype)
    if nan_row:
        padded[rows] = float("nan")
    if layout == "row_major":
        return padded
    if layout in THREAD_COLUMNS:
        _, blocks, columns_apart, count = geometry
        return padded.view(height, blocks, count, columns_apart).transpose(2, 3).contiguous()
    row_blocks, chunks, lanes, elements = geometry
    return padded.view(row_blocks, lanes, chunks, elements).transpose(1, 2).contiguous()


def rows_table(plan: PatchEmbedPlan, sources: Sources, addends: Callable[[], Addends]) -> torch.Tensor | None:
    """The bias + position table as the plan lays it out, kept while the constants live unchanged.

    Args:
        plan: of the kernel over rows.
        sources: tensors that it is made from, for `cute_kernels.runtime.constants`.
        addends: gives bias ``[N]`` and positions ``[S, N]``, either of which may be None.
    """
    problem = plan.problem
    if not problem.table_rows:
        return None
    dtype = getattr(torch, plan.table_dtype)

    def build() -> torch.Tensor:
        return build_table(
            *addends(),
            positions=problem.table_rows,
            columns=plan.padded_n,
            dtype=dtype,
            layout=plan.table_layout,
            nan_row=problem.table_index,
        )

    table = DERIVED.get(("table", plan.table_layout, plan.table_shape, dtype, problem.table_index), sources, build)
    if tuple(table.shape) != tuple(plan.table_shape):
        raise AssertionError(f"table {list(table.shape)} does not match the plan's {list(plan.table_shape)}")
    return table


def fragment_table(
    bias: torch.Tensor | None,
    pos_embed: torch.Tensor | None,
    shape: tuple[int, int, int, int, int],
    grid_width: int,
    tile_patches: int,
) -> torch.Tensor:
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
    lane = torch.arange(LANES, device=values.device)[:, None]
    value = torch.arange(_FRAGMENT_VALUES, device=values.device)
    group = torch.arange(period, device=values.device)[:, None, None]
    patch = (8 * group + 2 * (lane % 4) + value % 2) % tile_patches
    by_thread = padded.view(tiles, tile_patches, blocks, 2, 8)[:, patch, :, value // 2, lane // 4]
    return by_thread.permute(3, 4, 0, 1, 2).contiguous()
