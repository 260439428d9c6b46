"""The persistent GEMM over rows for Blackwell whose weight stays on chip: allocate, build pipes, dispatch to roles.

The output is computed transposed, ``D[feature, row] = weight * x^T``: 128 features of the weight stay in each CTA for
the whole launch, in tensor memory or in shared memory, and rows of ``x`` are the N operand. The load warp of each CTA
streams rows, the leader's MMA warp issues, and the epilogue warps drain one MMA tile of the accumulators while another
is computed.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.dsl import compiling
from cute_kernels.kernels import ptx
from cute_kernels.kernels.epilogue import Scales, scale_add_round
from cute_kernels.kernels.host import ELEMENT_TYPES, RowsHost, RowsOperands, TransposedArguments, transposed_arguments
from cute_kernels.kernels.load import Operand, RowsLoad, tma_operand
from cute_kernels.kernels.pipes import Pipe
from cute_kernels.kernels.sm100.cta_pair import ClusterPlace, cta_group
from cute_kernels.kernels.sm100.transposed import MATRICES, TransposedEpilogue, TransposedKernel, transposed_layout
from cute_kernels.kernels.tiles import PositionOrder, TileTableRows
from cute_kernels.kernels.tma import MMA_STEPS, Tma, k_major, load_tma, shared_tensor, swizzled
from cute_kernels.plan.base import LANES
from cute_kernels.plan.patch_embed_resident import Sm100ResidentPlan

# --- rows of ``x`` as the N operand of tcgen05.mma: how TMA fills a stage, and how MMAs read it ----------------------

@dataclass(frozen=True)
class Rows:
    """Operand stages that begin at ``stages`` in shared memory: 128 bytes of a row after another, SWIZZLE_128B."""

    plan: Sm100ResidentPlan
    stages: cute.Pointer

    def fragments(self, tiled_mma: cute.TiledMma, first: int, columns: int) -> cute.Tensor:
        """Shared-memory descriptors ``[.., k step in block, block]`` of this CTA's rows of an MMA tile."""
        plan = self.plan
        count, first = columns // plan.cta_group, first // plan.cta_group
        step, blocks = plan.tile_k // MMA_STEPS, plan.ring_blocks
        layout = cute.make_layout(
            ((count, step), 1, MMA_STEPS, blocks), stride=((plan.tile_k, 1), 0, step, plan.tile_k * plan.cta_rows)
        )
        # An MMA tile begins with a multiple of 8 rows, the 1024 bytes after which the swizzle repeats.
        rows = shared_tensor(self.stages + first * plan.k_block_bytes, swizzled(layout), element_type(plan))
        return tiled_mma.make_fragment_B(rows)


def element_type(plan: Sm100ResidentPlan) -> type:
    return ELEMENT_TYPES[plan.problem.in_dtype]


def rows_box(plan: Sm100ResidentPlan) -> tuple[int, int, int]:
    """``[images, 128 bytes of K, positions]`` of one CTA: TMA puts its rows one after another, images fastest."""
    return (plan.cta_images, plan.tile_k, plan.config.tile_positions)


def rows_operand(plan: Sm100ResidentPlan, tma: Tma, stages: cute.Pointer, rank: Int32) -> Operand:
    """``x`` as this CTA loads it: ``[box, row block, k_block, position block]`` to ``[box, block]``."""
    box, element = rows_box(plan), element_type(plan)
    boxes = shared_tensor(stages, k_major(element, box, plan.ring_blocks), element)
    rows = cute.local_tile(tma.view, box, (None, None, None))
    return tma_operand(tma.atom, rows, boxes, 3, tile=(plan.cta_group, rank))


# --- epilogue warps: sums of rows -> scale, bias + position, BF16 -> transposed staging -> TMA stores ----------------

