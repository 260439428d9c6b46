"""Common parts of plans: tiles where every CTA keeps its features (``out^T = weight * x^T``), and CTA pairs."""

from collections.abc import Hashable
from typing import ClassVar

from cute_kernels.common.facts import fact, flag, number
from cute_kernels.plan.base import Plan

CORE_COLUMNS = 8
"""Columns after which a tensor core's accumulators repeat, a core matrix's: a thread has two of each 8."""


class FeatureTiles(Plan):
    """A persistent kernel that takes every tile of ``x`` once for each feature group, clusters with the same features.

    A CTA keeps its `features`, an N tile, for the whole launch. The `ctas` of a cluster have neighbouring ones. All
    feature groups walk the tiles in the same order, so that ``x`` comes from DRAM once and from L2 afterwards.
    """

    features = number()
    """Output features of one CTA."""
    tiles = number()
    """Tiles of ``x``; each is taken once by every feature group."""
    n_tiles = number(lambda self: -(-self.problem.n // self.features))
    feature_groups = number(lambda self: -(-self.n_tiles // self.ctas))
    """Feature groups, which together have all features."""
    padded_n = number(lambda self: self.feature_groups * self.ctas * self.features)
    """Features rounded up to what all CTAs together compute, so that table reads need no bounds check."""

    @property
    def clusters(self) -> int:
        """Clusters: of each feature group as many as the device holds at once, at least one, at most one a tile."""
        of_group = self.sm_count // self.ctas // self.feature_groups
        return max(1, min(of_group, self.tiles)) * self.feature_groups

    tile_stages = number(lambda self: -(-self.k_blocks // self.config.stage_blocks))
    """Stages that one tile takes."""
    ring_blocks = number(lambda self: self.config.stages * self.config.stage_blocks)
    """K blocks of all stages."""


# --- what plans share whose tiles are images at neighbouring positions, or consecutive rows --------------------------

class RowTiles(Plan):
    """In position order a tile is `tile_images` images at ``tile_positions`` positions; in flat order rows are rows."""

    tile_rows = number()
    """Rows of a tile."""
    positions = number(lambda self: max(self.problem.table_rows, 1) if self.config.order == "position" else 1)
    """Positions that the tile order walks: 1 in flat order, where a row is a row."""
    rows_per_position = number(lambda self: self.problem.m // self.positions)
    """Images in position order, all rows in flat order."""
    tile_images = number(lambda self: max(1, self.tile_rows // self.config.tile_positions))
    """Rows of a tile at each of its positions: images in position order, all rows in flat order. A tile of fewer rows
    than positions is refused by its shape."""
    row_tiles = number(lambda self: -(-self.rows_per_position // self.tile_images))
    position_tiles = number(lambda self: -(-self.positions // self.config.tile_positions))
    tiles = number(lambda self: self.row_tiles * self.position_tiles)
    positions_in_order = flag(lambda self: self.config.order == "position" and self.problem.table_rows > 0)
    """Tiles are images at positions; without positions, position order is that of the rows."""

    @property
    def table_wraps_once(self) -> bool | None:
        """Flat order: the rows of a tile pass the end of the table at most once, so that no row needs a division.

        None where table rows do not follow from rows so: in position order, without a table, with an index.
        """
        if self.config.order != "flat" or self.problem.table_rows == 0 or self.problem.table_index:
            return None
        return self.problem.table_rows >= self.tile_rows


class TransposedRows(RowTiles):
    """Rows of the kernels that compute ``out^T``, whose threads have `thread_features` features, 8 apart."""

    thread_features: ClassVar[int]

    tile_rows = number(lambda self: self.config.tile_rows)

    @property
    def table_shape(self) -> tuple[int, int, int, int] | None:
        """``[rows, padded_n / (8 f), 8, f]`` of ``f`` features of a thread, or None without bias and positions.

        They stand side by side, so that one load brings all.
        """
        if self.problem.table_rows == 0:
            return None
        own = self.thread_features
        return (self.table_height, self.padded_n // (8 * own), 8, own)

    @property
    def compiled_in(self) -> dict[str, Hashable]:
        """Loops over K are unrolled, and a flat order either wraps once in a tile or divides."""
        return super().compiled_in | {"k_blocks": self.k_blocks, "table_wraps_once": self.table_wraps_once}


# --- clusters of CTA pairs, one warp role after the other, stages filled by both --------------------------------------

class CtaPairs:
    """Mixin of plans whose CTAs work in pairs; the dense GEMM and the patch embed lay out a pair alike."""

    load_warp: ClassVar[int] = 0
    mma_warp: ClassVar[int] = 1
    first_epilogue_warp: ClassVar[int] = 2

    ctas = number(lambda self: self.cta_group)
    """CTAs of a cluster, a multiple of ``cta_group``."""
    sharing_pairs: ClassVar[int] = 1
    """Pairs whose MMAs read what one CTA loads, its own among them."""
    clusters = number(lambda self: min(self.sm_count // self.ctas, self.tiles))
    """Persistent clusters: as many as the multiprocessors can hold, never more than there are tiles."""
    roles = fact(lambda self: ("load", "mma") + ("epilogue",) * self.epilogue_warps)
    """Role of each warp of a CTA, by hardware warp index."""
    b_stage_bytes = number(lambda self: self.config.tile_n // self.cta_group * self.k_block_bytes)
    """Each CTA holds its half of the columns."""
    stage_bytes = number(lambda self: self.a_stage_bytes + self.b_stage_bytes)
    """Operand bytes of one stage in one CTA."""
    stage_tx_bytes = number(lambda self: self.stage_bytes * self.cta_group)
    """Bytes that the leader's full barrier expects per stage: TMA of both CTAs signals the leader."""
