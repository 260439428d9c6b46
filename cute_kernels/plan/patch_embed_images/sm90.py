"""Plan of the SM90a kernel over uint8 images: pixels through shared memory, weights in registers or with the pixels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.config import Sm90ImagesConfig
from cute_kernels.plan.base import ITEMSIZE, SmemRegion, smem_map
from cute_kernels.plan.patch_embed_images.strips import REPACKED, StripsPlan
from cute_kernels.plan.sm90_transposed import (
    ADDRESSING_REGISTERS,
    BLOCK_REGISTERS,
    WARPGROUP_FEATURES,
    TransposedPlan,
)

ROWS_PER_STORE = 16
"""Columns of a WGMMA that one stmatrix.x4 of a warp covers."""

REPACK_WARPS = 7
"""Warps that lengthen rows of patches, the ones that two producer warpgroups have beside the one that loads: three of
one warpgroup could not keep up with TMA and the tensor cores (docs/measurements.md)."""

REPACK_REGISTERS = {1: (240, 136), 2: (208, 48), 3: (144, 40)}
"""Registers per consumer and per producer thread by consumer warpgroups, beside two producer warpgroups. A thread that
repacks holds two rows twice, which 48 have room for."""

RAW_STAGES = 2
"""Strips on their way to them at least: one is loaded while the other is repacked."""

MOST_COLUMNS = 256
"""The largest N of a WGMMA."""


@dataclass(frozen=True)
class Sm90ImagesPlan(StripsPlan, TransposedPlan):
    """The persistent WGMMA kernel over strips, as `TransposedPlan` says."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm90.patch_embed_images.kernel:PatchEmbedImagesKernel"

    config: Sm90ImagesConfig

    @property
    def resident(self) -> bool:
        return self.config.weight == "registers"

    @property
    def runs(self) -> str:
        weight = "" if self.resident else ", with the weight beside them"
        return f"{self.config.source}: one kernel reads the images{weight}"

    @property
    def roles(self) -> tuple[str, ...]:
        """A second producer warpgroup where rows are repacked, whose warps stand between TMA and the operand."""
        if not self.repacks:
            return super().roles
        return ("mma",) * (4 * self.config.warpgroups) + ("load",) + ("repack",) * REPACK_WARPS

    @property
    def stage_ctas(self) -> int:
        """What a CTA repacks it keeps."""
        return 1 if self.repacks else super().stage_ctas

    @property
    def load_stages(self) -> int:
        return self.config.raw_stages or RAW_STAGES if self.repacks else super().load_stages

    @property
    def held_pairs(self) -> int:
        """Pairs of rows that a thread of the warps that repack loads before it stores the first."""
        return self.config.repack_pairs or 1

    @property
    def drops_rows(self) -> bool:
        return self.repacks and self.config.skip_zeros

    def multiplies(self, block: int, step: int) -> bool:
        if not self.config.skip_zeros:
            return True
        first = block * self.k_block_bytes + step * self.mma_k_bytes
        if self.repacks:
            return first < REPACKED * self.span
        # Rows of a step or more alone can have a whole one of zeros.
        return self.splits or self.span < self.mma_k_bytes or first % self.span < self.row_bytes

    # ---- registers -------------------------------------------------------------------------------------------------

    @property
    def consumer_registers(self) -> int:
        return REPACK_REGISTERS[self.config.warpgroups][0] if self.repacks else super().consumer_registers

    @property
    def producer_registers(self) -> int:
        return REPACK_REGISTERS[self.config.warpgroups][1] if self.repacks else super().producer_registers

    @property
    def accumulator_registers(self) -> int:
        """Each term of a weight has sums of its own."""
        return self.terms * self.tile_rows // 2

    @property
    def held_blocks(self) -> int:
        """K blocks of a resident weight whose fragments stay in registers: of one term all.

        Of two, as many of the high one as there is room for beside two sets of accumulators.
        """
        if self.terms == 1:
            return self.k_blocks
        room = self.consumer_registers - self.accumulator_registers - ADDRESSING_REGISTERS
        return min(self.k_blocks, max(0, room // BLOCK_REGISTERS))

    @property
    def weight_registers(self) -> int:
        return self.held_blocks * BLOCK_REGISTERS if self.resident else 0

    @property
    def handover_stage(self) -> int:
        """Of two terms, whose weight leaves shared memory for a ring of one tile: half a tile behind.

        A stage is free only when every warpgroup has read it. A warpgroup that is half a tile behind stores while the
        other one multiplies, and of the ring the other half can be filled meanwhile.
        """
        behind = super().handover_stage
        return behind if self.terms == 1 else max(behind, min(self.tile_stages, self.config.stages) // 2)

    # ---- memory ----------------------------------------------------------------------------------------------------

    @property
    def shared_blocks(self) -> int:
        """K blocks of the weight that stay in shared memory: the low term, then the rest of the high one."""
        return self.terms * self.k_blocks - self.held_blocks

    @property
    def weight_bytes(self) -> int:
        """Of the weight that stays in shared memory."""
        return self.shared_blocks * self.features * self.k_block_bytes

    @property
    def weight_stage_bytes(self) -> int:
        """Of a streamed weight in a stage."""
        return 0 if self.resident else self.features * self.k_block_bytes * self.config.stage_blocks

    @property
    def ring_blocks(self) -> int:
        """K blocks of all stages."""
        return self.config.stages * self.config.stage_blocks

    @property
    def stage_bytes(self) -> int:
        return self.pixel_stage_bytes + self.weight_stage_bytes

    @property
    def staging_bytes(self) -> int:
        """Per warpgroup: ``tile_rows`` rows of 64 features, 128 bytes a row as SWIZZLE_128B needs."""
        return self.tile_rows * WARPGROUP_FEATURES * ITEMSIZE[self.problem.out_dtype]

    @cached_property
    def smem(self) -> tuple[SmemRegion, ...]:
        """Dynamic shared memory of a CTA, in address order: of the weight what stays, or its part of the stages."""
        stages = self.config.stages
        weight = self.weight_bytes + stages * self.weight_stage_bytes
        return smem_map((
            ("barriers", self.barrier_bytes, 128),
            (f"weight: {self.config.weight}, {self.shared_blocks} K blocks", weight, self.swizzle_period),
            (f"{self.config.source}: {stages} stages", stages * self.pixel_stage_bytes, self.swizzle_period),
            ("output staging", self.config.warpgroups * self.staging_bytes, self.swizzle_period),
            *((("strips before they are repacked", self.load_stages * self.load_pitch, 128),) if self.repacks else ()),
        ))  # fmt: skip

    # ---- bias + position table -------------------------------------------------------------------------------------

    @property
    def table_registers(self) -> int:
        """Table values of a thread for all columns of a tile."""
        return 4 * self.table_period if self.problem.table_rows else 0

    @property
    def holds_table(self) -> bool:
        """The values stay in registers until the position changes; otherwise they are read where they are added."""
        return 0 < self.table_registers <= self.consumer_registers - self.needed_registers

    @property
    def prefetches_table(self) -> bool:
        return self.holds_table

    @property
    def tile_positions(self) -> int:
        return self.tile_patches

    @property
    def rows_of_tiles(self) -> str:
        return "position"

    def describe_tiles(self) -> list[tuple[str, str]]:
        c = self.config
        what = f"{self.tile_images} images x {self.tile_patches} patches of a grid row"
        table = "none" if self.table_shape is None else f"{self.table_shape}, {'held' if self.holds_table else 'read'}"
        return [
            ("source", f"{c.source}: TMA boxes of {self.stage_box} pixels, images, rows, channels; {self._row}"),
            ("tile", f"{what} = {self.tile_rows} columns x {self.features} features, {self.k_blocks} K blocks of 128"),
            ("stages", f"{c.stages} of {c.stage_blocks} K blocks, {self.tile_stages} for a tile"),
            ("tiles", f"{self.tiles} = {self.image_tiles} of images x {self.position_tiles} of positions, {c.order}"),
            ("clusters", f"{self.clusters} of {c.cluster} CTAs in {self.groups} groups of features"),
            ("weight", f"{c.weight}, {self.weight_registers} registers per thread"),
            ("registers", f"{self.needed_registers} + table, of {self.consumer_registers} per consumer thread"),
            ("epilogue", f"table {table}, pingpong {c.pingpong}"),
        ]

    @property
    def _row(self) -> str:
        spans = " + ".join(str(part.span) for part in self.row_parts)
        return f"a patch's row of {self.row_bytes} bytes takes {spans}"
