"""Plan of the SM90a kernel: output transposed, weight resident in registers or streamed, warpgroups in turn."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.common.facts import number
from cute_kernels.config import PatchEmbedProblem, Sm90PatchEmbedConfig
from cute_kernels.plan import base, patch_embed
from cute_kernels.plan.patch_embed import PatchEmbedPlan
from cute_kernels.plan.patches_sm90 import Work, by_time
from cute_kernels.plan.sm90_transposed import TransposedPlan, check_barriers, of_tiles, ring_stages, work_of
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


# --- which SM90 configuration a problem gets: the one with the least modelled time ------------------------------------

def work(plan: Sm90PatchEmbedPlan) -> Work:
    """The work of a launch, for the model of its time."""
    p, c = plan.problem, plan.config
    beyond = (plan.row_tiles * plan.tile_images - plan.rows_per_position) * c.tile_positions
    at_once = plan.tiles <= plan.clusters // plan.feature_groups
    return work_of(
        plan, is_rows=True, block_bytes=plan.tile_rows * plan.k_block_bytes,
        beyond=min(plan.tile_rows / c.cluster, of_tiles(beyond, plan.row_tiles, at_once)),
        memory=(p.m + p.n) * p.k * plan.in_bytes + p.m * p.n * plan.out_bytes,
        flat=c.order == "flat" and p.table_rows > 1, positions=c.tile_positions, ragged=p.k * plan.in_bytes % 128 > 0
    )


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
    return by_time(plans, work)[0].config


def search_space(problem: PatchEmbedProblem, arch: base.Arch, sm_count: int) -> list[Sm90PatchEmbedPlan]:
    """Legal plans that are worth timing on a device, the one with the least modelled time first."""
    return by_time(candidates(problem, arch, sm_count), work)
