"""What plans of the patch embed of images have in common: the problem's limits, and how tiles cut images up."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.config import ImagesConfig, PatchEmbedImagesProblem
from cute_kernels.plan.base import ITEMSIZE, Plan, reject, require, round_up
from cute_kernels.plan.operands import Operand, sizes

STRIP_PATCH = 16
"""Pixels of a patch's row, 16 bytes in uint8: what one row of a core matrix is."""

STRIP_ROWS = 8
"""Rows of a patch in one K block of 128 bytes."""

BOX_BYTES = 256
"""Bytes of uint8 pixels in a row of a TMA box, and elements in any other of its dimensions (CUDA driver API)."""

MOST_PATCHES = BOX_BYTES // STRIP_PATCH


@dataclass(frozen=True)
class ImagesPlan(Plan):
    """Tiles of ``tile_patches`` patches of a grid row in ``tile_images`` images, and the K blocks of a patch."""

    operation: ClassVar[str] = "patch_embed_images"

    problem: PatchEmbedImagesProblem
    config: ImagesConfig

    @property
    def operands(self) -> tuple[Operand, ...]:
        """In memory: ``images`` [B, C, H, W], ``weight`` [N, K], ``scale`` [N], ``table`` as the plan's `table_shape`.

        Written is ``out`` [B, S, N]. K counts the pixels of a patch by (channel, row, column).
        """
        p = self.problem
        return (
            Operand("images", p.in_dtype),
            Operand("weight", "int8"),
            Operand("scale", "float32", alignment=4),
            Operand("table", "float32", present=p.table_rows > 0),
            Operand("out", p.out_dtype, written=True),
            *sizes(batch=p.batch, height=p.height, width=p.width, n=p.n, clusters=self.clusters),
        )

    @property
    def compiled_in(self) -> dict[str, Hashable]:
        return {"table": min(self.problem.table_rows, 2)}

    @property
    def launch_facts(self) -> dict[str, Any]:
        return {"table_shape": self.table_shape}

    @property
    def tile_patches(self) -> int:
        return self.config.tile_patches

    @property
    def tile_images(self) -> int:
        return self.config.tile_images

    @property
    def row_tiles(self) -> int:
        """Tiles along a grid row; of the last one, patches beyond the image are loaded as zeros and not stored."""
        return -(-self.problem.grid_width // self.tile_patches)

    @property
    def position_tiles(self) -> int:
        """Tiles of an image."""
        return self.row_tiles * self.problem.grid_height

    @property
    def image_tiles(self) -> int:
        return -(-self.problem.batch // self.tile_images)

    @property
    def tiles(self) -> int:
        return self.image_tiles * self.position_tiles

    @property
    def k_blocks(self) -> int:
        """Half patches of one channel, 8 rows of 16 bytes."""
        return self.problem.channels * (STRIP_PATCH // STRIP_ROWS)

    def describe_problem(self) -> str:
        p = self.problem
        layout = "NHWC" if p.channels_last else "NCHW"
        images = f"[{p.batch}, {p.channels}, {p.height}, {p.width}] {p.in_dtype} {layout}"
        return f"{images}, patches of {p.patch}, {p.n} features, {p.precision}, table rows {p.table_rows}"


def check_images_problem(p: PatchEmbedImagesProblem) -> None:
    """Limits of strips, of TMA and of the element types, on every architecture."""
    require("in_dtype", p.in_dtype, ("uint8",), "element types of images that this kernel multiplies")
    require("precision", p.precision, ("int8",), "contracts of uint8 images that have a kernel")
    require("out_dtype", p.out_dtype, ("bfloat16",), "element types that this kernel stores")
    if p.channels_last:
        rule = "strips are made of neighbouring pixels of one channel"
        reject("channels_last", p.channels_last, rule, False)
    require("patch", p.patch, (STRIP_PATCH,), "a patch's row of pixels is 16 bytes of a strip")
    for name, value, multiple in (("height", p.height, p.patch), ("width", p.width, p.patch)):
        if value < 1 or value % multiple:
            rule = f"an image has whole patches of {multiple}"
            reject(name, value, rule, max(multiple, round_up(value - multiple // 2, multiple)))
    # Coordinates of TMA are 32-bit, and a tile may begin up to its own length before the end of the tensor.
    largest = 2**31 - 256
    features = 16 // ITEMSIZE[p.out_dtype]
    for name, value, multiple, rule in (
        ("batch", p.batch, 1, ""),
        ("channels", p.channels, 1, ""),
        ("n", p.n, features, "an output row must be a multiple of 16 bytes for TMA; zero-pad it"),
    ):
        if not 1 <= value <= largest:
            limit = f"TMA coordinates allow 1 to {largest}"
            reject(name, value, limit, round_up(min(max(value, 1), largest), multiple))
        if value % multiple:
            reject(name, value, rule, round_up(value, multiple))
    strides = (
        ("height", p.height, p.channels * p.width, p.patch, "an image"),
        ("n", p.n, p.positions, features, "an image's embeddings"),
    )
    for name, value, rest, multiple, what in strides:
        if value * rest >= 2**31:
            rule = f"{what} of {value * rest:,} elements: strides are 32-bit"
            reject(name, value, rule, max(multiple, (2**31 - 1) // rest // multiple * multiple))
    legal = tuple(dict.fromkeys((0, 1, p.positions)))
    require("table_rows", p.table_rows, legal, "a table has 0 (absent), 1 (bias only) or S rows")
