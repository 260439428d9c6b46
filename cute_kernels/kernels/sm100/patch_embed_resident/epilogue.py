"""Epilogue warps: sums of rows -> scale, bias + position, BF16 -> transposed staging -> TMA stores."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.kernels import ptx
from cute_kernels.kernels.epilogue_math import scale_add_round
from cute_kernels.kernels.scales import Scales
from cute_kernels.kernels.sm100.transposed.epilogue import MATRICES, TransposedEpilogue
from cute_kernels.kernels.table_rows import TableRows
from cute_kernels.plan import Sm100ResidentPlan


@dataclass(frozen=True)
class Epilogue(TransposedEpilogue):
    """Of rows, stored to ``[box, row block, 32-feature block, position block]``.

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
