"""Plan of the SM90a kernel: output transposed, weight resident in registers or streamed, warpgroups in turn."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.common.facts import number, text
from cute_kernels.config import PatchEmbedProblem, Sm90PatchEmbedConfig
from cute_kernels.plan import base, patch_embed
from cute_kernels.plan.patch_embed import PatchEmbedPlan
from cute_kernels.plan.sm90_transposed import WARPGROUP_FEATURES, TransposedPlan, check_barriers, ring_stages
from cute_kernels.plan.sm90_transposed import check_registers as check_consumer_registers
from cute_kernels.plan.tiles import TransposedRows


@dataclass(frozen=True)
class Sm90PatchEmbedPlan(TransposedRows, TransposedPlan, PatchEmbedPlan):
    """The persistent WGMMA kernel over rows, as `TransposedPlan` says."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm90.patch_embed:Sm90PatchEmbedKernel"
    thread_features: ClassVar[int] = 2

    config: Sm90PatchEmbedConfig

    table_layout: patch_embed.TableLayout = "paired"

    # ---- tiles -----------------------------------------------------------------------------------------------------
    tile_positions = number(lambda self: self.config.tile_positions)

    rows_of_tiles = text(lambda self: "flat" if self.positions == 1 else self.config.order)
    """Without positions a tile is consecutive rows, whatever the order is called."""

    # ---- memory ----------------------------------------------------------------------------------------------------
    x_stage_bytes = number(lambda self: self.config.tile_rows * self.k_block_bytes * self.config.stage_blocks)
    stage_bytes = number(lambda self: self.x_stage_bytes + self.weight_stage_bytes)

    @cached_property
    def smem(self) -> tuple[base.SmemRegion, ...]:
        """Dynamic shared memory of a CTA, in address order."""
        stages = self.config.stages
        return base.smem_map(
            ("barriers", self.barrier_bytes, 128),
            (f"x: {stages} stages", stages * self.x_stage_bytes, self.swizzle_period),
            (f"weight: {self.config.weight}", stages * self.weight_stage_bytes, self.swizzle_period),
            ("output staging", self.config.warpgroups * self.staging_bytes, self.swizzle_period),
        )

    # ---- bias + position table -------------------------------------------------------------------------------------
    @property
    def table_registers(self) -> int:
        """Table values per thread of a tile: two features for every position, in flat order for every pair of rows."""
        return 2 * self.config.tile_positions if self.config.order == "position" else self.accumulator_registers

    @property
    def prefetches_table(self) -> bool:
        """A thread fetches its table values of a whole tile before its WGMMAs, if registers allow."""
        one_pair = self.config.order == "position" and self.config.tile_positions == 1
        return one_pair or self.needed_registers + self.table_registers <= self.consumer_registers

    row_registers = number(lambda self: self.config.tile_rows // 4 if self.problem.row_scale else 0)
    """Factors of a thread's rows of a tile."""

    @property
    def prefetches_rows(self) -> bool:
        """Whether these factors are prefetched beside the table values."""
        table = self.table_registers if self.problem.table_rows and self.prefetches_table else 0
        room = self.consumer_registers - self.needed_registers - table
        return 0 < self.row_registers <= room


FIELDS = {
    # A multiple of 16 is also one of 8, a swizzle atom, in the share of each of two CTAs.
    "tile_rows": base.Field("N of a WGMMA, in pairs of 8 rows for stmatrix", tuple(range(16, 257, 16))),
    "warpgroups": base.Field("consumer warpgroups that the register file holds", (1, 2, 3)),
    "stages": base.Field("TMA and WGMMA overlap only with two stages or more", least=2, open=base.TWO_TILES),
    "stage_blocks": base.Field("K blocks of 128 bytes in a stage", (1, 2, 3, 4)),
    "cluster": base.Field("pairs of multiprocessors share x; larger clusters leave some idle", (1, 2)),
    "weight": base.Field("where the weight operand comes from", ("registers", "streamed")),
    "order": patch_embed.ORDER,
    "epilogue": patch_embed.EPILOGUE,
}


def checked_plan(
    problem: PatchEmbedProblem, config: Sm90PatchEmbedConfig, arch: base.Arch, sm_count: int
) -> Sm90PatchEmbedPlan:
    base.check_fields(config, FIELDS)
    divisors = tuple(i for i in range(1, config.tile_rows // 8 + 1) if config.tile_rows % (8 * i) == 0)
    base.require("tile_positions", config.tile_positions, divisors, "the images of a tile are a multiple of 8")
    config = resolve(problem, config, arch)
    plan = Sm90PatchEmbedPlan(problem, config, arch, sm_count)
    base.check_sm_count(sm_count, config.cluster)
    patch_embed.check_order(problem, config.order)
    patch_embed.check_tile_positions(plan)
    if config.tile_positions > 1 and config.tile_positions % config.cluster:
        rule = f"each of {config.cluster} CTAs of a cluster loads its share of the positions of a tile"
        base.reject("tile_positions", config.tile_positions, rule, 1)
    check_registers(plan)
    check_barriers(plan)
    patch_embed.check_capacity(plan)
    return plan


def check_registers(plan: Sm90PatchEmbedPlan) -> None:
    """Checks registers like `cute_kernels.plan.sm90_transposed.check_registers`; a streamed weight takes none."""
    check_consumer_registers(plan, "tile_rows", 1, 16, ("weight", plan.config.weight, "streamed"))


def resolve(problem: PatchEmbedProblem, config: Sm90PatchEmbedConfig, arch: base.Arch) -> Sm90PatchEmbedConfig:
    """The configuration with what it leaves open filled in: order of the rows, number of stages."""
    if config.order is None:
        positions, images = max(problem.table_rows, 1), config.tile_rows // config.tile_positions
        whole = problem.m % positions == 0
        filled = config.tile_positions > 1 or problem.m // positions >= images // 2
        by_position = (positions == 1 or (whole and filled)) and not problem.table_index
        config = dataclasses.replace(config, order="position" if by_position else "flat")
    if config.stages is None:
        least = Sm90PatchEmbedPlan(problem, dataclasses.replace(config, stages=2), arch, arch.sm_count)
        config = dataclasses.replace(config, stages=ring_stages(least))
    return config


# --- which SM90 configuration a problem gets: the one with the least predicted time ----------------------------------
# The prediction is linear in a few facts of a plan, with coefficients fitted to some thousands of timings on an H200
# (``bench/tune.py`` measures and fits; docs/performance.md says how well it chooses). It knows bursts only: from
# `POWER_LIMITED_TERA_OPERATIONS` on, energy decides, and the configuration that was best when sustained is taken.


POWER_LIMITED_TERA_OPERATIONS = 0.25
"""Multiplications and additions from which launches in a row reach the power limit, about 250 images of 1024 rows."""

POWER_LIMITED = Sm90PatchEmbedConfig()

POWER_LIMITED_SLACK = 1.2
"""The configuration is not taken where its prediction for full clocks is so much longer than the least, as where its
tiles of 128 images are not full: 387 images took 1.35 of the fastest candidate's time (bench/results: 2026-11-29-h200).
"""

FACTS = (
    "launch",
    "tiles of a CTA",
    "elements of a CTA",
    "products of a CTA",
    "shared memory filled by a CTA",
    "L2 traffic",
    "resident weight",
    "resident weight of all CTAs",
    "first tile",
    "cluster",
    "stages of a CTA",
    "refills of the ring",
    "L2 traffic of rows that begin inside a line",
    "positions of a CTA",
    "table values of a CTA fetched late",
    "tiles of a CTA of a cluster",
    "loads of a CTA of rows that begin inside a line",
)
"""Names of the coefficients, in the order of `facts`."""

MICROSECONDS: dict[tuple[str, str], tuple[float, ...]] = {
    ("streamed", "flat"): (
        1.758, 0.0, 0.748, 0.211, 0.028, 0.05, 0.0, 0.0, 0.543,
        0.021, 0.877, 0.198, 0.026, 0.0, 0.0, 0.153, 0.398,
    ),
    ("registers", "flat"): (
        0.146, 0.368, 0.0, 1.414, 0.097, 0.009, 1.949, 1.099, 2.235,
        0.0, 0.0, 0.168, 0.025, 0.0, 0.205, 0.006, 0.0,
    ),
    ("streamed", "position"): (
        2.5, 0.0, 0.27, 0.332, 0.347, 0.0, 0.0, 0.0, 0.207,
        0.099, 0.0, 0.67, 0.021, 0.0, 0.0, 0.031, 0.292,
    ),
    ("registers", "position"): (
        0.0, 0.505, 0.0, 1.066, 0.0, 0.0, 1.399, 1.433, 2.107,
        0.0, 0.0, 0.0, 0.0, 0.738, 0.315, 0.0, 0.268,
    ),
}  # fmt: skip
"""Coefficients of `facts` by where the weight is and the order of the rows."""


def facts(plan: TransposedPlan) -> tuple[float, ...]:
    """Facts that the time of a launch is linear in, in the order of `FACTS`."""
    config = plan.config
    tiles = -(-plan.tiles // (plan.clusters // plan.feature_groups))
    ctas = plan.clusters * config.cluster
    weight_rows = 0 if plan.resident else plan.features
    blocks_kib = plan.tile_stages * config.stage_blocks * plan.k_block_bytes / 1024
    tile_kib = blocks_kib * (plan.tile_rows + weight_rows)
    l2_kib = blocks_kib * (plan.tile_rows / config.cluster + weight_rows)
    elements = plan.tile_rows * config.warpgroups
    # A load is one refill behind the stage that it follows: with s stages, s - 1 of them hide each other's latency.
    loads = tiles * plan.tile_stages
    refills = loads / (config.stages - 1) if loads > config.stages else 0.0
    resident = config.warpgroups * plan.k_blocks if plan.resident else 0
    return (
        1.0,
        tiles,
        tiles * elements / 1e2,
        tiles * elements * plan.k_blocks / 1e3,
        tiles * tile_kib / 1e2,
        ctas * tiles * l2_kib / 1e3,
        resident / 10,
        resident * ctas / 1e3,
        tile_kib / 1e2,
        float(config.cluster > 1),
        tiles * plan.tile_stages / 1e2,
        refills,
        ctas * tiles * l2_kib / 1e3 if plan.problem.k % 128 else 0.0,
        tiles * plan.tile_positions / 1e2,
        0.0 if plan.prefetches_table else tiles * plan.table_registers * config.warpgroups / 1e2,
        tiles if config.cluster > 1 else 0.0,
        tiles * l2_kib / 1e2 if plan.problem.k % 128 else 0.0,
    )


CAVEAT = (
    "Modelled, from launches on an H200 that were measured: of problems that the fit had not seen, error 6% in the "
    "median and 54% at the most, rank correlation within a problem 0.90 in the median and 0.68 at the least."
)
"""`python -m bench.model` prints these figures."""


ERROR = 0.17
"""Largest error of nine launches in ten, of problems that the fit had not seen."""


def predicted_microseconds(plan: TransposedPlan) -> float:
    """Time of a launch between others of its kind, by the fit."""
    return sum(a * b for a, b in zip(_coefficients(plan), facts(plan), strict=True))


def predict(plan: TransposedPlan) -> base.Prediction:
    """Predicted time of a launch, with what it consists of."""
    parts = {name: a * b for name, a, b in zip(FACTS, _coefficients(plan), facts(plan), strict=True) if a * b}
    return base.Prediction(sum(parts.values()), parts, CAVEAT, ERROR)


def _coefficients(plan: TransposedPlan) -> tuple[float, ...]:
    return MICROSECONDS[plan.config.weight, plan.rows_of_tiles]


def candidates(problem: PatchEmbedProblem, arch: base.Arch, sm_count: int) -> Iterator[Sm90PatchEmbedPlan]:
    """Legal plans worth comparing."""
    orders = ["flat"] if problem.table_rows > 1 or problem.table_index else ["position"]
    if problem.table_rows > 1 and problem.m % problem.table_rows == 0 and not problem.table_index:
        orders.append("position")
    choices = itertools.product(orders, ("streamed", "registers"), (1, 2, 3), (128, 96, 64, 32, 16), (1, 2), (1, 2, 3))
    for order, weight, warpgroups, tile_rows, cluster, blocks in choices:
        if weight == "registers" and (blocks != 2 or warpgroups == 1):
            continue  # never best where it was measured
        if warpgroups == 1 and tile_rows > 64:
            continue  # not measured: large tiles have work for more
        if cluster > sm_count:
            continue
        if weight == "streamed" and -(-problem.n // (warpgroups * WARPGROUP_FEATURES)) % cluster:
            continue  # TMA is slow to fill a CTA's rows behind the weight's last: up to 1.7 of cluster 1's time
        for positions in _tile_positions(problem, order, tile_rows, cluster):
            config = Sm90PatchEmbedConfig(
                tile_rows=tile_rows, warpgroups=warpgroups, stage_blocks=blocks, cluster=cluster, weight=weight,
                order=order, pingpong=warpgroups > 1, tile_positions=positions
            )
            plan = Sm90PatchEmbedPlan(problem, resolve(problem, config, arch), arch, sm_count)
            if base.is_legal(plan, check_registers) and base.is_legal(plan, patch_embed.check_capacity):
                yield plan


def _tile_positions(problem: PatchEmbedProblem, order: str, tile_rows: int, cluster: int) -> list[int]:
    """Positions of a tile worth comparing: the fewest and the most with which its images are well filled."""
    if order == "flat" or problem.table_rows <= 1:
        return [1]
    images = problem.m // problem.table_rows
    possible = []
    for positions in range(1, tile_rows // 8 + 1):
        tile_images, rest = divmod(tile_rows, positions)
        shared = positions == 1 or positions % cluster == 0
        legal = rest == 0 and tile_images % 8 == 0 and shared and positions <= problem.table_rows
        if legal and 2 * -(-images // tile_images) * tile_images <= 3 * images:
            possible.append(positions)
    return sorted({possible[0], possible[-1]}) if possible else []


@functools.lru_cache(maxsize=4096)
def default_config(problem: PatchEmbedProblem, arch: base.Arch, sm_count: int) -> Sm90PatchEmbedConfig:
    plans = list(candidates(problem, arch, sm_count))
    if not plans:  # something of the problem fits no configuration: the plan of this one says what
        return resolve(
            problem, Sm90PatchEmbedConfig(tile_rows=16, warpgroups=1, stages=2, cluster=1, weight="streamed"), arch
        )
    best = min(plans, key=predicted_microseconds)
    images = problem.m // max(problem.table_rows, 1)
    operations = 2 * problem.m * problem.n * problem.k / 1e12
    if operations >= POWER_LIMITED_TERA_OPERATIONS and images >= POWER_LIMITED.tile_rows and not problem.table_index:
        plan = Sm90PatchEmbedPlan(problem, resolve(problem, POWER_LIMITED, arch), arch, sm_count)
        legal = problem.m % plan.positions == 0 and plan.needed_registers <= plan.consumer_registers and sm_count > 1
        if legal and predicted_microseconds(plan) <= POWER_LIMITED_SLACK * predicted_microseconds(best):
            return plan.config
    return best.config


def search_space(problem: PatchEmbedProblem, arch: base.Arch, sm_count: int) -> list[Sm90PatchEmbedPlan]:
    """Legal plans that are worth timing on a device: the chooser's choice, then its candidates by predicted time."""
    chosen = checked_plan(problem, default_config(problem, arch, sm_count), arch, sm_count)
    others = sorted(candidates(problem, arch, sm_count), key=predicted_microseconds)
    return list(dict.fromkeys((chosen, *others)))
