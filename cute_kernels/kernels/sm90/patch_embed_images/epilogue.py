"""Epilogue of a consumer warpgroup: integer sums -> FP32, scale, bias + position, BF16 -> transposed staging -> TMA."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_kernels.kernels import ptx
from cute_kernels.kernels.sm90.transposed.staging import ROWS_PER_STORE, TransposedStaging
from cute_kernels.kernels.strips import TABLE_VALUES, TERM_FACTOR
from cute_kernels.plan.feature_slabs import COLUMN_GROUP
from cute_kernels.plan.patch_embed_images.sm90 import Sm90ImagesPlan


@dataclass(frozen=True)
class Epilogue:
    """Drains one warpgroup's sums of 64 features x the patches of a tile: ``int8`` and ``int16`` of the reference.

    Attributes:
        staging: this warpgroup's buffer, stored to ``[box, tile of a grid row, 64-feature block, image tile, grid
            row]``.
        table: ``[4, 32, period, padded features / 16, position tiles]`` view of the table, or None: see
            `StripsPlan.table_shape`.
        scales: of the two features of a thread.
        held: registers ``[4, period]`` of table values, and of which position tile they are: read anew only where that
            changes, which with images running fastest is once per many tiles. None if registers do not allow it.
        row_tiles: tiles along a grid row.
        feature_block: this warpgroup's block of 64 features.
        thread: index in the warpgroup.
    """

    plan: Sm90ImagesPlan
    staging: TransposedStaging
    table: cute.Tensor | None
    scales: tuple[Float32, Float32]
    held: tuple[cute.Tensor, cute.Tensor] | None
    row_tiles: Int32
    feature_block: Int32
    thread: Int32

    @cute.jit
    def prefetch(self, image_tile: Int32, position_tile: Int32) -> None:
        """Fetches the table values of a tile, if they have a place and are not there."""
        if cutlass.const_expr(self.held is not None):
            values, position = self.held
            if self._table_tile(position_tile) != position[0]:
                for j in cutlass.range_constexpr(self.plan.table_period):
                    self._load(values[None, j], j, position_tile)
                position[0] = self._table_tile(position_tile)

    @cute.jit
    def store(self, sums: cute.Tensor, fetched: None, image_tile: Int32, position_tile: Int32) -> None:
        """Converts, stages and stores one tile; returns as soon as the TMA store is issued."""
        groups = ROWS_PER_STORE // COLUMN_GROUP
        addresses = self.staging.addresses()
        self.staging.acquire()
        for i in cutlass.range_constexpr(self.plan.tile_rows // ROWS_PER_STORE):
            values = cute.make_rmem_tensor(cute.make_layout(TABLE_VALUES * groups), Float32)
            for group in cutlass.range_constexpr(groups):
                addends = self._addends(i * groups + group, position_tile)
                for j in cutlass.range_constexpr(TABLE_VALUES):
                    total = self._total(sums, (i * groups + group) * TABLE_VALUES + j)
                    scale = self.scales[j // 2]
                    if cutlass.const_expr(addends is None):
                        values[group * TABLE_VALUES + j] = ptx.mul_rn_f32(total, scale)
                    else:
                        values[group * TABLE_VALUES + j] = ptx.fma_rn_f32(total, scale, addends[j])
            rounded = cute.make_rmem_tensor(cute.make_layout(TABLE_VALUES * groups), BFloat16)
            rounded.store(values.load().to(BFloat16))
            self.staging.write(addresses, rounded, i)
        grid_row = position_tile // self.row_tiles
        self.staging.store(position_tile - grid_row * self.row_tiles, self.feature_block, image_tile, grid_row)

    @cute.jit
    def finish(self) -> None:
        self.staging.finish()

    def _total(self, sums: cute.Tensor, i: int) -> Float32:
        """FP32 of the ``i``-th sum; of two terms the sums of the high one come first."""
        total = Float32(sums[i])
        if self.plan.terms == 1:
            return total
        return ptx.fma_rn_f32(total, Float32(TERM_FACTOR), Float32(sums[self.plan.tile_rows // 2 + i]))

    def _addends(self, group: int, position_tile: Int32) -> cute.Tensor | None:
        """Table values of the ``group``-th 8 columns."""
        if self.table is None:
            return None
        j = group % self.plan.table_period
        if self.held is not None:
            return self.held[0][None, j]
        values = cute.make_rmem_tensor(cute.make_layout(TABLE_VALUES), Float32)
        self._load(values, j, position_tile)
        return values

    def _load(self, values: cute.Tensor, j: int, position_tile: Int32) -> None:
        block = self.feature_block * 4 + self.thread // 32
        source = self.table[None, self.thread % 32, j, block, self._table_tile(position_tile)]
        cute.autovec_copy(source, values)

    def _table_tile(self, position_tile: Int32) -> Int32:
        return position_tile if self.plan.problem.table_rows > 1 else Int32(0)
