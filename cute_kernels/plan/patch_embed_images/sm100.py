"""Plan of the SM100a kernel over images: strips are the N operand of tcgen05, the weight stays on chip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.config import Sm100ImagesConfig
from cute_kernels.plan.patch_embed.base import WEIGHT_TYPES
from cute_kernels.plan.patch_embed_images.strips import StripsPlan
from cute_kernels.plan.sm100_transposed import Sm100TransposedPlan


@dataclass(frozen=True)
class Sm100ImagesPlan(StripsPlan, Sm100TransposedPlan):
    """The persistent tcgen05 kernel over strips: rows of ``x`` are patches, of which a CTA loads its own images."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm100.patch_embed_images.kernel:PatchEmbedImagesKernel"
    stage_name: ClassVar[str] = "strips"

    config: Sm100ImagesConfig

    # ---- tiles -----------------------------------------------------------------------------------------------------

    @property
    def cta_images(self) -> int:
        return self.tile_images // self.cta_group

    @property
    def weight_dtype(self) -> str:
        return WEIGHT_TYPES[self.problem.in_dtype]

    # ---- printing --------------------------------------------------------------------------------------------------

    def describe_tiles(self) -> list[tuple[str, str]]:
        c = self.config
        what = f"{self.tile_images} images x {self.tile_patches} patches of a grid row"
        features = self.features * self.cta_group
        return [
            ("source", f"{c.source}: TMA boxes of {self.stage_box} pixels, images, rows, channels in each CTA"),
            ("tile", f"{what} = {self.columns} columns x {features} features, {self.k_blocks} K blocks of 128"),
            *self.describe_parts(),
            ("tiles", f"{self.tiles} = {self.image_tiles} of images x {self.position_tiles} of positions, {c.order}"),
            ("epilogue", f"tcgen05.ld.16x256b.x{c.tmem_load_width // 8}, table {self.table_shape or 'none'}"),
            *self.describe_memory(),
        ]
