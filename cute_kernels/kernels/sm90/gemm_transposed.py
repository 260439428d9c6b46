"""The consumer warpgroups of a dense GEMM on Hopper that computes ``out^T = b * a^T``.

Columns of the output are the rows of a WGMMA, rows of the output its columns: a tile may have any multiple of 16 of
them. ``stmatrix`` transposes what a warp has back, 16 columns of the output; four warps fill rows of 128 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.kernels.gemm import multipliers
from cute_kernels.kernels.sm90.gemm_mma import COLUMN_GROUP, GemmMma


@dataclass(frozen=True)
class TransposedMma(GemmMma):
    """Computes and stores this warpgroup's columns of the tiles of its cluster.

    A place is the first column of the output that this warp has, the first row of the tile, the batch. Column groups
    of the accumulators are 16 rows of the output.
    """

    WAVES_DIFFER: ClassVar[bool] = True
    TRANSPOSES: ClassVar[bool] = True

    @property
    def _groups(self) -> int:
        return self.plan.store_rows // COLUMN_GROUP

    def _features(self, place: tuple[Int32, ...], wave: int) -> tuple[Int32, Int32]:
        """The two columns of the output of which a thread has values."""
        feature = place[0] + wave * 64 + self.thread % 32 // 4
        return feature, feature + 8

    @cute.jit
    def _bias(
        self, place: tuple[Int32, ...], wave: cutlass.Constexpr[int], column: cutlass.Constexpr[int]
    ) -> cute.Tensor | None:
        if cutlass.const_expr(self.bias is None):
            return None
        pair = [self.bias[feature] for feature in self._features(place, wave)]
        values = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        for j in cutlass.range_constexpr(8):
            values[j] = pair[j // 2 % 2]
        return values

    @cute.jit
    def _row_factors(self, place: tuple[Int32, ...], wave: cutlass.Constexpr[int]) -> list[Float32 | None]:
        """Factors of both columns of the output."""
        scales = self.addends.scales
        if cutlass.const_expr(scales is None or scales.features is None):
            return [None, None]
        return [self.addends.column_factors(f, place[2], 1, 1)[0] for f in self._features(place, wave)]

    @cute.jit
    def _scales(
        self, factors: list[Float32 | None], place: tuple[Int32, ...], column: cutlass.Constexpr[int]
    ) -> Float32 | cute.Tensor | None:
        scales = self.addends.scales
        if cutlass.const_expr(scales is None):
            return None
        if cutlass.const_expr(scales.rows is None and scales.features is None):
            return scales.call
        values = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        for i in cutlass.range_constexpr(4):
            row = place[1] + column + i // 2 * 8 + self.thread % 4 * 2 + i % 2
            of_row = self.addends.row_factor(row, place[2])
            for half in cutlass.range_constexpr(2):
                values[i // 2 * 4 + half * 2 + i % 2] = multipliers(of_row, factors[half])
        return values

    def _block(self, place: tuple[Int32, ...], wave: int, region: int) -> tuple[Int32, ...]:
        row_block = place[1] // self.plan.store_rows + region
        return row_block, (place[0] + wave * 64) // self.plan.store_columns, place[2]

    def _matrix_row(self, buffer: int, group: int, dtype: type) -> cute.Pointer:
        """Lanes 8 i to 8 i + 7 give rows of the output of matrix i: both halves of 16 columns, and of 8 rows on."""
        lane, place = self.thread % 32, self.thread // 32 % self.plan.store_warps
        row, chunk = group * COLUMN_GROUP + lane // 16 * 8 + lane % 8, place * 2 + lane // 8 % 2
        return cute.recast_ptr(self.staging.chunk(row, chunk) + self.staging.offset(buffer), dtype=dtype)
