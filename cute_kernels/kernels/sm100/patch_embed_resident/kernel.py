"""The persistent GEMM over rows for Blackwell whose weight stays on chip: allocate, build pipes, dispatch to roles.

The output is computed transposed, ``D[feature, row] = weight * x^T``: 128 features of the weight stay in each CTA for
the whole launch, in tensor memory or in shared memory, and rows of ``x`` are the N operand. The load warp of each CTA
streams rows, the leader's MMA warp issues, and the epilogue warps drain one part of the accumulators while another is
computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from cute_kernels import dsl
from cute_kernels.kernels.graph import sm100_transposed_graph
from cute_kernels.kernels.rows_host import RowsHost, RowsOperands
from cute_kernels.kernels.rows_load import RowsLoad
from cute_kernels.kernels.scales import Scales
from cute_kernels.kernels.sm100.patch_embed_resident.epilogue import Epilogue
from cute_kernels.kernels.sm100.patch_embed_resident.operand import Rows, box_layout, row_boxes, rows_box
from cute_kernels.kernels.sm100.transposed.epilogue import MATRICES
from cute_kernels.kernels.sm100.transposed.instruction import make_mma
from cute_kernels.kernels.sm100.transposed.kernel import TransposedKernel
from cute_kernels.kernels.sm100.transposed.staging import staging_layout, warp_staging
from cute_kernels.kernels.sm100.transposed.weight import smem_tma
from cute_kernels.kernels.table_rows import TableRows
from cute_kernels.kernels.tiles import PositionOrder
from cute_kernels.plan import LANES, Sm100ResidentPlan


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


class PatchEmbedKernel(RowsHost, TransposedKernel):
    """Host entry and kernel for one plan. Blocks of K are compiled in."""

    plan: Sm100ResidentPlan

    def __init__(self, plan: Sm100ResidentPlan) -> None:
        super().__init__(plan, sm100_transposed_graph(plan))

    def arguments(self, operands: RowsOperands) -> DeviceArguments:
        plan, o = self.plan, operands
        group = tcgen05.CtaGroup.TWO if plan.cta_group == 2 else tcgen05.CtaGroup.ONE
        x_atom, x_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(group), o.x, box_layout(plan, 1), rows_box(plan)
        )
        out_atom, out_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), o.out, self._staging_layout(), self._out_box
        )
        weight_atom, weight = None, o.weight
        if plan.config.weight == "smem":
            weight_atom, weight = smem_tma(plan, make_mma(plan, plan.parts[0][1]), weight)
        groups = cute.ceil_div(cute.ceil_div(o.n, plan.features), plan.ctas)
        return DeviceArguments(
            x_atom, x_view, weight_atom, weight, out_atom, out_view, self._table_view(o.table, o.table_rows, groups),
            o.table_index, o.table_rows, o.scales, o.rows, cute.ceil_div(o.images, plan.tile_images),
            cute.ceil_div(o.positions, plan.config.tile_positions), groups,
        )  # fmt: skip

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
    def kernel(self, args: DeviceArguments, profile: cute.Pointer | None) -> None:
        self.run(args, profile)

    def atoms(self, args: DeviceArguments) -> tuple[cute.CopyAtom, ...]:
        return args.x_atom, args.out_atom

    def order(self, args: DeviceArguments, first: Int32, step: Int32) -> PositionOrder:
        return PositionOrder(args.row_tiles, args.position_tiles, first, step)

    def load(self, args, stages, pipe, order, place) -> RowsLoad:
        plan = self.plan
        source, boxes = row_boxes(plan, (args.x_atom, args.x), stages)
        return RowsLoad(
            args.x_atom, source, boxes, pipe, order, plan.tile_stages, plan.config.stage_blocks,
            row_step=plan.cta_group, first_rows=place.rank, announces=place.leads,
        )  # fmt: skip

    def operand(self, stages: cute.Pointer) -> Rows:
        return Rows(self.plan, stages)

    def epilogue(self, args, accumulators, staging, pipe, order, slab, quarter) -> Epilogue:
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
