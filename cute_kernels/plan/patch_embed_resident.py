"""Plan of the SM100a kernel over rows whose weight stays on chip: output transposed, rows are the N operand."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.common.facts import fact, number
from cute_kernels.config import PatchEmbedProblem, Sm100ResidentConfig
from cute_kernels.plan import b200, patch_embed
from cute_kernels.plan import sm100_transposed as transposed
from cute_kernels.plan.base import ITEMSIZE, Arch, Field, check_fields, check_sm_count, is_legal, reject, round_up
from cute_kernels.plan.patch_embed import PatchEmbedPlan
from cute_kernels.plan.tiles import CORE_COLUMNS, TransposedRows

_LINES_OF_A_FILL = 32
"""Wavefronts of one load of the weight's fill: each lane reads 16 bytes of a feature of its own."""

MOST_TABLE_REGISTERS = 32
"""Table values that a thread fetches before a tile; of tiles of more positions it reads them when they are added."""


@dataclass(frozen=True)
class Sm100ResidentPlan(TransposedRows, transposed.Sm100TransposedPlan, PatchEmbedPlan):
    """The persistent tcgen05 kernel over rows, of which each CTA of a pair loads half of the images of a tile."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm100.patch_embed_resident:Sm100ResidentKernel"

    thread_features: ClassVar[int] = 4

    config: Sm100ResidentConfig

    table_layout: patch_embed.TableLayout = "quads"

    @property
    def runs(self) -> str:
        place = {"tmem": "tensor memory", "smem": "shared memory"}[self.config.weight]
        return f"{super().runs}: weight in {place}"

    # ---- tiles -----------------------------------------------------------------------------------------------------
    cta_images = number(lambda self: self.tile_images // self.cta_group)
    """Images of a tile that one CTA loads, in flat order rows."""
    stage_bytes = number(lambda self: self.cta_rows * self.k_block_bytes * self.config.stage_blocks)

    def position_of(self, row: int) -> int:
        """Position in a tile of one of its rows as `row_of` counts them."""
        return row % self.cta_rows // self.cta_images

    def image_of(self, row: int) -> int:
        """Image in a tile of one of its rows as `row_of` counts them."""
        return row // self.cta_rows * self.cta_images + row % self.cta_images

    def staged_row(self, mma_tile: int, column: int) -> int:
        """Images of both CTAs side by side, position after position: what one TMA store takes."""
        row = self.row_of(mma_tile, column)
        return self.position_of(row) * self.tile_images + self.image_of(row)

    # ---- bias + position table -------------------------------------------------------------------------------------
    @property
    def prefetches_table(self) -> bool:
        """A thread fetches its table values of a tile before it waits for the accumulators."""
        return self.positions_in_order and 4 * self.config.tile_positions <= MOST_TABLE_REGISTERS

    # ---- counted work ----------------------------------------------------------------------------------------------
    @property
    def table_wavefronts(self) -> int:
        """Wavefronts of a CTA's loads of the table in a tile: one a warp and position, in flat order one a row."""
        if self.problem.table_rows == 0:
            return 0
        rows = self.config.tile_positions if self.positions_in_order else self.columns
        return self.epilogue_warps * rows

    @property
    def fill_wavefronts(self) -> int:
        """Wavefronts of bringing the weight to where it stays, once for a launch."""
        if self.config.weight == "smem":
            return self.weight_bytes // transposed.WAVEFRONT
        vectors = self.problem.k * self.in_bytes // 16
        return self.epilogue_warps * vectors * _LINES_OF_A_FILL

    work = fact(lambda self: transposed.transposed_work(self, self.memory_bytes, self.fill_wavefronts))
    """Work of the busiest CTA, in the units that the model of time has costs for."""


# --- limits of the SM100a kernel over rows whose weight stays on chip, and what it does where a field is left open ---

_LOAD_WIDTHS = (16, 32, 64)

FIELDS = {
    "weight": transposed.WEIGHT_MEMORY,
    "order": patch_embed.ORDER,
    "tile_rows": Field("N of an MMA is a multiple of 16 up to 256", least=16, most=transposed.MOST_COLUMNS),
    "tile_positions": Field("a tile has a multiple of 8 images at each position", least=1),
    "cta_group": transposed.CTA_GROUP,
    "accumulators": transposed.ACCUMULATORS,
    "mma_columns": transposed.MMA_COLUMNS,
    "tmem_load_width": Field("columns of a load", _LOAD_WIDTHS),
    "stages": transposed.STAGES,
    "stage_blocks": Field("K blocks of 128 bytes in a stage", (1, 2)),
    "epilogue": patch_embed.EPILOGUE,
}

