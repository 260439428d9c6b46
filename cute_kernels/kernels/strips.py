"""Strips of images: views of images, operand, output and table, the same on every architecture.

How a strip is an operand as it lands: `cute_kernels.plan.patch_embed_images.strips`.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from cute_kernels.kernels.elements import ELEMENT_TYPES
from cute_kernels.plan.patch_embed_images.base import STRIP_PATCH, STRIP_ROWS
from cute_kernels.plan.patch_embed_images.strips import BLOCK_FEATURES, StripsPlan

TABLE_VALUES = 4
"""What a thread adds to its accumulators of 16 features and 8 columns: two features x two columns."""


def images_layout(batch: Int32, channels: int, height: Int32, width: Int32) -> cute.Layout:
    """Contiguous ``[B, C, H, W]`` seen as ``[W, B, H, C]``, the order of a strip's bytes; 16-byte rows for TMA."""
    width = cute.assume(width, divby=STRIP_PATCH)
    plane = cute.assume(height * width, divby=STRIP_PATCH)
    image = cute.assume(plane * channels, divby=STRIP_PATCH)
    return cute.make_layout((width, batch, height, channels), stride=(1, image, width, plane))


def patches_layout(batch: Int32, channels: int, height: Int32, width: Int32) -> cute.Layout:
    """Contiguous ``[B, C, H, W]`` seen as ``[pixels of a patch's row, W / 16, B, H, C]``, of 16-bit pixels."""
    _, image, row, plane = images_layout(batch, channels, height, width).stride
    shape = (STRIP_PATCH, width // STRIP_PATCH, batch, height, channels)
    return cute.make_layout(shape, stride=(1, STRIP_PATCH, image, row, plane))


def source_box(plan: StripsPlan) -> tuple[int, ...]:
    """The TMA box of a stage in the view of the images: that of `images_layout`, or of `patches_layout`."""
    _, images, rows, channels = plan.stage_box
    return plan.stage_box if plan.pixel_bytes == 1 else (STRIP_PATCH, plan.tile_patches, images, rows, channels)


def out_layout(batch: Int32, grid_height: Int32, grid_width: Int32, n: Int32) -> cute.Layout:
    """Contiguous ``[B, grid rows, patches, N]`` seen as ``[patches, N, B, grid rows]``."""
    n = cute.assume(n, divby=8)
    row = cute.assume(grid_width * n, divby=8)
    image = cute.assume(grid_height * row, divby=8)
    return cute.make_layout((grid_width, n, batch, grid_height), stride=(n, 1, image, row))


def strip_layout(plan: StripsPlan, stages: int) -> cute.Layout | cute.ComposedLayout:
    """The pixels of the stages as TMA fills them: `source_box`, and a last mode of stages if there are several."""
    if plan.pixel_bytes == 2:
        shape = source_box(plan) if stages == 1 else (*source_box(plan), stages)
        return cute.make_composed_layout(
            row_swizzle(), 0, cute.make_ordered_layout(shape, order=tuple(range(len(shape))))
        )
    pixels, images, _, _ = plan.stage_box
    stride = (1, pixels, pixels * images, plan.stage_bytes)
    if stages == 1:
        return cute.make_layout(plan.stage_box, stride=stride)
    return cute.make_layout((*plan.stage_box, stages), stride=(*stride, plan.stage_bytes))


def row_swizzle() -> cute.Swizzle:
    """SWIZZLE_32B, of rows of 32 bytes."""
    return cute.make_swizzle(1, 4, 3)


def operand_layout(plan: StripsPlan) -> cute.Layout:
    """The same bytes as K-major blocks without swizzle: ``[patches, 128 bytes of K, blocks]``.

    A patch's 16 pixels of a row are neighbours, and so are the patches of all images; 8 rows make a block.
    """
    patches = plan.cta_patches
    shape = (patches, (STRIP_PATCH, STRIP_ROWS), plan.config.stages * plan.config.stage_blocks)
    return cute.make_layout(
        shape, stride=(STRIP_PATCH, (1, STRIP_PATCH * patches), STRIP_PATCH * STRIP_ROWS * patches)
    )


def table_view(plan: StripsPlan, pointer: cute.Pointer | None, groups: Int32, position_tiles: Int32):
    """``[4, 32, period, padded features / 16, position tiles]`` over the table of `StripsPlan.table_shape`, or None."""
    if pointer is None:
        return None
    blocks = groups * (plan.ctas * plan.features // BLOCK_FEATURES)
    shape = (TABLE_VALUES, 32, plan.table_period, blocks, position_tiles)
    return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=(0, 1, 2, 3, 4)))


@cute.jit
def scale_of_feature(scale: cute.Tensor, feature: Int32) -> Float32:
    """0 beyond the last feature."""
    value = Float32(0.0)
    if feature < scale.shape[0]:
        value = scale[feature]
    return value


def strip_boxes(
    plan: StripsPlan, tma: tuple[cute.CopyAtom, cute.Tensor], stages: cute.Pointer, share: tuple[int, int | Int32]
) -> tuple[cute.Tensor, cute.Tensor]:
    """What the load warp copies: ``[box, tile of a grid row, images, row block, channel]`` to ``[box, stage]``.

    Args:
        plan: what is loaded.
        tma: atom, and TMA view of the images.
        stages: buffers in shared memory.
        share: CTAs that share every strip, and which of its parts this CTA loads.
    """
    layout, box = strip_layout(plan, plan.config.stages), source_box(plan)
    if plan.pixel_bytes == 2:
        stages, layout = cute.recast_ptr(stages, layout.inner, dtype=ELEMENT_TYPES[plan.problem.in_dtype]), layout.outer
    boxes = cute.make_tensor(stages, layout)
    pixels = cute.local_tile(tma[1], box, (None,) * len(box))
    strips, source = cpasync.tma_partition(
        tma[0], share[1], cute.make_layout(share[0]), cute.group_modes(boxes, 0, len(box)),
        cute.group_modes(pixels, 0, len(box)),
    )  # fmt: skip
    return source if plan.pixel_bytes == 1 else source[None, 0, None, None, None, None], strips
