"""Plans of the kernels that read images as strips: what a stage holds, and the table beside its columns.

A strip is a TMA box of whole pieces of image rows: rows of the pixels of ``tile_patches`` neighbouring patches in some
images. It lands in shared memory as ``[row][image][pixel]``. A patch's 16 pixels of a row are 16 bytes, so that patch n
of the box, image by image, begins at 16 n: with the rows as chunks of K, that is a K-major operand without swizzle (PTX
ISA, shared memory matrix layout), and nothing has to be gathered or rearranged.

Of 16-bit pixels a patch's row is 32 bytes, which no core matrix has side by side. TMA then gathers a patch row by row
and swizzles it (SWIZZLE_32B): in the same order, each row of the patches is a K-major operand of one step of K = 16.
"""

from __future__ import annotations

import math

from cute_kernels.config import PatchEmbedImagesProblem
from cute_kernels.plan.base import ITEMSIZE, LANES, reject, require
from cute_kernels.plan.feature_slabs import FeatureSlabs
from cute_kernels.plan.patch_embed_images.base import INTEGERS, STRIP_PATCH, STRIP_ROWS, ImagesPlan

COLUMN_GROUP = 8
"""Columns of a tensor core's result that its accumulators repeat with: a thread has two of each."""

BLOCK_FEATURES = 16
"""Features of which a thread has two: lane / 4 and lane / 4 + 8."""


class StripsPlan(ImagesPlan, FeatureSlabs):
    """Columns of a tile are its patches, image by image; features are the rows of the tensor core's result."""

    @property
    def tile_patches(self) -> int:
        return self.config.tile_patches

    @property
    def tiles(self) -> int:
        return self.image_tiles * self.position_tiles

    @property
    def pixel_bytes(self) -> int:
        return ITEMSIZE[self.problem.in_dtype]

    @property
    def block_rows(self) -> int:
        """Rows of a patch in one K block of 128 bytes."""
        return STRIP_ROWS // self.pixel_bytes

    @property
    def k_blocks(self) -> int:
        """Parts of a patch of one channel: 8 rows of 16 bytes, or 4 of 32."""
        return self.problem.channels * (STRIP_PATCH // self.block_rows)

    @property
    def tile_rows(self) -> int:
        """Patches of a tile."""
        return self.tile_patches * self.tile_images

    @property
    def cta_images(self) -> int:
        """Images of a tile that one CTA has in its shared memory."""
        return self.tile_images

    @property
    def cta_patches(self) -> int:
        """Patches of a tile that one CTA has in its shared memory."""
        return self.tile_patches * self.cta_images

    @property
    def stage_box(self) -> tuple[int, int, int, int]:
        """Pixels of a row, images, rows and channels of the box that fills a stage."""
        rows = self.block_rows * self.config.stage_blocks
        return (STRIP_PATCH * self.tile_patches, self.cta_images, rows, 1)

    @property
    def stages_per_channel(self) -> int:
        return STRIP_PATCH // self.block_rows // self.config.stage_blocks

    @property
    def stage_bytes(self) -> int:
        return math.prod(self.stage_box) * self.pixel_bytes

    @property
    def table_period(self) -> int:
        """Groups of 8 columns after which the positions of a tile repeat."""
        if self.problem.table_rows == 1:
            return 1
        return self.tile_patches // math.gcd(COLUMN_GROUP, self.tile_patches)

    @property
    def table_shape(self) -> tuple[int, int, int, int, int] | None:
        """``[position tiles, padded_n / 16, table_period, 32, 4]``, or None without bias and positions.

        What a lane of a warp adds to its accumulators of 16 features and 8 columns, as the lane holds them:
        ``[t, b, j, l, r]`` belongs to feature ``16 b + l / 4 + 8 (r / 2)`` and patch
        ``(8 j + 2 (l % 4) + r % 2) % tile_patches`` of tile t. With a bias alone there is one tile.
        """
        if self.problem.table_rows == 0:
            return None
        tiles = self.position_tiles if self.problem.table_rows > 1 else 1
        return (tiles, self.padded_n // BLOCK_FEATURES, self.table_period, LANES, 4)


def images_step(tile_patches: int, columns: int = 16) -> int:
    """What the images of a tile are a multiple of, so that its patches are one of ``columns``."""
    return columns // math.gcd(columns, tile_patches)


def check_table(plan: StripsPlan) -> None:
    """The table is indexed with 32 bits."""
    problem: PatchEmbedImagesProblem = plan.problem
    if plan.table_shape is not None and math.prod(plan.table_shape) >= 2**31:
        rule = f"the table is indexed with 32 bits and has {plan.padded_n} padded columns"
        rows = (2**31 - 1) // (plan.padded_n * plan.row_tiles * plan.table_period * COLUMN_GROUP)
        reject("height", problem.height, rule, rows * problem.patch)


def check_strips_problem(p: PatchEmbedImagesProblem, precisions: tuple[str, ...]) -> None:
    """What strips cannot do; ``precisions`` are those that the kernel multiplies."""
    rule = "this kernel multiplies weights of one term" if p.precision in INTEGERS else "a strip's pixels are bytes"
    require("precision", p.precision, precisions, rule)
    require("out_dtype", p.out_dtype, ("bfloat16",), "element types that this kernel stores")
    require("channels_last", p.channels_last, (False,), "strips are neighbouring pixels of one channel")
    require("patch", p.patch, (STRIP_PATCH,), "a patch's row of pixels is 16 bytes of a strip")


def check_gathered_problem(p: PatchEmbedImagesProblem) -> None:
    """What patches of 16-bit pixels have to be that are gathered in the order of a strip."""
    require("out_dtype", p.out_dtype, ("bfloat16", "float16"), "element types of 16 bits, which stmatrix transposes")
    require("patch", p.patch, (STRIP_PATCH,), "a patch's row of pixels is 32 bytes, one step of K")
