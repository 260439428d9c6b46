"""What the epilogue warps of the SM100 kernel over rows do: columns of each, staging, stores, table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cute_kernels.config import PatchEmbedProblem, Sm100PatchEmbedConfig
from cute_kernels.plan.base import ITEMSIZE, LANES, VECTOR_BYTES, reject, require
from cute_kernels.plan.patch_embed.base import TableLayout

STORE_COLUMNS = 64
"""BF16 columns of a staging region: the 128 bytes of a SWIZZLE_128B row."""

DIRECT_BYTES = 32
"""What a thread stores at once without staging, a sector."""

BLOCK = 32
"""Rows and columns of a square of a blocked table."""


@dataclass(frozen=True)
class StoreGroup:
    """Regions of one warp whose TMA stores are issued together.

    Attributes:
        first, end: regions ``[first, end)`` of the tile.
        pending: store groups that may be unread when the first of them is written: with all but the newest ``pending``
            read, the buffers of this group are free. Groups complete in the order in which they were issued.
    """

    first: int
    end: int
    pending: int


def store_groups(regions: int, buffers: int, group: int) -> tuple[StoreGroup, ...]:
    """The groups of a tile of ``regions`` regions, which use ``buffers`` buffers in turn.

    Region ``r`` of a tile has the buffer of the region ``buffers`` before it, in this tile or the one before.
    """
    starts = range(0, regions, group)

    def number(region: int) -> int:
        return region // regions * len(starts) + region % regions // group

    groups = []
    for first in starts:
        end = min(first + group, regions)
        # Of a later tile, so that no number is negative.
        members = range(regions + first, regions + end)
        groups.append(StoreGroup(first, end, min(number(r) - 1 - number(r - buffers) for r in members)))
    return tuple(groups)


class Sm100Epilogue:
    """Mixin of the plan."""

    problem: PatchEmbedProblem
    config: Sm100PatchEmbedConfig

    @property
    def epilogue_warps(self) -> int:
        return self.config.epilogue_warps

    @property
    def warps(self) -> int:
        return self.first_epilogue_warp + self.epilogue_warps

    @cached_property
    def epilogue_columns(self) -> tuple[tuple[int, int], ...]:
        """Columns ``[begin, end)`` of the tile that each epilogue warp stores.

        A warp reaches only the tensor-memory lanes (= rows) of quarter ``warp_id % 4``, so the rows follow from the
        hardware warp id. Warps that share a quarter split its columns.
        """
        ids = range(self.first_epilogue_warp, self.warps)
        spans = []
        for warp in ids:
            sharers = [w for w in ids if w % 4 == warp % 4]
            width = self.tile_n // len(sharers)
            begin = sharers.index(warp) * width
            spans.append((begin, begin + width))
        return tuple(spans)

    # ---- staging ---------------------------------------------------------------------------------------------------

    @property
    def store_region_bytes(self) -> int:
        """One staging region: 32 rows of 64 output columns, 128 bytes a row as SWIZZLE_128B needs."""
        return LANES * STORE_COLUMNS * ITEMSIZE[self.problem.out_dtype]

    def store_buffers(self, columns: int) -> int:
        """Staging regions of a warp with so many columns."""
        return min(self.config.store_buffers, columns // STORE_COLUMNS)

    def store_groups(self, columns: int) -> tuple[StoreGroup, ...]:
        """In what order a warp with so many columns issues its TMA stores."""
        regions = columns // STORE_COLUMNS
        return store_groups(regions, self.store_buffers(columns), min(self.config.store_group, regions))

    def padded_row_bytes(self, columns: int) -> int:
        """From one row of padded staging to the next: 16 bytes more than the row, so that the 16-byte stores of eight
        lanes, one row each, meet eight different groups of four banks."""
        return columns * ITEMSIZE[self.problem.out_dtype] + VECTOR_BYTES

    def warp_staging_bytes(self, columns: int) -> int:
        """Staging of a warp with so many columns."""
        if self.config.store == "tma":
            return self.store_buffers(columns) * self.store_region_bytes
        return LANES * self.padded_row_bytes(columns) if self.config.store == "coalesced" else 0

    @cached_property
    def staging_offsets(self) -> tuple[int, ...]:
        """Where the staging of each epilogue warp begins, in bytes."""
        offsets, total = [], 0
        for begin, end in self.epilogue_columns:
            offsets.append(total)
            total += self.warp_staging_bytes(end - begin)
        return tuple(offsets)

    @property
    def staging_bytes(self) -> int:
        return sum(self.warp_staging_bytes(end - begin) for begin, end in self.epilogue_columns)

    # ---- bias + position table -------------------------------------------------------------------------------------

    @property
    def table_layout(self) -> TableLayout:
        return self.config.table

    @property
    def table_shape(self) -> tuple[int, ...] | None:
        """As `cute_kernels.operations.table.table_geometry` says, or None without bias and positions.

        Interleaved, ``[ceil(rows / 32), padded_n / V, 32, V]`` with V elements in 16 bytes: the 32 lanes of a warp hold
        32 consecutive rows, so that one 16-byte load per lane reads 512 consecutive bytes, four 128-byte lines instead
        of the 32 of a row-major table and the 16 of squares of 32 x 32.
        """
        if self.problem.table_rows == 0:
            return None
        if self.config.table == "row_major":
            return (self.table_height, self.padded_n)
        vector = BLOCK if self.config.table == "blocked" else VECTOR_BYTES // ITEMSIZE[self.table_dtype]
        return (-(-self.table_height // LANES), self.padded_n // vector, LANES, vector)

    @property
    def table_lines(self) -> int:
        """128-byte lines that the table loads of one CTA and tile touch, if the rows of a warp begin a block."""
        if self.problem.table_rows == 0:
            return 0
        requests = self.cta_m // LANES * self.tile_n * ITEMSIZE[self.table_dtype] // VECTOR_BYTES
        if self.config.order == "position":
            return requests  # all lanes of a warp read the same 16 bytes
        square = BLOCK * ITEMSIZE[self.table_dtype]  # bytes of one of its rows
        lines = {"row_major": LANES, "blocked": LANES * square // 128, "interleaved": LANES * VECTOR_BYTES // 128}
        return requests * lines[self.config.table]


def check_epilogue_warps(config: Sm100PatchEmbedConfig) -> None:
    """Fields that only the epilogue warps see."""
    require("epilogue_warps", config.epilogue_warps, (4, 5), "four lane quarters, at most one of them shared")
    require("tmem_load_width", config.tmem_load_width, (16, 32, 64), "a load must divide the columns of a warp")
    require("tmem_loads", config.tmem_loads, (1, 2), "more loads in flight than two have no registers")
    require("table", config.table, ("auto", "row_major", "blocked", "interleaved"), "layouts of the table")
    require("store", config.store, ("tma", "coalesced", "direct"), "ways of the output")
    require("store_group", config.store_group, (1, 2, 3, 4), "a tile has up to four regions of 64 columns per warp")
    require("store_buffers", config.store_buffers, (1, 2, 4), "buffers must divide the regions of a warp")
    if config.stagger_clocks not in range(1 << 16):
        nearest = min(max(config.stagger_clocks, 0), (1 << 16) - 1)
        reject("stagger_clocks", config.stagger_clocks, "clocks between two warps, 0 to 65535", nearest)
    for name, default in (("store_group", 1), ("store_buffers", 4)):
        if config.store != "tma" and getattr(config, name) != default:
            reject(name, getattr(config, name), f"store = {config.store!r} issues no TMA stores", default)
    if config.store_group > config.store_buffers:
        rule = f"regions that are stored together are staged together, in {config.store_buffers} buffers"
        reject("store_group", config.store_group, rule, config.store_buffers)


def check_columns(plan: Sm100Epilogue) -> None:
    """What depends on how many columns a warp has, and on the problem."""
    config = plan.config
    if config.table_ahead and config.tmem_load_width * config.tmem_loads > 64:
        rule = "registers do not hold the table values of two steps of 128 columns beside the accumulators"
        reject("table_ahead", config.table_ahead, rule, False)
    narrowest = min(end - begin for begin, end in plan.epilogue_columns)
    if config.tmem_load_width * config.tmem_loads > narrowest:
        rule = f"{config.tmem_loads} loads of {config.tmem_load_width} columns exceed the {narrowest} of a warp"
        reject("tmem_loads", config.tmem_loads, rule, 1)
    vector = DIRECT_BYTES // ITEMSIZE[plan.problem.out_dtype]
    if config.store == "direct" and plan.problem.n % vector:
        rule = f"without staging a thread stores {DIRECT_BYTES} bytes at once, n = {plan.problem.n}"
        reject("store", config.store, rule, "tma")
