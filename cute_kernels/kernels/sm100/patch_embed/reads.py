"""What an epilogue thread reads from global memory for its row: bias + position, and factors of the scale."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.kernels import ptx
from cute_kernels.kernels.scales import Scales
from cute_kernels.kernels.sm100.patch_embed.rows import TileRows, WarpRows
from cute_kernels.kernels.table_rows import TableRows
from cute_kernels.plan import LANES, VECTOR_BYTES, Sm100PatchEmbedPlan
from cute_kernels.plan.patch_embed.sm100_epilogue import BLOCK

FACTORS = 4
"""Factors of features in one load of 16 bytes."""


def table_view(
    plan: Sm100PatchEmbedPlan, pointer: cute.Pointer | None, rows: Int32, columns: Int32
) -> cute.Tensor | None:
    """``[rows, columns]`` over the table of `Plan.table_shape`, both modes hierarchical unless it is row-major.

    Args:
        rows: rows of the table in memory.
        columns: its columns, a multiple of a tile's.
    """
    if pointer is None:
        return None
    if plan.config.table == "row_major":
        pitch = cute.assume(columns, divby=plan.tile_n)
        return cute.make_tensor(pointer, cute.make_layout((rows, columns), stride=(pitch, 1)))
    vector = BLOCK if plan.config.table == "blocked" else VECTOR_BYTES * 8 // pointer.dtype.width
    chunks = columns // vector
    layout = cute.make_layout(
        ((LANES, cute.ceil_div(rows, LANES)), (vector, chunks)),
        stride=((vector, cute.assume(chunks * (LANES * vector), divby=LANES * vector)), (1, LANES * vector)),
    )
    return cute.make_tensor(pointer, layout)


@dataclass(frozen=True)
class TableReader:
    """Reads the bias + position table, 16 bytes at a time.

    Attributes:
        table: view of `table_view`, or None.
        rows: of the tiles.
        table_rows: which row of the table a row of the output gets, in flat order.
    """

    plan: Sm100PatchEmbedPlan
    table: cute.Tensor | None
    rows: TileRows
    table_rows: TableRows

    @cute.jit
    def row(self, rows: WarpRows, lane: Int32) -> Int32:
        """The row of the table that a lane adds: in position order the same for all lanes of the warp."""
        if cutlass.const_expr(self.table is None):
            return Int32(0)
        if cutlass.const_expr(self.plan.config.order == "position"):
            return min(rows.position, self.rows.positions - 1)
        return self.table_rows.of(self.rows.row(rows, lane))

    @cute.jit
    def first(self, rows: WarpRows, lane: Int32, column: Int32) -> Int32:
        """Elements from where the table begins to a lane's row at the first column of its warp, a multiple of 64."""
        if cutlass.const_expr(self.table is None):
            return Int32(0)
        row, layout = self.row(rows, lane), self.table.layout
        if cutlass.const_expr(self.plan.config.table == "row_major"):
            return cute.crd2idx((row, column), layout)
        place = ((row % LANES, row // LANES), (0, column // self.plan.table_shape[3]))
        return cute.crd2idx(place, layout)

    @cute.jit
    def load(
        self, first: Int32, column: cutlass.Constexpr[int], width: cutlass.Constexpr[int]
    ) -> cute.Tensor | None:
        """``width`` values of a row, from a column of the warp on; ``first`` is where its columns begin."""
        if cutlass.const_expr(self.table is None):
            return None
        vector = VECTOR_BYTES * 8 // self.table.element_type.width
        values = cute.make_rmem_tensor(cute.make_layout((vector, width // vector)), self.table.element_type)
        base = self.table.iterator + cute.assume(first, divby=vector)
        for i in cutlass.range_constexpr(width // vector):
            chunk = cute.make_tensor(base + self._further(column + i * vector), cute.make_layout(vector))
            cute.autovec_copy(chunk, values[None, i])
        return cute.make_tensor(values.iterator, cute.make_layout(width))

    def _further(self, column: int) -> int:
        """Elements from the first column of a warp to another one: whole chunks of the layout, and what is left."""
        if self.plan.config.table == "row_major":
            return column
        vector = self.plan.table_shape[3]
        return column // vector * (LANES * vector) + column % vector


@dataclass(frozen=True)
class ScaleReader:
    """The multipliers of a thread's row, and of its columns.

    Attributes:
        scales: dequantisation multipliers.
    """

    scales: Scales

    @cute.jit
    def row_factor(self, row: Int32) -> Float32 | None:
        """What of the multiplier is the same in the whole row, or None."""
        if cutlass.const_expr(self.scales.rows is None):
            return self.scales.call
        return self.scales.row(row)

    @cute.jit
    def multiplier(
        self, row_factor: Float32 | None, column: Int32, width: cutlass.Constexpr[int]
    ) -> Float32 | cute.Tensor:
        """The multiplier of this thread's row, or those of ``width`` columns.

        All lanes of a warp read the same 16 bytes. Of the features beyond N, a multiple of 8, nothing is stored.
        """
        features = self.scales.features
        if cutlass.const_expr(features is None):
            return row_factor
        values = cute.make_rmem_tensor(cute.make_layout((FACTORS, width // FACTORS)), Float32)
        for i in cutlass.range_constexpr(width // FACTORS):
            first = cute.assume(min(column + i * FACTORS, cute.size(features) - FACTORS), divby=FACTORS)
            cute.autovec_copy(cute.make_tensor(features.iterator + first, cute.make_layout(FACTORS)), values[None, i])
        flat = cute.make_tensor(values.iterator, cute.make_layout(width))
        if cutlass.const_expr(row_factor is not None):
            for i in cutlass.range_constexpr(0, width, 2):
                flat[i], flat[i + 1] = ptx.mul_rn_f32x2((flat[i], flat[i + 1]), (row_factor, row_factor))
        return flat
