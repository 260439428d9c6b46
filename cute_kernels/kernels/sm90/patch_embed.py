"""The persistent GEMM with a fused epilogue for Hopper: allocate, build pipes, dispatch to roles.

Consumer warpgroups own 64 output features each and walk the rows of ``x``, which one TMA warp streams through shared
memory. The weight stays in registers (or is streamed along), the accumulators are stored transposed.

Warpgroups that issue WGMMAs at any time run in lockstep, and their epilogues leave the tensor cores idle together. With
a ring of two tiles each has the tensor cores to itself for a tile while another one stores. A stage is refilled when
every warpgroup of every CTA of the cluster has arrived, since each CTA multicasts into all of them; a warpgroup arrives
when at most its newest WGMMA group is outstanding, so that the one which read the stage is complete.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.dsl import compiling
from cute_kernels.kernels import ptx
from cute_kernels.kernels.epilogue import Scales, scale_add_round
from cute_kernels.kernels.host import RowsHost, RowsOperands, TransposedArguments, transposed_arguments
from cute_kernels.kernels.load import RowsLoad, tma_operand
from cute_kernels.kernels.sm90.transposed import ROWS_PER_STORE, Frame, TransposedKernel, WarpgroupStaging
from cute_kernels.kernels.tiles import PositionOrder, TileTableRows
from cute_kernels.kernels.tma import all_ctas, k_major, load_tma, shared_tensor, store_tma, swizzled
from cute_kernels.plan.patch_embed_sm90 import Sm90PatchEmbedPlan

# --- epilogue of a consumer warpgroup: accumulators -> scale, bias + position, BF16 -> staging -> TMA store ----------

ROWS_PER_THREAD = ROWS_PER_STORE // 4
"""Rows of one stmatrix of which a thread has values."""


@dataclass(frozen=True)
class Sm90PatchEmbedEpilogue:
    """Drains one warpgroup's accumulators of its block of 64 features x tile_rows rows, to ``[box, row block,
    64-feature block, position block]``.

    ``table``: ``[2, 8, padded features / 16, rows]`` view of the bias + position table: a thread's pair of features,
    its place in a block of 16, the block; ``pair``: factors of the two features of a thread, or None.
    """

    plan: Sm90PatchEmbedPlan
    staging: WarpgroupStaging
    table: cute.Tensor | None
    table_rows: TileTableRows
    scales: Scales
    pair: tuple[Float32, Float32] | None
    feature_block: Int32

    @cute.jit
    def prefetch(self, row_block: Int32, position: Int32) -> tuple[cute.Tensor | None, cute.Tensor | None]:
        """Fetches before the WGMMAs of a tile what is needed of the table and of the rows' factors."""
        return self._prefetch_table(row_block, position), self._prefetch_rows(row_block, position)

    @cute.jit
    def _prefetch_rows(self, row_block: Int32, position: Int32) -> cute.Tensor | None:
        """Factors of all rows of a tile that a thread has, four for each stmatrix."""
        if cutlass.const_expr(not self.plan.prefetches_rows):
            return None
        factors = cute.make_rmem_tensor(self.plan.row_registers, Float32)
        for i in cutlass.range_constexpr(self.plan.config.tile_rows // ROWS_PER_STORE):
            self._load_rows(factors, i * ROWS_PER_THREAD, row_block, position, i)
        return factors

    @cute.jit
    def _prefetch_table(self, row_block: Int32, position: Int32) -> cute.Tensor | None:
        """Table values that are fetched before the WGMMAs of a tile: two for each position, in flat order all."""
        plan = self.plan
        if cutlass.const_expr(self.table is None or not plan.prefetches_table):
            return None
        values = cute.make_rmem_tensor(plan.table_registers, self.table.element_type)
        if cutlass.const_expr(plan.config.order == "position"):
            pair = cute.make_rmem_tensor(2, self.table.element_type)
            for i in cutlass.range_constexpr(plan.config.tile_positions):
                self._load_pair(pair, self.table_rows.position(position, i))
                values[2 * i], values[2 * i + 1] = pair[0], pair[1]
            return values
        first_table_row = self.table_rows.first(row_block)
        for i in cutlass.range_constexpr(plan.config.tile_rows // ROWS_PER_STORE):
            self._load_block(values, i * 8, row_block, first_table_row, i)
        return values

    @cute.jit
    def store(
        self, accumulator: cute.Tensor, fetched: tuple[cute.Tensor | None, cute.Tensor | None], row_block: Int32,
        position: Int32
    ) -> None:
        """Converts, stages and stores one tile; returns as soon as the TMA store is issued."""
        plan = self.plan
        fetched_table, fetched_rows = fetched
        addresses = self.staging.addresses()
        first_table_row = Int32(0)
        if cutlass.const_expr(plan.config.order == "flat" and self.table is not None and not plan.prefetches_table):
            first_table_row = self.table_rows.first(row_block)
        self.staging.acquire()
        for i in cutlass.range_constexpr(plan.config.tile_rows // ROWS_PER_STORE):
            registers = cute.make_rmem_tensor(8, Float32)
            for j in cutlass.range_constexpr(8):
                registers[j] = Float32(accumulator[i * 8 + j])
            addends = self._addends(fetched_table, row_block, position, first_table_row, i)
            scale = self._scale(fetched_rows, row_block, position, i)
            values = scale_add_round(registers, addends, scale, plan.config.epilogue, packed_f32=False)
            self.staging.write(addresses, values, i)
        self.staging.store(row_block, self.feature_block, position)

    @cute.jit
    def finish(self) -> None:
        self.staging.finish()

    @cute.jit
    def _scale(
        self, fetched: cute.Tensor | None, row_block: Int32, position: Int32, block: cutlass.Constexpr[int]
    ) -> Float32 | cute.Tensor:
        """The call's number, or the multipliers of one stmatrix in the order of `_addends`."""
        if cutlass.const_expr(self.scales.rows is None and self.pair is None):
            return self.scales.call
        values = cute.make_rmem_tensor(8, Float32)
        rows = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        if cutlass.const_expr(self.scales.rows is not None):
            if cutlass.const_expr(fetched is None):
                self._load_rows(rows, 0, row_block, position, block)
            else:
                for j in cutlass.range_constexpr(ROWS_PER_THREAD):
                    rows[j] = fetched[block * ROWS_PER_THREAD + j]
        for j in cutlass.range_constexpr(8):
            row = j // 4 * 2 + j % 2
            if cutlass.const_expr(self.scales.rows is None):
                values[j] = self.pair[j // 2 % 2]
            elif cutlass.const_expr(self.pair is None):
                values[j] = rows[row]
            else:
                values[j] = ptx.mul_rn_f32(rows[row], self.pair[j // 2 % 2])
        return values

    @cute.jit
    def _load_rows(
        self, factors: cute.Tensor, offset: cutlass.Constexpr[int], row_block: Int32, position: Int32,
        block: cutlass.Constexpr[int]
    ) -> None:
        """Factors of a thread's four rows of one stmatrix: rows 0-1, rows 8-9."""
        plan = self.plan
        for half in cutlass.range_constexpr(2):
            for odd in cutlass.range_constexpr(2):
                row = block * ROWS_PER_STORE + half * 8 + self.staging.thread % 4 * 2 + odd
                if cutlass.const_expr(plan.positions_in_order):
                    # 8 rows are one position's, since the images of a tile are a multiple of 8.
                    i = (block * ROWS_PER_STORE + half * 8) // plan.tile_images
                    image = row_block * plan.tile_images + row - i * plan.tile_images
                    index = self.table_rows.row_of(image, self.table_rows.position(position, i))
                else:
                    index = row_block * plan.config.tile_rows + row
                factors[offset + half * 2 + odd] = self.scales.row(index)

    @cute.jit
    def _addends(
        self, fetched: cute.Tensor | None, row_block: Int32, position: Int32, first_table_row: Int32,
        block: cutlass.Constexpr[int]
    ) -> cute.Tensor | None:
        """Table values of one stmatrix by register: feature 0 of rows 0-1, feature 8 of rows 0-1, the same for 8-9."""
        if cutlass.const_expr(self.table is None):
            return None
        plan = self.plan
        values = cute.make_rmem_tensor(8, self.table.element_type)
        if cutlass.const_expr(plan.config.order == "flat" and fetched is None):
            self._load_block(values, 0, row_block, first_table_row, block)
        elif cutlass.const_expr(plan.config.order == "flat"):
            for j in cutlass.range_constexpr(8):
                values[j] = fetched[block * 8 + j]
        else:
            pair = cute.make_rmem_tensor(2, self.table.element_type)
            for half in cutlass.range_constexpr(2):
                # 8 rows are one position's, since the images of a tile are a multiple of 8.
                i = (block * ROWS_PER_STORE + half * 8) // plan.tile_images
                if cutlass.const_expr(fetched is None):
                    self._load_pair(pair, self.table_rows.position(position, i))
                else:
                    pair[0], pair[1] = fetched[2 * i], fetched[2 * i + 1]
                for j in cutlass.range_constexpr(4):
                    values[half * 4 + j] = pair[j // 2]
        return values

    @cute.jit
    def _load_block(
        self, values: cute.Tensor, offset: cutlass.Constexpr[int], row_block: Int32, first_table_row: Int32,
        block: cutlass.Constexpr[int]
    ) -> None:
        """Flat order: fills the eight values of one stmatrix, beginning at ``offset``."""
        pair = cute.make_rmem_tensor(2, self.table.element_type)
        for half in cutlass.range_constexpr(2):
            for odd in cutlass.range_constexpr(2):
                offset_of_row = block * ROWS_PER_STORE + half * 8 + self.staging.thread % 4 * 2 + odd
                row = row_block * self.plan.config.tile_rows + offset_of_row
                self._load_pair(pair, self.table_rows.following(first_table_row, row, offset_of_row))
                values[offset + half * 4 + odd], values[offset + half * 4 + 2 + odd] = pair[0], pair[1]

    @cute.jit
    def _load_pair(self, pair: cute.Tensor, table_row: Int32) -> None:
        block = self.feature_block * 4 + self.staging.thread // 32
        cute.autovec_copy(self.table[None, self.staging.thread % 32 // 4, block, table_row], pair)


@dataclass(frozen=True)
class DeviceArguments:
    """Arguments of the kernel from the host function: the instruction, the operands, and the stages of a tile."""

    tiled_mma: cute.TiledMma
    operands: TransposedArguments
    tile_stages: Int32


class Sm90PatchEmbedKernel(RowsHost, TransposedKernel):
    """Host entry and kernel for one plan. A resident K is compiled in."""

    plan: Sm90PatchEmbedPlan

    def arguments(self, operands: RowsOperands) -> DeviceArguments:
        plan, config, o = self.plan, self.plan.config, operands
        tiled_mma = self.tiled_mma(self.weight_element, self.element)
        box = self._box(plan.tile_k)
        x = load_tma(o.x, k_major(self.element, box, 1), box, config.cluster)
        weight = o.weight
        if not plan.resident:
            block = (plan.features, plan.tile_k)
            weight = load_tma(o.weight, k_major(self.element, block, 1), block)
        out = store_tma(o.out, self.staging_layout(), self.out_box)
        common = transposed_arguments(plan, o, x, weight, out)
        return DeviceArguments(tiled_mma, common, cute.ceil_div(o.k, plan.tile_k * config.stage_blocks))

    def _box(self, columns: int) -> tuple[int, int, int]:
        """``[images, columns, positions]`` of a tile: TMA puts its rows one after another, images fastest."""
        return (self.plan.tile_images, columns, self.plan.config.tile_positions)

    @property
    def out_box(self) -> tuple[int, int, int]:
        return self._box(64)

    def staging_layout(self) -> cute.ComposedLayout:
        return swizzled(cute.make_layout(self.out_box, stride=(64, 1, 64 * self.plan.tile_images)))

    @cute.kernel
    def kernel(self, args: DeviceArguments) -> None:
        self.run(args)

    def atoms(self, operands: TransposedArguments) -> tuple[cute.CopyAtom, ...]:
        return operands.x.atom, operands.out.atom

    def order(self, operands: TransposedArguments, first: Int32, step: Int32) -> PositionOrder:
        return PositionOrder(operands.row_tiles, operands.position_tiles, first, step)

    def tile_stages(self, args: DeviceArguments) -> Int32:
        return args.tile_stages

    def _stages(self, memory: cute.Pointer, rows: int, element: type) -> cute.Tensor:
        layout = k_major(self.element, (rows, self.plan.tile_k), self.plan.ring_blocks)
        return shared_tensor(memory, layout, element)

    def weight_stages(self, frame: Frame) -> cute.Tensor:
        return self._stages(frame.memory[1], self.plan.features, self.weight_element)

    def x_stages(self, frame: Frame) -> Iterator[cute.Tensor]:
        yield self._stages(frame.memory[0], self.plan.tile_rows, self.element)

    def staging(self, frame: Frame) -> cute.Pointer:
        return frame.memory[2]

    def load(self, args: DeviceArguments, frame: Frame) -> RowsLoad:
        plan, config, o, box = self.plan, self.plan.config, args.operands, self._box(self.plan.tile_k)
        rows = cute.local_tile(o.x.view, box, (None, None, None))
        # As TMA fills the stages: rows of a tile by image and position.
        boxes = shared_tensor(frame.memory[0], k_major(self.element, box, plan.ring_blocks), self.element)
        ctas, weight = config.cluster, None
        x = tma_operand(o.x.atom, rows, boxes, 3, share=(ctas, frame.rank), mask=all_ctas(ctas))
        if cutlass.const_expr(not plan.resident):
            features = cute.local_tile(o.weight.view, (plan.features, plan.tile_k), (None, None))
            weight = tma_operand(o.weight.atom, features, self.weight_stages(frame), 2)
        return RowsLoad(
            x=x, operands=frame.pipes["operands"], order=frame.order, tile_stages=args.tile_stages,
            stage_blocks=config.stage_blocks, weight=weight, n_tile=frame.n_tile
        )

    def epilogue(
        self, operands: TransposedArguments, staging: WarpgroupStaging, feature_block: Int32
    ) -> Sm90PatchEmbedEpilogue:
        o, scales, pair = operands, operands.scales.loaded(), None
        if cutlass.const_expr(scales.features is not None):
            first = feature_block * 64 + staging.thread // 32 * 16 + staging.thread % 32 // 4
            pair = (scales.feature(first), scales.feature(first + 8))
        rows = TileTableRows(o.table_rows, o.table_index, o.rows, self.plan)
        return Sm90PatchEmbedEpilogue(self.plan, staging, o.table, rows, scales, pair, feature_block)


compiling.name_kernel(Sm90PatchEmbedKernel.kernel, "patch_embed_sm90a")
