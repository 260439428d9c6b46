"""Epilogue of a consumer warpgroup: accumulators -> scale, bias + position, BF16 -> transposed staging -> TMA store."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.kernels import ptx
from cute_kernels.kernels.epilogue_math import scale_add_round
from cute_kernels.kernels.scales import Scales
from cute_kernels.kernels.sm90.transposed.staging import ROWS_PER_STORE, TransposedStaging
from cute_kernels.kernels.table_rows import TableRows
from cute_kernels.plan import Sm90PatchEmbedPlan

ROWS_PER_THREAD = ROWS_PER_STORE // 4
"""Rows of one stmatrix of which a thread has values."""


@dataclass(frozen=True)
class Epilogue:
    """Drains one warpgroup's accumulators of 64 features x tile_rows rows.

    Attributes:
        staging: this warpgroup's buffer, stored to ``[box, row block, 64-feature block, position block]``.
        table: ``[2, 8, padded features / 16, rows]`` view of the bias + position table, or None: a thread's pair of
            features, its place in a block of 16, the block.
        table_rows: which row of the table a row of the output gets.
        scales: dequantisation multipliers.
        pair: factors of the two features of a thread, or None.
        feature_block: this warpgroup's block of 64 features.
        thread: index in the warpgroup.
    """

    plan: Sm90PatchEmbedPlan
    staging: TransposedStaging
    table: cute.Tensor | None
    table_rows: TableRows
    scales: Scales
    pair: tuple[Float32, Float32] | None
    feature_block: Int32
    thread: Int32

    @cute.jit
    def prefetch(self, row_block: Int32, position: Int32) -> tuple[cute.Tensor | None, cute.Tensor | None]:
        """What of the table and of the rows' factors is fetched before the WGMMAs of a tile."""
        return self._prefetch_table(row_block, position), self._prefetch_rows(row_block, position)

    @cute.jit
    def _prefetch_rows(self, row_block: Int32, position: Int32) -> cute.Tensor | None:
        """Factors of all rows of a tile that a thread has, four for each stmatrix."""
        if cutlass.const_expr(not self.plan.prefetches_rows):
            return None
        factors = cute.make_rmem_tensor(cute.make_layout(self.plan.row_registers), Float32)
        for i in cutlass.range_constexpr(self.plan.config.tile_rows // ROWS_PER_STORE):
            self._load_rows(factors, i * ROWS_PER_THREAD, row_block, position, i)
        return factors

    @cute.jit
    def _prefetch_table(self, row_block: Int32, position: Int32) -> cute.Tensor | None:
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
    def store(
        self, accumulator: cute.Tensor, fetched: tuple[cute.Tensor | None, cute.Tensor | None], row_block: Int32,
        position: Int32,
    ) -> None:  # fmt: skip
        """Converts, stages and stores one tile; returns as soon as the TMA store is issued."""
        plan = self.plan
        fetched_table, fetched_rows = fetched
        addresses = self.staging.addresses()
        first_table_row = Int32(0)
        if cutlass.const_expr(plan.config.order == "flat" and self.table is not None and not plan.prefetches_table):
            first_table_row = self._first_table_row(row_block)
        self.staging.acquire()
        for i in cutlass.range_constexpr(plan.config.tile_rows // ROWS_PER_STORE):
            registers = cute.make_rmem_tensor(cute.make_layout(8), Float32)
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
        values = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        rows = cute.make_rmem_tensor(cute.make_layout(ROWS_PER_THREAD), Float32)
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
        block: cutlass.Constexpr[int],
    ) -> None:  # fmt: skip
        """Factors of a thread's four rows of one stmatrix: rows 0-1, rows 8-9."""
        plan = self.plan
        for half in cutlass.range_constexpr(2):
            for odd in cutlass.range_constexpr(2):
                row = block * ROWS_PER_STORE + half * 8 + self.thread % 4 * 2 + odd
                if cutlass.const_expr(plan.positions_in_order):
                    # 8 rows are one position's, since the images of a tile are a multiple of 8.
                    i = (block * ROWS_PER_STORE + half * 8) // plan.tile_images
                    positions = self.table_rows.positions
                    image = min(
                        row_block * plan.tile_images + row - i * plan.tile_images,
                        self.table_rows.rows // positions - 1,
                    )
                    index = image * positions + self._position(position, i)
                else:
                    index = row_block * plan.config.tile_rows + row
                factors[offset + half * 2 + odd] = self.scales.row(index)

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