FEW_OUTPUTS = 2**19
"""Outputs of a multiprocessor up to which shared memory keeps the weight, which TMA fills faster; beyond, it pays that
MMAs do not read it again for each tile. By the model (docs/model.md); nobody has timed it."""

_TRIED_SHAPES = 4
"""Shapes of tiles that a tuner times for each memory and group of CTAs."""


def checked_plan(
    problem: PatchEmbedProblem, config: Sm100ResidentConfig, arch: Arch, sm_count: int
) -> Sm100ResidentPlan:
    """The plan, or ValueError; what a config leaves open is chosen by `resolve`."""
    check_fields(config, FIELDS)
    check_sm_count(sm_count, config.cta_group, "pair")
    patch_embed.check_order(problem, config.order)
    most = longest_k(problem, config, arch)
    if problem.k > most:
        rule = "the weight of 128 features stays on chip beside the smallest tile, and has K times as many bytes"
        reject("k", problem.k, rule, most)
    plan = resolve(problem, config, arch, sm_count)
    check(plan)
    return plan


def default_config(problem: PatchEmbedProblem, arch: Arch, sm_count: int) -> Sm100ResidentConfig:
    """Where the weight of a problem stays; the shape of its tiles is left open."""
    in_smem = Sm100ResidentConfig(weight="smem")
    few = problem.m * problem.n <= FEW_OUTPUTS * sm_count
    return in_smem if few and problem.k <= longest_k(problem, in_smem, arch) else Sm100ResidentConfig(weight="tmem")


def why_on_chip(problem: PatchEmbedProblem, arch: Arch) -> str:
    """Why the weight is not streamed; empty where it is, which is where it does not fit on chip."""
    most = longest_k(problem, Sm100ResidentConfig(), arch)
    return f"the weight of 128 features stays on chip up to K = {most}" if problem.k <= most else ""


