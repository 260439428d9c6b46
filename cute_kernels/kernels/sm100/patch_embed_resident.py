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
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from cute_kernels import dsl
from cute_kernels.kernels import ptx
from cute_kernels.kernels.epilogue import Scales, scale_add_round
from cute_kernels.kernels.graph import sm100_transposed_graph
from cute_kernels.kernels.host import ELEMENT_TYPES, RowsHost, RowsOperands
from cute_kernels.kernels.load import RowsLoad
from cute_kernels.kernels.sm100.transposed import (
    MATRICES,
    MMA_STEPS,
    TransposedEpilogue,
    TransposedKernel,
    make_mma,
    smem_tma,
    staging_layout,
    warp_staging,
)
from cute_kernels.kernels.tiles import PositionOrder, TableRows
from cute_kernels.plan import LANES, Sm100ResidentPlan

# --- rows of ``x`` as the N operand of tcgen05.mma: how TMA fills a stage, and how MMAs read it ----------------------


@dataclass(frozen=True)
class Rows:
    """Operand stages that begin at ``stages`` in shared memory: 128 bytes of a row after another, SWIZZLE_128B."""

    plan: Sm100ResidentPlan
    stages: cute.Pointer

    def fragments(self, tiled_mma: cute.TiledMma, first: int, columns: int) -> cute.Tensor:
        """Shared-memory descriptors ``[.., k step in block, block]`` of this CTA's rows of a part of the columns."""
        plan = self.plan
        count, first = columns // plan.cta_group, first // plan.cta_group
        step, blocks = plan.tile_k // MMA_STEPS, plan.config.stages * plan.config.stage_blocks
        layout = cute.make_layout(
            ((count, step), 1, MMA_STEPS, blocks), stride=((plan.tile_k, 1), 0, step, plan.tile_k * plan.cta_rows)
        )
        # A part begins with a multiple of 8 rows, the 1024 bytes after which the swizzle repeats.
        rows = cute.recast_ptr(
            self.stages + first * plan.k_block_bytes, cute.make_swizzle(3, 4, 3), dtype=element_type(plan)
        )
        return tiled_mma.make_fragment_B(cute.make_tensor(rows, layout))


def element_type(plan: Sm100ResidentPlan) -> type:
    return ELEMENT_TYPES[plan.problem.in_dtype]


def rows_box(plan: Sm100ResidentPlan) -> tuple[int, int, int]:
    """``[images, 128 bytes of K, positions]`` of one CTA: TMA puts its rows one after another, images fastest."""
    return (plan.cta_images, plan.tile_k, plan.config.tile_positions)


def box_layout(plan: Sm100ResidentPlan, blocks: int) -> cute.ComposedLayout:
    """Boxes as TMA fills them, ``[images, 128 bytes of K, positions, blocks]``; no last mode for a single block."""
    atom = sm100_utils.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, element_type(plan))
    layout = cute.tile_to_shape(atom, (*rows_box(plan), blocks), order=(0, 1, 2, 3))
    return layout if blocks > 1 else cute.slice_(layout, (None, None, None, 0))


def row_boxes(
    plan: Sm100ResidentPlan, tma: tuple[cute.CopyAtom, cute.Tensor], stages: cute.Pointer
) -> tuple[cute.Tensor, cute.Tensor]:
    """Views that the load warp copies: ``[box, row block, k_block, position block]`` to ``[box, block]``.

    Args:
        plan: what is loaded.
        tma: atom, and TMA view ``[images, K, positions]`` of ``x``.
        stages: buffers in shared memory.
    """
    layout = box_layout(plan, plan.config.stages * plan.config.stage_blocks)
    boxes = cute.make_tensor(cute.recast_ptr(stages, layout.inner, dtype=element_type(plan)), layout.outer)
    rows = cute.local_tile(tma[1], rows_box(plan), (None, None, None))
    blocks, source = cpasync.tma_partition(
        tma[0], 0, cute.make_layout(1), cute.group_modes(boxes, 0, 3), cute.group_modes(rows, 0, 3)
    )
    return source, blocks


# --- epilogue warps: sums of rows -> scale, bias + position, BF16 -> transposed staging -> TMA stores ----------------


