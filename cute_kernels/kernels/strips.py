"""Strips of images: views of images, operand, output and table, the same on every architecture.

How a strip is an operand as it lands: `cute_kernels.plan.images_strips`.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.kernels.host import ELEMENT_TYPES, Operands
from cute_kernels.kernels.load import Operand
from cute_kernels.kernels.pipes import Pipe
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.kernels.tma import Tma, fetch, load_tma, shared_tensor, sides, swizzled
from cute_kernels.plan.images_strips import BLOCK_BYTES, BLOCK_FEATURES, SPANS, RowPart, StripsPlan

TABLE_VALUES = 4
"""Table values that a thread adds to its accumulators of 16 features and 8 columns: two features x two columns."""


def images_layout(plan: StripsPlan, batch: Int32, height: Int32, width: Int32, part: RowPart) -> cute.Layout:
    """``[B, planes, H, pixels of a row]`` in memory, in the order of the bytes of a box; rows of 16 bytes for TMA.

    Strips: ``[pixels of a row, B, H, planes]``. Where rows of patches are gathered the first mode is split:
    ``[elements of a patch's row, W / p, ..]``, or those of a part of it, behind that part's first. Where channels are
    last they belong to the row's pixels.
    """
    elements = plan.row_bytes // plan.in_bytes
    patches = width // plan.problem.patch
    divisor = SPANS[0] // plan.in_bytes if plan.repacks else elements
    row = cute.assume(patches * elements, divby=divisor)
    plane = cute.assume(height * row, divby=divisor)
    image = cute.assume(plane * plan.planes, divby=divisor)
    shape, stride = (batch, height, plan.planes), (image, row, plane)
    if plan.gathers:
        own = min(elements - part.offset // plan.in_bytes, part.span // plan.in_bytes)
        return cute.make_layout((own, patches, *shape), stride=(1, elements, *stride))
    return cute.make_layout((row, *shape), stride=(1, *stride))


def out_layout(batch: Int32, grid_height: Int32, grid_width: Int32, n: Int32) -> cute.Layout:
    """Contiguous ``[B, grid rows, patches, N]`` seen as ``[patches, N, B, grid rows]``."""
    n = cute.assume(n, divby=8)
    row = cute.assume(grid_width * n, divby=8)
    image = cute.assume(grid_height * row, divby=8)
    return cute.make_layout((grid_width, n, batch, grid_height), stride=(n, 1, image, row))


def strip_layout(plan: StripsPlan, stages: int, part: RowPart) -> cute.Layout | cute.ComposedLayout:
    """The pixels of the stages as TMA fills them: `box_of`, and a last mode of stages if there are several."""
    box = plan.box_of(part)
    if plan.gathers:
        strides = [math.prod(box[:i]) for i in range(len(box))]
        outer = cute.make_layout(box, stride=tuple(strides))
        if stages > 1:
            stage = plan.pixel_stage_bytes // plan.in_bytes
            outer = cute.make_layout((*box, stages), stride=(*strides, stage))
        return swizzled(outer, SPANS.index(part.span)) if part.span > SPANS[0] else outer
    pixels, images, _, _ = box
    stride = (1, pixels, pixels * images, plan.load_bytes)
    if stages == 1:
        return cute.make_layout(box, stride=stride)
    return cute.make_layout((*box, stages), stride=(*stride, plan.load_pitch))


def row_swizzle(part: RowPart) -> cute.Swizzle:
    """SWIZZLE_32B, 64B or 128B, of rows of as many bytes; none of 16."""
    return cute.make_swizzle(SPANS.index(part.span), 4, 3)


def operand_layout(plan: StripsPlan, part: RowPart) -> cute.Layout:
    """View of the bytes as K-major blocks: ``[patches, 128 bytes of K, blocks]``, without the swizzle of gathered rows.

    A patch's pixels of a row are neighbours, and so are the patches of all images; a block has as many rows as make 128
    bytes. Of split rows the blocks are those of one part, stage by stage. Where pixels are repacked the last
    block of a stage ends behind it.
    """
    patches, span, block = plan.cta_patches, part.span, BLOCK_BYTES * plan.cta_patches
    rows, stages = (span, BLOCK_BYTES // span), plan.config.stages
    if not plan.splits and not plan.repacks:
        return cute.make_layout((patches, rows, stages * part.blocks), stride=(span, (1, span * patches), block))
    return cute.make_layout(
        (patches, rows, (part.blocks, stages)),
        stride=(span, (1, span * patches), (block, plan.pixel_stage_bytes // plan.in_bytes)),
    )


def operand(plan: StripsPlan, stages: cute.Pointer, part: RowPart) -> cute.Tensor:
    """`operand_layout` of uint8 pixels over the buffers in shared memory."""
    stages = _first_byte(plan, stages, part)
    if part.span > SPANS[0]:
        stages = cute.recast_ptr(stages, row_swizzle(part), dtype=ELEMENT_TYPES[plan.problem.in_dtype])
    return cute.make_tensor(stages, operand_layout(plan, part))


def _first_byte(plan: StripsPlan, stages: cute.Pointer, part: RowPart) -> cute.Pointer:
    """Where a part lies in the first stage."""
    return stages + part.first_block * BLOCK_BYTES * plan.cta_patches


def table_view(
    plan: StripsPlan, pointer: cute.Pointer | None, feature_groups: Int32, position_tiles: Int32
) -> cute.Tensor | None:
    """``[4, 32, period, padded features / 16, position tiles]`` over the table of `StripsPlan.table_shape`, or None."""
    if pointer is None:
        return None
    blocks = feature_groups * (plan.ctas * plan.features // BLOCK_FEATURES)
    shape = (TABLE_VALUES, 32, plan.table_period, blocks, position_tiles)
    return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=(0, 1, 2, 3, 4)))


# --- arguments of the kernels over strips ----------------------------------------------------------------------------

@dataclass(frozen=True)
class StripsArguments:
    """Arguments of a kernel: a load for each part of the rows, weight, table, scales and sizes in tiles.

    ``weight`` is ``[N, K]`` in memory, or its load where TMA brings it into shared memory.
    """

    images: tuple[Tma, ...]
    weight: cute.Tensor | Tma
    out: Tma
    table: cute.Tensor | None
    scale: cute.Tensor | None
    image_tiles: Int32
    row_tiles: Int32
    position_tiles: Int32
    feature_groups: Int32


def strips_arguments(
    plan: StripsPlan, o: Operands, grid: tuple[Int32, Int32], images: tuple[Tma, ...], weight: cute.Tensor | Tma,
    out: Tma
) -> StripsArguments:
    """The arguments, from operands, patches along both sides of an image, and TMA copies."""
    row_tiles = cute.ceil_div(grid[1], plan.tile_patches)
    position_tiles = row_tiles * grid[0]
    feature_groups = cute.ceil_div(cute.ceil_div(o.n, plan.features), plan.ctas)
    return StripsArguments(
        images=images,
        weight=weight,
        out=out,
        table=table_view(plan, o.table, feature_groups, position_tiles),
        scale=None if o.scale is None else cute.make_tensor(o.scale, (o.n,)),
        image_tiles=cute.ceil_div(o.batch, plan.tile_images),
        row_tiles=row_tiles,
        position_tiles=position_tiles,
        feature_groups=feature_groups,
    )


def images_tma(plan: StripsPlan, o: Operands, sharers: int, *group: tcgen05.CtaGroup) -> tuple[Tma, ...]:
    """Loads of the images, one for each part of the rows, as `load_tma`."""
    loads = []
    for part in plan.row_parts:
        images = cute.make_tensor(o.images + part.offset, images_layout(plan, o.batch, o.height, o.width, part))
        loads.append(load_tma(images, strip_layout(plan, 1, part), plan.box_of(part), sharers, *group))
    return tuple(loads)


def images_order(plan: StripsPlan, args: StripsArguments, first: Int32, step: Int32) -> ImageOrder | PositionOrder:
    """The tiles of a cluster."""
    kind = ImageOrder if plan.config.order == "row" else PositionOrder
    return kind(args.image_tiles, args.position_tiles, first, step)


@cute.jit
def scale_of_feature(scale: cute.Tensor, feature: Int32) -> Float32:
    """0 beyond the last feature."""
    value = Float32(0.0)
    if feature < scale.shape[0]:
        value = scale[feature]
    return value


class StripBoxes(NamedTuple):
    """TMA load of boxes ``[box, tile of a grid row, images, row block, plane]`` to buffers ``[box, stage]``.

    Pixels beyond the images are loaded as zeros, so that a stage always has all its bytes.
    """

    atom: cute.CopyAtom
    source: cute.Tensor
    strips: cute.Tensor


def strip_boxes(
    plan: StripsPlan, tma: Tma, stages: cute.Pointer, share: tuple[int, int | Int32], part: RowPart
) -> StripBoxes:
    """Boxes of a part of the rows that the load warp copies to ``stages``, of which this CTA loads its ``share``."""
    layout, box = strip_layout(plan, plan.load_stages, part), plan.box_of(part)
    stages = _first_byte(plan, stages, part)
    if plan.gathers and part.span > SPANS[0]:
        boxes = shared_tensor(stages, layout, ELEMENT_TYPES[plan.problem.in_dtype])
    else:
        boxes = cute.make_tensor(stages, layout)
    pixels = cute.local_tile(tma.view, box, (None,) * len(box))
    strips, source = sides(tma.atom, boxes, pixels, len(box), share)
    return StripBoxes(tma.atom, source[None, 0, None, None, None, None] if plan.gathers else source, strips)


# --- TMA producer warp: images -> strips in shared memory ------------------------------------------------------------

@dataclass(frozen=True)
class StripLoad:
    """Fills operand stages for every tile of this cluster.

    With multicast, each CTA of a cluster loads its share of the rows of a strip for all of them, so a stage may be
    filled only when the consumers of every CTA have released it; each CTA's full barrier expects the whole stage. In a
    pair of SM100 CTAs each loads strips of its own images, and the bytes of both complete on the leader's barrier.

    Attributes:
        weight, n_tile: a weight that comes with the pixels, and which features of it this CTA computes; None if it is
            resident.
        image_step, first_images: the images of tile t are box ``t * image_step + first_images``.
        announces: whether this CTA announces the bytes of a stage.
        multicast: CTAs of the cluster that receive what this CTA loads, as a bit mask; None without multicast.
    """

    plan: StripsPlan
    parts: tuple[StripBoxes, ...]
    operands: Pipe
    order: PositionOrder | ImageOrder
    row_tiles: Int32
    image_step: int = 1
    first_images: int | Int32 = 0
    announces: bool | Boolean = True
    multicast: Int16 | None = None
    weight: Operand | None = None
    n_tile: int | Int32 = 0

    @cute.jit
    def run(self) -> None:
        per_plane, stage_blocks = self.plan.stages_per_plane, self.plan.config.stage_blocks
        state = self.operands.producer_state()
        image_tile, position_tile = self.order.start()
        stride = self.order.stride()
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            grid_row = position_tile // self.row_tiles
            row_tile = position_tile - grid_row * self.row_tiles
            images = image_tile * self.image_step + self.first_images
            for plane in cutlass.range_constexpr(self.plan.planes):
                for stage in cutlass.range(per_plane, unroll=4):
                    barrier = self.operands.acquire(state, self.announces)
                    place = (None, row_tile, images, grid_row * per_plane + stage, plane)
                    for i in cutlass.range_constexpr(len(self.parts)):
                        atom, source, strips = self.parts[i]
                        fetch(atom, source[place], strips[None, state.index], barrier, self.multicast)
                    if cutlass.const_expr(self.weight is not None):
                        features = self.weight.place(self.n_tile, ())
                        first = (plane * per_plane + stage) * stage_blocks
                        for i in cutlass.range_constexpr(stage_blocks):
                            self.weight.fetch(features, first + i, state.index * stage_blocks + i, barrier)
                    state.advance()
            image_tile, position_tile = self.order.advance(image_tile, position_tile, stride)
        self.operands.drain(state)
