"""Plan of the SM100a kernel over rows whose weight stays on chip: output transposed, rows are the N operand."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.config import Sm100ResidentConfig
from cute_kernels.model import b200
from cute_kernels.plan.base import ITEMSIZE, LANES
from cute_kernels.plan.patch_embed.base import WEIGHT_TYPES, PatchEmbedPlan, TableLayout
from cute_kernels.plan.patch_embed.row_tiles import RowTiles
from cute_kernels.plan.sm100_transposed import WAVEFRONT, Sm100TransposedPlan
from cute_kernels.plan.sm100_transposed_time import transposed_work

_LINES_OF_A_FILL = 32
"""Wavefronts of one load of the weight's fill: each lane reads 16 bytes of a feature of its own."""

MOST_TABLE_REGISTERS = 32
"""Table values that a thread fetches before a tile; of tiles of more positions it reads them when they are added."""


@dataclass(frozen=True)
class Sm100ResidentPlan(RowTiles, Sm100TransposedPlan, PatchEmbedPlan):
    """The persistent tcgen05 kernel over rows, of which each CTA of a pair loads half of the images of a tile."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm100.patch_embed_resident.kernel:PatchEmbedKernel"

    config: Sm100ResidentConfig

    table_layout: TableLayout = "quads"

    # ---- tiles -----------------------------------------------------------------------------------------------------

    @property
    def tile_rows(self) -> int:
        return self.config.tile_rows

    @property
    def weight_dtype(self) -> str:
        return WEIGHT_TYPES[self.problem.in_dtype]

    @property
    def cta_images(self) -> int:
        """Images of a tile that one CTA loads, in flat order rows."""
        return self.tile_images // self.cta_group

    @property
    def stage_bytes(self) -> int:
        return self.cta_rows * self.k_block_bytes * self.config.stage_blocks

    def position_of(self, row: int) -> int:
        """Of a tile, that of one of its rows as `row_of` counts them."""
        return row % self.cta_rows // self.cta_images

    def image_of(self, row: int) -> int:
        """Of a tile, likewise."""
        return row // self.cta_rows * self.cta_images + row % self.cta_images

    def staged_row(self, part: int, column: int) -> int:
        """Images of both CTAs side by side, position after position: what one TMA store takes."""
        row = self.row_of(part, column)
        return self.position_of(row) * self.tile_images + self.image_of(row)

    # ---- bias + position table -------------------------------------------------------------------------------------

    @property
    def table_shape(self) -> tuple[int, int, int, int] | None:
        """``[rows, padded_n / 32, 8, 4]``, or None without bias and positions.

        A thread holds features ``f + 8 i`` of 32, which stand side by side, so that one load brings all four.
        """
        if self.problem.table_rows == 0:
            return None
        return (self.table_height, self.padded_n // LANES, 8, 4)

    @property
    def prefetches_table(self) -> bool:
        """A thread fetches its table values of a tile before it waits for the accumulators."""
        return self.positions_in_order and 4 * self.config.tile_positions <= MOST_TABLE_REGISTERS

    @property
    def compiled_in(self) -> dict[str, Hashable]:
        """Loops over K are unrolled, and a flat order either wraps once in a tile or divides."""
        return super().compiled_in | {"k_blocks": self.k_blocks, "table_wraps_once": self.table_wraps_once}

    # ---- counted work ----------------------------------------------------------------------------------------------

    @property
    def table_wavefronts(self) -> int:
        """Of a CTA's loads of the table in a tile: a line for each warp and position, in flat order for each row."""
        if self.problem.table_rows == 0:
            return 0
        rows = self.config.tile_positions if self.positions_in_order else self.columns
        return self.epilogue_warps * rows

    @property
    def fill_wavefronts(self) -> int:
        """Of bringing the weight to where it stays, once for a launch."""
        if self.config.weight == "smem":
            return self.weight_bytes // WAVEFRONT
        vectors = self.problem.k * ITEMSIZE[self.problem.in_dtype] // 16
        return self.epilogue_warps * vectors * _LINES_OF_A_FILL

    @property
    def work(self) -> b200.TileWork:
        """What the busiest CTA does, in the units that the model of time has costs for."""
        return transposed_work(self, self.memory_bytes, self.fill_wavefronts)

    # ---- printing --------------------------------------------------------------------------------------------------

    def describe_tiles(self) -> list[tuple[str, str]]:
        c = self.config
        rows = f"{self.tile_images} images x {c.tile_positions} positions, {c.order} order"
        if not self.positions_in_order:
            rows = f"{self.columns} consecutive rows"
        features, load = self.features * self.cta_group, f"tcgen05.ld.16x256b.x{c.tmem_load_width // 8}"
        return [
            ("tile", f"{self.columns} rows x {features} features, {self.k_blocks} K blocks of {self.tile_k}"),
            ("rows of a tile", rows),
            *self.describe_parts(),
            ("tiles", f"{self.tiles} = {self.row_tiles} x {self.position_tiles} of positions"),
            ("epilogue", f"{c.epilogue}, {load}, table {self.table_shape or 'none'}"),
            *self.describe_memory(),
        ]
