"""Epilogue warps: sums -> FP32, scale, bias + position, rounding -> transposed staging -> TMA stores."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.kernels import ptx
from cute_kernels.kernels.sm100.patch_embed_images.staging import PatchStaging
from cute_kernels.kernels.sm100.pipes import Sm100Pipe, release_accumulator
from cute_kernels.kernels.strips import TABLE_VALUES
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.plan import LANES, Sm100ImagesPlan
from cute_kernels.plan.patch_embed_images.strips import BLOCK_FEATURES, COLUMN_GROUP

BLOCKS = LANES // BLOCK_FEATURES
"""Blocks of 16 features in the lanes of a warp."""


@dataclass(frozen=True)
class Epilogue:
    """Drains accumulators, one warp at a time, 32 features each.

    Integer sums by the contract ``int8`` of the reference; FP32 sums get the table by one addition, and are rounded.

    Attributes:
        accumulators: of each part, tensor-memory view ``[.., accumulator]`` of this CTA's 128 features.
        staging: this warp's buffer, stored to ``[box, tile of a grid row, 32-feature block, image tile, grid row]``.
        table: ``[4, 32, period, padded features / 16, position tiles]`` view of the table, or None: see
            `StripsPlan.table_shape`.
        scales: of the four features of a thread, ``lane / 4 + 8 i``; None of FP32 sums.
        row_tiles: tiles along a grid row.
        feature_block: this warp's block of 32 features.
        quarter: of the lanes of tensor memory, all that this warp may reach.
    """

    plan: Sm100ImagesPlan
    accumulators: tuple[cute.Tensor, ...]
    staging: PatchStaging
    table: cute.Tensor | None
    scales: tuple[Float32, ...] | None
    accumulator: Sm100Pipe
    order: PositionOrder | ImageOrder
    row_tiles: Int32
    feature_block: Int32
    quarter: Int32

    @cute.jit
    def run(self) -> None:
        plan = self.plan
        width = plan.config.tmem_load_width
        load_atom = cute.make_copy_atom(tcgen05.Ld16x256bOp(tcgen05.Repetition(width // COLUMN_GROUP)), self._kind)
        # (128 features, width columns, 1, chunks, accumulators)
        tiler = (plan.features, width)
        chunks = [cute.flat_divide(part[(None, None), 0, 0, None], tiler) for part in self.accumulators]
        lane = self.quarter * LANES + self.staging.lane
        load = tcgen05.make_tmem_copy(load_atom, chunks[0][None, None, 0, 0, 0]).get_slice(lane)
        sources = [load.partition_S(part) for part in chunks]
        shape = load.partition_D(cute.make_identity_tensor((plan.features, width))).shape
        addresses = self.staging.addresses()

        table, held = self._registers(), Int32(-1)
        state = self.accumulator.consumer_state()
        image_tile, position_tile = self.order.start()
        stride = self.order.stride()
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            if cutlass.const_expr(table is not None):
                tile = position_tile if plan.problem.table_rows > 1 else Int32(0)
                if tile != held:
                    self._load_table(table, tile)
                    held = tile
            for part in cutlass.range_constexpr(len(plan.parts)):
                columns = plan.parts[part][1]
                self.accumulator.wait_full(state, part)
                ptx.tcgen05_fence_after_thread_sync()
                if cutlass.const_expr(part == 0):
                    self.staging.acquire()
                for chunk in cutlass.range_constexpr(columns // width):
                    fragment = cute.make_rmem_tensor(shape, self._kind)
                    cute.copy(load, sources[part][None, None, None, 0, chunk, state.index], fragment)
                    cute.arch.fence_view_async_tmem_load()
                    if cutlass.const_expr((chunk + 1) * width == columns):
                        release_accumulator(self.accumulator, state, part)
                    # (2 columns, +8 lanes, groups of 8 columns, +16 lanes)
                    sums = cute.make_tensor(fragment.iterator, cute.make_layout((2, 2, width // COLUMN_GROUP, BLOCKS)))
                    for group in cutlass.range_constexpr(width // COLUMN_GROUP):
                        patch = plan.patch_of(part, chunk * width + group * COLUMN_GROUP)
                        values = self._finish(sums[None, None, group, None], table, patch)
                        self.staging.write(addresses, values, patch)
            grid_row = position_tile // self.row_tiles
            row_tile = position_tile - grid_row * self.row_tiles
            self.staging.store(row_tile, self.feature_block, image_tile, grid_row)
            state.advance()
            image_tile, position_tile = self.order.advance(image_tile, position_tile, stride)
        self.staging.finish()

    @cute.jit
    def _finish(self, sums: cute.Tensor, table: cute.Tensor | None, patch: cutlass.Constexpr[int]) -> cute.Tensor:
        """Rounded values of 32 features x 8 patches, matrix by matrix of stmatrix: ``[2 patches, 4 features]``."""
        values = cute.make_rmem_tensor(cute.make_layout((2, 2 * BLOCKS)), Float32)
        for i in cutlass.range_constexpr(2 * BLOCKS):
            pair = (Float32(sums[0, i % 2, i // 2]), Float32(sums[1, i % 2, i // 2]))
            scale = (Float32(1.0), Float32(1.0)) if self.scales is None else (self.scales[i], self.scales[i])
            if cutlass.const_expr(table is None and self.scales is None):
                values[0, i], values[1, i] = pair
            elif cutlass.const_expr(table is None):
                values[0, i], values[1, i] = ptx.mul_rn_f32x2(pair, scale)
            else:
                j = patch // COLUMN_GROUP % self.plan.table_period
                addends = (table[2 * (i % 2), i // 2, j], table[2 * (i % 2) + 1, i // 2, j])
                values[0, i], values[1, i] = ptx.fma_rn_f32x2(pair, scale, addends)
        rounded = cute.make_rmem_tensor(cute.make_layout((2, 2 * BLOCKS)), self.staging.dtype)
        rounded.store(values.load().to(self.staging.dtype))
        return rounded

    @property
    def _kind(self) -> type:
        """Element type of the accumulators."""
        return self.accumulators[0].element_type

    def _registers(self) -> cute.Tensor | None:
        """``[4, blocks of 16 features, period]``: read anew where the position changes, with images fastest rarely."""
        if self.table is None:
            return None
        values = cute.make_rmem_tensor(cute.make_layout((TABLE_VALUES, BLOCKS, self.plan.table_period)), Float32)
        values.fill(0.0)
        return values

    @cute.jit
    def _load_table(self, values: cute.Tensor, tile: Int32) -> None:
        for j in cutlass.range_constexpr(self.plan.table_period):
            for block in cutlass.range_constexpr(BLOCKS):
                source = self.table[None, self.staging.lane, j, self.feature_block * BLOCKS + block, tile]
                cute.autovec_copy(source, values[None, block, j])
