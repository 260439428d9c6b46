"""Plan of the SM100a dense GEMM: CTA pairs, one or two MMA tiles per stage, a short ring of store buffers."""

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.common.facts import fact, number
from cute_kernels.config import GemmProblem, Sm100GemmConfig
from cute_kernels.plan import base
from cute_kernels.plan.gemm import GROUP_M, StagedGemmPlan, check_tile_order
from cute_kernels.plan.shared_operands import check_stores_and_stages
from cute_kernels.plan.tiles import CtaPairs

LEVEL_8 = Sm100GemmConfig()
LEVEL_7 = Sm100GemmConfig(block_m=256, stages=4)

WIDE = Sm100GemmConfig(tile_n=256, stages=6)
"""256 x 256 per pair: the widest UMMA, both accumulators in all of tensor memory."""

ONE_ACCUMULATOR = Sm100GemmConfig(block_m=256, tile_n=256, stages=4, accumulators=1)
"""512 x 256 per pair: two MMA tiles of the widest UMMA fill tensor memory; the epilogue overlaps only one by one."""


@dataclass(frozen=True)
class Sm100GemmPlan(CtaPairs, StagedGemmPlan):
    """A pair of CTAs (``cta_group::2``) computes ``mma_tiles`` UMMA tiles of 256 x ``tile_n`` side by side.

    Each CTA holds 128 rows of every MMA tile and loads those rows of ``a`` and half of the tile's rows of ``b``.
    """

    kernel: ClassVar[str] = "cute_kernels.kernels.sm100.gemm:Sm100GemmKernel"
    graph: ClassVar[str] = "cute_kernels.kernels.graph:sm100_graph"

    config: Sm100GemmConfig

    cta_group: int = 2
    cta_m: int = 128
    epilogue_warps: int = 4
    tmem_load_width: int = 32
    store_rows: int = base.LANES
    barrier_region: ClassVar[str] = "barriers and tensor-memory address"

    # ---- tiles -----------------------------------------------------------------------------------------------------
    mma_tiles = number(lambda self: self.config.block_m // self.cta_m)
    """UMMA tiles of 256 rows in one tile of the pair; they share the stage of ``b``."""
    mma_m = number(lambda self: self.cta_m * self.cta_group)
    pairs = fact(lambda self: (self.config.cluster_m // self.cta_group, self.config.cluster_n))
    """CTA pairs of a cluster along rows and columns."""
    ctas = number(lambda self: self.config.cluster_m * self.config.cluster_n)
    sharing_pairs = number(lambda self: sum(self.pairs) - 1)
    cluster_rows = number(lambda self: self.config.block_m * self.config.cluster_m)
    cluster_columns = number(lambda self: self.config.tile_n * self.config.cluster_n)

    # ---- memory ----------------------------------------------------------------------------------------------------
    a_stage_bytes = number(lambda self: self.config.block_m * self.k_block_bytes)
    storing_warps = number(lambda self: self.epilogue_warps)
    accumulators = number(lambda self: self.config.accumulators)
    tmem_columns = number(lambda self: self.accumulators * self.mma_tiles * self.config.tile_n)
    """Accumulators of every MMA tile, in the powers of two that tcgen05.alloc hands out."""
    tmem = fact(lambda self: base.tmem_accumulators(self.accumulators * self.mma_tiles, self.config.tile_n))


FIELDS = {
    "block_m": base.Field("one or two UMMA tiles of 128 rows per CTA", (128, 256)),
    "tile_n": base.Field("N of a UMMA in swizzle atoms of b, both CTAs holding half", (64, 128, 256)),
    "stages": base.Field("TMA and tensor core overlap only with two stages or more", least=2),
    "group_m": GROUP_M,
    "cluster_m": base.Field("CTAs of a cluster along the rows: one pair or two", (2, 4)),
    "cluster_n": base.Field("pairs of a cluster along the columns", (1, 2)),
    "accumulators": base.Field("of a whole tile in tensor memory", (1, 2)),
}


def checked_plan(problem: GemmProblem, config: Sm100GemmConfig, arch: base.Arch, sm_count: int) -> Sm100GemmPlan:
    base.check_fields(config, FIELDS)
    plan = Sm100GemmPlan(problem, config, arch, sm_count)
    if plan.tmem_columns > arch.tmem_columns:
        size = f"{config.accumulators} accumulators of {plan.mma_tiles} x {config.tile_n} columns"
        base.reject("tile_n", config.tile_n, f"{size} exceed {arch.tmem_columns} TMEM columns", config.tile_n // 2)
    base.check_sm_count(sm_count, plan.ctas)
    check_tile_order(plan)
    check_stores_and_stages(plan)
    return plan


CANDIDATES = {WIDE: 1.96, LEVEL_7: 1.96, LEVEL_8: 1.0}
"""Candidates that the chooser chooses from, and the time of a tile over that of Level 8's, which has half the outputs.

Level 7 is 1.0 to 5.5% faster than Level 8 where both fill the device. `WIDE` has tiles of its size; nobody has timed it
(docs/experiments.md).
"""


def default_config(problem: GemmProblem, arch: base.Arch, sm_count: int) -> Sm100GemmConfig:
    """The candidate that finishes its waves first.

    One rule that reproduces the CUDA original's table: time is the tiles of the busiest cluster times the cost of a
    tile. Larger tiles read less, but leave more clusters idle in the last wave of small problems.
    """

    def cost(config: Sm100GemmConfig) -> float:
        plan = Sm100GemmPlan(problem, config, arch, sm_count)
        return -(-plan.tiles // max(1, sm_count // plan.ctas)) * CANDIDATES[config]

    config = min(CANDIDATES, key=cost)
    regions = Sm100GemmPlan(problem, config, arch, sm_count).regions_per_tile
    # Of an output of 8 bits a tile has half as many store buffers.
    return dataclasses.replace(config, store_stages=math.gcd(config.store_stages, regions))


TUNED = (
    dataclasses.replace(WIDE, cluster_m=4),
    dataclasses.replace(WIDE, cluster_n=2),
    dataclasses.replace(WIDE, cluster_m=4, cluster_n=2),
    ONE_ACCUMULATOR,
    dataclasses.replace(LEVEL_8, cluster_m=4),
    dataclasses.replace(LEVEL_8, tile_n=64, stages=9, store_stages=1),
)
"""Candidates of a tuner besides: less traffic at a cost that no count shows, and tiles for small problems."""


def search_space(problem: GemmProblem, arch: base.Arch, sm_count: int) -> list[Sm100GemmPlan]:
    """Legal plans that are worth timing on a device: the chooser's choice, its candidates, and the others."""
    configs = dict.fromkeys((default_config(problem, arch, sm_count), *CANDIDATES, *TUNED))
    return base.legal_plans(checked_plan, problem, configs, arch, sm_count)
