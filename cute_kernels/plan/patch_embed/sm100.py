"""Plan of the SM100a kernel: CTA pairs, tensor memory, specialised warps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.config import PatchEmbedProblem, Sm100PatchEmbedConfig
from cute_kernels.plan.base import (
    ITEMSIZE,
    LANES,
    VECTOR_BYTES,
    Arch,
    SmemRegion,
    reject,
    require,
    smem_map,
)
from cute_kernels.plan.cta_pair import CtaPairs
from cute_kernels.plan.patch_embed.base import PatchEmbedPlan, TableLayout, check_capacity, check_epilogue

TUNED = {
    "tile_n": (256, 128), "stages": (4, 3, 5, 6, 7, 8), "epilogue_warps": (5, 4), "tmem_load_width": (32, 16, 64),
}  # fmt: skip
"""Fields of the configuration that a tuner varies, with their values; the rounding contract is the caller's."""


@dataclass(frozen=True)
class Sm100PatchEmbedPlan(CtaPairs, PatchEmbedPlan):
    """The persistent tcgen05 GEMM: CTA pairs, tensor-memory accumulators, specialised warps.

    Tiles are 256 rows by ``tile_n`` columns and belong to a pair of CTAs (``cta_group::2``): each CTA holds 128 rows of
    the accumulator and loads its 128 rows of ``x`` and half of the tile's weight rows.
    """

    kernel: ClassVar[str] = "cute_kernels.kernels.sm100.patch_embed.kernel:PatchEmbedKernel"
    graph: ClassVar[str] = "cute_kernels.kernels.graph:sm100_graph"

    config: Sm100PatchEmbedConfig

    cta_group: int = 2
    cta_m: int = 128
    k_block_bytes: int = 128
    mma_k_bytes: int = 32
    accumulators: int = 2
    waves: int = 1
    load_warp: int = 0
    mma_warp: int = 1
    first_epilogue_warp: int = 2
    table_layout: TableLayout = "blocked"
    store_columns: int = 64
    swizzle_period: int = 1024
    barrier_bytes: int = 1024

    # ---- tiles -----------------------------------------------------------------------------------------------------

    @property
    def tile_m(self) -> int:
        return self.cta_m * self.cta_group

    @property
    def tile_n(self) -> int:
        return self.config.tile_n

    @property
    def tile_k(self) -> int:
        """Elements of K in one stage: the 128 bytes that one SWIZZLE_128B row holds."""
        return self.k_block_bytes // ITEMSIZE[self.problem.in_dtype]

    @property
    def m_tiles(self) -> int:
        return -(-self.problem.m // self.tile_m)

    @property
    def n_tiles(self) -> int:
        return -(-self.problem.n // self.tile_n)

    @property
    def tiles(self) -> int:
        return self.m_tiles * self.n_tiles

    # ---- warps -----------------------------------------------------------------------------------------------------

    @property
    def epilogue_warps(self) -> int:
        return self.config.epilogue_warps

    @property
    def warps(self) -> int:
        return self.first_epilogue_warp + self.epilogue_warps

    @cached_property
    def epilogue_columns(self) -> tuple[tuple[int, int], ...]:
        """Columns ``[begin, end)`` of the tile that each epilogue warp stores.

        A warp reaches only the tensor-memory lanes (= rows) of quarter ``warp_id % 4``, so the rows follow from the
        hardware warp id. Warps that share a quarter split its columns.
        """
        ids = range(self.first_epilogue_warp, self.warps)
        spans = []
        for warp in ids:
            sharers = [w for w in ids if w % 4 == warp % 4]
            width = self.tile_n // len(sharers)
            begin = sharers.index(warp) * width
            spans.append((begin, begin + width))
        return tuple(spans)

    # ---- memory ----------------------------------------------------------------------------------------------------

    @property
    def a_stage_bytes(self) -> int:
        return self.cta_m * self.k_block_bytes

    @property
    def store_region_bytes(self) -> int:
        """One staging region: 32 rows of 64 output columns, 128 bytes a row as SWIZZLE_128B needs."""
        return LANES * self.store_columns * ITEMSIZE[self.problem.out_dtype]

    @cached_property
    def staging_regions(self) -> tuple[int, ...]:
        """First staging region of each epilogue warp, in units of `store_region_bytes`."""
        firsts, total = [], 0
        for begin, end in self.epilogue_columns:
            firsts.append(total)
            total += (end - begin) // self.store_columns
        return tuple(firsts)

    @property
    def staging_bytes(self) -> int:
        return self.cta_m * self.tile_n * ITEMSIZE[self.problem.out_dtype]

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

    # ---- bias + position table -------------------------------------------------------------------------------------

    @property
    def padded_n(self) -> int:
        """Columns rounded up to whole tiles, so that table reads need no bounds check."""
        return self.n_tiles * self.tile_n

    @property
    def table_shape(self) -> tuple[int, int, int, int] | None:
        """``[ceil(rows / 32), padded_n / V, 32, V]`` with V elements in 16 bytes, or None without bias and positions.

        The 32 lanes of a warp hold 32 consecutive rows, so one 16-byte load per lane reads 512 consecutive bytes: four
        128-byte lines instead of the 32 of a row-major table and the 16 of a `[.., .., 32, 32]` blocked one.
        """
        if self.problem.table_rows == 0:
            return None
        vector = VECTOR_BYTES // ITEMSIZE[self.table_dtype]
        return (-(-self.table_height // LANES), self.padded_n // vector, LANES, vector)

    # ---- printing --------------------------------------------------------------------------------------------------

    def describe_tiles(self) -> list[tuple[str, str]]:
        c = self.config
        return [
            ("tile", f"{self.tile_m} x {self.tile_n} per CTA pair, {self.k_blocks} K blocks of {self.tile_k}"),
            ("tiles", f"{self.tiles} = {self.m_tiles} x {self.n_tiles} over {self.clusters} clusters"),
            ("epilogue columns by warp", ", ".join(f"{b}-{e}" for b, e in self.epilogue_columns)),
            ("epilogue", f"{c.epilogue}, tcgen05.ld.32x32b.x{c.tmem_load_width}, table {self.table_shape}"),
            ("TMEM accumulators", f"{self.accumulators} x {self.tile_n} columns"),
            ("TMEM total", f"{self.tmem_columns} of {self.arch.tmem_columns} columns"),
        ]


def plan_sm100(
    problem: PatchEmbedProblem, config: Sm100PatchEmbedConfig | None, arch: Arch, sm_count: int
) -> Sm100PatchEmbedPlan:
    """The plan, or ValueError; the default configuration when ``config`` is None."""
    config = Sm100PatchEmbedConfig() if config is None else config
    require("tile_n", config.tile_n, (128, 256), "two accumulators of tile_n columns share 512 TMEM columns")
    require("epilogue_warps", config.epilogue_warps, (4, 5), "four lane quarters, at most one of them shared")
    require("tmem_load_width", config.tmem_load_width, (16, 32, 64), "a load must divide the columns of a warp")
    if config.stages < 2:
        reject("stages", config.stages, "TMA and tensor core overlap only with two stages or more", 2)
    check_epilogue(config.epilogue)
    plan = Sm100PatchEmbedPlan(problem, config, arch, sm_count)
    plan.check_sm_count()
    check_capacity(plan)
    return plan


def search_space(problem: PatchEmbedProblem, arch: Arch, sm_count: int) -> list[Sm100PatchEmbedPlan]:
    """Legal plans that are worth timing on a device: the default, then those that differ from it, in few fields first.

    The default is the fastest of the notes that it descends from (docs/experiments.md), so that what is near to it
    is more promising than what is far.
    """
    chosen = plan_sm100(problem, None, arch, sm_count)
    names = tuple(TUNED)

    def distance(values: tuple[int, ...]) -> int:
        return sum(getattr(chosen.config, name) != value for name, value in zip(names, values, strict=True))

    plans = [chosen]
    for values in sorted(itertools.product(*TUNED.values()), key=distance):
        with contextlib.suppress(ValueError):
            config = dataclasses.replace(chosen.config, **dict(zip(names, values, strict=True)))
            plans.append(plan_sm100(problem, config, arch, sm_count))
    return list(dict.fromkeys(plans))
