"""Common parts of the plans of SM100a kernels that compute ``out^T = weight * x^T``.

Features are the lanes of tensor memory, whose weight a CTA keeps for the whole launch; rows of ``x`` are the columns of
an accumulator. The parts of such kernels are in `cute_kernels.kernels.sm100.transposed`.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeVar

from cute_kernels.common.facts import number, text
from cute_kernels.config import WEIGHT_TYPES, Sm100ImagesConfig, Sm100ResidentConfig
from cute_kernels.plan import b200, base
from cute_kernels.plan.b200 import MACS_PER_CLOCK
from cute_kernels.plan.tiles import CtaPairs, FeatureTiles

TMEM_LANES = 128
"""Lanes of tensor memory, rows of a CTA's accumulator: one for each output feature."""

COLUMN_STEP = 16
"""Rows of ``x`` of one CTA in a tile come in multiples of it: N of an MMA is a multiple of 16, of a pair of 32."""

MOST_COLUMNS = 256
"""The largest N of an MMA."""

BARRIER_BYTES = 8

ADDRESS_BYTES = 4
"""Where tcgen05.alloc writes the address of tensor memory, behind the barriers."""

WAVEFRONT = 128
"""Bytes that shared memory moves in a clock."""


@dataclass(frozen=True)
class Sm100TransposedPlan(FeatureTiles, CtaPairs):
    """A persistent tcgen05 kernel: ``D[feature, row] = weight * x^T``.

    A tile is computed by a pair of CTAs (``cta_group::2``), or by one. Each CTA holds the accumulator of its 128
    features, and of the tile's rows it loads its own share; the MMAs of a pair read the rows of both.

    Subclasses say what a tile is and what a stage holds: `tile_rows`, `tiles`, `stage_bytes`.
    """

    graph: ClassVar[str] = "cute_kernels.kernels.graph:sm100_transposed_graph"
    stage_name: ClassVar[str] = "x"

    lanes: int = TMEM_LANES
    epilogue_warps: int = 4

    tile_rows = number()
    """Rows of ``x`` in a tile."""
    stage_bytes = number()
    """Operand bytes of one stage in one CTA."""

    weight_dtype = text(lambda self: WEIGHT_TYPES[self.problem.in_dtype])
    """Element type of the weight, as torch names it."""

    features = number(lambda self: self.lanes)
    cta_group = number(lambda self: self.config.cta_group)
    ctas = number(lambda self: self.cta_group)

    # ---- tiles -----------------------------------------------------------------------------------------------------
    columns = number(lambda self: self.tile_rows)
    """Columns of an accumulator: the rows of a tile."""
    cta_rows = number(lambda self: self.tile_rows // self.cta_group)
    """Rows of a tile that one CTA has in its shared memory."""

    @cached_property
    def mma_spans(self) -> tuple[tuple[int, int], ...]:
        """First column and columns of each MMA tile of an accumulator.

        The first half of the columns of an MMA tile are rows of the leader, the others of its neighbour,
        from row ``first column / cta_group`` of each on.
        """
        step = self.config.mma_columns
        return tuple((first, min(step, self.columns - first)) for first in range(0, self.columns, step))

    def row_of(self, mma_tile: int, column: int) -> int:
        """Row of the tile, the leader's first, that a column of an MMA tile belongs to."""
        first, columns = self.mma_spans[mma_tile]
        cta, row = divmod(column, columns // self.cta_group)
        return cta * self.cta_rows + first // self.cta_group + row

    def staged_row(self, mma_tile: int, column: int) -> int:
        """Row of a staging buffer that a column of an MMA tile is written to."""
        return self.row_of(mma_tile, column)

    # ---- memory ----------------------------------------------------------------------------------------------------
    weight_bytes = number(lambda self: self.lanes * self.k_blocks * self.k_block_bytes)
    """Bytes of the weight of a CTA's features, whichever memory they stay in."""
    weight_columns = number(lambda self: self.k_blocks * self.k_block_bytes // 4 if self.config.weight == "tmem" else 0)
    """Columns of tensor memory of the weight: a lane has that of its feature, four bytes of K in a column."""
    accumulator_columns = number(lambda self: self.config.accumulators * self.columns)
    tmem_columns = number(lambda self: max(32, 1 << (self.accumulator_columns + self.weight_columns - 1).bit_length()))
    """Columns allocated, in the powers of two that tcgen05.alloc hands out, from 32 on."""

    @property
    def tmem(self) -> tuple[base.TmemRegion, ...]:
        weight = (base.TmemRegion("weight", self.weight_column, self.weight_columns),) if self.weight_columns else ()
        return base.tmem_accumulators(self.config.accumulators, self.columns) + weight

    weight_column = number(lambda self: self.tmem_columns - self.weight_columns)
    """The first column of the weight, which has the last ones."""
    staging_bytes = number(lambda self: base.round_up(self.columns * base.LANES * self.out_bytes, 512))
    """Staging of a warp: the rows of a tile x its features, up to 64 bytes a row; whole periods of SWIZZLE_64B."""

    @cached_property
    def smem(self) -> tuple[base.SmemRegion, ...]:
        """Dynamic shared memory of a CTA, in address order."""
        stages = self.config.stages
        return base.smem_map(
            ("barriers and tensor-memory address", self.barrier_bytes, 128),
            ("weight", self.weight_bytes if self.config.weight == "smem" else 0, self.swizzle_period),
            (f"{self.stage_name}: {stages} stages", stages * self.stage_bytes, self.swizzle_period),
            ("output staging", self.epilogue_warps * self.staging_bytes, self.swizzle_period),
        )

    slots = number(lambda self: 2 * self.config.stages + 2 * self.config.accumulators * len(self.mma_spans) + 1)
    """Barriers: full and empty ones of stages and MMA tiles, and that of the weight."""
    used_barrier_bytes = number(lambda self: self.slots * BARRIER_BYTES + ADDRESS_BYTES)
    """Bytes of the barriers, and of the address behind them."""

    # ---- counted work ----------------------------------------------------------------------------------------------
    mma_clocks = number(lambda self: self.lanes * self.columns * self.k_blocks * self.k_block_bytes / MACS_PER_CLOCK)
    """Clocks of the MMAs of a tile, by the published rate."""

    @property
    def wavefronts(self) -> int:
        """Wavefronts of shared memory in one CTA and tile, as the emulator counts them.

        ``x`` written by TMA and read by the MMAs, the output staged and read by TMA; a weight in shared memory is read
        by the MMAs of each MMA tile.
        """
        fill = self.stage_bytes * self.tile_stages // WAVEFRONT
        weight = self.weight_bytes * len(self.mma_spans) // WAVEFRONT if self.config.weight == "smem" else 0
        return 2 * fill + weight + self.staging_wavefronts

    out_bytes_of_tile = number(lambda self: self.epilogue_warps * self.columns * base.LANES * self.out_bytes)
    staging_wavefronts = number(lambda self: 2 * self.out_bytes_of_tile // WAVEFRONT)
    """Wavefronts of the output, which the warps write and TMA reads."""
    table_wavefronts: ClassVar[int] = 0
    """Wavefronts of loads of the table in a CTA and tile; 0 where they are few."""


# --- limits that the plans of `Sm100TransposedPlan` share, and what they do where a configuration leaves it open -----

AnyPlan = TypeVar("AnyPlan", bound=Sm100TransposedPlan)
AnyConfig = TypeVar("AnyConfig", Sm100ResidentConfig, Sm100ImagesConfig)

WEIGHT_MEMORY = base.Field("where the weight stays", ("tmem", "smem"))
CTA_GROUP = base.Field("CTAs of one MMA", (1, 2))
ACCUMULATORS = base.Field("accumulators in tensor memory", (1, 2))
MMA_COLUMNS = base.Field("N of an MMA is a multiple of 16", least=COLUMN_STEP, most=MOST_COLUMNS)
STAGES = base.Field("TMA and MMA overlap only with two stages or more", least=2, open=base.TWO_TILES)

TILE_CLOCKS = 400
"""Clocks that a tile costs besides: signals between its roles. An estimate."""

_DRAIN_CLOCKS = 1000
"""From the last MMA to the last store of an accumulator that nothing else hides. An estimate."""


def check_mma_tiles(plan: Sm100TransposedPlan) -> None:
    """Every MMA tile is a legal N, and whole loads of an epilogue warp."""
    config, step = plan.config, COLUMN_STEP * plan.cta_group
    if config.mma_columns % step or not step <= config.mma_columns <= plan.columns:
        rule = f"N of an MMA of {plan.cta_group} CTAs is a multiple of {step}, and the tile has {plan.columns} columns"
        nearest = min(max(base.round_up(config.mma_columns, step), step), plan.columns)
        base.reject("mma_columns", config.mma_columns, rule, nearest)
    for _, columns in plan.mma_spans:
        if columns // plan.cta_group % config.tmem_load_width:
            rule = f"a load's columns are rows of one CTA, and an MMA tile has {columns // plan.cta_group} of each"
            base.reject("tmem_load_width", config.tmem_load_width, rule, COLUMN_STEP)


def check_stages(plan: Sm100TransposedPlan, name: str, value: int, smaller: Callable[[], int]) -> None:
    """Barriers and shared memory; all MMA tiles of a tile read its stages, which the last one frees.

    Where two stages do not fit, a field of the tile's shape is reported: name, value and nearest legal value.
    """
    config = plan.config
    room = base.room_for_stages(plan)
    slots = (plan.barrier_bytes - ADDRESS_BYTES) // BARRIER_BYTES
    most = min(room, (slots - (plan.used_barrier_bytes - ADDRESS_BYTES) // BARRIER_BYTES) // 2 + config.stages)
    if config.stages > room:
        rule = base.smem_rule(plan)
        if most >= 2:
            base.reject("stages", config.stages, rule, most)
        rule = f"{rule}, and at least two stages have to fit"
        if config.stage_blocks == 2 and room >= 1:
            base.reject("stage_blocks", config.stage_blocks, rule, 1)
        base.reject(name, value, rule, smaller())
    if config.stages > most:
        rule = f"the {plan.barrier_bytes:,} B of barriers hold those of {most} stages"
        base.reject("stages", config.stages, rule, most)
    if len(plan.mma_spans) > 1 and config.stages < plan.tile_stages:
        rule = f"MMA tiles read the {plan.tile_stages} stages of a tile one after another, and the last one frees them"
        if plan.tile_stages <= most:
            base.reject("stages", config.stages, rule, plan.tile_stages)
        base.reject("mma_columns", config.mma_columns, f"{rule}; {most} fit", plan.columns)


def check_tensor_memory(plan: Sm100TransposedPlan, narrower: Callable[[int], tuple[str, object, object]]) -> None:
    """Accumulators beside the weight; ``narrower`` gives the field, as `reject` takes it, that makes one fit columns.
    """
    config, most = plan.config, plan.arch.tmem_columns
    room = most - plan.weight_columns
    if plan.accumulator_columns <= room:
        return
    rule = (
        f"{plan.weight_columns} columns of weight and {config.accumulators} accumulators of {plan.columns} make "
        f"{plan.weight_columns + plan.accumulator_columns}, tensor memory has {most}"
    )
    if plan.columns <= room:
        base.reject("accumulators", config.accumulators, rule, room // plan.columns)
    name, value, nearest = narrower(room // config.accumulators)
    base.reject(name, value, rule, nearest)


def smallest(config: AnyConfig, weight: str, **shape: object) -> AnyConfig:
    """The configuration with as little as possible beside the weight, and a tile of this shape."""
    few = {"cta_group": 1, "accumulators": 1, "mma_columns": COLUMN_STEP, "tmem_load_width": 16, "stages": 2}
    return dataclasses.replace(config, **few, stage_blocks=1, weight=weight, **shape)


def largest_fitting(plan: Sm100TransposedPlan, step: int, name: str, columns: int = 1, **fixed: object) -> int:
    """The largest multiple of ``step`` below the plan's value of a field with which two stages fit, or ``step``.

    ``columns``: of a tile for each unit of the field; ``fixed``: other fields, by their values.
    """
    for value in range(getattr(plan.config, name) - step, step, -step):
        shape = {name: value, "mma_columns": value * columns, "stages": 2, **fixed}
        smaller = dataclasses.replace(plan, config=dataclasses.replace(plan.config, **shape))
        if smaller.smem_bytes <= plan.arch.smem_bytes:
            return value
    return step


def complete(plan: AnyPlan) -> AnyPlan:
    """With accumulators, MMA tiles and stages that the configuration leaves open.

    Two accumulators where tensor memory holds them; otherwise one in two MMA tiles, of which the first is drained while
    the second is multiplied.
    """
    config = plan.config
    accumulators = config.accumulators or (2 if 2 * plan.columns + plan.weight_columns <= plan.arch.tmem_columns else 1)
    step = COLUMN_STEP * plan.cta_group
    half = base.round_up(-(-plan.columns // 2), max(step, config.tmem_load_width * plan.cta_group))
    columns = config.mma_columns or (plan.columns if accumulators > 1 or half >= plan.columns else half)
    config = dataclasses.replace(config, accumulators=accumulators, mma_columns=columns, stages=config.stages or 2)
    resolved = dataclasses.replace(plan, config=config)
    if not plan.config.stages:
        stages = max(2, min(base.room_for_stages(resolved), 2 * resolved.tile_stages))
        resolved = dataclasses.replace(resolved, config=dataclasses.replace(config, stages=stages))
    return resolved


def launch_clocks(plan: Sm100TransposedPlan) -> float:
    """Clocks of a launch as far as shapes tell them apart: counted work by published rates, no measured time.

    The tensor core's products, or the wavefronts of shared memory, whichever take longer. Tiles that a cluster has one
    after the other, and rounds of clusters that the device does not hold at once.
    """
    clocks = max(plan.mma_clocks, plan.wavefronts + plan.table_wavefronts) + TILE_CLOCKS
    if plan.config.accumulators * len(plan.mma_spans) == 1:
        clocks += _DRAIN_CLOCKS
    tiles = -(-plan.tiles * plan.feature_groups // plan.clusters)
    rounds = -(-plan.clusters * plan.ctas // plan.sm_count)
    return tiles * rounds * clocks


# --- work of a tile, in the units that `cute_kernels.plan.b200` has costs for ---------------------------------------

def predict(plan: b200.Timed) -> base.Prediction:
    """The modelled time of a launch on a B200.

    The costs are fitted to variants that stream the weight; of a weight on chip the model has seen no time.
    """
    return b200.predict(plan.work)


def transposed_work(plan: Sm100TransposedPlan, memory_bytes: int, once_lines: float = 0.0) -> b200.TileWork:
    """Work of the busiest CTA; every warp of the epilogue has a quarter of the features.

    ``memory_bytes``: that a launch cannot do without; ``once_lines``: of bringing the weight to where it stays.
    """
    return b200.TileWork(
        tiles=-(-plan.tiles * plan.feature_groups // plan.clusters) * -(-plan.clusters * plan.ctas // plan.sm_count),
        mma_clocks=plan.mma_clocks,
        operand_bytes=plan.tile_stages * plan.stage_bytes,
        lines=plan.table_wavefronts + plan.staging_wavefronts,
        waits=sum(-(-columns // plan.config.tmem_load_width) for _, columns in plan.mma_spans),
        columns=plan.columns,
        memory_bytes=memory_bytes,
        once_lines=once_lines,
    )
