"""Common parts of plans of GEMMs whose operands both come from shared memory and whose warps store own rows."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.common.facts import fact, number
from cute_kernels.common.words import counted
from cute_kernels.plan import base

SWIZZLE_BYTES = 128
"""Row of a SWIZZLE_128B buffer: of an operand stage in K, and of a store buffer in N."""

LEAST_ROW_BYTES = 32
"""Row of a buffer with the narrowest swizzle, SWIZZLE_32B."""

WARPGROUP_ROWS = 64
"""Rows of a WGMMA."""

WARP_ROWS = WARPGROUP_ROWS // 4
"""Rows of a WGMMA of which one warp has the accumulators."""

ADDRESSING_REGISTERS = 40
"""Registers that a consumer thread needs besides accumulators, as the assembler reports it without spills."""

GPC_SHARE = (10, 11)
"""Multiprocessors of which clusters of four or eight can be resident at once: those of a GPC are no multiple of them.
An H200 holds 30 clusters of four and 15 of eight. One more runs after all others: 32 of 2 x 2 took twice the time of 64
of 2 x 1 (bench/results)."""


@dataclass(frozen=True)
class StoreBuffers(base.Plan):
    """Every storing warp has a ring of ``store_stages`` buffers of ``store_rows`` rows of ``store_row_bytes``."""

    barrier_region: ClassVar[str] = "barriers"
    operand_names: ClassVar[tuple[str, str]] = ("a", "b")
    spare_barrier_bytes: ClassVar[int] = 0
    """Bytes of those of barriers that `first_smem` takes."""
    first_smem: ClassVar[tuple[tuple[str, int, int], ...]] = ()
    """Regions between barriers and stages: name, bytes, alignment."""
    more_smem: ClassVar[tuple[tuple[str, int, int], ...]] = ()
    """Regions behind all others."""

    storing_warps = number()
    """Warps of a CTA that store."""
    mma_tiles = number()
    """Pieces of a tile along its rows that one storing warp stores one after another."""
    store_row_bytes = number(lambda self: math.gcd(self.config.tile_n * self.out_bytes, SWIZZLE_BYTES))
    """Row of a store buffer: 128 bytes, or 64 or 32 where the columns of a tile are no whole number of those."""
    store_columns = number(lambda self: self.store_row_bytes // self.out_bytes)
    """Output columns of one store buffer."""

    @property
    def staging_bytes(self) -> int:
        """Store buffers of all warps that store."""
        return self.storing_warps * self.config.store_stages * self.store_rows * self.store_row_bytes

    @cached_property
    def smem(self) -> tuple[base.SmemRegion, ...]:
        """Dynamic shared memory of a CTA, in address order."""
        c, (a, b) = self.config, self.operand_names
        return base.smem_map(
            (self.barrier_region, self.barrier_bytes - self.spare_barrier_bytes, 128),
            *self.first_smem,
            (f"{a}: {c.stages} stages", c.stages * self.a_stage_bytes, self.swizzle_period),
            (f"{b}: {c.stages} stages", c.stages * self.b_stage_bytes, self.swizzle_period),
            (f"output: {counted(c.store_stages, 'stage')}", self.staging_bytes, self.swizzle_period),
            *self.more_smem,
        )

    regions_per_tile = number(lambda self: self.mma_tiles * (self.config.tile_n // self.store_columns))
    """Store buffers that one storing warp fills per tile."""


@dataclass(frozen=True)
class WgmmaPair(StoreBuffers):
    """A CTA has one loading warp and two consumer warpgroups; its accumulators are registers of the consumers.

    The warpgroups compute half of the rows of a tile each, or with ``pingpong`` a tile each, in turn. A tile of the
    rows of one WGMMA, without ``pingpong``, has one: two such CTAs fit the registers of a multiprocessor, so that the
    next launch is ready when this one ends.
    """

    tile_m = number()
    """Rows of a tile of one CTA, or of one warpgroup with ``pingpong``."""
    warpgroups = number(lambda self: 1 if self.tile_m == WARPGROUP_ROWS and not self.config.pingpong else 2)
    """Consumer warpgroups."""
    resident_ctas = number(lambda self: 2 if self.warpgroups == 1 else 1)
    consumer_registers = number(lambda self: 128 if self.warpgroups == 1 else 240)
    """With those of the producers no more than 65,536, or half of that."""
    producer_registers: ClassVar[int] = 24
    sharing_ctas = number()
    """CTAs that load operands for each other."""

    @property
    def most_clusters(self) -> int:
        """Clusters that are resident at once. They do not cross GPCs."""
        usable = self.sm_count
        if self.ctas > 2:
            usable = max(self.ctas, usable * GPC_SHARE[0] // GPC_SHARE[1])
        return max(1, usable // self.ctas)

    clusters = number(lambda self: max(1, min(self.most_clusters, self.tiles)))
    """Clusters of a launch."""

    warpgroup_rows = number(lambda self: self.tile_m if self.config.pingpong else self.tile_m // self.warpgroups)
    """Rows of the tile that one warpgroup computes."""
    mma_tiles = number(lambda self: self.warpgroup_rows // WARPGROUP_ROWS)
    """WGMMAs of 64 rows per K step of a warpgroup."""
    roles = fact(lambda self: ("mma",) * (4 * self.warpgroups) + ("load", "idle", "idle", "idle"))
    """Consumer warpgroups first, then the producer warpgroup, of which one warp loads."""
    load_warp = number(lambda self: 4 * self.warpgroups)
    accumulator_registers = number(lambda self: self.warpgroup_rows * self.config.tile_n // 128)
    a_stage_bytes = number(lambda self: self.tile_m * SWIZZLE_BYTES)
    b_stage_bytes = number(lambda self: self.config.tile_n * SWIZZLE_BYTES)
    stage_bytes = number(lambda self: self.a_stage_bytes + self.b_stage_bytes)
    """Operand bytes of one stage in one CTA, its own and those multicast to it."""
    store_rows: ClassVar[int] = WARP_ROWS
    """Rows of a store buffer: those of a WGMMA whose accumulators a warp has."""
    loaded_bytes = number(lambda self: self.stage_bytes)
    """Bytes that complete on the barrier of a stage."""
    storing_warps = number(lambda self: 4 * self.warpgroups)


def check_store_stages(plan: StoreBuffers) -> None:
    """A warp fills its ring of store buffers in whole turns."""
    if plan.store_row_bytes < LEAST_ROW_BYTES:
        columns = LEAST_ROW_BYTES // plan.out_bytes
        rule = f"rows of a store buffer have {LEAST_ROW_BYTES} bytes, {columns} columns of {plan.problem.out_dtype}"
        base.reject("tile_n", plan.config.tile_n, rule, base.round_up(plan.config.tile_n, columns))
    regions = plan.regions_per_tile
    divisors = tuple(count for count in range(1, regions + 1) if regions % count == 0)
    rule = f"a warp stores {regions} buffers per tile, in whole turns of the ring"
    base.require("store_stages", plan.config.store_stages, divisors, rule)


def check_stores_and_stages(plan: StoreBuffers) -> None:
    """Shared memory, by the number of operand stages, or of store buffers where two stages do not fit beside them."""
    if plan.smem_bytes <= plan.arch.smem_bytes:
        return
    c, fit, rule = plan.config, base.room_for_stages(plan), base.smem_rule(plan)
    if fit >= 2:
        base.reject("stages", c.stages, rule, fit)
    room = plan.arch.smem_bytes - plan.smem_bytes + plan.staging_bytes + (c.stages - 2) * plan.stage_bytes
    buffers = room * c.store_stages // plan.staging_bytes
    legal = [count for count in range(1, buffers + 1) if plan.regions_per_tile % count == 0]
    base.reject("store_stages", c.store_stages, f"{rule}, and at least two stages have to fit", max(legal, default=1))


def check_accumulators(plan: WgmmaPair) -> None:
    """The accumulators of a consumer thread leave registers for addresses."""
    needed = plan.accumulator_registers + ADDRESSING_REGISTERS
    if needed <= plan.consumer_registers:
        return
    rule = (
        f"{plan.accumulator_registers} registers of accumulators and {ADDRESSING_REGISTERS} for addressing make "
        f"{needed}, the limit is {plan.consumer_registers}"
    )
    fit = (plan.consumer_registers - ADDRESSING_REGISTERS) * 128 // plan.warpgroup_rows // 16 * 16
    base.reject("tile_n", plan.config.tile_n, rule, fit)
