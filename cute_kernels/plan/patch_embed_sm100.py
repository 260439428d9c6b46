"""Plan of the SM100a kernel: CTA pairs, tensor memory, specialised warps."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.common.facts import fact, number, text
from cute_kernels.config import PatchEmbedProblem, Sm100PatchEmbedConfig
from cute_kernels.plan import b200, base
from cute_kernels.plan.patch_embed import EPILOGUE, FLAT_ROWS, ORDER, PatchEmbedPlan, check_capacity, check_order
from cute_kernels.plan.tiles import CtaPairs, RowTiles

# --- what the epilogue warps of the SM100 kernel over rows do: columns of each, staging, stores, table ---------------

STORE_COLUMNS = 64
"""BF16 columns of a staging region: the 128 bytes of a SWIZZLE_128B row."""

# --- which rows make a tile of the SM100 kernel, where a configuration leaves that open ------------------------------
# In position order a tile is images at positions. A warp then adds one row of the table to its 32 rows, but tiles that
# reach beyond the images or the positions are partly empty.


Planned = Callable[[Sm100PatchEmbedConfig], "Sm100PatchEmbedPlan"]


def positions_of(problem: PatchEmbedProblem) -> int:
    """Positions of an image, 1 where there are none."""
    return max(problem.table_rows, 1)


def allowed_positions(problem: PatchEmbedProblem, config: Sm100PatchEmbedConfig) -> tuple[int, ...]:
    """Values of ``tile_positions`` in position order: 32 images or more in a tile, no more positions than there are."""
    most = 128 * config.cta_group // base.LANES
    return tuple(p for p in (1, 2, 4, 8) if p <= most and p <= positions_of(problem))


def check_rows(problem: PatchEmbedProblem, config: Sm100PatchEmbedConfig) -> None:
    """Fields of the order, before and after they are resolved."""
    positions = positions_of(problem)
    check_order(problem, config.order)
    legal = allowed_positions(problem, config)
    rule = f"a tile of {128 * config.cta_group} rows has 32 images or more, and an image has {positions} positions"
    if config.order == "flat":
        legal, rule = (1,), FLAT_ROWS
    base.require("tile_positions", config.tile_positions, legal, rule)
    if config.order == "position" and config.table not in (None, "row_major"):
        base.reject("table", config.table, "in position order all rows of a warp have the same table row", "row_major")


def resolve(problem: PatchEmbedProblem, config: Sm100PatchEmbedConfig, planned: Planned) -> Sm100PatchEmbedConfig:
    """The configuration with order, positions of a tile and layout of the table filled in."""
    table = config.table or "interleaved"
    flat = dataclasses.replace(config, order="flat", tile_positions=config.tile_positions or 1, table=table)
    whole = problem.m % positions_of(problem) == 0 and not problem.table_index
    if config.order == "flat" or not whole:
        return flat
    counts = (config.tile_positions,) if config.tile_positions else allowed_positions(problem, config)
    position = min(
        (dataclasses.replace(config, order="position", tile_positions=p, table="row_major") for p in counts),
        key=lambda candidate: planned(candidate).tiles,
    )
    if config.order == "position" or flat.tile_positions > 1:
        return position
    if problem.table_rows == 0 or config.table not in (None, "row_major"):
        return flat
    return min((position, flat), key=lambda candidate: shared_memory_clocks(planned(candidate)))


def tile_wavefronts(plan: "Sm100PatchEmbedPlan") -> int:
    """128-byte wavefronts of one CTA in a tile: TMA fill, operand reads, table, staging.

    All pass through the shared memory and L1 of the SM, one a clock.
    """
    operands = plan.k_blocks * plan.stage_bytes // 128
    return 2 * operands + plan.table_lines + 2 * plan.cta_m * plan.tile_n * 2 // 128


def shared_memory_clocks(plan: "Sm100PatchEmbedPlan") -> int:
    """`tile_wavefronts` of the cluster with the most tiles.

    It is a count, not a prediction of time: what of it runs beside what is not documented.
    """
    return -(-plan.tiles // plan.clusters) * tile_wavefronts(plan)


LINE = 128
"""Bytes of a line of shared and global memory."""

TUNED = {"tile_n": (256, 128), "stages": (4, 3, 5, 6, 7, 8), "epilogue_warps": (5, 4), "tmem_load_width": (32, 16, 64)}
"""Fields of the configuration that a tuner varies, with their values; the rounding contract is the caller's."""


