"""What plans share whose tiles are images at neighbouring positions, or consecutive rows."""

from __future__ import annotations

from abc import abstractmethod

from cute_kernels.plan.base import Plan


class RowTiles(Plan):
    """In position order a tile is `tile_images` images at ``tile_positions`` positions; in flat order rows are rows."""

    @property
    @abstractmethod
    def tile_rows(self) -> int:
        """Rows of a tile."""

    @property
    def positions(self) -> int:
        """Positions that the tile order walks: 1 in flat order, where a row is a row."""
        return max(self.problem.table_rows, 1) if self.config.order == "position" else 1

    @property
    def rows_per_position(self) -> int:
        """Images in position order, all rows in flat order."""
        return self.problem.m // self.positions

    @property
    def tile_images(self) -> int:
        """Rows of a tile at each of its positions: images in position order, all rows in flat order."""
        return self.tile_rows // self.config.tile_positions

    @property
    def row_tiles(self) -> int:
        return -(-self.rows_per_position // self.tile_images)

    @property
    def position_tiles(self) -> int:
        return -(-self.positions // self.config.tile_positions)

    @property
    def tiles(self) -> int:
        return self.row_tiles * self.position_tiles

    @property
    def positions_in_order(self) -> bool:
        """Tiles are images at positions; without positions, position order is that of the rows."""
        return self.config.order == "position" and self.problem.table_rows > 0

    @property
    def table_wraps_once(self) -> bool | None:
        """Flat order: the rows of a tile pass the end of the table at most once, so that no row needs a division.

        None where table rows do not follow from rows so: in position order, without a table, with an index.
        """
        if self.config.order != "flat" or self.problem.table_rows == 0 or self.problem.table_index:
            return None
        return self.problem.table_rows >= self.tile_rows
