"""Epilogue warps: accumulators -> scale, bias + position, BF16 -> swizzled staging -> TMA stores."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.kernels import ptx
from cute_kernels.kernels.epilogue_math import scale_add_round
from cute_kernels.kernels.scales import Scales
from cute_kernels.kernels.sm100.pipes import Sm100Pipe, release_accumulator
from cute_kernels.kernels.staging import warp_staging
from cute_kernels.kernels.table_rows import TableRows
from cute_kernels.kernels.tiles import SnakeOrder
from cute_kernels.plan import LANES, Sm100PatchEmbedPlan

FACTORS = 4
"""Factors of features in one load of 16 bytes."""


@dataclass(frozen=True)
class Epilogue:
    """Drains accumulators, one warp at a time: nothing but the accumulator's barriers is shared between warps.

    Attributes:
        accumulators: tensor-memory view ``[.., accumulator]`` of this CTA's 128 rows.
        staging: this CTA's staging area, regions of 32 rows x 64 columns; a warp's regions are a ring that it goes
            round once per tile.
        store_atom, out: TMA store of a region, and TMA view ``[M, N]`` of the output.
        table: ``[(32, row blocks), (V, column chunks)]`` view of the bias + position table, or None.
        table_rows: which of its rows a row of the output gets.
        scales: dequantisation multipliers.
    """

    plan: Sm100PatchEmbedPlan
    accumulators: cute.Tensor
    staging: cute.Pointer
    store_atom: cute.CopyAtom
    out: cute.Tensor
    table: cute.Tensor | None
    table_rows: TableRows
    scales: Scales
    accumulator: Sm100Pipe
    order: SnakeOrder
    cta_rank: Int32

    @cute.jit
    def run(self, warp: Int32) -> None:
        """Picks this warp's share of columns; one unrolled copy of the loop exists per distinct width."""
        plan = self.plan
        columns, first_column, first_region = Int32(0), Int32(0), Int32(0)
        for i in cutlass.range_constexpr(plan.config.epilogue_warps):
            if warp == plan.first_epilogue_warp + i:
                begin, end = plan.epilogue_columns[i]
                columns, first_column, first_region = Int32(end - begin), Int32(begin), Int32(plan.staging_regions[i])
        widths = sorted({end - begin for begin, end in plan.epilogue_columns})
        for i in cutlass.range_constexpr(len(widths)):
            if columns == widths[i]:
                self._drain(warp, widths[i], first_column, first_region)

    @cute.jit
    def _drain(self, warp: Int32, columns: cutlass.Constexpr[int], first_column: Int32, first_region: Int32) -> None:
        plan = self.plan
        width = plan.config.tmem_load_width
        regions = columns // plan.store_columns
        lane = cute.arch.lane_idx()
        quarter = self.lane_quarter(warp)
        row = quarter * LANES + lane

        load_atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(width)), self.accumulators.element_type)
        # (128 rows, width columns, 1, chunks, accumulators)
        chunks = cute.flat_divide(self.accumulators[(None, None), 0, 0, None], (plan.cta_m, width))
        tmem_load = tcgen05.make_tmem_copy(load_atom, chunks[None, None, 0, 0, 0]).get_slice(row)
        source = tmem_load.partition_S(chunks)
        fragment_shape = tmem_load.partition_D(cute.make_identity_tensor((plan.cta_m, width))).shape
        staging = warp_staging(self.staging, first_region, LANES, regions, self.store_atom, self.out, BFloat16)
        row_chunks = staging.row_chunks(lane)

        state = self.accumulator.consumer_state()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            m_tile, n_tile = self.order.coordinates(tile)
            cta_row = (m_tile * plan.cta_group + self.cta_rank) * plan.cta_m
            table_row = cta_row + row if self.table is None else self.table_rows.of(cta_row + row)
            row_factor = self._row_factor(cta_row + row)
            self.accumulator.wait_full(state)
            ptx.tcgen05_fence_after_thread_sync()
            for region in cutlass.range_constexpr(regions):
                staging.acquire()
                for part in cutlass.range_constexpr(plan.store_columns // width):
                    column = region * plan.store_columns + part * width
                    fragment = cute.make_rmem_tensor(fragment_shape, self.accumulators.element_type)
                    chunk = (first_column + column) // width
                    first = n_tile * plan.tile_n + first_column + column
                    table = self._load_table(table_row, first, width)
                    scale = self._scale(row_factor, first, width)
                    cute.copy(tmem_load, source[None, None, None, 0, chunk, state.index], fragment)
                    cute.arch.fence_view_async_tmem_load()
                    if cutlass.const_expr(column + width == columns):
                        release_accumulator(self.accumulator, state)
                    registers = _as_floats(cute.make_tensor(fragment.iterator, cute.make_layout(width)))
                    values = scale_add_round(registers, table, scale, plan.config.epilogue, packed_f32=True)
                    staging.write_row(values, row_chunks, region, part * width)
                column_block = (n_tile * plan.tile_n + first_column) // plan.store_columns + region
                staging.store(region, cta_row // LANES + quarter, column_block)
            state.advance()
        staging.finish()

    @staticmethod
    def lane_quarter(warp: Int32) -> Int32:
        """Quarter of the tensor-memory lanes that a warp may reach, by its hardware id (PTX ISA, tcgen05.ld)."""
        return warp % 4

    @cute.jit
    def _row_factor(self, row: Int32) -> Float32 | None:
        if cutlass.const_expr(self.scales.rows is None):
            return self.scales.call
        return self.scales.row(row)

    @cute.jit
    def _scale(self, row_factor: Float32 | None, column: Int32, width: cutlass.Constexpr[int]) -> Float32 | cute.Tensor:
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

    @cute.jit
    def _load_table(self, row: Int32, column: Int32, width: cutlass.Constexpr[int]) -> cute.Tensor | None:
        """``width`` table values of one row in 16-byte loads, each 512 consecutive bytes for the 32 lanes of a warp."""
        if cutlass.const_expr(self.table is None):
            return None
        vector = self.plan.table_shape[3]
        values = cute.make_rmem_tensor(cute.make_layout((vector, width // vector)), self.table.element_type)
        for i in cutlass.range_constexpr(width // vector):
            chunk = self.table[(row % LANES, row // LANES), (None, column // vector + i)]
            cute.autovec_copy(chunk, values[None, i])
        return cute.make_tensor(values.iterator, cute.make_layout(width))


def _as_floats(sums: cute.Tensor) -> cute.Tensor:
    """The registers themselves, or integers rounded to FP32."""
    if sums.element_type is Float32:
        return sums
    values = cute.make_rmem_tensor(sums.layout, Float32)
    values.store(sums.load().to(Float32))
    return values
