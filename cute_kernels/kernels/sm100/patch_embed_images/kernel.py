"""The persistent GEMM over images for Blackwell: allocate, build pipes, dispatch to roles.

The output is computed transposed, ``D[feature, patch] = weight * patches^T``: 128 features of the weight, or both terms
of 64, stay in each CTA for the whole launch, and strips of images, which TMA reads where they lie, are the N operand.
The load warp of each CTA streams strips, the leader's MMA warp issues, and the epilogue warps drain one part of the
accumulators while another is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from cute_kernels import dsl
from cute_kernels.kernels.graph import sm100_transposed_graph
from cute_kernels.kernels.images_host import ImagesHost, ImagesOperands
from cute_kernels.kernels.sm100.patch_embed_images.epilogue import Epilogue
from cute_kernels.kernels.sm100.patch_embed_images.operand import Strips
from cute_kernels.kernels.sm100.transposed.instruction import make_mma
from cute_kernels.kernels.sm100.transposed.kernel import TransposedKernel
from cute_kernels.kernels.sm100.transposed.staging import staging_layout, warp_staging
from cute_kernels.kernels.sm100.transposed.weight import smem_tma
from cute_kernels.kernels.strips import (
    images_layout,
    out_layout,
    scale_of_feature,
    strip_boxes,
    strip_layout,
    table_view,
)
from cute_kernels.kernels.strips_load import StripLoad
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.plan import Sm100ImagesPlan


@dataclass(frozen=True)
class DeviceArguments:
    """What the host function hands to the kernel: TMA atoms with their views, weight, table, scales and sizes.

    ``weight`` is ``[N, K]`` in memory, or its TMA view where ``weight_atom`` loads it into shared memory.
    """

    images_atom: cute.CopyAtom
    images: cute.Tensor
    weight_atom: cute.CopyAtom | None
    weight: cute.Tensor
    weight_low: cute.Tensor | None
    out_atom: cute.CopyAtom
    out: cute.Tensor
    table: cute.Tensor | None
    scale: cute.Tensor | None
    image_tiles: Int32
    row_tiles: Int32
    position_tiles: Int32
    groups: Int32


class PatchEmbedImagesKernel(ImagesHost, TransposedKernel):
    """Host entry and kernel for one plan."""

    plan: Sm100ImagesPlan

    def __init__(self, plan: Sm100ImagesPlan) -> None:
        super().__init__(plan, sm100_transposed_graph(plan))

    def arguments(self, operands: ImagesOperands) -> DeviceArguments:
        plan, o = self.plan, operands
        images = cute.make_tensor(o.images, images_layout(plan, o.batch, o.height, o.width))
        out = cute.make_tensor(o.out, out_layout(o.batch, o.grid_height, o.grid_width, o.n))
        group = tcgen05.CtaGroup.TWO if plan.cta_group == 2 else tcgen05.CtaGroup.ONE
        images_atom, images_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(group), images, strip_layout(plan, 1), plan.load_box
        )
        out_atom, out_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), out, self._staging_layout(), self._out_box
        )
        weight_atom, weight = None, o.weight
        if plan.config.weight == "smem":
            weight_atom, weight = smem_tma(plan, make_mma(plan, plan.parts[0][1]), weight)
        row_tiles = cute.ceil_div(o.grid_width, plan.tile_patches)
        position_tiles = row_tiles * o.grid_height
        groups = cute.ceil_div(cute.ceil_div(o.n, plan.features), plan.ctas)
        scale = None if o.scale is None else cute.make_tensor(o.scale, cute.make_layout((o.n,)))
        return DeviceArguments(
            images_atom, images_view, weight_atom, weight, o.weight_low, out_atom, out_view,
            table_view(plan, o.table, groups, position_tiles), scale, cute.ceil_div(o.batch, plan.tile_images),
            row_tiles, position_tiles, groups,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, args: DeviceArguments, profile: cute.Pointer | None) -> None:
        self.run(args, profile)

    def atoms(self, args: DeviceArguments) -> tuple[cute.CopyAtom, ...]:
        return args.images_atom, args.out_atom

    def order(self, args: DeviceArguments, first: Int32, step: Int32) -> ImageOrder | PositionOrder:
        kind = ImageOrder if self.plan.config.order == "row" else PositionOrder
        return kind(args.image_tiles, args.position_tiles, first, step)

    def load(self, args, stages, pipe, order, place) -> StripLoad:
        plan = self.plan
        source, boxes = strip_boxes(plan, (args.images_atom, args.images), stages, (1, 0))
        return StripLoad(
            plan, args.images_atom, source, boxes, pipe, order, args.row_tiles,
            image_step=plan.cta_group, first_images=place.rank, announces=place.leads,
        )  # fmt: skip

    def operand(self, stages: cute.Pointer) -> Strips:
        return Strips(self.plan, stages)

    def terms(self, args: DeviceArguments) -> tuple[cute.Tensor, cute.Tensor | None]:
        return args.weight, args.weight_low

    @property
    def _out_box(self) -> tuple[int, int, int, int]:
        """``[patches, features, images, grid rows]`` of a warp's part of a tile."""
        return (self.plan.tile_patches, self.plan.warp_features, self.plan.tile_images, 1)

    def _staging_layout(self) -> cute.ComposedLayout:
        """Patches follow each other, image after image, as those of a tile do."""
        plan, row = self.plan, self.plan.warp_features
        return staging_layout(self._out_box, (row, 1, row * plan.tile_patches, row * plan.columns), row)

    def epilogue(self, args, accumulators, staging, pipe, order, slab, quarter) -> Epilogue:
        plan = self.plan
        block = slab * plan.epilogue_warps + quarter
        scales, lane = None, cute.arch.lane_idx()
        ring = warp_staging(plan, staging, self._staging_layout(), args.out_atom, args.out, self._out_box, quarter)
        if cutlass.const_expr(args.scale is not None):
            first = block * plan.warp_features + lane // 4
            scales = tuple(scale_of_feature(args.scale, first + 8 * i) for i in range(plan.warp_features // 8))
        return Epilogue(
            plan, accumulators, ring, pipe, order, block, quarter, args.table, scales, args.row_tiles
        )


dsl.name_kernel(PatchEmbedImagesKernel.kernel, "patch_embed_images_sm100a")