@functools.lru_cache(maxsize=1024)
def longest_k(problem: PatchEmbedProblem, config: Sm100ResidentConfig, arch: Arch) -> int:
    """The largest K whose weight fits where the configuration has it, in whole blocks of 128 bytes."""
    block = dataclasses.replace(problem, k=128 // ITEMSIZE[problem.in_dtype])
    shape = {"order": "flat", "tile_rows": transposed.COLUMN_STEP, "tile_positions": 1}
    configs = {weight: transposed.smallest(config, weight, **shape) for weight in ("tmem", "smem")}
    plans = {weight: Sm100ResidentPlan(block, least, arch, arch.sm_count) for weight, least in configs.items()}
    beside, stages = plans["smem"], 2 * plans["smem"].stage_bytes
    fixed = beside.smem_bytes - beside.weight_bytes - stages
    most = {
        "tmem": (arch.tmem_columns - transposed.COLUMN_STEP) // plans["tmem"].weight_columns,
        "smem": (arch.smem_bytes - fixed - stages) // beside.weight_bytes,
    }
    return block.k * (max(most.values()) if config.weight is None else most[config.weight])


# ---- limits of a complete configuration -----------------------------------------------------------------------------

def check(plan: Sm100ResidentPlan) -> None:
    """Raises ValueError for the first limit that is broken."""
    _check_tile(plan)
    transposed.check_tensor_memory(plan, functools.partial(_narrower, plan))
    transposed.check_mma_tiles(plan)
    step = transposed.COLUMN_STEP * plan.cta_group
    fitting = functools.partial(transposed.largest_fitting, plan, step, "tile_rows", tile_positions=1)
    transposed.check_stages(plan, "tile_rows", plan.columns, fitting)
    patch_embed.check_capacity(plan)


def _check_tile(plan: Sm100ResidentPlan) -> None:
    """The columns of a tile are a legal N, and 8 of them belong to one position."""
    config, step = plan.config, transposed.COLUMN_STEP * plan.cta_group
    if config.tile_rows % step or not step <= config.tile_rows <= transposed.MOST_COLUMNS:
        rule = f"N of an MMA of {plan.cta_group} CTAs is a multiple of {step} up to {transposed.MOST_COLUMNS}"
        nearest = min(max(round_up(config.tile_rows, step), step), transposed.MOST_COLUMNS)
        reject("tile_rows", config.tile_rows, rule, nearest)
    positions = config.tile_positions
    if positions < 1 or plan.cta_rows % positions or plan.cta_rows // positions % CORE_COLUMNS:
        rule = f"each CTA has {plan.cta_rows} rows of a tile, a multiple of {CORE_COLUMNS} images at each position"
        reject("tile_positions", positions, rule, 1)
    patch_embed.check_tile_positions(plan)


def _narrower(plan: Sm100ResidentPlan, columns: int) -> tuple[str, object, object]:
    step = transposed.COLUMN_STEP * plan.cta_group
    return "tile_rows", plan.columns, max(step, columns // step * step)


# ---- what a problem gets --------------------------------------------------------------------------------------------

def cost(plan: Sm100ResidentPlan) -> float:
    """Clocks of a launch by counted work: those of its tiles, and the weight's way to where it stays.

    Reading the table of a flat order takes wavefronts beside the others.
    """
    return transposed.launch_clocks(plan) + plan.fill_wavefronts


@functools.lru_cache(maxsize=1024)
def resolve(problem: PatchEmbedProblem, config: Sm100ResidentConfig, arch: Arch, sm_count: int) -> Sm100ResidentPlan:
    """The plan with what the configuration leaves open filled in: of all legal shapes the one that `quickest` takes.

    Of equal shapes the first is taken, so that CTAs work alone where a pair gains nothing. Where none is legal, it is
    the one of least counted work, whose limit `check` then names.
    """
    plans = list(candidates(problem, config, arch, sm_count))
    return b200.quickest(plans, cost, lambda plan: is_legal(plan, check)) or min(plans, key=cost)


def search_space(problem: PatchEmbedProblem, arch: Arch, sm_count: int) -> list[Sm100ResidentPlan]:
    """Legal plans that are worth timing on a device: of each memory and group of CTAs those of least cost."""
    plans: list[Sm100ResidentPlan] = []
    for weight, group in itertools.product(("tmem", "smem"), (1, 2) if sm_count > 1 else (1,)):
        config = Sm100ResidentConfig(weight=weight, cta_group=group)
        if problem.k <= longest_k(problem, config, arch):
            shapes = sorted(candidates(problem, config, arch, sm_count), key=cost)
            tiles = {(plan.columns, plan.config.order): plan for plan in reversed(shapes) if is_legal(plan, check)}
            plans += sorted(tiles.values(), key=cost)[:_TRIED_SHAPES]
    return sorted(plans, key=cost)


def candidates(
    problem: PatchEmbedProblem, config: Sm100ResidentConfig, arch: Arch, sm_count: int
) -> Iterator[Sm100ResidentPlan]:
    """Complete configurations, with single CTAs and wide tiles first."""
    weights = ("tmem", "smem") if config.weight is None else (config.weight,)
    groups = (config.cta_group,) if config.cta_group else (1, 2) if sm_count > 1 else (1,)
    for weight, group, order in itertools.product(weights, groups, _orders(problem, config)):
        step = transposed.COLUMN_STEP * group
        for rows in (config.tile_rows,) if config.tile_rows else range(transposed.MOST_COLUMNS, 0, -step):
            positions = config.tile_positions or _positions(problem, order, rows, group)
            widths = [w for w in _LOAD_WIDTHS if rows // group % w == 0] or [_LOAD_WIDTHS[0]]
            for width in (config.tmem_load_width,) if config.tmem_load_width else reversed(widths[:2]):
                shape = dataclasses.replace(
                    config, weight=weight, cta_group=group, order=order, tile_rows=rows, tile_positions=positions,
                    tmem_load_width=width
                )
                yield transposed.complete(Sm100ResidentPlan(problem, shape, arch, sm_count))


def _orders(problem: PatchEmbedProblem, config: Sm100ResidentConfig) -> tuple[str, ...]:
    """Without positions, consecutive rows are all of one position."""
    if config.order is not None:
        return (config.order,)
    if problem.table_rows <= 1:
        return ("flat",) if problem.table_index else ("position",)
    whole = problem.m % problem.table_rows == 0 and not problem.table_index
    return ("position", "flat") if whole else ("flat",)


def _positions(problem: PatchEmbedProblem, order: str, rows: int, group: int) -> int:
    """Positions of a tile: those that leave the fewest tiles; of equal numbers the fewest positions."""
    if order == "flat" or problem.table_rows <= 1:
        return 1
    images, positions = problem.m // problem.table_rows, problem.table_rows
    cta_rows = rows // group
    legal = [p for p in range(1, min(positions, cta_rows // CORE_COLUMNS) + 1) if cta_rows % (CORE_COLUMNS * p) == 0]
    return min(legal or [1], key=lambda p: -(-images // (rows // p)) * -(-positions // p))
