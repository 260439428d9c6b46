"""Plan of the SM100a kernel over images: strips are the N operand of tcgen05, the weight stays on chip."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.config import Sm100ImagesConfig
from cute_kernels.plan.base import ITEMSIZE, LANES, SmemRegion, round_up, smem_map
from cute_kernels.plan.cta_pair import CtaPairs
from cute_kernels.plan.patch_embed_images.strips import StripsPlan

FEATURES = 128
"""Rows of a CTA's accumulator, the lanes of tensor memory: the output features that one CTA computes."""

COLUMN_STEP = 16
"""Patches of one CTA in a tile come in multiples of it: N of an integer MMA is a multiple of 16, of a pair of 32."""

MOST_COLUMNS = 256
"""The largest N of an MMA."""

BARRIER_BYTES = 8

ADDRESS_BYTES = 4
"""Where tcgen05.alloc writes the address of tensor memory, behind the barriers."""


@dataclass(frozen=True)
class Sm100ImagesPlan(StripsPlan, CtaPairs):
    """The persistent tcgen05 kernel over strips: ``D[feature, patch] = weight * patches^T``.

    A tile is computed by a pair of CTAs (``cta_group::2``), or by one. Each CTA holds the accumulator of its 128
    features, and of the patches it loads its own images; the MMAs of a pair read the patches of both.
    """

    kernel: ClassVar[str] = "cute_kernels.kernels.sm100.patch_embed_images.kernel:PatchEmbedImagesKernel"
    graph: ClassVar[str] = "cute_kernels.kernels.graph:sm100_images_graph"

    config: Sm100ImagesConfig

    features: int = FEATURES
    k_block_bytes: int = 128
    mma_k_bytes: int = 32
    load_warp: int = 0
    mma_warp: int = 1
    first_epilogue_warp: int = 2
    epilogue_warps: int = 4
    swizzle_period: int = 1024
    barrier_bytes: int = 1024

    @property
    def cta_group(self) -> int:
        return self.config.cta_group

    @property
    def ctas(self) -> int:
        return self.cta_group

    # ---- tiles -----------------------------------------------------------------------------------------------------

    @property
    def cta_images(self) -> int:
        return self.tile_images // self.cta_group

    @property
    def columns(self) -> int:
        """Of an accumulator: the patches of a tile."""
        return self.tile_rows

    @cached_property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """First column and columns of each part of an accumulator.

        The columns of a part are an MMA's: the first half of them are patches of the leader, the others of its
        neighbour, from patch ``first column / cta_group`` of the strips of each on.
        """
        step = self.config.part_columns
        return tuple((first, min(step, self.columns - first)) for first in range(0, self.columns, step))

    def patch_of(self, part: int, column: int) -> int:
        """Patch of the tile, the leader's first, that a column of a part belongs to."""
        first, columns = self.parts[part]
        cta, patch = divmod(column, columns // self.cta_group)
        return cta * self.cta_patches + first // self.cta_group + patch

    # ---- memory ----------------------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """Of a CTA's features, whichever memory they stay in."""
        return FEATURES * self.k_blocks * self.k_block_bytes

    @property
    def weight_columns(self) -> int:
        """Of tensor memory: a lane has the weight of its feature, four bytes of K in a column."""
        return self.k_blocks * self.k_block_bytes // 4 if self.config.weight == "tmem" else 0

    @property
    def accumulator_columns(self) -> int:
        return self.config.accumulators * self.columns

    @property
    def tmem_columns(self) -> int:
        """Columns allocated, in the powers of two that tcgen05.alloc hands out, from 32 on."""
        return max(32, 1 << (self.accumulator_columns + self.weight_columns - 1).bit_length())

    @property
    def weight_column(self) -> int:
        """The first column of the weight, which has the last ones."""
        return self.tmem_columns - self.weight_columns

    @property
    def staging_bytes(self) -> int:
        """Of a warp: the patches of a tile x 32 features, 64 bytes a patch; whole periods of SWIZZLE_64B."""
        return round_up(self.columns * LANES * ITEMSIZE[self.problem.out_dtype], 512)

    @cached_property
    def smem(self) -> tuple[SmemRegion, ...]:
        """Dynamic shared memory of a CTA, in address order."""
        stages = self.config.stages
        return smem_map((
            ("barriers and tensor-memory address", self.barrier_bytes, 128),
            ("weight", self.weight_bytes if self.config.weight == "smem" else 0, self.swizzle_period),
            (f"strips: {stages} stages", stages * self.stage_bytes, self.swizzle_period),
            ("output staging", self.epilogue_warps * self.staging_bytes, self.swizzle_period),
        ))  # fmt: skip

    @property
    def used_barrier_bytes(self) -> int:
        """Full and empty ones of stages and parts of accumulators, that of the weight, and the address behind them."""
        slots = 2 * self.config.stages + 2 * self.config.accumulators * len(self.parts) + 1
        return slots * BARRIER_BYTES + ADDRESS_BYTES

    # ---- printing --------------------------------------------------------------------------------------------------

    def describe_tiles(self) -> list[tuple[str, str]]:
        c = self.config
        what = f"{self.tile_images} images x {self.tile_patches} patches of a grid row"
        rows = self.features * self.cta_group
        weight = f", {self.weight_columns} columns from {self.weight_column} on" if c.weight == "tmem" else ""
        return [
            ("source", f"{c.source}: TMA boxes of {self.stage_box} pixels, images, rows, channels in each CTA"),
            ("tile", f"{what} = {self.columns} columns x {rows} features, {self.k_blocks} K blocks of 128"),
            ("parts", ", ".join(f"{first}-{first + count}" for first, count in self.parts)),
            ("stages", f"{c.stages} of {c.stage_blocks} K blocks, {self.tile_stages} for a tile"),
            ("tiles", f"{self.tiles} = {self.image_tiles} of images x {self.position_tiles} of positions, {c.order}"),
            ("clusters", f"{self.clusters} of {self.ctas} CTAs in {self.groups} groups of features"),
            ("epilogue", f"tcgen05.ld.16x256b.x{c.tmem_load_width // 8}, table {self.table_shape or 'none'}"),
            ("weight", f"{self.weight_bytes:,} B in {c.weight}{weight}"),
            ("TMEM accumulators", f"{c.accumulators} x {self.columns} columns"),
            ("TMEM total", f"{self.tmem_columns} of {self.arch.tmem_columns} columns"),
        ]
