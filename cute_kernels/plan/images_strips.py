"""Plans of the kernels that read images as strips: what a stage holds, and the table beside its columns.

A strip is a TMA box of whole pieces of image rows: rows of the pixels of ``tile_patches`` neighbouring patches in some
images. It lands in shared memory as ``[row][image][pixel]``. A patch's 16 pixels of a row are 16 bytes, so that patch n
of the box, image by image, begins at 16 n: with the rows as chunks of K, that is a K-major operand without swizzle (PTX
ISA, shared memory matrix layout), and nothing has to be gathered or rearranged.

Longer rows, of 16-bit pixels, of larger patches, or of patches whose channels are last, are no 16 bytes, which is all
that a core matrix has side by side. TMA then gathers a patch row by row and swizzles it, SWIZZLE_32B, 64B or 128B after
the bytes of a row, its `span`: in the same order, each row of the patches is a K-major operand of one, two or four
steps of 32 bytes. Rows between two spans, such as the 48 bytes of 16 pixels with three channels, are boxes longer than
the row is in the tensor map: TMA fills the rest with zeros, and so has the weight. Or they are split: two boxes bring
two thirds and one third of each row, 32 and 16 or 64 and 32 bytes, to operands of their own, and K has no zeros.

Rows of 14 pixels begin where no row of an operand can. Strips of them are loaded all the same, and warps copy them to
rows of 16 bytes; with two rows of zeros a patch then is one of 16 x 16.
"""

import math
from dataclasses import dataclass

from cute_kernels.common.facts import fact, flag, number
from cute_kernels.config import PatchEmbedImagesProblem
from cute_kernels.plan.base import ITEMSIZE, LANES, reject, require, round_up
from cute_kernels.plan.images import STRIP_PATCH, GridTilesPlan
from cute_kernels.plan.tiles import CORE_COLUMNS, FeatureTiles

BLOCK_FEATURES = 16
"""Features of which a thread has two: lane / 4 and lane / 4 + 8."""

BLOCK_BYTES = 128
"""Bytes of K in a K block."""

REPACKED = 14
"""Side of the patches whose rows of bytes warps lengthen to 16."""

REPACKED_ROWS = 16
"""Rows that such a patch has in an operand, two of them zeros: whole stages of 256 bytes."""

SPANS = (16, 32, 64, 128)
"""Bytes of a row of K-major operands: a core matrix's without swizzle, and those of the swizzles (PTX ISA)."""


SPLIT_SPANS = {48: (32, 16), 96: (64, 32)}
"""Parts that rows of these bytes are split into."""

SPLIT_BLOCKS = 3
"""K blocks of a stage of split rows: two of the longer parts, one of the shorter ones, of the same rows."""


@dataclass(frozen=True)
class RowPart:
    """Part of the rows of patches that one TMA box brings: its first byte in a patch's row, the bytes that it takes in
    shared memory, and which K blocks of a stage it fills."""

    offset: int
    span: int
    first_block: int
    blocks: int