@dataclass(frozen=True)
class Sm100ResidentEpilogue(TransposedEpilogue):
    """Epilogue of rows, stored to ``[box, row block, 32-feature block, position block]``.

    In position order every 8 columns are images at one position, and a thread adds the same four numbers to all of
    them. In flat order each row has table values of its own.

    Attributes:
        table: ``[4, 8, padded features / 32, rows]`` view of the bias + position table, or None: a thread's features,
            its place in a block of 32, the block.
        table_rows: which row of the table a row of the output gets.
        scales: dequantisation multipliers.
        features: factors of the four features of a thread, ``lane / 4 + 8 i``, or None.
    """

    plan: Sm100ResidentPlan
    table: cute.Tensor | None
    table_rows: TableRows
    scales: Scales
    features: tuple[Float32, ...] | None

    def registers(self) -> cute.Tensor | None:
        """``[4, positions]``, if they are fetched before a tile."""
        if self.table is None or not self.plan.prefetches_table:
            return None
        return cute.make_rmem_tensor(
            cute.make_layout((MATRICES, self.plan.config.tile_positions)), self.table.element_type
        )

    @cute.jit
    def fetch(self, registers: cute.Tensor | None, row_block: Int32, position: Int32, held: Int32) -> Int32:
        """Table values of the positions; in flat order the table row of the first row of the tile."""
        if cutlass.const_expr(registers is not None):
            for i in cutlass.range_constexpr(self.plan.config.tile_positions):
                self._load_table(registers[None, i], self._position(position, i))
        if cutlass.const_expr(self.plan.table_wraps_once):
            held = self.table_rows.of(row_block * self.plan.tile_rows)
        return held

    @cute.jit
    def finish(
        self, sums: cute.Tensor, registers: cute.Tensor | None, held: Int32, row: cutlass.Constexpr[int],
        row_block: Int32, position: Int32,
    ) -> cute.Tensor:  # fmt: skip
        plan = self.plan
        values = cute.make_rmem_tensor(cute.make_layout(2 * MATRICES), Float32)
        for i in cutlass.range_constexpr(MATRICES):
            for odd in cutlass.range_constexpr(2):
                values[2 * i + odd] = Float32(sums[odd, i % 2, i // 2])
        addends = self._addends(registers, held, row, row_block, position)
        scale = self._scale(row, row_block, position)
        return scale_add_round(values, addends, scale, plan.config.epilogue, packed_f32=True)

    @cute.jit
    def store(self, row_block: Int32, position: Int32) -> None:
        self.staging.store(row_block, self.feature_block, position)

    @cute.jit
    def _addends(
        self, registers: cute.Tensor | None, held: Int32, row: cutlass.Constexpr[int], row_block: Int32,
        position: Int32,
    ) -> cute.Tensor | None:  # fmt: skip
        """Table values in the order of stmatrix: two rows of each of four features."""
        if cutlass.const_expr(self.table is None):
            return None
        plan = self.plan
        addends = cute.make_rmem_tensor(cute.make_layout((2, MATRICES)), self.table.element_type)
        if cutlass.const_expr(registers is not None):
            own = registers[None, plan.position_of(row)]
            for i in cutlass.range_constexpr(MATRICES):
                addends[0, i], addends[1, i] = own[i], own[i]
        else:
            own = cute.make_rmem_tensor(cute.make_layout(MATRICES), self.table.element_type)
            for odd in cutlass.range_constexpr(2):
                if cutlass.const_expr(not plan.positions_in_order):
                    self._load_table(own, self._table_row(held, row, row_block, odd))
                elif cutlass.const_expr(odd == 0):
                    self._load_table(own, self._position(position, plan.position_of(row)))
                for i in cutlass.range_constexpr(MATRICES):
                    addends[odd, i] = own[i]
        return cute.make_tensor(addends.iterator, cute.make_layout(2 * MATRICES))

    @cute.jit
    def _scale(self, row: cutlass.Constexpr[int], row_block: Int32, position: Int32) -> Float32 | cute.Tensor:
        """The call's number, or the multipliers in the order of `_addends`."""
        if cutlass.const_expr(self.scales.rows is None and self.features is None):
            return self.scales.call
        values = cute.make_rmem_tensor(cute.make_layout(2 * MATRICES), Float32)
        for odd in cutlass.range_constexpr(2):
            factor = None
            if cutlass.const_expr(self.scales.rows is not None):
                factor = self.scales.row(self._row(row, row_block, position, odd))
            for i in cutlass.range_constexpr(MATRICES):
                if cutlass.const_expr(self.scales.rows is None):
                    values[2 * i + odd] = self.features[i]
                elif cutlass.const_expr(self.features is None):
                    values[2 * i + odd] = factor
                else:
                    values[2 * i + odd] = ptx.mul_rn_f32(factor, self.features[i])
        return values

    @cute.jit
    def _row(
        self, row: cutlass.Constexpr[int], row_block: Int32, position: Int32, odd: cutlass.Constexpr[int]
    ) -> Int32:
        """Row of ``x`` of one of this thread's two columns of the 8 that begin with a row of the tile."""
        plan = self.plan
        image = row_block * plan.tile_images + plan.image_of(row) + self.staging.lane % 4 * 2 + odd
        if cutlass.const_expr(not plan.positions_in_order):
            return image
        # Of images beyond the last one, which nobody stores, that of the last.
        positions = self.table_rows.positions
        image = min(image, self.table_rows.rows // positions - 1)
        return image * positions + self._position(position, plan.position_of(row))

    @cute.jit
    def _table_row(
        self, held: Int32, row: cutlass.Constexpr[int], row_block: Int32, odd: cutlass.Constexpr[int]
    ) -> Int32:
        """Flat order: table row of one of this thread's two columns."""
        if cutlass.const_expr(not self.plan.table_wraps_once):
            return self.table_rows.of(self._row(row, row_block, Int32(0), odd))
        table_row = held + self.plan.image_of(row) + self.staging.lane % 4 * 2 + odd
        if table_row >= self.table_rows.positions:
            table_row -= self.table_rows.positions
        return table_row

    @cute.jit
    def _position(self, block: Int32, i: cutlass.Constexpr[int]) -> Int32:
        """Position ``i`` of a tile. Beyond the last one, whose rows TMA clips, the last: the table ends there."""
        if cutlass.const_expr(self.plan.config.tile_positions == 1):
            return block
        return min(block * self.plan.config.tile_positions + i, self.table_rows.positions - 1)

    @cute.jit
    def _load_table(self, values: cute.Tensor, table_row: Int32) -> None:
        cute.autovec_copy(self.table[None, self.staging.lane // 4, self.feature_block, table_row], values)


# --- the kernel ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceArguments:
    """Arguments of the kernel from the host function: TMA atoms with their views, weight, table, scales and sizes.

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


class Sm100ResidentKernel(RowsHost, TransposedKernel):
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
            x_atom=x_atom,
            x=x_view,
            weight_atom=weight_atom,
            weight=weight,
            out_atom=out_atom,
            out=out_view,
            table=self._table_view(o.table, o.table_rows, groups),
            table_index=o.table_index,
            table_rows=o.table_rows,
            scales=o.scales,
            rows=o.rows,
            row_tiles=cute.ceil_div(o.images, plan.tile_images),
            position_tiles=cute.ceil_div(o.positions, plan.config.tile_positions),
            groups=groups,
        )

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

    def epilogue(self, args, accumulators, staging, pipe, order, slab, quarter) -> Sm100ResidentEpilogue:
        plan = self.plan
        block = slab * (plan.features // LANES) + quarter
        buffer = warp_staging(plan, staging, self._staging_layout(), args.out_atom, args.out, self._out_box, quarter)
        scales, features = args.scales.loaded(), None
        if cutlass.const_expr(scales.features is not None):
            first = block * LANES + buffer.lane // MATRICES
            features = tuple(scales.feature(first + 8 * i) for i in range(MATRICES))
        rows = TableRows(args.table_rows, args.table_index, args.rows)
        return Sm100ResidentEpilogue(
            plan, accumulators, buffer, pipe, order, block, quarter, args.table, rows, scales, features
        )


dsl.name_kernel(Sm100ResidentKernel.kernel, "patch_embed_resident_sm100a")

