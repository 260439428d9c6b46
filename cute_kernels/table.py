"""The table that the epilogue adds: bias and position embedding, summed once and laid out for one warp's loads.

In a row-major ``[positions, n]`` table, the 32 lanes of a warp hold 32 consecutive rows, so that one 16-byte load per
lane touches 32 different cache lines. The layout here puts the same 16-byte column chunk of 32 consecutive positions
side by side: the warp then reads 512 consecutive bytes. It refines the blocked table of the CUDA original (F13).
"""

from __future__ import annotations

import torch

LANES = 32
LOAD_BYTES = 16


def table_geometry(rows: int, columns: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Shape of the table: ``(row blocks, column chunks, lanes, elements per 16-byte load)``.

    Raises:
        ValueError: ``columns`` is not a whole number of 16-byte loads.
    """
    elements = LOAD_BYTES // dtype.itemsize
    if columns % elements:
        raise ValueError(f"columns = {columns} of {dtype} do not divide into {LOAD_BYTES}-byte loads of {elements}")
    return -(-rows // LANES), columns // elements, LANES, elements


def build_table(
    bias: torch.Tensor | None,
    pos_embed: torch.Tensor | None,
    *,
    positions: int,
    columns: int,
    dtype: torch.dtype,
    blocked: bool = True,
) -> torch.Tensor:
    """Sum ``bias`` and ``pos_embed`` in FP32 and lay the sum out as the epilogue reads it.

    Args:
        bias: ``[n]`` BF16, FP16 or FP32, or None.
        pos_embed: ``[positions, n]`` BF16, FP16 or FP32, or None. At least one of the two must be given.
        positions: positions per image; without ``pos_embed`` the table has a single row whatever this says.
        columns: ``n`` padded to what the plan reads, a multiple of one 16-byte load.
        blocked: the layout of the SM100 epilogue, whose warps read rows by lane; otherwise row-major.
        dtype: ``torch.float32`` (rounded once, when summed) or ``torch.bfloat16`` (the FP32 sum rounded once more).

    Returns:
        Blocked: a contiguous tensor of shape `table_geometry(rows, columns, dtype)`. The value of (position p, column
        c) stands at ``[p // 32, c // V, p % 32, c % V]`` with V = elements per 16 bytes. Otherwise ``[rows, columns]``.
        Everything outside ``rows x n`` is zero.

    Raises:
        ValueError: neither input given, or shapes, ``columns`` or ``dtype`` that do not fit together.
    """
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
    if not blocked:
        padded = torch.zeros(rows, columns, dtype=dtype, device=values.device)
        padded[:, :n] = values.to(dtype)
        return padded
    row_blocks, chunks, lanes, elements = table_geometry(rows, columns, dtype)
    padded = torch.zeros(row_blocks * lanes, columns, dtype=dtype, device=values.device)
    padded[:rows, :n] = values.to(dtype)
    return padded.view(row_blocks, lanes, chunks, elements).transpose(1, 2).contiguous()
