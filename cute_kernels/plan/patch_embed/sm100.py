"""Plan of the SM100a kernel: CTA pairs, tensor memory, specialised warps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.config import PatchEmbedProblem, Sm100PatchEmbedConfig
from cute_kernels.model import b200
from cute_kernels.plan.base import ITEMSIZE, Arch, SmemRegion, TmemRegion, reject, require, smem_map
from cute_kernels.plan.cta_pair import CtaPairs
from cute_kernels.plan.patch_embed.base import PatchEmbedPlan, check_capacity, check_epilogue
from cute_kernels.plan.patch_embed.row_tiles import RowTiles
from cute_kernels.plan.patch_embed.sm100_epilogue import (
    STORE_COLUMNS,
    Sm100Epilogue,
    check_columns,
    check_epilogue_warps,
)
from cute_kernels.plan.patch_embed.sm100_order import check_order, resolve

LINE = 128
"""Bytes of a line of shared and global memory."""

TUNED = {
    "tile_n": (256, 128), "stages": (4, 3, 5, 6, 7, 8), "epilogue_warps": (5, 4), "tmem_load_width": (32, 16, 64),
}  # fmt: skip
"""Fields of the configuration that a tuner varies, with their values; the rounding contract is the caller's."""


@dataclass(frozen=True)
class Sm100PatchEmbedPlan(RowTiles, Sm100Epilogue, CtaPairs, PatchEmbedPlan):
    """The persistent tcgen05 GEMM: CTA pairs, tensor-memory accumulators, specialised warps.

    Tiles are 256 rows by ``tile_n`` columns and belong to a pair of CTAs (``cta_group::2``): each CTA holds 128 rows of
    the accumulator and loads its 128 rows of ``x`` and half of the tile's weight rows. With ``cta_group::1`` a CTA
    works alone, on 128 rows. The rows are consecutive ones, or images at positions, images running fastest.
    """

    kernel: ClassVar[str] = "cute_kernels.kernels.sm100.patch_embed.kernel:PatchEmbedKernel"
    graph: ClassVar[str] = "cute_kernels.kernels.graph:sm100_graph"

    config: Sm100PatchEmbedConfig

    cta_m: int = 128
    k_block_bytes: int = 128
    mma_k_bytes: int = 32
    accumulators: int = 2
    waves: int = 1
    load_warp: int = 0
    mma_warp: int = 1
    first_epilogue_warp: int = 2
    store_columns: int = STORE_COLUMNS
    swizzle_period: int = 1024
    barrier_bytes: int = 1024

    # ---- tiles -----------------------------------------------------------------------------------------------------

    @property
    def cta_group(self) -> int:
        return self.config.cta_group

    @property
    def tile_m(self) -> int:
        return self.cta_m * self.cta_group

    @property
    def tile_rows(self) -> int:
        return self.tile_m

    @property
    def cta_positions(self) -> int:
        """Positions of the rows that one CTA loads: those of the tile are dealt out first, images where it has one."""
        return max(self.config.tile_positions // self.cta_group, 1)

    @property
    def cta_images(self) -> int:
        return self.cta_m // self.cta_positions

    @property
    def tile_n(self) -> int:
        return self.config.tile_n

    @property
    def tile_k(self) -> int:
        """Elements of K in one stage: the 128 bytes that one SWIZZLE_128B row holds."""
        return self.k_block_bytes // ITEMSIZE[self.problem.in_dtype]

    @property
    def m_tiles(self) -> int:
        """Blocks of images times blocks of positions, which run faster."""
        return self.row_tiles * self.position_tiles

    @property
    def n_tiles(self) -> int:
        return -(-self.problem.n // self.tile_n)

    @property
    def tiles(self) -> int:
        return self.m_tiles * self.n_tiles

    # ---- memory ----------------------------------------------------------------------------------------------------

    @property
    def a_stage_bytes(self) -> int:
        return self.cta_m * self.k_block_bytes

    @cached_property
    def smem(self) -> tuple[SmemRegion, ...]:
        """Dynamic shared memory of a CTA, in address order."""
        stages = self.config.stages
        return smem_map((
            ("barriers and tensor-memory address", self.barrier_bytes, 128),
            (f"x: {stages} stages", stages * self.a_stage_bytes, self.swizzle_period),
            (f"weight: {stages} stages", stages * self.b_stage_bytes, self.swizzle_period),
            ("output staging", self.staging_bytes, self.swizzle_period),
        ))  # fmt: skip

    @property
    def tmem_columns(self) -> int:
        """Columns allocated: both accumulators, in the powers of two that tcgen05.alloc hands out."""
        return self.accumulators * self.tile_n

    @property
    def tmem(self) -> tuple[TmemRegion, ...]:
        return tuple(TmemRegion(f"accumulator {i}", i * self.tile_n, self.tile_n) for i in range(self.accumulators))

    @property
    def padded_n(self) -> int:
        """Columns rounded up to whole tiles, so that table reads need no bounds check."""
        return self.n_tiles * self.tile_n

    # ---- counted work ----------------------------------------------------------------------------------------------

    @property
    def mma_clocks(self) -> float:
        """Of a tile in one CTA, by the published rate."""
        return self.cta_m * self.tile_n * self.k_blocks * self.k_block_bytes / b200.MACS_PER_CLOCK

    @property
    def work(self) -> b200.TileWork:
        """What the busiest CTA does, in the units that the model of time has costs for.

        Every warp of the epilogue has a quarter of the rows.
        """
        config = self.config
        out_lines = self.cta_m * self.tile_n * ITEMSIZE[self.problem.out_dtype] // LINE
        stores = {
            "tma": 2 * out_lines,  # staging is written and read by TMA
            "coalesced": 3 * out_lines,  # and stored by the warps, line by line
            "direct": 4 * out_lines,  # 32 bytes of a line at a time
        }[config.store]
        columns = max(end - begin for begin, end in self.epilogue_columns)
        return b200.TileWork(
            tiles=-(-self.tiles // self.clusters),
            mma_clocks=self.mma_clocks,
            operand_bytes=self.k_blocks * self.stage_bytes,
            lines=self.table_lines + stores,
            partial_lines=4 * out_lines if config.store == "direct" else 0,
            waits=-(-columns // (config.tmem_load_width * config.tmem_loads)),
            columns=columns,
            memory_bytes=self.memory_bytes,
        )

    # ---- printing --------------------------------------------------------------------------------------------------

    def describe_tiles(self) -> list[tuple[str, str]]:
        c = self.config
        owner = "CTA pair" if self.cta_group == 2 else "CTA"
        rows = "consecutive"
        if c.order == "position":
            rows = f"{self.tile_images} images x {c.tile_positions} positions"
        loads = f"{c.tmem_loads} x tcgen05.ld.32x32b.x{c.tmem_load_width}"
        stores = {"tma": "TMA", "coalesced": "rows, coalesced", "direct": "32 bytes per thread"}[c.store]
        if c.store == "tma":
            widest = max(end - begin for begin, end in self.epilogue_columns)
            groups = ", ".join(str(group.end - group.first) for group in self.store_groups(widest))
            regions = f"regions of {self.store_columns} columns: {groups}"
            stores = f"{stores}, {regions}; {self.store_buffers(widest)} buffers"
        return [
            ("tile", f"{self.tile_m} x {self.tile_n} per {owner}, {self.k_blocks} K blocks of {self.tile_k}"),
            ("rows of a tile", f"{rows}, {c.order} order"),
            ("tiles", f"{self.tiles} = {self.m_tiles} x {self.n_tiles} over {self.clusters} clusters"),
            ("epilogue columns by warp", ", ".join(f"{b}-{e}" for b, e in self.epilogue_columns)),
            ("epilogue", f"{c.epilogue}, {loads}, {c.table} table {self.table_shape}"),
            ("stores", stores),
            ("TMEM accumulators", f"{self.accumulators} x {self.tile_n} columns"),
            ("TMEM total", f"{self.tmem_columns} of {self.arch.tmem_columns} columns"),
        ]


def plan_streamed(
    problem: PatchEmbedProblem, config: Sm100PatchEmbedConfig, arch: Arch, sm_count: int
) -> Sm100PatchEmbedPlan:
    """The plan, or ValueError."""
    require("tile_n", config.tile_n, (128, 256), "two accumulators of tile_n columns share 512 TMEM columns")
    require("cta_group", config.cta_group, (1, 2), "tcgen05.mma multiplies in one CTA or in a pair")
    if config.stages < 2:
        reject("stages", config.stages, "TMA and tensor core overlap only with two stages or more", 2)
    check_epilogue(config.epilogue)
    check_epilogue_warps(config)
    check_order(problem, config)

    def planned(candidate: Sm100PatchEmbedConfig) -> Sm100PatchEmbedPlan:
        return Sm100PatchEmbedPlan(problem, candidate, arch, sm_count)

    planned(config).check_sm_count()
    plan = planned(resolve(problem, config, planned))
    check_order(problem, plan.config)
    check_columns(plan)
    check_capacity(plan)
    return plan


def search_space(problem: PatchEmbedProblem, arch: Arch, sm_count: int) -> list[Sm100PatchEmbedPlan]:
    """Legal plans that are worth timing on a device: the default, then those that differ from it, in few fields first.

    The default is the fastest of the notes that it descends from (docs/experiments.md), so that what is near to it
    is more promising than what is far.
    """
    chosen = plan_streamed(problem, Sm100PatchEmbedConfig(), arch, sm_count)
    names = tuple(TUNED)

    def distance(values: tuple[int, ...]) -> int:
        return sum(getattr(chosen.config, name) != value for name, value in zip(names, values, strict=True))

    plans = [chosen]
    for values in sorted(itertools.product(*TUNED.values()), key=distance):
        with contextlib.suppress(ValueError):
            config = dataclasses.replace(chosen.config, **dict(zip(names, values, strict=True)))
            plans.append(plan_streamed(problem, config, arch, sm_count))
    return list(dict.fromkeys(plans))
