"""The persistent, warp-specialised GEMM with a fused epilogue: allocate, build pipes, dispatch to roles.

Each pair of CTAs walks tiles of 256 x tile_n, or each CTA tiles of 128 x tile_n. The load warp of each CTA streams
operands, the leader's MMA warp issues UMMAs into one of two accumulators in tensor memory, and the epilogue warps drain
the other.
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
from cute_kernels.kernels.load import Load, tma_operand
from cute_kernels.kernels.pipes import make_pipes, stamp_waits
from cute_kernels.kernels.rows_host import RowsHost, RowsOperands
from cute_kernels.kernels.scales import Scales
from cute_kernels.kernels.sm100.cluster import cluster_place
from cute_kernels.kernels.sm100.frame import begin, clusters_of_grid, end, stage_tensor, tensor_memory
from cute_kernels.kernels.sm100.mma import IntegerMmaOp, Mma
from cute_kernels.kernels.sm100.patch_embed.epilogue import Epilogue
from cute_kernels.kernels.sm100.patch_embed.reads import ScaleReader, TableReader, table_view
from cute_kernels.kernels.sm100.patch_embed.rows import RowsOperand, TileRows
from cute_kernels.kernels.sm100.patch_embed.stores import Output
from cute_kernels.kernels.sm100.pipes import Sm100Pipe
from cute_kernels.kernels.staging import staging_layout
from cute_kernels.kernels.stamps import make_stamps
from cute_kernels.kernels.table_rows import TableRows
from cute_kernels.kernels.tiles import SnakeOrder
from cute_kernels.plan import LANES, Sm100PatchEmbedPlan
from cute_kernels.plan.patch_embed.base import WEIGHT_TYPES


@dataclass(frozen=True)
class DeviceArguments:
    """What the host function hands to the kernel: TMA atoms with their views, layouts, table, scale and sizes."""

    tiled_mma: cute.TiledMma
    x_atom: cute.CopyAtom
    x: cute.Tensor
    x_layout: cute.ComposedLayout
    x_boxes: cute.ComposedLayout
    weight_atom: cute.CopyAtom
    weight: cute.Tensor
    weight_layout: cute.ComposedLayout
    out_atom: cute.CopyAtom | None
    out: cute.Tensor
    table: cute.Tensor | None
    table_index: cute.Tensor | None
    table_rows: Int32
    rows: Int32
    images: Int32
    positions: Int32
    position_tiles: Int32
    scales: Scales
    order_m_tiles: Int32
    order_n_tiles: Int32
    k_blocks: Int32


class PatchEmbedKernel(RowsHost):
    """Host entry and kernel for one plan: one compiled kernel serves all sizes."""

    plan: Sm100PatchEmbedPlan

    def __init__(self, plan: Sm100PatchEmbedPlan) -> None:
        super().__init__(plan, sm100_graph(plan))
        self.element = ELEMENT_TYPES[plan.problem.in_dtype]
        self.weight_element = ELEMENT_TYPES[WEIGHT_TYPES[plan.problem.in_dtype]]
        self.accumulator = Int32 if plan.sums_integers else Float32

    def arguments(self, operands: RowsOperands) -> DeviceArguments:
        plan, config, o = self.plan, self.plan.config, operands
        tiled_mma = self._tiled_mma()
        tile_mnk = (plan.tile_m, plan.tile_n, plan.tile_k)
        x_layout = sm100_utils.make_smem_layout_a(tiled_mma, tile_mnk, self.element, config.stages)
        weight_layout = sm100_utils.make_smem_layout_b(tiled_mma, tile_mnk, self.weight_element, config.stages)
        cluster_vmnk = cute.tiled_divide(cute.make_layout((*plan.cluster,)), (tiled_mma.thr_id,))
        load = cpasync.CopyBulkTensorTileG2SOp(self.group)
        x_atom, x_view = cpasync.make_tiled_tma_atom(load, o.x, self._x_boxes(1), self._x_box())
        weight_tma = cute.nvgpu.make_tiled_tma_atom_B(
            load, o.weight, cute.slice_(weight_layout, (None, None, None, 0)), tile_mnk, tiled_mma, cluster_vmnk.shape
        )
        out_atom, out = None, o.out
        if config.store == "tma":
            box = (LANES, plan.store_columns)
            out_atom, out = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(), out, staging_layout(*box), box
            )
        n_tiles = cute.ceil_div(o.n, plan.tile_n)
        height = o.table_rows + int(plan.problem.table_index)
        position_tiles = cute.ceil_div(o.positions, config.tile_positions)
        return DeviceArguments(
            tiled_mma, x_atom, x_view, x_layout, self._x_boxes(config.stages), weight_tma.atom, weight_tma.tma_tensor,
            weight_layout, out_atom, out, table_view(plan, o.table, height, n_tiles * plan.tile_n), o.table_index,
            o.table_rows, o.rows, o.images, Int32(o.positions), Int32(position_tiles), o.scales,
            cute.ceil_div(o.images, plan.tile_images) * position_tiles, n_tiles, cute.ceil_div(o.k, plan.tile_k),
        )  # fmt: skip

    @property
    def group(self) -> tcgen05.CtaGroup:
        return tcgen05.CtaGroup.TWO if self.plan.cta_group == 2 else tcgen05.CtaGroup.ONE

    def _x_box(self) -> tuple[int, int, int]:
        """``[images, 128 bytes of K, positions]`` of a CTA's rows: TMA puts them one after another, images fastest."""
        return (self.plan.cta_images, self.plan.tile_k, self.plan.cta_positions)

    def _x_boxes(self, stages: int) -> cute.ComposedLayout:
        """The bytes of the stages of ``x`` as TMA fills them: `_x_box` and, of several, their number."""
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, self.element)
        layout = cute.tile_to_shape(atom, (*self._x_box(), stages), order=(0, 1, 2, 3))
        return layout if stages > 1 else cute.slice_(layout, (None, None, None, 0))

    def _tiled_mma(self) -> cute.TiledMma:
        shape, group = (self.plan.tile_m, self.plan.tile_n), self.group
        if self.plan.sums_integers:
            operation = IntegerMmaOp(self.element, self.weight_element, shape, group, tcgen05.OperandSource.SMEM)
            return cute.make_tiled_mma(cute.make_mma_atom(operation))
        return sm100_utils.make_trivial_tiled_mma(
            self.element, self.weight_element, OperandMajorMode.K, OperandMajorMode.K, Float32, group, shape
        )

    @cute.kernel
    def kernel(self, args: DeviceArguments, profile: cute.Pointer | None) -> None:
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if plan.ctas > 1 else Int32(0)

        storage = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=plan.swizzle_period)
        barriers = cute.recast_ptr(storage, dtype=Int64)
        tmem_address = cute.recast_ptr(storage + self.graph.slots * 8, dtype=Int32)
        x_stages, weight_stages, staging = (storage + region.offset for region in plan.smem[1:])
        place = cluster_place(plan, rank)
        pipes = make_pipes(self.graph, barriers, functools.partial(Sm100Pipe, place=place))

        atoms = (args.x_atom, args.weight_atom, args.out_atom)
        begin(plan, self.graph, warp, barriers, tmem_address, tuple(atom for atom in atoms if atom is not None))

        stamps = stamp_waits(pipes, make_stamps(plan, profile, warp))
        rows = TileRows(plan, rank, args.images, args.positions, args.position_tiles)
        order = SnakeOrder(
            args.order_m_tiles, args.order_n_tiles, cute.arch.block_idx()[0] // plan.ctas, clusters_of_grid(plan),
            plan.config.snake,
        )  # fmt: skip
        x_tensor = stage_tensor(x_stages, args.x_layout, self.element)
        weight_tensor = stage_tensor(weight_stages, args.weight_layout, self.weight_element)
        accumulators = tensor_memory(
            args.tiled_mma, (plan.tile_m, plan.tile_n), plan.accumulators, tmem_address, self.accumulator
        )

        if warp == plan.load_warp:
            self._load(args, x_stages, weight_tensor, pipes["operands"], order, rows, place).run()
        elif warp == plan.mma_warp:
            if place.leads:
                Mma(
                    args.tiled_mma, args.tiled_mma.make_fragment_A(x_tensor),
                    args.tiled_mma.make_fragment_B(weight_tensor), accumulators,
                    pipes["operands"], pipes["accumulator"], order, args.k_blocks,
                ).run()  # fmt: skip
        else:
            self._epilogue(args, accumulators, staging, pipes["accumulator"], order, rows).run(warp)

        stamps.finish()
        end(plan, warp, accumulators)

    def _load(self, args, x_stages, weight_tensor, pipe, order, rows, place) -> Load:
        plan = self.plan
        boxes = cute.local_tile(args.x, self._x_box(), (None, None, None))
        stages = stage_tensor(x_stages, args.x_boxes, self.element)
        x = tma_operand((args.x_atom, boxes), stages, 3)
        weight = cute.local_tile(args.weight, (plan.tile_n, plan.tile_k), (None, None))
        weight = args.tiled_mma.get_slice(rows.rank).partition_B(weight)
        return Load(
            RowsOperand(x.atom, x.source, x.stages, rows=rows),
            tma_operand((args.weight_atom, weight), weight_tensor, 3), pipe, order, args.k_blocks, place.leads,
        )  # fmt: skip

    def _epilogue(self, args, accumulators, staging, pipe, order, rows) -> Epilogue:
        plan = self.plan
        table_rows = TableRows(args.table_rows, args.table_index, args.rows)
        return Epilogue(
            plan, accumulators, Output(plan, staging, args.out_atom, args.out, rows, pipe.stamps),
            TableReader(plan, args.table, rows, table_rows), ScaleReader(args.scales.loaded()), pipe, order, rows,
        )  # fmt: skip


dsl.name_kernel(PatchEmbedKernel.kernel, "patch_embed_sm100a")
