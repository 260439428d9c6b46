"""Epilogue of a consumer warpgroup: accumulators -> scale, bias + position, BF16 -> transposed staging -> TMA store."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import warp

from cute_kernels.kernels.epilogue_math import scale_add_round
from cute_kernels.kernels.table_rows import TableRows
from cute_kernels.plan import VECTOR_BYTES, Sm90PatchEmbedPlan

ROWS_PER_STORE = 16
"""Rows of ``x`` (WGMMA columns) that one stmatrix.x4 of a warp covers, with the warp's 16 features."""


@dataclass(frozen=True)
class Epilogue:
    """Drains one warpgroup's accumulators of 64 features x tile_rows rows.

    A thread holds features ``lane / 4`` and ``lane / 4 + 8`` of its warp's 16, and of every 8 rows two neighbouring
    ones (PTX ISA, wgmma accumulator layout). stmatrix with ``.trans`` turns that into rows of features.

    Attributes:
        staging: this warpgroup's staging buffer, tile_rows rows of 64 features, SWIZZLE_128B.
        store_atom, store_source, store_target: TMA store of the buffer to ``[box, row block, 64-feature block,
            position block]``; TMA clips rows, features and positions beyond the output.
        table: ``[2, 8, padded features / 16, rows]`` view of the bias + position table, or None: a thread's pair of
            features, its place in a block of 16, the block.
        table_rows: which row of the table a row of the output gets.
        feature_block: this warpgroup's block of 64 features.
        staged: named barrier of this warpgroup.
    """

    plan: Sm90PatchEmbedPlan
    staging: cute.Pointer
    store_atom: cute.CopyAtom
    store_source: cute.Tensor
    store_target: cute.Tensor
    table: cute.Tensor | None
    table_rows: TableRows
    scale: Float32
    feature_block: Int32
    thread: Int32
    staged: Int32

    @cute.jit
    def prefetch(self, row_block: Int32, position: Int32) -> cute.Tensor | None:
        """Table values that are fetched before the WGMMAs of a tile: two for each position, in flat order all."""
        plan = self.plan
        if cutlass.const_expr(self.table is None or not plan.prefetches_table):
            return None
        values = cute.make_rmem_tensor(cute.make_layout(plan.table_registers), self.table.element_type)
        if cutlass.const_expr(plan.config.order == "position"):
            pair = cute.make_rmem_tensor(cute.make_layout(2), self.table.element_type)
            for i in cutlass.range_constexpr(plan.config.tile_positions):
                self._load_pair(pair, self._position(position, i))
                values[2 * i], values[2 * i + 1] = pair[0], pair[1]
            return values
        first_table_row = self._first_table_row(row_block)
        for i in cutlass.range_constexpr(plan.config.tile_rows // ROWS_PER_STORE):
            self._load_block(values, i * 8, row_block, first_table_row, i)
        return values

    @cute.jit
    def store(self, accumulator: cute.Tensor, fetched: cute.Tensor | None, row_block: Int32, position: Int32) -> None:
        """Converts, stages and stores one tile; returns as soon as the TMA store is issued."""
        plan = self.plan
        lane, warp_index = self.thread % 32, self.thread // 32
        # stmatrix: lanes 8 i to 8 i + 7 give the row addresses of matrix i; matrices 0, 1 are features 0-7, 8-15 of
        # rows 0-7, matrices 2, 3 of rows 8-15. SWIZZLE_128B: chunk XOR row % 8, the buffer begins on 1024 bytes.
        row = lane // 16 * 8 + lane % 8
        chunk = (warp_index * 2 + lane // 8 % 2) ^ lane % 8
        offset = cute.assume(row * 128 + chunk * VECTOR_BYTES, divby=VECTOR_BYTES)
        target = cute.recast_ptr(self.staging + offset, dtype=BFloat16)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), BFloat16)

        first_table_row = Int32(0)
        if cutlass.const_expr(plan.config.order == "flat" and self.table is not None and not plan.prefetches_table):
            first_table_row = self._first_table_row(row_block)
        if warp_index == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self._synchronise()
        for i in cutlass.range_constexpr(plan.config.tile_rows // ROWS_PER_STORE):
            registers = cute.make_rmem_tensor(cute.make_layout(8), Float32)
            for j in cutlass.range_constexpr(8):
                registers[j] = accumulator[i * 8 + j]
            addends = self._addends(fetched, row_block, position, first_table_row, i)
            values = scale_add_round(registers, addends, self.scale, plan.config.epilogue, packed_f32=False)
            rows_16 = cute.make_tensor(target + i * (ROWS_PER_STORE * 64), cute.make_layout((8, 1)))
            cute.copy(atom, cute.make_tensor(values.iterator, cute.make_layout((8, 1))), rows_16)
        cute.arch.fence_view_async_shared()
        self._synchronise()
        if warp_index == 0:
            cute.copy(
                self.store_atom, self.store_source, self.store_target[None, row_block, self.feature_block, position]
            )
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def finish(self) -> None:
        """The CTA must not exit before TMA has read its staging."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _synchronise(self) -> None:
        cute.arch.barrier(barrier_id=self.staged, number_of_threads=128)

    @cute.jit
    def _addends(
        self, fetched: cute.Tensor | None, row_block: Int32, position: Int32, first_table_row: Int32,
        block: cutlass.Constexpr[int],
    ) -> cute.Tensor | None:  # fmt: skip
        """Table values of one stmatrix by register: feature 0 of rows 0-1, feature 8 of rows 0-1, the same for 8-9."""
        if cutlass.const_expr(self.table is None):
            return None
        plan = self.plan
        values = cute.make_rmem_tensor(cute.make_layout(8), self.table.element_type)
        if cutlass.const_expr(plan.config.order == "flat" and fetched is None):
            self._load_block(values, 0, row_block, first_table_row, block)
        elif cutlass.const_expr(plan.config.order == "flat"):
            for j in cutlass.range_constexpr(8):
                values[j] = fetched[block * 8 + j]
        else:
            pair = cute.make_rmem_tensor(cute.make_layout(2), self.table.element_type)
            for half in cutlass.range_constexpr(2):
                # 8 rows are one position's, since the images of a tile are a multiple of 8.
                i = (block * ROWS_PER_STORE + half * 8) // plan.tile_images
                if cutlass.const_expr(fetched is None):
                    self._load_pair(pair, self._position(position, i))
                else:
                    pair[0], pair[1] = fetched[2 * i], fetched[2 * i + 1]
                for j in cutlass.range_constexpr(4):
                    values[half * 4 + j] = pair[j // 2]
        return values

    @cute.jit
    def _load_block(
        self, values: cute.Tensor, offset: cutlass.Constexpr[int], row_block: Int32, first_table_row: Int32,
        block: cutlass.Constexpr[int],
    ) -> None:  # fmt: skip
        """Flat order: fills the eight values of one stmatrix, beginning at ``offset``."""
        pair = cute.make_rmem_tensor(cute.make_layout(2), self.table.element_type)
        for half in cutlass.range_constexpr(2):
            for odd in cutlass.range_constexpr(2):
                row = block * ROWS_PER_STORE + half * 8 + self.thread % 4 * 2 + odd
                self._load_pair(pair, self._table_row(row_block, first_table_row, row))
                values[offset + half * 4 + odd], values[offset + half * 4 + 2 + odd] = pair[0], pair[1]

    @cute.jit
    def _position(self, block: Int32, i: cutlass.Constexpr[int]) -> Int32:
        """Position ``i`` of a tile. Beyond the last one, whose rows TMA clips, the last: the table ends there."""
        if cutlass.const_expr(self.plan.config.tile_positions == 1):
            return block
        return min(block * self.plan.config.tile_positions + i, self.table_rows.positions - 1)

    @property
    def _wraps_once(self) -> bool:
        return self.plan.table_wraps_once and self.table_rows.index is None

    @cute.jit
    def _first_table_row(self, row_block: Int32) -> Int32:
        """Table row of the first row of a tile, where the others follow from it without a division."""
        if cutlass.const_expr(not self._wraps_once):
            return Int32(0)
        return self.table_rows.of(row_block * self.plan.config.tile_rows)

    @cute.jit
    def _table_row(self, row_block: Int32, first_table_row: Int32, row: Int32) -> Int32:
        """Table row of row ``row`` of a tile."""
        if cutlass.const_expr(not self._wraps_once):
            return self.table_rows.of(row_block * self.plan.config.tile_rows + row)
        table_row = first_table_row + row
        if table_row >= self.table_rows.positions:
            table_row -= self.table_rows.positions
        return table_row

    @cute.jit
    def _load_pair(self, pair: cute.Tensor, table_row: Int32) -> None:
        block = self.feature_block * 4 + self.thread // 32
        cute.autovec_copy(self.table[None, self.thread % 32 // 4, block, table_row], pair)
