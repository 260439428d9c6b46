"""Epilogue of a consumer warpgroup: accumulators -> scale, bias + position, BF16 -> transposed staging -> TMA store."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import warp

from cute_kernels.kernels.epilogue_math import scale_add_round
from cute_kernels.plan import VECTOR_BYTES, Sm90Plan

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
            position]``; TMA clips rows and features beyond the output.
        table: ``[rows, padded features]`` bias + position table, or None.
        feature_block: this warpgroup's block of 64 features.
        staged: named barrier of this warpgroup.
    """

    plan: Sm90Plan
    staging: cute.Pointer
    store_atom: cute.CopyAtom
    store_source: cute.Tensor
    store_target: cute.Tensor
    table: cute.Tensor | None
    table_rows: Int32
    rows: Int32
    scale: Float32
    feature_block: Int32
    thread: Int32
    staged: Int32

    @cute.jit
    def load_vector(self, position: Int32) -> cute.Tensor | None:
        """Position order: the two table values that this thread needs for a whole tile, fetched before its WGMMAs."""
        if cutlass.const_expr(self.table is None or self.plan.config.order == "flat"):
            return None
        values = cute.make_rmem_tensor(cute.make_layout(2), self.table.element_type)
        self._load_pair(values, position)
        return values

    @cute.jit
    def store(self, accumulator: cute.Tensor, vector: cute.Tensor | None, row_block: Int32, position: Int32) -> None:
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

        if warp_index == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self._synchronise()
        for i in cutlass.range_constexpr(plan.config.tile_rows // ROWS_PER_STORE):
            registers = cute.make_rmem_tensor(cute.make_layout(8), Float32)
            for j in cutlass.range_constexpr(8):
                registers[j] = accumulator[i * 8 + j]
            addends = self._addends(vector, row_block * plan.config.tile_rows + i * ROWS_PER_STORE)
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
    def _addends(self, vector: cute.Tensor | None, first_row: Int32) -> cute.Tensor | None:
        """Table values of one stmatrix by register: feature 0 of rows 0-1, feature 8 of rows 0-1, the same for 8-9."""
        if cutlass.const_expr(self.table is None):
            return None
        values = cute.make_rmem_tensor(cute.make_layout(8), self.table.element_type)
        pair = cute.make_rmem_tensor(cute.make_layout(2), self.table.element_type)
        for half in cutlass.range_constexpr(2):
            for odd in cutlass.range_constexpr(2):
                if cutlass.const_expr(vector is None):
                    # Rows beyond the output read a valid table row; TMA clips their stores.
                    row = first_row + half * 8 + self.thread % 4 * 2 + odd
                    self._load_pair(pair, row % self.table_rows)
                    values[half * 4 + odd], values[half * 4 + 2 + odd] = pair[0], pair[1]
                else:
                    values[half * 4 + odd], values[half * 4 + 2 + odd] = vector[0], vector[1]
        return values

    @cute.jit
    def _load_pair(self, pair: cute.Tensor, table_row: Int32) -> None:
        feature = self.feature_block * 64 + self.thread // 32 * 16 + self.thread % 32 // 4
        pair[0] = self.table[table_row, feature]
        pair[1] = self.table[table_row, feature + 8]
