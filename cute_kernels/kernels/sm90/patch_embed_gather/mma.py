"""Consumer warpgroup: operand stages -> WGMMA accumulators -> bias + position, rounding, store buffers, TMA."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.kernels.sm90.gemm.mma import GemmMma
from cute_kernels.kernels.tiles import PatchOrder
from cute_kernels.plan.patch_embed_images.gather import Sm90GatherPlan
from cute_kernels.plan.shared_operands import WARPGROUP_ROWS


@dataclass(frozen=True)
class GatherMma(GemmMma):
    """Computes and stores this warpgroup's patches of the tiles of its cluster.

    A WGMMA's 64 rows are one patch of each of 64 pieces. Waves of a tile run through the places of a patch in a piece
    first, then through blocks of 64 pieces.

    Attributes:
        bias: table ``[2, padded features / 2, rows]``, or None.
        grid: patches of a column and of a row of an image.
    """

    plan: Sm90GatherPlan
    order: PatchOrder
    grid: tuple[Int32, Int32] = (0, 0)

    @property
    def activation(self) -> str:
        return "none"

    @cute.jit
    def _place(self, tile: Int32) -> tuple[Int32, ...]:
        """Of a tile: its first piece of a grid row, grid row, image and column."""
        plan, config = self.plan, self.plan.config
        row_tile, column_tile, image_tile, n_tile = self.order.coordinates(tile)
        column = (n_tile * config.cluster + self.rank_n) * config.tile_n
        return row_tile * plan.pieces, column_tile * config.tile_rows, image_tile * config.tile_images, column

    def _wave(self, wave: int) -> tuple[Int32 | int, Int32 | int]:
        """Place of a wave's patches in their pieces, and first of its 64 pieces."""
        q = self.plan.config.row_patches
        number = wave if self.plan.config.pingpong else self.warpgroup * self.plan.waves + wave
        return number % q, number // q * WARPGROUP_ROWS

    def _piece(self, place: tuple[Int32, ...], row: Int32) -> tuple[Int32, Int32, Int32]:
        """Piece of a grid row, grid row and image of a row of the operand."""
        pieces, rows = self.plan.pieces, self.plan.config.tile_rows
        return place[0] + row % pieces, place[1] + row // pieces % rows, place[2] + row // (pieces * rows)

    def _block(self, place: tuple[Int32, ...], wave: int, region: int) -> tuple[Int32, ...]:
        """The box of the output that a store buffer goes to: features, place in a piece, piece, grid row, image."""
        plan = self.plan
        column = place[3] // plan.store_columns + region
        patch, first = self._wave(wave)
        piece, grid_row, image = self._piece(place, first + self.thread // 32 * plan.store_rows)
        _, _, pieces, rows, images = plan.store_box
        return column, patch, piece // pieces, grid_row // rows, image // images

    @cute.jit
    def _addends(
        self, place: tuple[Int32, ...], wave: cutlass.Constexpr[int], column: cutlass.Constexpr[int]
    ) -> cute.Tensor | None:
        """Table values of the eight accumulators of one column group: two rows, of the same position or not."""
        if cutlass.const_expr(self.bias is None):
            return None
        values = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        pairs = (place[3] + column) // 2 + self.thread % 4
        for row in cutlass.range_constexpr(2):
            if cutlass.const_expr(row == 0 or not self.plan.one_position):
                table_row = self._table_row(place, wave, row)
            for half in cutlass.range_constexpr(2):
                if cutlass.const_expr(row == 1 and self.plan.one_position):
                    pair[0], pair[1] = values[half * 4], values[half * 4 + 1]
                else:
                    cute.autovec_copy(self.bias[None, pairs + half * 4, table_row], pair)
                values[half * 4 + row * 2], values[half * 4 + row * 2 + 1] = pair[0], pair[1]
        return values

    @cute.jit
    def _table_row(
        self, place: tuple[Int32, ...], wave: cutlass.Constexpr[int], half: cutlass.Constexpr[int]
    ) -> Int32:
        """Position of a thread's row of a wave; beyond the grid, where TMA clips, a last one: the table ends there."""
        plan = self.plan
        if cutlass.const_expr(plan.problem.table_rows == 1):
            return Int32(0)
        patch, first = self._wave(wave)
        row = first + self.thread // 32 * plan.store_rows + self.thread % 32 // 4 + 8 * half
        piece, grid_row, _ = self._piece(place, row)
        height, width = self.grid
        return min(grid_row, height - 1) * width + min(piece * plan.config.row_patches + patch, width - 1)
