"""Epilogue warps: sums -> FP32, scale, bias + position, rounding -> transposed staging -> TMA stores."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.kernels import ptx
from cute_kernels.kernels.sm100.transposed.epilogue import MATRICES, TransposedEpilogue
from cute_kernels.kernels.strips import TABLE_VALUES, TERM_FACTOR
from cute_kernels.plan import LANES, Sm100ImagesPlan
from cute_kernels.plan.feature_slabs import COLUMN_GROUP
from cute_kernels.plan.patch_embed_images.strips import BLOCK_FEATURES

BLOCKS = LANES // BLOCK_FEATURES
"""Blocks of 16 lanes of a warp: of 16 features each, or the two terms of 16 features."""


@dataclass(frozen=True)
class Epilogue(TransposedEpilogue):
    """Of patches out of images, stored to ``[box, tile of a grid row, block of features, image tile, grid row]``.

    Integer sums by the contracts ``int8`` and ``int16`` of the reference; FP32 sums get the table by one addition, and
    are rounded.

    Attributes:
        table: ``[4, 32, period, padded features / 16, position tiles]`` view of the table, or None: see
            `StripsPlan.table_shape`.
        scales: of the four or two features of a thread, ``lane / 4 + 8 i``; None of FP32 sums.
        row_tiles: tiles along a grid row.
    """

    plan: Sm100ImagesPlan
    table: cute.Tensor | None
    scales: tuple[Float32, ...] | None
    row_tiles: Int32

    def registers(self) -> cute.Tensor | None:
        """``[4, blocks of 16 features, period]``: read anew where the position changes, with images fastest rarely."""
        if self.table is None:
            return None
        values = cute.make_rmem_tensor(cute.make_layout((TABLE_VALUES, self._blocks, self.plan.table_period)), Float32)
        values.fill(0.0)
        return values

    @cute.jit
    def fetch(self, registers: cute.Tensor | None, row_block: Int32, position: Int32, held: Int32) -> Int32:
        if cutlass.const_expr(registers is not None):
            tile = position if self.plan.problem.table_rows > 1 else Int32(0)
            if tile != held:
                self._load_table(registers, tile)
                held = tile
        return held

    @cute.jit
    def finish(
        self, sums: cute.Tensor, registers: cute.Tensor | None, held: Int32, row: cutlass.Constexpr[int],
        row_block: Int32, position: Int32,
    ) -> cute.Tensor:  # fmt: skip
        matrices = MATRICES // self.plan.terms
        values = cute.make_rmem_tensor(cute.make_layout((2, matrices)), Float32)
        for i in cutlass.range_constexpr(matrices):
            pair = (Float32(sums[0, i % 2, i // 2]), Float32(sums[1, i % 2, i // 2]))
            if cutlass.const_expr(self.plan.terms == 2):
                factor, low = Float32(TERM_FACTOR), (Float32(sums[0, i, 1]), Float32(sums[1, i, 1]))
                pair = ptx.fma_rn_f32x2(pair, (factor, factor), low)
            scale = (Float32(1.0), Float32(1.0)) if self.scales is None else (self.scales[i], self.scales[i])
            if cutlass.const_expr(registers is None and self.scales is None):
                values[0, i], values[1, i] = pair
            elif cutlass.const_expr(registers is None):
                values[0, i], values[1, i] = ptx.mul_rn_f32x2(pair, scale)
            else:
                j = row // COLUMN_GROUP % self.plan.table_period
                addends = (registers[2 * (i % 2), i // 2, j], registers[2 * (i % 2) + 1, i // 2, j])
                values[0, i], values[1, i] = ptx.fma_rn_f32x2(pair, scale, addends)
        rounded = cute.make_rmem_tensor(cute.make_layout((2, matrices)), self.staging.dtype)
        rounded.store(values.load().to(self.staging.dtype))
        return rounded

    @cute.jit
    def store(self, row_block: Int32, position: Int32) -> None:
        grid_row = position // self.row_tiles
        row_tile = position - grid_row * self.row_tiles
        self.staging.store(row_tile, self.feature_block, row_block, grid_row)

    @property
    def _blocks(self) -> int:
        """Blocks of 16 features of this warp."""
        return BLOCKS // self.plan.terms

    @cute.jit
    def _load_table(self, values: cute.Tensor, tile: Int32) -> None:
        for j in cutlass.range_constexpr(self.plan.table_period):
            for block in cutlass.range_constexpr(self._blocks):
                source = self.table[None, self.staging.lane, j, self.feature_block * self._blocks + block, tile]
                cute.autovec_copy(source, values[None, block, j])
