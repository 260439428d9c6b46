"""The persistent GEMM over rows for Blackwell whose weight stays on chip: allocate, build pipes, dispatch to roles.

The output is computed transposed, ``D[feature, row] = weight * x^T``: 128 features of the weight stay in each CTA for
the whole launch, in tensor memory or in shared memory, and rows of ``x`` are the N operand. The load warp of each CTA
streams rows, the leader's MMA warp issues, and the epilogue warps drain one part of the accumulators while another is
computed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync, tcgen05

from cute_kernels import dsl
from cute_kernels.kernels.graph import sm100_transposed_graph
from cute_kernels.kernels.host import launch_clusters
from cute_kernels.kernels.pipes import make_pipes
from cute_kernels.kernels.row_views import positions_layout, rows_layout
from cute_kernels.kernels.rows_load import RowsLoad
from cute_kernels.kernels.scales import Scales, scales_of
from cute_kernels.kernels.sm100.cluster import cluster_place
from cute_kernels.kernels.sm100.frame import begin, end
from cute_kernels.kernels.sm100.patch_embed_resident.epilogue import Epilogue
from cute_kernels.kernels.sm100.patch_embed_resident.operand import Rows, box_layout, row_boxes, rows_box
from cute_kernels.kernels.sm100.pipes import Sm100Pipe
from cute_kernels.kernels.sm100.transposed.epilogue import MATRICES
from cute_kernels.kernels.sm100.transposed.instruction import accumulators_of_parts, make_mma
from cute_kernels.kernels.sm100.transposed.mma import Mma
from cute_kernels.kernels.sm100.transposed.staging import staging_layout, warp_staging
from cute_kernels.kernels.sm100.transposed.weight import fill_tensor_memory, smem_tma, weight_load
from cute_kernels.kernels.table_rows import TableRows, index_view
from cute_kernels.kernels.tiles import PositionOrder
from cute_kernels.plan import LANES, Sm100ResidentPlan
from cute_kernels.plan.base import ITEMSIZE, VECTOR_BYTES


@dataclass(frozen=True)
class DeviceArguments:
    """What the host function hands to the kernel: TMA atoms with their views, weight, table, scales and sizes.

    ``weight`` is ``[N, K]`` in memory, or its TMA view where ``weight_atom`` loads it into shared memory.
    """

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


class PatchEmbedKernel:
    """Host entry and kernel for one plan. Rows, features and positions are launch arguments; blocks of K are not."""

    def __init__(self, plan: Sm100ResidentPlan) -> None:
        self.plan = plan
        self.graph = sm100_transposed_graph(plan)

    @cute.jit
    def __call__(
        self,
        x_pointer: cute.Pointer,
        weight_pointer: cute.Pointer,
        table_pointer: cute.Pointer | None,
        index_pointer: cute.Pointer | None,
        out_pointer: cute.Pointer,
        scale_argument: Float32 | cute.Pointer | None,
        row_scale_pointer: cute.Pointer | None,
        feature_scale_pointer: cute.Pointer | None,
        m: Int32,
        n: Int32,
        k: Int32,
        table_rows: Int32,
        clusters: Int32,
        stream,
    ) -> None:
        """Builds TMA descriptors and launches ``clusters`` clusters on ``stream``."""
        plan = self.plan
        positions = table_rows if cutlass.const_expr(plan.positions_in_order) else 1
        images = m // positions
        in_row = VECTOR_BYTES // ITEMSIZE[plan.problem.in_dtype]
        x = cute.make_tensor(x_pointer, positions_layout(images, k, positions, in_row))
        out = cute.make_tensor(out_pointer, positions_layout(images, n, positions, 8))
        weight = cute.make_tensor(weight_pointer, rows_layout(n, k, in_row))
        group = tcgen05.CtaGroup.TWO if plan.cta_group == 2 else tcgen05.CtaGroup.ONE
        x_atom, x_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(group), x, box_layout(plan, 1), rows_box(plan)
        )
        out_atom, out_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), out, self._staging_layout(), self._out_box
        )
        weight_atom, weight_view = None, weight
        if cutlass.const_expr(plan.config.weight == "smem"):
            weight_atom, weight_view = smem_tma(plan, make_mma(plan, plan.parts[0][1]), weight)
        groups = cute.ceil_div(cute.ceil_div(n, plan.features), plan.ctas)
        by_pointer = plan.problem.scale_source == "pointer"
        arguments = DeviceArguments(
            x_atom, x_view, weight_atom, weight_view, out_atom, out_view,
            self._table_view(table_pointer, table_rows, groups), index_view(index_pointer, m), table_rows,
            scales_of(by_pointer, scale_argument, row_scale_pointer, feature_scale_pointer, m, n), m,
            cute.ceil_div(images, plan.tile_images), cute.ceil_div(positions, plan.config.tile_positions), groups,
        )  # fmt: skip
        launch_clusters(self.kernel(arguments), plan, clusters, stream)

    def _table_view(self, pointer: cute.Pointer | None, rows: Int32, groups: Int32) -> cute.Tensor | None:
        """``[4, 8, padded features / 32, rows]`` over the table of `Plan.table_shape`."""
        if pointer is None:
            return None
        blocks = groups * (self.plan.ctas * self.plan.features // LANES)
        shape = (MATRICES, LANES // MATRICES, blocks, rows + int(self.plan.problem.table_index))
        row = cute.assume(blocks * LANES, divby=LANES)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=(1, MATRICES, LANES, row)))

    @property
    def _out_box(self) -> tuple[int, int, int]:
        """``[images, features, positions]`` of a warp's part of a tile."""
        return (self.plan.tile_images, LANES, self.plan.config.tile_positions)

    def _staging_layout(self) -> cute.ComposedLayout:
        """Images follow each other, position after position, as `Sm100ResidentPlan.staged_row` has them."""
        return staging_layout(self._out_box, (LANES, 1, LANES * self.plan.tile_images))

    @cute.kernel
    def kernel(self, args: DeviceArguments) -> None:
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if plan.ctas > 1 else Int32(0)
        place = cluster_place(plan, rank)

        storage = cute.arch.get_dyn_smem(Uint8, alignment=plan.swizzle_period)
        barriers = cute.recast_ptr(storage, dtype=Int64)
        tmem_address = cute.recast_ptr(storage + self.graph.slots * 8, dtype=Int32)
        weight, stages, staging = (storage + region.offset for region in plan.smem[1:])
        pipes = make_pipes(self.graph, barriers, functools.partial(Sm100Pipe, place=place))

        begin(plan, self.graph, warp, barriers, tmem_address, (args.x_atom, args.out_atom))

        tmem = cute.arch.retrieve_tmem_ptr(Int32, 16, tmem_address)
        accumulators = accumulators_of_parts(plan, tmem)
        cluster = cute.arch.block_idx()[0] // plan.ctas
        clusters = cute.arch.grid_dim()[0] // plan.ctas
        group = cluster % args.groups
        order = PositionOrder(args.row_tiles, args.position_tiles, cluster // args.groups, clusters // args.groups)

        if warp == plan.load_warp:
            if cutlass.const_expr(plan.config.weight == "smem"):
                weight_load(plan, (args.weight_atom, args.weight), weight, pipes["weight"], group, place).run()
            source, boxes = row_boxes(plan, (args.x_atom, args.x), stages)
            RowsLoad(
                args.x_atom, source, boxes, pipes["operands"], order, plan.tile_stages, plan.config.stage_blocks,
                row_step=plan.cta_group, first_rows=rank, announces=place.leads,
            ).run()  # fmt: skip
        elif warp == plan.mma_warp:
            if place.leads:
                resident = weight if plan.config.weight == "smem" else tmem + plan.weight_column
                edges = (pipes[name] for name in ("operands", "accumulator", "weight"))
                Mma(plan, Rows(plan, stages), resident, accumulators, *edges, order).run()
        else:
            slab = group * plan.ctas + rank
            quarter = warp % 4
            if cutlass.const_expr(plan.config.weight == "tmem"):
                lane = quarter * LANES + cute.arch.lane_idx()
                fill_tensor_memory(plan, (args.weight, None), tmem + plan.weight_column, slab, lane, pipes["weight"])
            self._epilogue(args, accumulators, staging, pipes["accumulator"], order, slab, quarter).run()

        end(plan, warp, accumulators[0])

    def _epilogue(self, args, accumulators, staging, pipe, order, slab, quarter) -> Epilogue:
        plan = self.plan
        block = slab * (plan.features // LANES) + quarter
        buffer = warp_staging(plan, staging, self._staging_layout(), args.out_atom, args.out, self._out_box, quarter)
        scales, features = args.scales.loaded(), None
        if cutlass.const_expr(scales.features is not None):
            first = block * LANES + buffer.lane // MATRICES
            features = tuple(scales.feature(first + 8 * i) for i in range(MATRICES))
        rows = TableRows(args.table_rows, args.table_index, args.rows)
        return Epilogue(
            plan, accumulators, buffer, pipe, order, block, quarter, args.table, rows, scales, features
        )


dsl.name_kernel(PatchEmbedKernel.kernel, "patch_embed_resident_sm100a")
