"""The persistent integer GEMM over images for Hopper: allocate, build pipes, dispatch to roles.

As the kernel over FP8 rows, with patches that TMA reads out of the images themselves: a strip of whole pieces of image
rows is a K-major operand as it lands (`cute_kernels.plan.patch_embed_images.base`).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int16, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_kernels import dsl
from cute_kernels.kernels.gemm import Tma
from cute_kernels.kernels.graph import sm90_graph
from cute_kernels.kernels.images_host import ImagesHost, ImagesOperands
from cute_kernels.kernels.pipes import make_pipes, stamp_waits
from cute_kernels.kernels.sm90.frame import begin
from cute_kernels.kernels.sm90.patch_embed_images.epilogue import Epilogue
from cute_kernels.kernels.sm90.patch_embed_images.repack import Repack
from cute_kernels.kernels.sm90.patch_embed_images.terms import (
    TermsMma,
    integer_mma,
    shared_weight,
    weight_load,
    weight_operand,
    weight_tensor,
    weight_tma,
)
from cute_kernels.kernels.sm90.pipes import Sm90Pipe
from cute_kernels.kernels.sm90.transposed.mma import Mma
from cute_kernels.kernels.sm90.transposed.staging import TransposedStaging
from cute_kernels.kernels.sm90.transposed.weight import resident_weight
from cute_kernels.kernels.stamps import make_stamps
from cute_kernels.kernels.strips import (
    TABLE_VALUES,
    images_layout,
    operand,
    out_layout,
    scale_of_feature,
    strip_boxes,
    strip_layout,
    table_view,
)
from cute_kernels.kernels.strips_load import StripLoad
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.plan.patch_embed_images.sm90 import Sm90ImagesPlan
from cute_kernels.plan.patch_embed_images.strips import RowPart


@dataclass(frozen=True)
class DeviceArguments:
    """What the host function hands to the kernel: TMA atoms with their views, weight, table, scales and sizes.

    ``weight`` is ``[N, K]`` in memory. ``streamed`` loads it where it comes with the pixels, ``low`` and ``high`` what
    of a weight of two terms stays in shared memory, ``rest`` what of split rows the images' own does not: atom and view
    each.
    """

    tiled_mma: cute.TiledMma
    images_atom: cute.CopyAtom
    images: cute.Tensor
    rest: Tma | None
    weight: cute.Tensor
    streamed: Tma | None
    low: Tma | None
    high: Tma | None
    out_atom: cute.CopyAtom
    out: cute.Tensor
    table: cute.Tensor | None
    scale: cute.Tensor
    image_tiles: Int32
    row_tiles: Int32
    position_tiles: Int32
    groups: Int32


@dataclass(frozen=True)
class SplitMma(Mma):
    """With descriptors of their own for the shorter parts of split rows, the last block of every stage."""

    rest_fragments: cute.Tensor

    def _columns(self, stage: Int32, block: int, step: int) -> cute.Tensor:
        longer, shorter = self.plan.row_parts
        if block < longer.blocks:
            return self.x_fragments[None, None, step, stage * longer.blocks + block]
        return self.rest_fragments[None, None, step, stage * shorter.blocks + block - longer.blocks]


class PatchEmbedImagesKernel(ImagesHost):
    """Host entry and kernel for one plan."""

    plan: Sm90ImagesPlan

    def __init__(self, plan: Sm90ImagesPlan) -> None:
        super().__init__(plan, sm90_graph(plan))

    def arguments(self, operands: ImagesOperands) -> DeviceArguments:
        plan, config, o = self.plan, self.plan.config, operands
        out = cute.make_tensor(o.out, out_layout(o.batch, o.grid_height, o.grid_width, o.n))
        first, *others = (self._images_tma(o, part) for part in plan.row_parts)
        out_atom, out_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), out, self._staging_layout(), self._out_box()
        )
        row_tiles = cute.ceil_div(o.grid_width, plan.tile_patches)
        position_tiles = row_tiles * o.grid_height
        groups = cute.ceil_div(cute.ceil_div(o.n, plan.features), config.cluster)
        return DeviceArguments(
            integer_mma(plan, warpgroup.OperandSource.RMEM if plan.resident else warpgroup.OperandSource.SMEM),
            *first, others[0] if others else None, o.weight, None if plan.resident else weight_tma(plan, o.weight),
            weight_tma(plan, o.weight_low) if plan.terms > 1 else None,
            weight_tma(plan, o.weight) if plan.shared_blocks > plan.k_blocks else None, out_atom, out_view,
            table_view(plan, o.table, groups, position_tiles), cute.make_tensor(o.scale, cute.make_layout((o.n,))),
            cute.ceil_div(o.batch, plan.tile_images), row_tiles, position_tiles, groups,
        )  # fmt: skip

    def _images_tma(self, o: ImagesOperands, part: RowPart) -> Tma:
        """Atom and view of a part of the rows of patches."""
        cluster = self.plan.config.cluster
        load = cpasync.CopyBulkTensorTileG2SMulticastOp() if cluster > 1 else cpasync.CopyBulkTensorTileG2SOp()
        images = cute.make_tensor(
            o.images + part.offset, images_layout(self.plan, o.batch, o.height, o.width, part)
        )
        return cpasync.make_tiled_tma_atom(
            load, images, strip_layout(self.plan, 1, part), self.plan.box_of(part), num_multicast=cluster
        )

    def _out_box(self) -> tuple[int, int, int, int]:
        """``[patches, features, images, grid rows]`` of a warpgroup's part of a tile."""
        return (self.plan.tile_patches, 64, self.plan.tile_images, 1)

    def _staging_layout(self) -> cute.ComposedLayout:
        """That box in BF16, SWIZZLE_128B: patches follow each other, image after image, as the columns of a tile do."""
        outer = cute.make_layout(
            self._out_box(), stride=(64, 1, 64 * self.plan.tile_patches, 64 * self.plan.tile_rows)
        )
        return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, outer)

    @cute.kernel
    def kernel(self, args: DeviceArguments, profile: cute.Pointer | None) -> None:
        plan, config = self.plan, self.plan.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta_rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if config.cluster > 1 else Int32(0)

        storage = cute.arch.get_dyn_smem(Uint8, alignment=plan.swizzle_period)
        barriers = cute.recast_ptr(storage, dtype=Int64)
        weight, strips, staging, *raw = (storage + region.offset for region in plan.smem[1:])
        pipes = make_pipes(self.graph, barriers, Sm90Pipe)
        pipe = pipes["operands"]

        begin(self.graph, warp == plan.load_warp, barriers, (args.images_atom, args.out_atom))

        stamps = stamp_waits(pipes, make_stamps(plan, profile, warp))
        cluster = cute.arch.block_idx()[0] // config.cluster
        clusters = cute.arch.grid_dim()[0] // config.cluster
        slab = cluster % args.groups * config.cluster + cta_rank
        kind = ImageOrder if config.order == "row" else PositionOrder
        order = kind(args.image_tiles, args.position_tiles, cluster // args.groups, clusters // args.groups)

        if warp >= plan.load_warp:
            cute.arch.setmaxregister_decrease(plan.producer_registers)
            if warp == plan.load_warp:
                if cutlass.const_expr(plan.terms > 1):
                    weight_load(plan, (args.low, args.high), weight, pipes["weight"], slab).run()
                loaded = (raw[0], pipes["raw"]) if plan.repacks else (strips, pipe)
                self._load(args, weight, *loaded, order, slab, cta_rank).run()
            elif cutlass.const_expr(plan.repacks):
                thread = cute.arch.thread_idx()[0] - (plan.load_warp + 1) * 32
                Repack(plan, raw[0], strips, pipes["raw"], pipe, order, thread).run()
        else:
            cute.arch.setmaxregister_increase(plan.consumer_registers)
            if cutlass.const_expr(plan.terms > 1):
                pipes["weight"].wait_full(pipes["weight"].consumer_state())
            self._mma(args, weight, strips, staging, pipe, order, slab, warp // 4).run()
        stamps.finish()

    def _load(self, args, shared, strips, pipe, order, slab, cta_rank) -> StripLoad:
        ctas = self.plan.config.cluster
        weight = None
        if cutlass.const_expr(not self.plan.resident):
            weight = weight_operand(self.plan, args.streamed, shared, self.plan.ring_blocks)
        source, blocks = strip_boxes(self.plan, (args.images_atom, args.images), strips, (ctas, cta_rank))
        rest = None
        if cutlass.const_expr(self.plan.splits):
            rest = (args.rest[0], *strip_boxes(self.plan, args.rest, strips, (ctas, cta_rank), self.plan.row_parts[1]))
        multicast = Int16((1 << ctas) - 1) if ctas > 1 else None
        return StripLoad(
            self.plan, args.images_atom, source, blocks, pipe, order, args.row_tiles, multicast=multicast,
            rest=rest, weight=weight, slab=slab,
        )  # fmt: skip

    def _mma(self, args, shared, strips, staging, pipe, order, slab, warpgroup_index) -> Mma:
        plan, config = self.plan, self.plan.config
        thread = cute.arch.thread_idx()[0] % 128
        slice_ = args.tiled_mma.get_slice(thread)
        feature_block = slab * config.warpgroups + warpgroup_index
        if cutlass.const_expr(plan.resident):
            # A layout has elements; those of a block that no WGMMA reads are not loaded.
            columns = max(1, plan.held_blocks) * plan.k_block_bytes
            weight = resident_weight(args.tiled_mma, slice_, args.weight, feature_block, columns)
        else:
            streamed = weight_tensor(plan, shared, plan.ring_blocks)
            mine = cute.local_tile(streamed, (64, plan.k_block_bytes, plan.ring_blocks), (warpgroup_index, 0, 0))
            weight = args.tiled_mma.make_fragment_A(slice_.partition_A(mine))
        fragments, *others = (
            args.tiled_mma.make_fragment_B(slice_.partition_B(operand(plan, strips, part))) for part in plan.row_parts
        )

        buffer = staging + cute.assume(warpgroup_index * plan.staging_bytes, divby=plan.swizzle_period)
        layout = self._staging_layout()
        staged = cute.make_tensor(cute.recast_ptr(buffer, layout.inner, dtype=BFloat16), layout.outer)
        boxes = cute.local_tile(args.out, self._out_box(), (None,) * 4)
        source, target = cpasync.tma_partition(
            args.out_atom, 0, cute.make_layout(1), cute.group_modes(staged, 0, 4), cute.group_modes(boxes, 0, 4)
        )
        named = {barrier.name: barrier.identifier for barrier in self.graph.named_barriers}
        buffer = TransposedStaging(
            buffer, args.out_atom, source, target, thread, named["staged 0"] + warpgroup_index, pipe.stamps
        )
        feature = feature_block * 64 + thread // 32 * 16 + thread % 32 // 4
        scales = (scale_of_feature(args.scale, feature), scale_of_feature(args.scale, feature + 8))
        epilogue = Epilogue(
            plan, buffer, args.table, scales, self._held(), args.row_tiles, feature_block, thread
        )
        common = (
            plan, args.tiled_mma, Int32, weight, fragments, pipe, epilogue, order, Int32(plan.tile_stages),
            warpgroup_index, thread, named["turn 0"],
        )  # fmt: skip
        if cutlass.const_expr(plan.splits):
            return SplitMma(*common, *others)
        return Mma(*common) if plan.terms == 1 else TermsMma(*common, *shared_weight(plan, shared, warpgroup_index))

    def _held(self) -> tuple[cute.Tensor, cute.Tensor] | None:
        if not self.plan.holds_table:
            return None
        values = cute.make_rmem_tensor(cute.make_layout((TABLE_VALUES, self.plan.table_period)), Float32)
        values.fill(0.0)
        position = cute.make_rmem_tensor(cute.make_layout(1), Int32)
        position.fill(-1)
        return values, position


dsl.name_kernel(PatchEmbedImagesKernel.kernel, "patch_embed_images_sm90a")
