"""Common parts of the plans of the patch embed of images: the problem's limits, and how tiles cut images up."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.common.facts import fact, number
from cute_kernels.config import ImagesConfig, PatchEmbedImagesProblem
from cute_kernels.plan.base import ITEMSIZE, Field, Operand, Plan, reject, require, round_up, sizes
from cute_kernels.plan.options import BATCH, FEATURES, TABLE, Option, ProblemOptions, table_rows
from cute_kernels.plan.patchify import CONVERSIONS, describe_images

STRIP_PATCH = 16
"""Pixels of a patch's row, 16 bytes in uint8: what one row of a core matrix is."""

BOX_BYTES = 256
"""Bytes of uint8 pixels in a row of a TMA box, and elements in any other of its dimensions (CUDA driver API)."""

MOST_PATCHES = BOX_BYTES // STRIP_PATCH

TILE_PATCHES = Field(f"a row of a TMA box has {BOX_BYTES} bytes at most", least=1, most=MOST_PATCHES)
TILE_IMAGES = Field("a tile has images", least=1)
TILE_ORDER = Field("images or positions run fastest", ("row", "image"))


PIXEL_TYPES = {"int8": "uint8", "bf16": "bfloat16", "fp16": "float16"}
"""Element type of the images by precision, for those precisions that have a kernel."""


FLOATS = ("bfloat16", "float16", "float32")
"""Element types that an epilogue rounds to."""

GATHERED_PATCHES = (16, 32, 64)
"""Sides of patches whose rows of 16-bit pixels are 32, 64 or 128 bytes, which TMA swizzles as a whole."""


def describe_problem(p: PatchEmbedImagesProblem) -> str:
    """One line about what is computed."""
    return f"{describe_images(p)}, patches of {p.patch}, {p.n} features, {p.precision}, table rows {p.table_rows}"


def multiplied_type(pixels: str, precision: str) -> str:
    """Element type that pixels of type ``pixels`` are given to a kernel as, to which they are rounded where it differs.

    With integer weights they have to be bytes; floating-point ones are multiplied by numbers of their own type.
    """
    return PIXEL_TYPES[precision] if precision in ("bf16", "fp16") else pixels


def pixel_types(patch: int, precision: str) -> tuple[str, ...]:
    """Element types that images may have, the one that is multiplied first.

    A pass that lays out rows also rounds; it is there where TMA cannot read patches of this side as 16-bit numbers.
    """
    multiplied = PIXEL_TYPES[precision]
    if multiplied == "uint8" or patch in GATHERED_PATCHES:
        return (multiplied,)
    rounded = (pixels for pixels, rows in CONVERSIONS.items() if multiplied in rows and pixels != multiplied)
    return (multiplied, *rounded)


@dataclass(frozen=True)
class ImagesPlan(Plan):
    """A kernel that reads patches out of images."""

    operation: ClassVar[str] = "patch_embed_images"

    problem: PatchEmbedImagesProblem
    config: ImagesConfig

    @functools.cached_property
    def operands(self) -> tuple[Operand, ...]:
        """In memory: ``images`` [B, C, H, W], ``weight`` [N, K], ``scale`` [N], ``table`` as the plan's `table_shape`.

        Written is ``out`` [B, S, N]. K is the plan's `weight_columns_of_k`, the pixels of a patch by (channel, row,
        column) unless the plan says otherwise. Integer weights alone have a scale.
        """
        p = self.problem
        integers = p.precision == "int8"
        return (
            Operand("images", p.in_dtype),
            Operand("weight", "int8" if integers else p.in_dtype),
            Operand("scale", "float32", alignment=4, present=integers),
            Operand("table", "float32", present=p.table_rows > 0),
            Operand("out", p.out_dtype, written=True),
            *sizes(batch=p.batch, height=p.height, width=p.width, n=p.n, clusters=self.clusters),
        )

    weight_columns_of_k = number(lambda self: self.problem.k)
    """Columns of the weight as the kernel reads it."""

    table_shape = fact()
    """Shape of the bias + position table as the kernel reads it; None without one."""

    compiled_in = fact(lambda self: {"table": min(self.problem.table_rows, 2)})

    def describe_problem(self) -> str:
        return describe_problem(self.problem)


@dataclass(frozen=True)
class GridTilesPlan(ImagesPlan):
    """A tile has neighbouring patches of a grid row, at the same positions in ``tile_images`` images."""

    @property
    def runs(self) -> str:
        source = "strips" if self.problem.precision == "int8" else "gather"
        return f"{source}: one kernel reads the images"

    tile_patches = number(lambda self: self.config.tile_patches)
    """Neighbouring patches of a grid row in a tile."""
    tile_images = number(lambda self: self.config.tile_images)
    row_tiles = number(lambda self: -(-self.problem.grid_width // self.tile_patches))
    """Tiles along a grid row; of the last one, patches beyond the image are loaded as zeros and not stored."""
    position_tiles = number(lambda self: self.row_tiles * self.problem.grid_height)
    """Tiles of an image."""
    image_tiles = number(lambda self: -(-self.problem.batch // self.tile_images))


def check_images_problem(p: PatchEmbedImagesProblem) -> None:
    """Limits of TMA and of the element types, whatever the kernel."""
    require("precision", p.precision, tuple(PIXEL_TYPES), "contracts that have a kernel")
    rule = f"element types of images that a kernel multiplies with precision {p.precision!r}"
    require("in_dtype", p.in_dtype, pixel_types(p.patch, p.precision), rule)
    require("out_dtype", p.out_dtype, FLOATS, "element types that an epilogue rounds to")
    if p.channels_last and p.precision != "int8":
        rule = "sums of rounded products have the order of the channels; those of integers are exact in any"
        reject("channels_last", p.channels_last, rule, False)
    if p.patch < 1:
        reject("patch", p.patch, "a patch has pixels", STRIP_PATCH)
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


def _problem_of_options(
    *, features: int, table: str, precision: str, in_dtype: str | None, **fields: Any
) -> PatchEmbedImagesProblem:
    pixels = in_dtype or PIXEL_TYPES[precision]
    problem = PatchEmbedImagesProblem(n=features, precision=precision, in_dtype=pixels, **fields)
    return dataclasses.replace(problem, table_rows=table_rows(table, problem.positions))


OPTIONS = ProblemOptions(
    (
        BATCH,
        FEATURES,
        TABLE,
        Option("height", 224, "height of an image in pixels, whole patches"),
        Option("width", 224, "width of an image in pixels, whole patches"),
        Option("channels", 3),
        Option("patch", 16, "pixels of a patch along each side"),
        Option("channels_last", False, "the channels of a pixel are neighbours in memory"),
        Option("precision", "int8", "precision of the prepared weight", tuple(PIXEL_TYPES)),
        Option(
            "in_dtype",
            None,
            "element type of the images (default: uint8 with int8, otherwise that of --precision)",
            (*FLOATS, "uint8"),
        ),
        Option("out_dtype", "bfloat16", choices=FLOATS),
    ),
    _problem_of_options,
)
