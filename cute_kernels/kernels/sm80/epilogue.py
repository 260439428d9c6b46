"""Where a lane's accumulators go, and how a kernel is launched: what all kernels of ``mma.sync`` have in common."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.kernels.sm80.load import team_of
from cute_kernels.kernels.sm80.mainloop import MainLoop, Tiles, Warp
from cute_kernels.plan.base import VECTOR_BYTES
from cute_kernels.plan.sm80 import Sm80Plan

ROWS_AHEAD = 4
"""Rows whose addends a lane loads at once, in front of stores, before which no load is moved: one after the other, each
would take the latency of L2."""

LANES_ALONG = 4
"""Lanes with neighbouring columns of a row (PTX ISA, accumulators of mma.m16n8)."""


def lane_blocks(plan: Sm80Plan) -> range:
    """Blocks of columns of a warp of which a lane has `Sm80Plan.lane_columns` each."""
    return range(plan.warp_n // (LANES_ALONG * plan.lane_columns))


def lane_column(warp: Warp, block: int) -> Int32:
    """A lane's first column of a block, in the tile."""
    wide = warp.plan.lane_columns
    return warp.column + wide * (warp.lane % LANES_ALONG) + LANES_ALONG * wide * block


def lane_rows(plan: Sm80Plan) -> range:
    """Blocks of 8 rows of a warp of which a lane has one each."""
    return range(plan.warp_m // 8)


def lane_row(warp: Warp, eighth: int) -> Int32:
    """A lane's row of a block of 8, in the tile."""
    return warp.row + 8 * eighth + warp.lane // LANES_ALONG


def lane_sums(sums: cute.Tensor, plan: Sm80Plan, block: int, eighth: int) -> cute.Tensor:
    """A lane's neighbouring sums of one row as FP32 registers; integers are rounded to nearest."""
    wide = plan.lane_columns
    values = cute.make_rmem_tensor(wide, Float32)
    for e in range(wide):
        values[e] = Float32(sums[2 * (eighth % 2) + e % 2, wide // 2 * block + e // 2, eighth // 2])
    return values


def load_vector(source: cute.Pointer, offset: Int64 | Int32, count: int, kind: type) -> cute.Tensor:
    """Registers with ``count`` neighbouring numbers of memory that begin on a multiple of 16 bytes."""
    elements = VECTOR_BYTES * 8 // kind.width
    values = cute.make_rmem_tensor(count, kind)
    place = source + cute.assume(offset, divby=elements)
    cute.autovec_copy(cute.make_tensor(place, count), values)
    return values


def store_vector(target: cute.Pointer, offset: Int64, values: cute.Tensor) -> None:
    """Stores 16 bytes of registers."""
    count = cute.size(values)
    place = target + cute.assume(offset, divby=count)
    cute.autovec_copy(values, cute.make_tensor(place, count))


def launch(kernel: Any, plan: Sm80Plan, ctas: Int32, stream: Any) -> None:
    """Launches the CTAs, each of which takes tiles in turn."""
    several = plan.config.resident_ctas > 1
    kernel.launch(
        grid=(ctas, 1, 1),
        block=(plan.threads, 1, 1),
        smem=plan.smem_bytes,
        min_blocks_per_mp=plan.config.resident_ctas,
        # All of it for shared memory: what CuTe DSL takes otherwise it asks a driver for, when it compiles.
        preferred_smem_carveout=100 if several else None,
        stream=stream,
    )


def run(plan: Sm80Plan, tiles: Tiles, count: Int32, k_blocks: Int32) -> None:
    """Work of every CTA: its share of ``count`` tiles."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    first = block if plan.teams == 1 else block + blocks * team_of(plan)
    MainLoop(plan, tiles, k_blocks).run(first, count, blocks * plan.teams)