@dataclass(frozen=True)
class Sm100PatchEmbedPlan(RowTiles, CtaPairs, PatchEmbedPlan):
    """The persistent tcgen05 GEMM: CTA pairs, tensor-memory accumulators, specialised warps.

    Tiles are 256 rows by ``tile_n`` columns and belong to a pair of CTAs (``cta_group::2``): each CTA holds 128 rows of
    the accumulator and loads its 128 rows of ``x`` and half of the tile's weight rows. With ``cta_group::1`` a CTA
    works alone, on 128 rows. The rows are consecutive ones, or images at positions, images running fastest.
    """

    kernel: ClassVar[str] = "cute_kernels.kernels.sm100.patch_embed:Sm100PatchEmbedKernel"
    graph: ClassVar[str] = "cute_kernels.kernels.graph:sm100_graph"

    config: Sm100PatchEmbedConfig

    cta_m: int = 128
    accumulators: int = 2
    mma_tiles: int = 1
    store_columns: int = STORE_COLUMNS

    runs = text(lambda self: f"{super().runs}: weight streamed")

    # ---- tiles -----------------------------------------------------------------------------------------------------
    cta_group = number(lambda self: self.config.cta_group)
    tile_m = number(lambda self: self.cta_m * self.cta_group)
    tile_rows = number(lambda self: self.tile_m)
    cta_positions = number(lambda self: max(self.config.tile_positions // self.cta_group, 1))
    """Positions of the rows that one CTA loads: those of the tile are dealt out first, images where it has one."""
    cta_images = number(lambda self: self.cta_m // self.cta_positions)
    tile_n = number(lambda self: self.config.tile_n)
    m_tiles = number(lambda self: self.row_tiles * self.position_tiles)
    """Blocks of images times blocks of positions, which run faster."""
    n_tiles = number(lambda self: -(-self.problem.n // self.tile_n))
    tiles = number(lambda self: self.m_tiles * self.n_tiles)

    # ---- memory ----------------------------------------------------------------------------------------------------
    def smaller_stage(self, nbytes: int) -> tuple[str, object, object]:
        return "tile_n", self.tile_n, min(FIELDS["tile_n"].legal)

    a_stage_bytes = number(lambda self: self.cta_m * self.k_block_bytes)

    @cached_property
    def smem(self) -> tuple[base.SmemRegion, ...]:
        """Dynamic shared memory of a CTA, in address order."""
        stages = self.config.stages
        return base.smem_map(
            ("barriers and tensor-memory address", self.barrier_bytes, 128),
            (f"x: {stages} stages", stages * self.a_stage_bytes, self.swizzle_period),
            (f"weight: {stages} stages", stages * self.b_stage_bytes, self.swizzle_period),
            ("output staging", self.staging_bytes, self.swizzle_period),
        )

    tmem_columns = number(lambda self: self.accumulators * self.tile_n)
    """Columns allocated: both accumulators, in the powers of two that tcgen05.alloc hands out."""
    tmem = fact(lambda self: base.tmem_accumulators(self.accumulators, self.tile_n))
    padded_n = number(lambda self: self.n_tiles * self.tile_n)
    """Columns rounded up to whole tiles, so that table reads need no bounds check."""

    # ---- epilogue warps --------------------------------------------------------------------------------------------
    epilogue_warps = number(lambda self: self.config.epilogue_warps)
    warps = number(lambda self: self.first_epilogue_warp + self.epilogue_warps)

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
    store_region_bytes = number(lambda self: base.LANES * STORE_COLUMNS * self.out_bytes)
    """One staging region: 32 rows of 64 output columns, 128 bytes a row as SWIZZLE_128B needs."""

    def store_buffers(self, columns: int) -> int:
        """Staging regions of a warp with so many columns."""
        return min(self.config.store_buffers, columns // STORE_COLUMNS)

    def warp_staging_bytes(self, columns: int) -> int:
        """Staging of a warp with so many columns."""
        return self.store_buffers(columns) * self.store_region_bytes

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
    table_layout = fact(lambda self: self.config.table)

    @property
    def table_shape(self) -> tuple[int, ...] | None:
        """Shape of the table as `cute_kernels.operations.table` lays it out, or None without bias and positions.

        Interleaved, ``[ceil(rows / 32), padded_n / V, 32, V]`` with V elements in 16 bytes: the 32 lanes of a warp hold
        32 consecutive rows, so that one 16-byte load per lane reads 512 consecutive bytes, four 128-byte lines instead
        of the 32 of a row-major table.
        """
        if self.problem.table_rows == 0:
            return None
        if self.config.table == "row_major":
            return (self.table_height, self.padded_n)
        vector = base.VECTOR_BYTES // base.ITEMSIZE[self.table_dtype]
        return (-(-self.table_height // base.LANES), self.padded_n // vector, base.LANES, vector)

    @property
    def table_lines(self) -> int:
        """128-byte lines that the table loads of one CTA and tile touch, if the rows of a warp begin a block."""
        if self.problem.table_rows == 0:
            return 0
        requests = self.cta_m // base.LANES * self.tile_n * base.ITEMSIZE[self.table_dtype] // base.VECTOR_BYTES
        if self.config.order == "position":
            return requests  # all lanes of a warp read the same 16 bytes
        return requests * (base.LANES if self.config.table == "row_major" else base.LANES * 16 // 128)

    # ---- counted work ----------------------------------------------------------------------------------------------
    @property
    def mma_clocks(self) -> float:
        """Clocks of the MMAs of a tile in one CTA, by the published rate."""
        return self.cta_m * self.tile_n * self.k_blocks * self.k_block_bytes / b200.MACS_PER_CLOCK

    @property
    def work(self) -> b200.TileWork:
        """Work of the busiest CTA, in the units that the model of time has costs for.

        Every warp of the epilogue has a quarter of the rows.
        """
        config = self.config
        stores = 2 * self.cta_m * self.tile_n * self.out_bytes // LINE  # staging is written, and read by TMA
        columns = max(end - begin for begin, end in self.epilogue_columns)
        return b200.TileWork(
            tiles=-(-self.tiles // self.clusters),
            mma_clocks=self.mma_clocks,
            operand_bytes=self.k_blocks * self.stage_bytes,
            lines=self.table_lines + stores,
            waits=-(-columns // config.tmem_load_width),
            columns=columns,
            memory_bytes=self.memory_bytes,
        )


FIELDS = {
    "tile_n": base.Field("two accumulators of tile_n columns share 512 TMEM columns", (128, 256)),
    "stages": base.Field("TMA and tensor core overlap only with two stages or more", least=2),
    "epilogue_warps": base.Field("four lane quarters, at most one of them shared", (4, 5)),
    "tmem_load_width": base.Field("a load must divide the columns of a warp", (16, 32, 64)),
    "epilogue": EPILOGUE,
    "cta_group": base.Field("tcgen05.mma multiplies in one CTA or in a pair", (1, 2)),
    "order": ORDER,
    "tile_positions": base.Field("a tile has 32 images or more", (1, 2, 4, 8)),
    "table": base.Field("layouts of the table", ("row_major", "interleaved")),
    "store_buffers": base.Field("buffers must divide the regions of a warp", (1, 2, 4)),
    "stagger_clocks": base.Field("clocks between two warps", least=0, most=65_535),
}

_ALONE = Sm100PatchEmbedConfig(stages=3, cta_group=1)
"""For a device of one multiprocessor, which has no pair."""


def default_config(problem: PatchEmbedProblem, arch: base.Arch, sm_count: int) -> Sm100PatchEmbedConfig:
    """Configuration of a problem whose weight does not stay on chip; the rows of a tile are left open."""
    return Sm100PatchEmbedConfig() if sm_count > 1 else _ALONE


def checked_plan(
    problem: PatchEmbedProblem, config: Sm100PatchEmbedConfig, arch: base.Arch, sm_count: int
) -> Sm100PatchEmbedPlan:
    base.check_fields(config, FIELDS)
    check_rows(problem, config)

    def planned(candidate: Sm100PatchEmbedConfig) -> Sm100PatchEmbedPlan:
        return Sm100PatchEmbedPlan(problem, candidate, arch, sm_count)

    base.check_sm_count(sm_count, config.cta_group)
    plan = planned(resolve(problem, config, planned))
    check_rows(problem, plan.config)
    check_capacity(plan)
    return plan


def predict(plan: Sm100PatchEmbedPlan) -> base.Prediction:
    """The modelled time of a launch on a B200, whose costs are fitted to variants of this design."""
    return b200.predict(plan.work, error=b200.ERROR)


def search_space(problem: PatchEmbedProblem, arch: base.Arch, sm_count: int) -> list[Sm100PatchEmbedPlan]:
    """Legal plans that are worth timing on a device: the default, then those that differ from it, in few fields first.

    The default is the fastest of the notes that it descends from (docs/experiments.md), so that what is near to it
    is more promising than what is far.
    """
    if sm_count == 1:
        return []
    chosen = checked_plan(problem, Sm100PatchEmbedConfig(), arch, sm_count)
    names = tuple(TUNED)

    def distance(values: tuple[int, ...]) -> int:
        return sum(getattr(chosen.config, name) != value for name, value in zip(names, values, strict=True))

    tuned = sorted(itertools.product(*TUNED.values()), key=distance)
    configs = [dataclasses.replace(chosen.config, **dict(zip(names, values, strict=True))) for values in tuned]
    return list(dict.fromkeys((chosen, *base.legal_plans(checked_plan, problem, configs, arch, sm_count))))
