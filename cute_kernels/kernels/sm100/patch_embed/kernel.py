"""The persistent, warp-specialised GEMM with a fused epilogue: allocate, build pipes, dispatch to roles.

Each pair of CTAs walks tiles of 256 x tile_n. The load warp of each CTA streams operands, the leader's MMA warp issues
2-CTA UMMA into one of two accumulators in tensor memory, and the epilogue warps drain the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from cute_kernels import dsl
from cute_kernels.kernels.elements import ELEMENT_TYPES
from cute_kernels.kernels.graph import sm100_graph
from cute_kernels.kernels.host import launch_clusters
from cute_kernels.kernels.load import Load, tma_operand
from cute_kernels.kernels.pipes import make_pipes
from cute_kernels.kernels.scales import Scales, scales_of
from cute_kernels.kernels.sm100.cluster import cluster_place
from cute_kernels.kernels.sm100.frame import begin, clusters_of_grid, end, stage_tensor, tensor_memory
from cute_kernels.kernels.sm100.mma import IntegerMmaOp, Mma
from cute_kernels.kernels.sm100.patch_embed.epilogue import Epilogue
from cute_kernels.kernels.sm100.pipes import Sm100Pipe
from cute_kernels.kernels.staging import staging_layout
from cute_kernels.kernels.table_rows import TableRows, index_view
from cute_kernels.kernels.tiles import SnakeOrder
from cute_kernels.plan import VECTOR_BYTES, Sm100PatchEmbedPlan
from cute_kernels.plan.patch_embed.base import WEIGHT_TYPES


@dataclass(frozen=True)
class DeviceArguments:
    """What the host function hands to the kernel: TMA atoms with their views, layouts, table, scale and sizes."""

    tiled_mma: cute.TiledMma
    x_atom: cute.CopyAtom
    x: cute.Tensor
    x_layout: cute.ComposedLayout
    weight_atom: cute.CopyAtom
    weight: cute.Tensor
    weight_layout: cute.ComposedLayout
    out_atom: cute.CopyAtom
    out: cute.Tensor
    table: cute.Tensor | None
    table_index: cute.Tensor | None
    table_rows: Int32
    rows: Int32
    scales: Scales
    order_m_tiles: Int32
    order_n_tiles: Int32
    k_blocks: Int32


class PatchEmbedKernel:
    """Host entry and kernel for one plan. Sizes are launch arguments: one compiled kernel serves all of them."""

    def __init__(self, plan: Sm100PatchEmbedPlan) -> None:
        self.plan = plan
        self.graph = sm100_graph(plan)
        self.element = ELEMENT_TYPES[plan.problem.in_dtype]
        self.weight_element = ELEMENT_TYPES[WEIGHT_TYPES[plan.problem.in_dtype]]
        self.accumulator = Int32 if plan.sums_integers else Float32

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
        """Builds TMA descriptors and launches ``clusters`` pairs of CTAs on ``stream``."""
        plan = self.plan
        in_row = VECTOR_BYTES * 8 // self.element.width
        x = cute.make_tensor(x_pointer, _rows(m, k, in_row))
        weight = cute.make_tensor(weight_pointer, _rows(n, k, in_row))
        out = cute.make_tensor(out_pointer, _rows(m, n, 8))

        tiled_mma = self._tiled_mma()
        tile_mnk = (plan.tile_m, plan.tile_n, plan.tile_k)
        stages = plan.config.stages
        x_layout = sm100_utils.make_smem_layout_a(tiled_mma, tile_mnk, self.element, stages)
        weight_layout = sm100_utils.make_smem_layout_b(tiled_mma, tile_mnk, self.weight_element, stages)
        cluster_vmnk = cute.tiled_divide(cute.make_layout((*plan.cluster,)), (tiled_mma.thr_id,))
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        stage = (None, None, None, 0)
        x_tma = cute.nvgpu.make_tiled_tma_atom_A(
            load, x, cute.slice_(x_layout, stage), tile_mnk, tiled_mma, cluster_vmnk.shape
        )
        weight_tma = cute.nvgpu.make_tiled_tma_atom_B(
            load, weight, cute.slice_(weight_layout, stage), tile_mnk, tiled_mma, cluster_vmnk.shape
        )
        out_atom, out_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), out, staging_layout(32, plan.store_columns), (32, plan.store_columns)
        )
        by_pointer = plan.problem.scale_source == "pointer"
        scales = scales_of(by_pointer, scale_argument, row_scale_pointer, feature_scale_pointer, m, n)
        arguments = DeviceArguments(
            tiled_mma, x_tma.atom, x_tma.tma_tensor, x_layout, weight_tma.atom, weight_tma.tma_tensor, weight_layout,
            out_atom, out_view, self._table_view(table_pointer, table_rows, n),
            index_view(index_pointer, m), table_rows, m, scales,
            cute.ceil_div(m, plan.tile_m), cute.ceil_div(n, plan.tile_n), cute.ceil_div(k, plan.tile_k),
        )  # fmt: skip
        launch_clusters(self.kernel(arguments), plan, clusters, stream)

    def _tiled_mma(self) -> cute.TiledMma:
        shape, group = (self.plan.tile_m, self.plan.tile_n), tcgen05.CtaGroup.TWO
        if self.plan.sums_integers:
            operation = IntegerMmaOp(self.element, self.weight_element, shape, group, tcgen05.OperandSource.SMEM)
            return cute.make_tiled_mma(cute.make_mma_atom(operation))
        return sm100_utils.make_trivial_tiled_mma(
            self.element, self.weight_element, OperandMajorMode.K, OperandMajorMode.K, Float32, group, shape
        )

    def _table_view(self, pointer: cute.Pointer | None, rows: Int32, n: Int32) -> cute.Tensor | None:
        """``[(32, row blocks), (V, column chunks)]`` over the table of `Plan.table_shape`."""
        if pointer is None:
            return None
        vector = self.plan.table_shape[3]
        height = rows + int(self.plan.problem.table_index)
        chunks = cute.ceil_div(n, self.plan.tile_n) * (self.plan.tile_n // vector)
        layout = cute.make_layout(
            ((32, cute.ceil_div(height, 32)), (vector, chunks)),
            stride=((vector, cute.assume(chunks * (32 * vector), divby=32 * vector)), (1, 32 * vector)),
        )
        return cute.make_tensor(pointer, layout)

    @cute.kernel
    def kernel(self, args: DeviceArguments) -> None:
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta_rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        storage = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=plan.swizzle_period)
        barriers = cute.recast_ptr(storage, dtype=Int64)
        tmem_address = cute.recast_ptr(storage + self.graph.slots * 8, dtype=Int32)
        x_stages, weight_stages, staging = (storage + region.offset for region in plan.smem[1:])
        place = cluster_place(plan, cta_rank)
        pipes = make_pipes(self.graph, barriers, functools.partial(Sm100Pipe, place=place))

        begin(plan, self.graph, warp, barriers, tmem_address, (args.x_atom, args.weight_atom, args.out_atom))

        order = SnakeOrder(args.order_m_tiles, args.order_n_tiles, cute.arch.cluster_idx()[0], clusters_of_grid(plan))
        x_tensor = stage_tensor(x_stages, args.x_layout, self.element)
        weight_tensor = stage_tensor(weight_stages, args.weight_layout, self.weight_element)
        accumulators = tensor_memory(
            args.tiled_mma, (plan.tile_m, plan.tile_n), plan.accumulators, tmem_address, self.accumulator
        )

        if warp == plan.load_warp:
            mma = args.tiled_mma.get_slice(cta_rank)
            tile_mnk = (plan.tile_m, plan.tile_n, plan.tile_k)
            x = cute.local_tile(args.x, cute.slice_(tile_mnk, (None, 0, None)), (None, None))
            weight = cute.local_tile(args.weight, cute.slice_(tile_mnk, (0, None, None)), (None, None))
            Load(
                tma_operand((args.x_atom, mma.partition_A(x)), x_tensor, 3),
                tma_operand((args.weight_atom, mma.partition_B(weight)), weight_tensor, 3),
                pipes["operands"], order, args.k_blocks, place.leads,
            ).run()  # fmt: skip
        elif warp == plan.mma_warp:
            if place.leads:
                Mma(
                    args.tiled_mma, args.tiled_mma.make_fragment_A(x_tensor),
                    args.tiled_mma.make_fragment_B(weight_tensor), accumulators,
                    pipes["operands"], pipes["accumulator"], order, args.k_blocks,
                ).run()  # fmt: skip
        else:
            self._epilogue(args, accumulators, staging, pipes["accumulator"], order, cta_rank).run(warp)

        end(plan, warp, accumulators)

    def _epilogue(self, args, accumulators, staging, pipe, order, cta_rank) -> Epilogue:
        plan = self.plan
        return Epilogue(
            plan, accumulators, staging, args.out_atom, args.out, args.table,
            TableRows(args.table_rows, args.table_index, args.rows), args.scales.loaded(), pipe, order, cta_rank,
        )  # fmt: skip


def _rows(rows: Int32, columns: Int32, divisor: int) -> cute.Layout:
    """Row-major ``[rows, columns]`` whose rows are a multiple of 16 bytes, as TMA requires."""
    columns = cute.assume(columns, divby=divisor)
    return cute.make_layout((rows, columns), stride=(columns, 1))


dsl.name_kernel(PatchEmbedKernel.kernel, "patch_embed_sm100a")
