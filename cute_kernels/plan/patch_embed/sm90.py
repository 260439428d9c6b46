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
from cute_kernels.plan.patch_embed.row_tiles import RowTiles
from cute_kernels.plan.sm90_transposed import (
    WARPGROUP_FEATURES,
    WARPGROUP_THREADS,
    TransposedPlan,
    check_barriers,
    ring_stages,
)
from cute_kernels.plan.sm90_transposed import check_registers as check_consumer_registers


@dataclass(frozen=True)
class Sm90PatchEmbedPlan(RowTiles, TransposedPlan, PatchEmbedPlan):
    """The persistent WGMMA kernel over rows, as `TransposedPlan` says."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm90.patch_embed.kernel:PatchEmbedKernel"
    config: Sm90PatchEmbedConfig

    table_layout: TableLayout = "paired"

    # ---- tiles -----------------------------------------------------------------------------------------------------

    @property
    def tile_rows(self) -> int:
        return self.config.tile_rows

    @property
    def resident(self) -> bool:
        return self.config.weight == "registers"

    @property
    def tile_positions(self) -> int:
        return self.config.tile_positions

    @property
    def rows_of_tiles(self) -> str:
        """Without positions a tile is consecutive rows, whatever the order is called."""
        return "flat" if self.positions == 1 else self.config.order

    @property
    def tile_k(self) -> int:
        return self.k_block_bytes // ITEMSIZE[self.problem.in_dtype]

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

    # ---- bias + position table -------------------------------------------------------------------------------------

    @property
    def table_shape(self) -> tuple[int, int, int, int] | None:
        """``[rows, padded_n / 16, 8, 2]``, or None without bias and positions.

        A thread holds features ``f`` and ``f + 8`` of 16, which stand side by side, so that one load brings both.
        """
        if self.problem.table_rows == 0:
            return None
        return (self.table_height, self.padded_n // 16, 8, 2)

    @property
    def compiled_in(self) -> dict[str, Hashable]:
        """Loops over K are unrolled, and a flat order either wraps once in a tile or divides."""
        return super().compiled_in | {"k_blocks": self.k_blocks, "table_wraps_once": self.table_wraps_once}

    @property
    def table_registers(self) -> int:
        """Table values per thread of a tile: two features for every position, in flat order for every pair of rows."""
        return 2 * self.config.tile_positions if self.config.order == "position" else self.accumulator_registers

    @property
    def prefetches_table(self) -> bool:
        """A thread fetches its table values of a whole tile before its WGMMAs, if registers allow."""
        one_pair = self.config.order == "position" and self.config.tile_positions == 1
        return one_pair or self.needed_registers + self.table_registers <= self.consumer_registers

    @property
    def row_registers(self) -> int:
        """Factors of a thread's rows of a tile."""
        return self.config.tile_rows // 4 if self.problem.row_scale else 0

    @property
    def prefetches_rows(self) -> bool:
        """Likewise of these factors, beside the table values."""
        table = self.table_registers if self.problem.table_rows and self.prefetches_table else 0
        room = self.consumer_registers - self.needed_registers - table
        return 0 < self.row_registers <= room

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


def check_registers(plan: Sm90PatchEmbedPlan) -> None:
    """As `cute_kernels.plan.sm90_transposed.check_registers`; a streamed weight takes no registers."""
    check_consumer_registers(plan, "tile_rows", 1, 16, ("weight", plan.config.weight, "streamed"))


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
        config = dataclasses.replace(config, stages=ring_stages(least))
    return config


__all__ = [
    "VECTOR_BYTES",
    "WARPGROUP_FEATURES",
    "WARPGROUP_THREADS",
    "Sm90PatchEmbedPlan",
    "plan_configured",
    "resolve",
]
