"""The Triton kernel of `bench.peers.triton_peers`; imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _coordinates(tile, tiles_n, positions, POSITION_MAJOR: tl.constexpr):
    """Column tile, row tile and position: column tiles of the same rows run next to each other, then positions."""
    column = tile % tiles_n
    rest = tile // tiles_n
    if POSITION_MAJOR:
        return column, rest // positions, rest % positions
    else:
        return column, rest, 0


# One parameter per address, size and compile-time constant: Triton's kernels take no structures.
@triton.jit
def patch_embed_kernel(
    x,
    weight,
    out,
    table,
    scale,
    rows,
    positions,
    n,
    k,
    POSITION_MAJOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Persistent over tiles of ``[ROWS, COLUMNS]``; FP8 products with fast accumulation (Triton's default on SM90)."""
    first, programs = tl.program_id(0), tl.num_programs(0)
    tiles_n = n // COLUMNS
    tiles = tl.cdiv(rows, ROWS) * tiles_n
    if POSITION_MAJOR:
        tiles *= positions
    # The epilogue counts tiles by itself: with a value carried from the loads, the loop could not be pipelined across
    # tiles.
    stored = first - programs
    for tile in tl.range(first, tiles, programs, flatten=True):
        column, row, position = _coordinates(tile, tiles_n, positions, POSITION_MAJOR)
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for block in range(tl.cdiv(k, BLOCK_K)):
            a = x.load([row * ROWS, position * k + block * BLOCK_K])
            b = weight.load([column * COLUMNS, block * BLOCK_K])
            acc = tl.dot(a, b.T, acc)

        stored += programs
        column, row, position = _coordinates(stored, tiles_n, positions, POSITION_MAJOR)
        features = column * COLUMNS + tl.arange(0, COLUMNS)
        if POSITION_MAJOR:
            addend = tl.load(table + position * n + features)[None, :]
        else:
            row_positions = (row * ROWS + tl.arange(0, ROWS)) % positions
            addend = tl.load(table + row_positions[:, None] * n + features[None, :]).to(tl.float32)
        result = (acc * scale + addend).to(tl.bfloat16)
        row_offset, column_offset = row * ROWS, position * n + column * COLUMNS
        if HALVES == 1:
            out.store([row_offset, column_offset], result)
        else:
            # Half the staging memory, for one more stage of operands.
            left, right = tl.split(tl.permute(tl.reshape(result, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
            out.store([row_offset, column_offset], left)
            out.store([row_offset, column_offset + COLUMNS // 2], right)