class StripsPlan(GridTilesPlan, FeatureTiles):
    """Columns of a tile are its patches, image by image; features are the rows of the tensor core's result."""

    tiles = number(lambda self: self.image_tiles * self.position_tiles)
    row_bytes = number(lambda self: row_bytes(self.problem))
    """Bytes of a patch side by side in memory: a row of its pixels, with all channels where these are last."""
    span = number(lambda self: span_of(self.row_bytes))
    """Bytes that such a row takes in shared memory and in K."""
    gathers = flag(lambda self: self.span > SPANS[0])
    """TMA gathers single rows of patches; otherwise a row of a box is that of neighbouring patches, a strip."""
    splits = flag(lambda self: self.config.source == "split")
    """Rows come in two parts, each an operand of its own."""

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        if not self.splits:
            return (RowPart(0, self.span, 0, self.config.stage_blocks),)
        longer, shorter = SPLIT_SPANS[self.row_bytes]
        return (RowPart(0, longer, 0, SPLIT_BLOCKS - 1), RowPart(longer, shorter, SPLIT_BLOCKS - 1, 1))

    part_blocks = fact(lambda self: tuple(part.blocks for part in self.row_parts))
    """K blocks of a stage in each part."""
    row_span = number(lambda self: sum(part.span for part in self.row_parts))
    """Bytes of K that a row takes."""
    repacks = flag(lambda self: self.row_bytes == REPACKED)
    """Warps lengthen the rows of patches between the strips that TMA loads and the operand."""
    operand_rows = number(lambda self: REPACKED_ROWS if self.repacks else self.problem.patch)
    """Rows of a patch in the operand and in K."""
    load_box = fact(lambda self: self.box_of(self.row_parts[0]))
    """Box that TMA loads at once, of the only part of the rows."""

    def box_of(self, part: RowPart) -> tuple[int, ...]:
        """Box that TMA loads at once: of strips elements of a row, images, rows and planes.

        Where rows of patches are gathered the first mode is split: elements of one patch's row, patches.
        """
        _, *others = self.stage_box
        if self.gathers:
            return (part.span // self.in_bytes, self.tile_patches, *others)
        if self.repacks:
            return (REPACKED * self.tile_patches, self.cta_images, REPACKED, 1)
        return self.stage_box

    load_bytes = number(lambda self: math.prod(self.load_box) * self.in_bytes)
    load_pitch = number(lambda self: round_up(self.load_bytes, BLOCK_BYTES))
    """From one such box in shared memory to the next; TMA writes to multiples of 128 bytes."""
    load_stages = number(lambda self: self.config.stages)
    """Stages of what TMA loads: those of the operand, unless warps stand between."""
    planes = number(lambda self: 1 if self.problem.channels_last else self.problem.channels)
    """Images of one channel that an image consists of in memory; one, where channels are last."""
    k_blocks = number(lambda self: self.planes * self.operand_rows * self.row_span // BLOCK_BYTES)
    """Parts of a patch, plane by plane."""
    weight_columns_of_k = number(lambda self: self.planes * self.operand_rows * self.row_span // self.in_bytes)
    """K counts the pixels of a patch by (plane, row, place in the row), rows zero-padded to their span.

    Of split rows by (plane, stage, part, row of the stage, place in the part).
    """
    stage_rows = number(lambda self: sum(self.part_blocks) * BLOCK_BYTES // self.row_span)
    """Rows of a patch in a stage."""
    tile_rows = number(lambda self: self.tile_patches * self.tile_images)
    """Patches of a tile."""
    cta_images = number(lambda self: self.tile_images)
    """Images of a tile that one CTA has in its shared memory."""
    cta_patches = number(lambda self: self.tile_patches * self.cta_images)
    """Patches of a tile that one CTA has in its shared memory."""

    @property
    def stage_box(self) -> tuple[int, int, int, int]:
        """Elements of a row of all patches, images, rows and planes of the box that fills a stage."""
        return (self.row_span // self.in_bytes * self.tile_patches, self.cta_images, self.stage_rows, 1)

    stages_per_plane = number(lambda self: self.operand_rows // self.stage_rows)

    @property
    def pixel_stage_bytes(self) -> int:
        """Bytes of the pixels of the patches in a stage."""
        if self.repacks:  # rows of zeros are in K and not in the stages, since nothing multiplies them
            return REPACKED * self.row_span * self.cta_patches
        return math.prod(self.stage_box) * self.in_bytes

    stage_bytes = number(lambda self: self.pixel_stage_bytes)

    @property
    def table_period(self) -> int:
        """Groups of 8 columns after which the positions of a tile repeat."""
        if self.problem.table_rows == 1:
            return 1
        return self.tile_patches // math.gcd(CORE_COLUMNS, self.tile_patches)

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


def row_bytes(p: PatchEmbedImagesProblem) -> int:
    """Bytes of the pixels that a patch has side by side in memory."""
    return p.patch * ITEMSIZE[p.in_dtype] * (p.channels if p.channels_last else 1)


def may_split(p: PatchEmbedImagesProblem) -> bool:
    """Whether rows of patches are what two swizzles make up, and those of a patch whole stages."""
    return row_bytes(p) in SPLIT_SPANS and p.patch * row_bytes(p) % (SPLIT_BLOCKS * BLOCK_BYTES) == 0


def span_of(nbytes: int) -> int:
    """The least bytes of a row of an operand that holds so many; those of the longest one where none does."""
    return next((span for span in SPANS if span >= nbytes), SPANS[-1])


def why_no_operand(p: PatchEmbedImagesProblem) -> str:
    """Why rows of pixels of these patches are no rows of an operand as TMA writes them; empty where they are."""
    nbytes = row_bytes(p)
    if nbytes == REPACKED == p.patch:
        rule = f"an image's row of {p.width} pixels is not whole multiples of {SPANS[0]} bytes, as TMA reads them"
        return rule if p.width % SPANS[0] else ""
    what = f"a patch's row of {p.patch} pixels" + (f" and {p.channels} channels" if p.channels_last else "")
    if nbytes % SPANS[0] or nbytes > SPANS[-1]:
        return f"{what} is {nbytes} bytes: TMA reads multiples of {SPANS[0]}, and swizzles {SPANS[-1]} at most"
    if p.patch * span_of(nbytes) % (2 * BLOCK_BYTES):
        return f"{what} is {nbytes} bytes, and {p.patch} rows make no whole stages of {2 * BLOCK_BYTES}"
    return ""


def images_step(tile_patches: int, columns: int = 16) -> int:
    """Number that the images of a tile are a multiple of, so that its patches are one of ``columns``."""
    return columns // math.gcd(columns, tile_patches)


def check_table(plan: StripsPlan) -> None:
    """The table is indexed with 32 bits."""
    problem: PatchEmbedImagesProblem = plan.problem
    if plan.table_shape is not None and math.prod(plan.table_shape) >= 2**31:
        rule = f"the table is indexed with 32 bits and has {plan.padded_n} padded columns"
        rows = (2**31 - 1) // (plan.padded_n * plan.row_tiles * plan.table_period * CORE_COLUMNS)
        reject("height", problem.height, rule, rows * problem.patch)


def check_strips_problem(p: PatchEmbedImagesProblem) -> None:
    """Checks what strips of 16 bytes can do, on every architecture."""
    check_integers(p)
    require("channels_last", p.channels_last, (False,), "strips are neighbouring pixels of one channel")
    require("patch", p.patch, (STRIP_PATCH,), "a patch's row of pixels is 16 bytes of a strip")


def check_integers(p: PatchEmbedImagesProblem) -> None:
    """Checks what kernels of uint8 pixels multiply and store."""
    require("precision", p.precision, ("int8",), "a strip's pixels are bytes")
    require("out_dtype", p.out_dtype, ("bfloat16",), "element types that this kernel stores")


def check_gathered_problem(p: PatchEmbedImagesProblem) -> None:
    """Checks patches of 16-bit pixels that are gathered in the order of a strip."""
    require("out_dtype", p.out_dtype, ("bfloat16", "float16"), "element types of 16 bits, which stmatrix transposes")
    require("patch", p.patch, (STRIP_PATCH,), "a patch's row of pixels is 32 bytes, one step of K")
