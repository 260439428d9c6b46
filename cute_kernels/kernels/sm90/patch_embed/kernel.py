"""The persistent GEMM with a fused epilogue for Hopper: allocate, build pipes, dispatch to roles.

Consumer warpgroups own 64 output features each and walk the rows of ``x``, which one TMA warp streams through shared
memory. The weight stays in registers (or is streamed along), the accumulators are stored transposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from cute_kernels import dsl
from cute_kernels.kernels.elements import ELEMENT_TYPES
from cute_kernels.kernels.graph import sm90_graph
from cute_kernels.kernels.pipes import make_pipes, stamp_waits
from cute_kernels.kernels.rows_host import RowsHost, RowsOperands
from cute_kernels.kernels.rows_load import RowsLoad
from cute_kernels.kernels.scales import Scales
from cute_kernels.kernels.sm90.frame import begin
from cute_kernels.kernels.sm90.patch_embed.epilogue import Epilogue
from cute_kernels.kernels.sm90.pipes import Sm90Pipe
from cute_kernels.kernels.sm90.transposed.mma import Mma
from cute_kernels.kernels.sm90.transposed.staging import TransposedStaging
from cute_kernels.kernels.sm90.transposed.weight import resident_weight
from cute_kernels.kernels.stamps import make_stamps
from cute_kernels.kernels.table_rows import TableRows
from cute_kernels.kernels.tiles import PositionOrder
from cute_kernels.plan import Sm90PatchEmbedPlan
from cute_kernels.plan.patch_embed.base import WEIGHT_TYPES


@dataclass(frozen=True)
class DeviceArguments:
    """What the host function hands to the kernel: TMA atoms with their views, weight, table, scale and sizes."""

    tiled_mma: cute.TiledMma
    x_atom: cute.CopyAtom
    x: cute.Tensor
    weight_atom: cute.CopyAtom | None
    weight: cute.Tensor
    out_atom: cute.CopyAtom
    out: cute.Tensor
    table: cute.Tensor | None
    table_index: cute.Tensor | None
    table_rows: Int32
    scales: Scales
    rows: Int32
    row_tiles: Int32
    position_tiles: Int32
    groups: Int32
    tile_stages: Int32


class PatchEmbedKernel(RowsHost):
    """Host entry and kernel for one plan. A resident K is compiled in."""

    plan: Sm90PatchEmbedPlan

    def __init__(self, plan: Sm90PatchEmbedPlan) -> None:
        super().__init__(plan, sm90_graph(plan))
        self.streamed = plan.config.weight == "streamed"
        self.element = ELEMENT_TYPES[plan.problem.in_dtype]
        self.weight_element = ELEMENT_TYPES[WEIGHT_TYPES[plan.problem.in_dtype]]
        self.accumulator = Int32 if plan.sums_integers else Float32

    def arguments(self, operands: RowsOperands) -> DeviceArguments:
        plan, config, o = self.plan, self.plan.config, operands
        tiled_mma = cute.make_tiled_mma(self._mma_op())
        load = cpasync.CopyBulkTensorTileG2SMulticastOp() if config.cluster > 1 else cpasync.CopyBulkTensorTileG2SOp()
        x_atom, x_view = cpasync.make_tiled_tma_atom(
            load, o.x, self._box_layout(1), self._box(plan.tile_k), num_multicast=config.cluster
        )
        weight_atom, weight = None, o.weight
        if self.streamed:
            weight_atom, weight = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(), weight, self._block_layout(plan.features, 1),
                (plan.features, plan.tile_k),
            )  # fmt: skip
        out_atom, out_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), o.out, self._staging_layout(), self._box(64)
        )
        groups = cute.ceil_div(cute.ceil_div(o.n, plan.features), config.cluster)
        return DeviceArguments(
            tiled_mma, x_atom, x_view, weight_atom, weight, out_atom, out_view,
            self._table_view(o.table, o.table_rows, groups), o.table_index, o.table_rows, o.scales, o.rows,
            cute.ceil_div(o.images, plan.tile_images), cute.ceil_div(o.positions, config.tile_positions), groups,
            cute.ceil_div(o.k, plan.tile_k * config.stage_blocks),
        )  # fmt: skip

    def _table_view(self, pointer: cute.Pointer | None, rows: Int32, groups: Int32) -> cute.Tensor | None:
        """``[2, 8, padded features / 16, rows]`` over the table of `Plan.table_shape`."""
        if pointer is None:
            return None
        blocks = groups * (self.plan.config.cluster * self.plan.features // 16)
        shape = (2, 8, blocks, rows + int(self.plan.problem.table_index))
        row = cute.assume(blocks * 16, divby=16)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=(1, 2, 16, row)))

    def _mma_op(self) -> warpgroup.MmaOp:
        """WGMMA of 64 features, the rows of a tile and 32 bytes of K."""
        plan = self.plan
        source = warpgroup.OperandSource.SMEM if self.streamed else warpgroup.OperandSource.RMEM
        shape = (64, plan.config.tile_rows, plan.mma_k_bytes * 8 // self.element.width)
        majors = (OperandMajorMode.K, OperandMajorMode.K)
        if plan.sums_integers:
            return warpgroup.MmaI8Op(self.weight_element, self.element, Int32, shape, source, *majors)
        if self.element.width == 16:
            return warpgroup.MmaF16BF16Op(self.element, Float32, shape, source, *majors)
        return warpgroup.MmaF8Op(self.weight_element, self.element, Float32, shape, source, *majors)

    def _block_layout(self, rows: int, blocks: int) -> cute.ComposedLayout:
        """``[rows, 128 bytes of K, blocks]``, K-major, SWIZZLE_128B; without the last mode for a single block."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.element)
        layout = cute.tile_to_shape(atom, (rows, self.plan.tile_k, blocks), order=(0, 1, 2))
        return layout if blocks > 1 else cute.slice_(layout, (None, None, 0))

    def _box(self, columns: int) -> tuple[int, int, int]:
        """``[images, columns, positions]`` of a tile: TMA puts its rows one after another, images fastest."""
        return (self.plan.tile_images, columns, self.plan.config.tile_positions)

    def _box_layout(self, blocks: int) -> cute.ComposedLayout:
        """The bytes of `_block_layout` as TMA fills them: ``[images, 128 bytes of K, positions, blocks]``."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.element)
        layout = cute.tile_to_shape(atom, (*self._box(self.plan.tile_k), blocks), order=(0, 1, 2, 3))
        return layout if blocks > 1 else cute.slice_(layout, (None, None, None, 0))

    def _staging_layout(self) -> cute.ComposedLayout:
        """``[images, 64, positions]`` BF16 of a tile, SWIZZLE_128B."""
        outer = cute.make_layout(self._box(64), stride=(64, 1, 64 * self.plan.tile_images))
        return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, outer)

    @cute.kernel
    def kernel(self, args: DeviceArguments, profile: cute.Pointer | None) -> None:
        plan, config = self.plan, self.plan.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta_rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if config.cluster > 1 else Int32(0)

        storage = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=plan.swizzle_period)
        barriers = cute.recast_ptr(storage, dtype=Int64)
        x_stages, weight_stages, staging = (storage + region.offset for region in plan.smem[1:])
        pipes = make_pipes(self.graph, barriers, Sm90Pipe)
        pipe = pipes["operands"]

        begin(self.graph, warp == plan.load_warp, barriers, (args.x_atom, args.out_atom))

        stamps = stamp_waits(pipes, make_stamps(plan, profile, warp))
        cluster = cute.arch.block_idx()[0] // config.cluster
        clusters = cute.arch.grid_dim()[0] // config.cluster
        slab = cluster % args.groups * config.cluster + cta_rank
        order = PositionOrder(args.row_tiles, args.position_tiles, cluster // args.groups, clusters // args.groups)
        blocks = config.stages * config.stage_blocks
        weight_tensor = None
        if cutlass.const_expr(self.streamed):
            weight_tensor = _blocks(weight_stages, self._block_layout(plan.features, blocks), self.weight_element)

        if warp >= plan.load_warp:
            cute.arch.setmaxregister_decrease(plan.producer_registers)
            if warp == plan.load_warp:
                self._load(args, x_stages, weight_tensor, pipe, order, slab, cta_rank).run()
        else:
            cute.arch.setmaxregister_increase(plan.consumer_registers)
            x_tensor = _blocks(x_stages, self._block_layout(config.tile_rows, blocks), self.element)
            self._mma(args, x_tensor, weight_tensor, staging, pipe, order, slab, warp // 4).run()
        stamps.finish()

    def _load(self, args, x_stages, weight_tensor, pipe, order, slab, cta_rank) -> RowsLoad:
        plan, config = self.plan, self.plan.config
        rows = cute.local_tile(args.x, self._box(plan.tile_k), (None, None, None))
        x_boxes = _blocks(x_stages, self._box_layout(config.stages * config.stage_blocks), self.element)
        x_blocks, x_source = cpasync.tma_partition(
            args.x_atom, cta_rank, cute.make_layout(config.cluster),
            cute.group_modes(x_boxes, 0, 3), cute.group_modes(rows, 0, 3),
        )  # fmt: skip
        weight = None
        if cutlass.const_expr(self.streamed):
            features = cute.local_tile(args.weight, (plan.features, plan.tile_k), (None, None))
            blocks, source = cpasync.tma_partition(
                args.weight_atom, 0, cute.make_layout(1),
                cute.group_modes(weight_tensor, 0, 2), cute.group_modes(features, 0, 2),
            )  # fmt: skip
            weight = (args.weight_atom, source, blocks)
        return RowsLoad(
            args.x_atom, x_source, x_blocks, pipe, order, args.tile_stages, config.stage_blocks, weight, slab,
            config.cluster,
        )  # fmt: skip

    def _mma(self, args, x_tensor, weight_tensor, staging, pipe, order, slab, warpgroup_index) -> Mma:
        plan, config = self.plan, self.plan.config
        thread = cute.arch.thread_idx()[0] % 128
        slice_ = args.tiled_mma.get_slice(thread)
        feature_block = slab * config.warpgroups + warpgroup_index
        if cutlass.const_expr(self.streamed):
            blocks = config.stages * config.stage_blocks
            mine = cute.local_tile(weight_tensor, (64, plan.tile_k, blocks), (warpgroup_index, 0, 0))
            weight = args.tiled_mma.make_fragment_A(slice_.partition_A(mine))
        else:
            weight = resident_weight(args.tiled_mma, slice_, args.weight, feature_block, plan.k_blocks * plan.tile_k)
        x_fragments = args.tiled_mma.make_fragment_B(slice_.partition_B(x_tensor))

        buffer = staging + cute.assume(warpgroup_index * plan.staging_bytes, divby=plan.swizzle_period)
        layout = self._staging_layout()
        staged = cute.make_tensor(cute.recast_ptr(buffer, layout.inner, dtype=BFloat16), layout.outer)
        boxes = cute.local_tile(args.out, self._box(64), (None, None, None))
        source, target = cpasync.tma_partition(
            args.out_atom, 0, cute.make_layout(1), cute.group_modes(staged, 0, 3), cute.group_modes(boxes, 0, 3)
        )
        named = {barrier.name: barrier.identifier for barrier in self.graph.named_barriers}
        staging = TransposedStaging(
            buffer, args.out_atom, source, target, thread, named["staged 0"] + warpgroup_index, pipe.stamps
        )
        table_rows = TableRows(args.table_rows, args.table_index, args.rows)
        scales = args.scales.loaded()
        pair = None
        if cutlass.const_expr(scales.features is not None):
            first = feature_block * 64 + thread // 32 * 16 + thread % 32 // 4
            pair = (scales.feature(first), scales.feature(first + 8))
        epilogue = Epilogue(plan, staging, args.table, table_rows, scales, pair, feature_block, thread)
        return Mma(
            plan, args.tiled_mma, self.accumulator, weight, x_fragments, pipe, epilogue, order, args.tile_stages,
            warpgroup_index, thread, named["turn 0"],
        )  # fmt: skip


def _blocks(pointer: cute.Pointer, layout: cute.ComposedLayout, element: type) -> cute.Tensor:
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=element), layout.outer)


dsl.name_kernel(PatchEmbedKernel.kernel, "patch_embed_sm90a")
