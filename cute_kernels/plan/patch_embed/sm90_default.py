"""Which SM90 configuration a problem gets: the one with the least predicted time.

The prediction is linear in a few facts of a plan, with coefficients fitted to some thousands of timings on an H200
(``bench/tune.py`` measures and fits; docs/measurements.md says how well it chooses). It knows bursts only: from
`POWER_LIMITED_TERA_OPERATIONS` on, energy decides, and the configuration that was best when sustained is taken.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from cute_kernels.config import PatchEmbedProblem, Sm90PatchEmbedConfig
from cute_kernels.model.prediction import Prediction
from cute_kernels.plan.base import Arch
from cute_kernels.plan.patch_embed.base import check_capacity
from cute_kernels.plan.patch_embed.sm90 import Sm90PatchEmbedPlan, check_registers, plan_configured, resolve
from cute_kernels.plan.sm90_transposed import TransposedPlan

POWER_LIMITED_TERA_OPERATIONS = 0.25
"""Multiplications and additions from which launches in a row reach the power limit, about 250 images of 1024 rows."""

POWER_LIMITED = Sm90PatchEmbedConfig()

FACTS = (
    "launch", "tiles of a CTA", "elements of a CTA", "products of a CTA", "shared memory filled by a CTA",
    "L2 traffic", "resident weight", "resident weight of all CTAs", "first tile", "cluster", "stages of a CTA",
    "refills of the ring", "L2 traffic of rows that begin inside a line", "positions of a CTA",
    "table values of a CTA fetched late", "tiles of a CTA of a cluster",
    "loads of a CTA of rows that begin inside a line",
)  # fmt: skip
"""What a coefficient belongs to, in the order of `facts`."""

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
    """What the time of a launch is linear in, in the order of `FACTS`."""
    config = plan.config
    tiles = -(-plan.tiles // (plan.clusters // plan.groups))
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


def predicted_microseconds(plan: TransposedPlan) -> float:
    """Time of a launch between others of its kind, by the fit."""
    return sum(a * b for a, b in zip(_coefficients(plan), facts(plan), strict=True))


def predict(plan: TransposedPlan) -> Prediction:
    """The same, with what it consists of."""
    parts = {name: a * b for name, a, b in zip(FACTS, _coefficients(plan), facts(plan), strict=True) if a * b}
    return Prediction(sum(parts.values()), parts, CAVEAT)


def _coefficients(plan: TransposedPlan) -> tuple[float, ...]:
    return MICROSECONDS[plan.config.weight, plan.rows_of_tiles]


def candidates(problem: PatchEmbedProblem, arch: Arch, sm_count: int) -> Iterator[Sm90PatchEmbedPlan]:
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
        for positions in _tile_positions(problem, order, tile_rows, cluster):
            config = Sm90PatchEmbedConfig(
                tile_rows, warpgroups, 0, blocks, cluster, weight, order,
                pingpong=warpgroups > 1, tile_positions=positions,
            )  # fmt: skip
            plan = Sm90PatchEmbedPlan(problem, resolve(problem, config, arch), arch, sm_count)
            try:
                check_registers(plan)
                check_capacity(plan)
            except ValueError:
                continue
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
def default_config(problem: PatchEmbedProblem, arch: Arch, sm_count: int) -> Sm90PatchEmbedConfig:
    """The configuration for a problem."""
    images = problem.m // max(problem.table_rows, 1)
    operations = 2 * problem.m * problem.n * problem.k / 1e12
    if operations >= POWER_LIMITED_TERA_OPERATIONS and images >= POWER_LIMITED.tile_rows and not problem.table_index:
        plan = Sm90PatchEmbedPlan(problem, resolve(problem, POWER_LIMITED, arch), arch, sm_count)
        if problem.m % plan.positions == 0 and plan.needed_registers <= plan.consumer_registers and sm_count > 1:
            return plan.config
    plans = list(candidates(problem, arch, sm_count))
    if not plans:  # something of the problem fits no configuration: the plan of this one says what
        return resolve(
            problem, Sm90PatchEmbedConfig(tile_rows=16, warpgroups=1, stages=2, cluster=1, weight="streamed"), arch
        )
    return min(plans, key=predicted_microseconds).config


def search_space(problem: PatchEmbedProblem, arch: Arch, sm_count: int) -> list[Sm90PatchEmbedPlan]:
    """Legal plans that are worth timing on a device: the chooser's choice, then its candidates by predicted time."""
    chosen = plan_sm90(problem, None, arch, sm_count)
    others = sorted(candidates(problem, arch, sm_count), key=predicted_microseconds)
    return list(dict.fromkeys((chosen, *others)))


def plan_sm90(
    problem: PatchEmbedProblem, config: Sm90PatchEmbedConfig | None, arch: Arch, sm_count: int
) -> Sm90PatchEmbedPlan:
    """The plan, or ValueError; `default_config` when ``config`` is None."""
    config = default_config(problem, arch, sm_count) if config is None else config
    return plan_configured(problem, config, arch, sm_count)