@dataclass(frozen=True)
class Sm100ResidentEpilogue(TransposedEpilogue):
    """Epilogue of rows, stored to ``[box, row block, 32-feature block, position block]``.

    In position order every 8 columns are images at one position, and a thread adds the same four numbers to all of
    them. In flat order each row has table values of its own. ``table``: ``[4, 8, padded features / 32, rows]`` view of
    the bias + position table: a thread's features, its place in a block of 32, the block; ``features``: factors of the
    four features of a thread, ``lane / 4 + 8 i``, or None.
    """

    plan: Sm100ResidentPlan
    table: cute.Tensor | None
    table_rows: TileTableRows
    scales: Scales
    features: tuple[Float32, ...] | None

    def registers(self) -> cute.Tensor | None:
        """``[4, positions]``, if they are fetched before a tile."""
        if self.table is None or not self.plan.prefetches_table:
            return None
        return cute.make_rmem_tensor((MATRICES, self.plan.config.tile_positions), self.table.element_type)

    @cute.jit
    def fetch(self, registers: cute.Tensor | None, row_block: Int32, position: Int32, held: Int32) -> Int32:
        """Table values of the positions; in flat order the table row of the first row of the tile."""
        if cutlass.const_expr(registers is not None):
            for i in cutlass.range_constexpr(self.plan.config.tile_positions):
                self._load_table(registers[None, i], self.table_rows.position(position, i))
        return self.table_rows.first(row_block)

    @cute.jit
    def finish(
        self, sums: cute.Tensor, registers: cute.Tensor | None, held: Int32, row: cutlass.Constexpr[int],
        row_block: Int32, position: Int32
    ) -> cute.Tensor:
        plan = self.plan
        values = cute.make_rmem_tensor(2 * MATRICES, Float32)
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
        self, registers: cute.Tensor | None, held: Int32, row: cutlass.Constexpr[int], row_block: Int32, position: Int32
    ) -> cute.Tensor | None:
        """Table values in the order of stmatrix: two rows of each of four features."""
        if cutlass.const_expr(self.table is None):
            return None
        plan = self.plan
        addends = cute.make_rmem_tensor((2, MATRICES), self.table.element_type)
        if cutlass.const_expr(registers is not None):
            own = registers[None, plan.position_of(row)]
            for i in cutlass.range_constexpr(MATRICES):
                addends[0, i], addends[1, i] = own[i], own[i]
        else:
            own = cute.make_rmem_tensor(MATRICES, self.table.element_type)
            for odd in cutlass.range_constexpr(2):
                if cutlass.const_expr(not plan.positions_in_order):
                    offset = plan.image_of(row) + self.staging.lane % 4 * 2 + odd
                    x_row = self._row(row, row_block, position, odd)
                    self._load_table(own, self.table_rows.following(held, x_row, offset))
                elif cutlass.const_expr(odd == 0):
                    self._load_table(own, self.table_rows.position(position, plan.position_of(row)))
                for i in cutlass.range_constexpr(MATRICES):
                    addends[odd, i] = own[i]
        return cute.make_tensor(addends.iterator, 2 * MATRICES)

    @cute.jit
    def _scale(self, row: cutlass.Constexpr[int], row_block: Int32, position: Int32) -> Float32 | cute.Tensor:
        """The call's number, or the multipliers in the order of `_addends`."""
        if cutlass.const_expr(self.scales.rows is None and self.features is None):
            return self.scales.call
        values = cute.make_rmem_tensor(2 * MATRICES, Float32)
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
        return self.table_rows.row_of(image, self.table_rows.position(position, plan.position_of(row)))

    @cute.jit
    def _load_table(self, values: cute.Tensor, table_row: Int32) -> None:
        cute.autovec_copy(self.table[None, self.staging.lane // 4, self.feature_block, table_row], values)


class Sm100ResidentKernel(RowsHost, TransposedKernel):
    """Host entry and kernel for one plan. Blocks of K are compiled in."""

    plan: Sm100ResidentPlan

    def arguments(self, operands: RowsOperands) -> TransposedArguments:
        plan, o = self.plan, operands
        box = rows_box(plan)
        x = load_tma(o.x, k_major(element_type(plan), box, 1), box, 1, cta_group(plan))
        return transposed_arguments(plan, o, x, self.weight_tma(o.weight), self.out_tma(o.out))

    @property
    def out_box(self) -> tuple[int, int, int]:
        """``[images, features, positions]`` of a warp's part of a tile."""
        return (self.plan.tile_images, LANES, self.plan.config.tile_positions)

    def staging_layout(self) -> cute.ComposedLayout:
        """Images follow each other, position after position, as `Sm100ResidentPlan.staged_row` has them."""
        return transposed_layout(self.out_box, (LANES, 1, LANES * self.plan.tile_images))

    @cute.kernel
    def kernel(self, args: TransposedArguments) -> None:
        self.run(args)

    def atoms(self, args: TransposedArguments) -> tuple[cute.CopyAtom, ...]:
        return args.x.atom, args.out.atom

    def order(self, args: TransposedArguments, first: Int32, step: Int32) -> PositionOrder:
        return PositionOrder(args.row_tiles, args.position_tiles, first, step)

    def load(
        self, args: TransposedArguments, stages: cute.Pointer, pipe: Pipe, order: PositionOrder, place: ClusterPlace
    ) -> RowsLoad:
        plan = self.plan
        return RowsLoad(
            x=rows_operand(plan, args.x, stages, place.rank), operands=pipe, order=order, tile_stages=plan.tile_stages,
            stage_blocks=plan.config.stage_blocks, announces=place.leads
        )

    def operand(self, stages: cute.Pointer) -> Rows:
        return Rows(self.plan, stages)

    def epilogue(self, args: TransposedArguments, drain: TransposedEpilogue) -> Sm100ResidentEpilogue:
        scales, features = args.scales.loaded(), None
        if cutlass.const_expr(scales.features is not None):
            first = drain.feature_block * LANES + drain.staging.lane // MATRICES
            features = tuple(scales.feature(first + 8 * i) for i in range(MATRICES))
        rows = TileTableRows(args.table_rows, args.table_index, args.rows, self.plan)
        return Sm100ResidentEpilogue(**vars(drain), table=args.table, table_rows=rows, scales=scales, features=features)


compiling.name_kernel(Sm100ResidentKernel.kernel, "patch_embed_resident_sm100a")
