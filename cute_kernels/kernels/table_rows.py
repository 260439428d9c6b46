"""Which row of the bias + position table belongs to a row of the output."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class TableRows:
    """Row of ``x`` -> row of the table: ``row % positions``, or what an index in memory says.

    Attributes:
        positions: rows of the table that a row of ``x`` may ask for.
        index: ``[rows]`` Int32, or None. The table then has one more row, of NaN, which stands for every number that is
            no position: a wrong index gives a row of NaN, never an access outside the table and never a plausible one.
        rows: rows of ``x``.
    """

    positions: Int32
    index: cute.Tensor | None
    rows: Int32

    @cute.jit
    def of(self, row: Int32) -> Int32:
        """The table row of one output row. Rows beyond the output get a valid one too; TMA clips their stores."""
        if cutlass.const_expr(self.index is None):
            return row % self.positions
        table_row = Int32(0)
        if row < self.rows:
            table_row = self.index[row]
        if table_row < 0 or table_row >= self.positions:
            table_row = self.positions
        return table_row


def index_view(pointer: cute.Pointer | None, rows: Int32) -> cute.Tensor | None:
    """``[rows]`` over the index in memory."""
    return None if pointer is None else cute.make_tensor(pointer, cute.make_layout(rows))
