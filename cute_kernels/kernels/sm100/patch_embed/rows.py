"""Which rows of the output a tile, a CTA and a warp have: consecutive ones, or images at positions."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.kernels.load import Operand
from cute_kernels.plan import LANES, Sm100PatchEmbedPlan


@dataclass(frozen=True)
class WarpRows:
    """The 32 rows of a warp in one tile, at one position.

    Attributes:
        block: block of 32 images, in flat order of 32 rows.
        position: of all of them, 0 in flat order; possibly beyond the last one.
    """

    block: Int32
    position: Int32


@dataclass(frozen=True)
class TileRows:
    """Rows of a tile: images run fastest, positions next; flat order has one position, whose images are the rows.

    Attributes:
        rank: which CTA of the pair.
        images, positions: of the problem.
        position_tiles: tiles along the positions, which run faster than those of images.
    """

    plan: Sm100PatchEmbedPlan
    rank: Int32
    images: Int32
    positions: Int32
    position_tiles: Int32

    @cute.jit
    def split(self, m_tile: Int32) -> tuple[Int32, Int32]:
        """``m_tile -> (tile of images, tile of positions)``."""
        image_tile, position_tile = m_tile, Int32(0)
        if cutlass.const_expr(self.plan.config.order == "position"):
            image_tile = m_tile // self.position_tiles
            position_tile = m_tile - image_tile * self.position_tiles
        return image_tile, position_tile

    @cute.jit
    def box(self, m_tile: Int32) -> tuple[Int32, Int32]:
        """(image block, position block) of what this CTA loads, in boxes of ``cta_images`` x ``cta_positions``."""
        plan = self.plan
        image_block, position_block = self.split(m_tile)
        if cutlass.const_expr(plan.config.tile_positions >= plan.cta_group):
            position_block = position_block * plan.cta_group + self.rank
        else:
            image_block = image_block * plan.cta_group + self.rank
        return image_block, position_block

    @cute.jit
    def of_warp(self, m_tile: Int32, quarter: Int32) -> WarpRows:
        """The rows of a quarter of this CTA's lanes."""
        plan = self.plan
        blocks = plan.tile_images // LANES
        image_tile, position_tile = self.split(m_tile)
        place = self.rank * (plan.cta_m // LANES) + quarter
        position = position_tile * plan.config.tile_positions + place // blocks
        return WarpRows(image_tile * blocks + place % blocks, position)

    @cute.jit
    def row(self, rows: WarpRows, lane: Int32) -> Int32:
        """The row of ``x`` and of the output that a lane has; one that exists if it is beyond images or positions.

        In flat order a row beyond the last one stays what it is.
        """
        row = rows.block * LANES + lane
        if cutlass.const_expr(self.plan.config.order == "position"):
            position = min(rows.position, self.positions - 1)
            row = min(row, self.images - 1) * self.positions + position
        return row


@dataclass(frozen=True)
class RowsOperand(Operand):
    """``x`` as this CTA loads it: TMA view ``[box, image block, k_block, position block]``.

    Attributes:
        rows: of the tiles.
    """

    rows: TileRows | None = None

    def place(self, tile: Int32, batch: tuple) -> tuple[Int32, ...]:
        return self.rows.box(tile)
