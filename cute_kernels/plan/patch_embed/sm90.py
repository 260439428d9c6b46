"""Plan of the SM90a kernel: output transposed, weight resident in registers or streamed, warpgroups in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.config import PatchEmbedProblem, Sm90PatchEmbedConfig
from cute_kernels.plan.base import (
    ITEMSIZE,
    VECTOR_BYTES,
    Arch,
    SmemRegion,
    reject,
    require,
    smem_map,
)
from cute_kernels.plan.patch_embed.base import PatchEmbedPlan, TableLayout, check_capacity, check_epilogue

WARPGROUP_THREADS = 128
WARPGROUP_FEATURES = 64
"""Rows of a WGMMA: the output features that one warpgroup computes."""

CONSUMER_REGISTERS = {1: 240, 2: 232, 3: 160}
"""Registers per consumer thread by consumer warpgroups, and"""

PRODUCER_REGISTERS = {1: 40, 2: 40, 3: 32}
"""per producer thread: setmaxnreg hands the register file of 65,536 to those who need it, in multiples of 8."""

STAGE_BARRIER_BYTES = 16
"""Two mbarriers of a stage: full and empty."""

ADDRESSING_REGISTERS = 32
"""What a consumer needs besides weight fragments and accumulators, as the assembler reports it without spills."""


@dataclass(frozen=True)
class Sm90PatchEmbedPlan(PatchEmbedPlan):
    """The persistent WGMMA kernel. A tile is ``tile_rows`` rows of ``x`` by the features of one CTA.

    A CTA keeps its ``warpgroups * 64`` features, its slab, for the whole launch. The ``cluster`` CTAs of a cluster have
    neighbouring slabs and share their tiles of ``x``; ``groups`` clusters cover all features, and every group walks the
    rows in the same order, so that ``x`` comes from DRAM once and from L2 afterwards.
    """

    kernel: ClassVar[str] = "cute_kernels.kernels.sm90.patch_embed.kernel:PatchEmbedKernel"
    graph: ClassVar[str] = "cute_kernels.kernels.graph:sm90_graph"

    config: Sm90PatchEmbedConfig

    k_block_bytes: int = 128
    mma_k_bytes: int = 32
    table_layout: TableLayout = "paired"
    swizzle_period: int = 1024
    barrier_bytes: int = 1024

    # ---- tiles -----------------------------------------------------------------------------------------------------

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
        return self.config.tile_rows // self.config.tile_positions

    @property
    def row_tiles(self) -> int:
        return -(-self.rows_per_position // self.tile_images)

    @property
    def position_tiles(self) -> int:
        return -(-self.positions // self.config.tile_positions)

    @property
    def tiles(self) -> int:
        """Tiles of ``x``; each is taken once by every group."""
        return self.row_tiles * self.position_tiles

    @property
    def tile_k(self) -> int:
        return self.k_block_bytes // ITEMSIZE[self.problem.in_dtype]

    @property
    def features(self) -> int:
        """Output features of one CTA."""
        return self.config.warpgroups * WARPGROUP_FEATURES

    @property
    def slabs(self) -> int:
        return -(-self.problem.n // self.features)

    @property
    def groups(self) -> int:
        """Clusters that together cover all features."""
        return -(-self.slabs // self.config.cluster)

    @property
    def clusters(self) -> int:
        """As many whole groups as the device holds at once, at least one, never more than there are tiles."""
        resident_groups = self.sm_count // self.config.cluster // self.groups
        return max(1, min(resident_groups, self.tiles)) * self.groups

    @property
    def cluster(self) -> tuple[int, int, int]:
        return (self.config.cluster, 1, 1)

    # ---- warps -----------------------------------------------------------------------------------------------------

    @property
    def roles(self) -> tuple[str, ...]:
        """Consumer warpgroups first, then the producer warpgroup, of which one warp loads."""
        return ("mma",) * (4 * self.config.warpgroups) + ("load", "idle", "idle", "idle")

    @property
    def load_warp(self) -> int:
        return 4 * self.config.warpgroups

    @property
    def consumer_registers(self) -> int:
        return CONSUMER_REGISTERS[self.config.warpgroups]

    @property
    def producer_registers(self) -> int:
        return PRODUCER_REGISTERS[self.config.warpgroups]

    @property
    def tile_stages(self) -> int:
        """Stages that one tile takes."""
        return -(-self.k_blocks // self.config.stage_blocks)

    @property
    def handover_stage(self) -> int:
        """Stage of a tile after whose issue the next warpgroup may begin the same tile.

        The last one where the ring holds two tiles: then one warpgroup has the tensor cores to itself while another
        stores. With a shorter ring an earlier one, since a stage is free only when every warpgroup has read it.
        """
        return min(self.tile_stages - 1, max(0, self.config.stages - self.tile_stages + 1))

    # ---- memory ----------------------------------------------------------------------------------------------------

    @property
    def x_stage_bytes(self) -> int:
        return self.config.tile_rows * self.k_block_bytes * self.config.stage_blocks

    @property
    def weight_stage_bytes(self) -> int:
        streamed = self.config.weight == "streamed"
        return self.features * self.k_block_bytes * self.config.stage_blocks if streamed else 0

    @property
    def stage_bytes(self) -> int:
        """Operand bytes of one stage in one CTA; all of them complete on this CTA's full barrier."""
        return self.x_stage_bytes + self.weight_stage_bytes

    @property
    def staging_bytes(self) -> int:
        """Per warpgroup: ``tile_rows`` rows of 64 features, 128 bytes a row as SWIZZLE_128B needs."""
        return self.config.tile_rows * WARPGROUP_FEATURES * ITEMSIZE[self.problem.out_dtype]

    @cached_property
    def smem(self) -> tuple[SmemRegion, ...]:
        """Dynamic shared memory of a CTA, in address order."""
        stages = self.config.stages
        return smem_map((
            ("barriers", self.barrier_bytes, 128),
            (f"x: {stages} stages", stages * self.x_stage_bytes, self.swizzle_period),
            (f"weight: {self.config.weight}", stages * self.weight_stage_bytes, self.swizzle_period),
            ("output staging", self.config.warpgroups * self.staging_bytes, self.swizzle_period),
        ))  # fmt: skip

    @property
    def accumulator_registers(self) -> int:
        return self.config.tile_rows // 2

    @property
    def weight_registers(self) -> int:
        """Registers per thread of resident weight fragments: 64 x K bytes over 128 threads."""
        return self.k_blocks * 16 if self.config.weight == "registers" else 0

    @property
    def needed_registers(self) -> int:
        """Registers that a consumer thread holds through a tile."""
        return self.weight_registers + self.accumulator_registers + ADDRESSING_REGISTERS

    # ---- bias + position table -------------------------------------------------------------------------------------

    @property
    def padded_n(self) -> int:
        """Features rounded up to what all CTAs together compute, so that table reads need no bounds check."""
        return self.groups * self.config.cluster * self.features

    @property
    def table_shape(self) -> tuple[int, int, int, int] | None:
        """``[rows, padded_n / 16, 8, 2]``, or None without bias and positions.

        A thread holds features ``f`` and ``f + 8`` of 16, which stand side by side, so that one load brings both.
        """
        if self.problem.table_rows == 0:
            return None
        return (self.table_height, self.padded_n // 16, 8, 2)

    @property
    def table_wraps_once(self) -> bool:
        """Flat order: the rows of a tile pass the end of the table at most once, so that no row needs a division."""
        return self.problem.table_rows >= self.config.tile_rows

    @property
    def compiled_in(self) -> dict[str, Hashable]:
        """Loops over K are unrolled, and a flat order either wraps once in a tile or divides."""
        flat_table = self.config.order == "flat" and self.problem.table_rows > 0 and not self.problem.table_index
        wraps_once = self.table_wraps_once if flat_table else None
        return super().compiled_in | {"k_blocks": self.k_blocks, "table_wraps_once": wraps_once}

    @property
    def table_registers(self) -> int:
        """Table values per thread of a tile: two features for every position, in flat order for every pair of rows."""
        return 2 * self.config.tile_positions if self.config.order == "position" else self.accumulator_registers

    @property
    def prefetches_table(self) -> bool:
        """A thread fetches its table values of a whole tile before its WGMMAs, if registers allow."""
        one_pair = self.config.order == "position" and self.config.tile_positions == 1
        return one_pair or self.needed_registers + self.table_registers <= self.consumer_registers

    def describe_tiles(self) -> list[tuple[str, str]]:
        c = self.config
        registers = self.weight_registers + self.accumulator_registers
        if c.order == "flat":
            rows, tiles = "consecutive, image after image", f"{self.tiles}, flat order"
        else:
            rows = f"{self.tile_images} images x {c.tile_positions} positions"
            tiles = f"{self.tiles} = {self.row_tiles} x {self.position_tiles} of positions, {c.order} order"
        return [
            ("tile", f"{c.tile_rows} rows x {self.features} features, {self.k_blocks} K blocks of {self.tile_k}"),
            ("rows of a tile", rows),
            ("stages", f"{c.stages} of {c.stage_blocks} K blocks, {self.tile_stages} for a tile"),
            ("tiles", tiles),
            ("clusters", f"{self.clusters} of {c.cluster} CTAs in {self.groups} groups of features"),
            ("weight", f"{c.weight}, {self.weight_registers} registers per thread"),
            ("registers", f"{registers} + addressing, of {self.consumer_registers} per consumer thread"),
            ("epilogue", f"{c.epilogue}, table {self.table_shape}, pingpong {c.pingpong}"),
        ]


def plan_configured(
    problem: PatchEmbedProblem, config: Sm90PatchEmbedConfig, arch: Arch, sm_count: int
) -> Sm90PatchEmbedPlan:
    """The plan, or ValueError."""
    # A multiple of 16 is also one of 8, a swizzle atom, in the share of each of two CTAs.
    rows = tuple(range(16, 257, 16))
    require("tile_rows", config.tile_rows, rows, "N of a WGMMA, in pairs of 8 rows for stmatrix")
    require("warpgroups", config.warpgroups, (1, 2, 3), "consumer warpgroups that the register file holds")
    require("stage_blocks", config.stage_blocks, (1, 2, 3, 4), "K blocks of 128 bytes in a stage")
    require("cluster", config.cluster, (1, 2), "pairs of multiprocessors share x; larger clusters leave some idle")
    require("weight", config.weight, ("registers", "streamed"), "where the weight operand comes from")
    require("order", config.order, ("auto", "position", "flat"), "which rows make a tile")
    divisors = tuple(i for i in range(1, config.tile_rows // 8 + 1) if config.tile_rows % (8 * i) == 0)
    require("tile_positions", config.tile_positions, divisors, "the images of a tile are a multiple of 8")
    if config.stages < 2 and config.stages != 0:
        reject("stages", config.stages, "TMA and WGMMA overlap only with two stages or more; 0 fills the memory", 2)
    check_epilogue(config.epilogue)
    config = resolve(problem, config, arch)
    plan = Sm90PatchEmbedPlan(problem, config, arch, sm_count)
    if sm_count < config.cluster:
        reject("sm_count", sm_count, f"a cluster needs {config.cluster} multiprocessors", config.cluster)
    if problem.table_index and config.order != "flat":
        reject("order", config.order, "an index gives every row its own table row", "flat")
    if problem.m % plan.positions:
        rule = f"position order needs whole images of {plan.positions} positions, m = {problem.m}"
        reject("order", config.order, rule, "flat")
    if config.tile_positions > plan.positions:
        rule = f"{config.order} order has {plan.positions} positions"
        if config.order == "flat":
            rule = "in flat order the rows of a tile are consecutive ones"
        reject("tile_positions", config.tile_positions, rule, 1)
    if config.tile_positions > 1 and config.tile_positions % config.cluster:
        rule = f"each of {config.cluster} CTAs of a cluster loads its share of the positions of a tile"
        reject("tile_positions", config.tile_positions, rule, 1)
    check_registers(plan)
    check_barriers(plan)
    check_capacity(plan)
    return plan


def check_barriers(plan: Sm90PatchEmbedPlan) -> None:
    """The region of the barriers has a full and an empty one for each stage; operands begin right behind it."""
    most = plan.barrier_bytes // STAGE_BARRIER_BYTES
    if plan.config.stages > most:
        rule = f"the {plan.barrier_bytes:,} B of barriers hold those of {most} stages"
        others = plan.smem_bytes - plan.config.stages * plan.stage_bytes
        room = (plan.arch.smem_bytes - others) // plan.stage_bytes
        reject("stages", plan.config.stages, rule, max(2, min(most, room)))


def check_registers(plan: Sm90PatchEmbedPlan) -> None:
    """Weight fragments, accumulators and addressing of a consumer thread, against what setmaxnreg gives it."""
    needed = plan.needed_registers
    # A WGMMA's accumulators must fit what a thread has before setmaxnreg takes effect, too: the assembler says so.
    at_entry = plan.arch.register_file // plan.threads // 8 * 8
    if plan.accumulator_registers + ADDRESSING_REGISTERS > at_entry:
        rule = (
            f"{plan.accumulator_registers} registers of accumulators and {ADDRESSING_REGISTERS} for addressing, the "
            f"limit with {plan.threads} threads is {at_entry}"
        )
        reject("tile_rows", plan.config.tile_rows, rule, (at_entry - ADDRESSING_REGISTERS) * 2 // 16 * 16)
    if needed <= plan.consumer_registers:
        return
    rule = (
        f"{plan.weight_registers} registers of weight, {plan.accumulator_registers} of accumulators and "
        f"{ADDRESSING_REGISTERS} for addressing make {needed}, the limit with {plan.config.warpgroups} warpgroups is "
        f"{plan.consumer_registers}"
    )
    fit = (plan.consumer_registers - plan.weight_registers - ADDRESSING_REGISTERS) * 2 // 16 * 16
    if fit >= 16:
        reject("tile_rows", plan.config.tile_rows, rule, fit)
    reject("weight", plan.config.weight, rule, "streamed")


def resolve(problem: PatchEmbedProblem, config: Sm90PatchEmbedConfig, arch: Arch) -> Sm90PatchEmbedConfig:
    """The configuration with what it leaves open filled in: order of the rows, number of stages."""
    if config.order == "auto":
        positions, images = max(problem.table_rows, 1), config.tile_rows // config.tile_positions
        whole = problem.m % positions == 0
        filled = config.tile_positions > 1 or problem.m // positions >= images // 2
        by_position = (positions == 1 or (whole and filled)) and not problem.table_index
        config = dataclasses.replace(config, order="position" if by_position else "flat")
    if config.stages == 0:
        least = Sm90PatchEmbedPlan(problem, dataclasses.replace(config, stages=2), arch, arch.sm_count)
        room = 2 + (arch.smem_bytes - least.smem_bytes) // least.stage_bytes
        config = dataclasses.replace(config, stages=max(2, min(room, 2 * least.tile_stages)))
    return config


__all__ = [
    "VECTOR_BYTES",
    "WARPGROUP_FEATURES",
    "WARPGROUP_THREADS",
    "Sm90PatchEmbedPlan",
    "plan_configured",
    "resolve",
]
