"""Epilogue warps: accumulators -> scale, bias + position, BF16 -> stores."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.kernels import ptx
from cute_kernels.kernels.clock import idle
from cute_kernels.kernels.epilogue_math import scale_add_round
from cute_kernels.kernels.sm100.patch_embed.reads import ScaleReader, TableReader
from cute_kernels.kernels.sm100.patch_embed.rows import TileRows
from cute_kernels.kernels.sm100.patch_embed.stores import Output
from cute_kernels.kernels.sm100.pipes import Sm100Pipe, release_accumulator
from cute_kernels.kernels.tiles import SnakeOrder
from cute_kernels.plan import LANES, Sm100PatchEmbedPlan
from cute_kernels.plan.profile import Phase


@dataclass(frozen=True)
class Epilogue:
    """Drains accumulators, one warp at a time: nothing but the accumulator's barriers is shared between warps.

    Attributes:
        accumulators: tensor-memory view ``[.., accumulator]`` of this CTA's 128 rows.
        output: where the warps store.
        table, scales: what they read.
        rows: of the tiles.
    """

    plan: Sm100PatchEmbedPlan
    accumulators: cute.Tensor
    output: Output
    table: TableReader
    scales: ScaleReader
    accumulator: Sm100Pipe
    order: SnakeOrder
    rows: TileRows

    @cute.jit
    def run(self, warp: Int32) -> None:
        """Picks this warp's share of columns; one unrolled copy of the loop exists per distinct width."""
        plan = self.plan
        columns, first_column, offset = Int32(0), Int32(0), Int32(0)
        for i in cutlass.range_constexpr(plan.config.epilogue_warps):
            if warp == plan.first_epilogue_warp + i:
                begin, end = plan.epilogue_columns[i]
                columns, first_column, offset = Int32(end - begin), Int32(begin), Int32(plan.staging_offsets[i])
        widths = sorted({end - begin for begin, end in plan.epilogue_columns})
        for i in cutlass.range_constexpr(len(widths)):
            if columns == widths[i]:
                self._drain(warp, widths[i], first_column, offset)

    @cute.jit
    def _drain(self, warp: Int32, columns: cutlass.Constexpr[int], first_column: Int32, offset: Int32) -> None:
        plan, config = self.plan, self.plan.config
        width = config.tmem_load_width
        step = width * config.tmem_loads
        lane = cute.arch.lane_idx()
        quarter = self.lane_quarter(warp)

        load_atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(width)), self.accumulators.element_type)
        # (128 rows, width columns, 1, chunks, accumulators)
        chunks = cute.flat_divide(self.accumulators[(None, None), 0, 0, None], (plan.cta_m, width))
        tmem_load = tcgen05.make_tmem_copy(load_atom, chunks[None, None, 0, 0, 0]).get_slice(quarter * LANES + lane)
        source = tmem_load.partition_S(chunks)
        fragment_shape = tmem_load.partition_D(cute.make_identity_tensor((plan.cta_m, width))).shape
        stores = self.output.of_warp(columns, offset, lane)

        state = self.accumulator.consumer_state()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            self.accumulator.stamps.mark(Phase.TILE)
            m_tile, n_tile = self.order.coordinates(tile)
            rows = self.rows.of_warp(m_tile, quarter)
            row_factor = self.scales.row_factor(self.rows.row(rows, lane))
            first = n_tile * plan.tile_n + first_column
            table_first = self.table.first(rows, lane, first)
            ahead = []
            if cutlass.const_expr(config.table_ahead):
                ahead = self._load_table(table_first, 0)
            self.accumulator.wait_full(state)
            if cutlass.const_expr(config.stagger_clocks > 0):
                self.accumulator.stamps.mark(Phase.STAGGER)
                idle((warp - plan.first_epilogue_warp) * config.stagger_clocks)
                self.accumulator.stamps.mark(Phase.READ)
            ptx.tcgen05_fence_after_thread_sync()
            for column in cutlass.range_constexpr(0, columns, step):
                if cutlass.const_expr(column > 0):
                    self.accumulator.stamps.mark(Phase.READ)
                addends = ahead
                if cutlass.const_expr(not config.table_ahead):
                    addends = self._load_table(table_first, column)
                elif cutlass.const_expr(column + step < columns):
                    ahead = self._load_table(table_first, column + step)
                fragments = []
                for i in cutlass.range_constexpr(config.tmem_loads):
                    fragment = cute.make_rmem_tensor(fragment_shape, self.accumulators.element_type)
                    chunk = (first_column + column) // width + i
                    cute.copy(tmem_load, source[None, None, None, 0, chunk, state.index], fragment)
                    fragments.append(fragment)
                cute.arch.fence_view_async_tmem_load()
                if cutlass.const_expr(config.early_release and column + step == columns):
                    release_accumulator(self.accumulator, state)
                for i in cutlass.range_constexpr(config.tmem_loads):
                    self.accumulator.stamps.mark(Phase.MATH)
                    begin = column + i * width
                    scale = self.scales.multiplier(row_factor, first + begin, width)
                    registers = _as_floats(cute.make_tensor(fragments[i].iterator, cute.make_layout(width)))
                    values = scale_add_round(registers, addends[i], scale, config.epilogue, packed_f32=True)
                    stores.write(values, begin, rows, first)
            stores.finish_tile(rows, first)
            if cutlass.const_expr(not config.early_release):
                release_accumulator(self.accumulator, state)
            state.advance()
        stores.finish()

    @cute.jit
    def _load_table(self, row: Int32, column: cutlass.Constexpr[int]) -> list[cute.Tensor | None]:
        """What is added to the columns of one step, for each of its loads."""
        width = self.plan.config.tmem_load_width
        return [self.table.load(row, column + i * width, width) for i in range(self.plan.config.tmem_loads)]

    @staticmethod
    def lane_quarter(warp: Int32) -> Int32:
        """Quarter of the tensor-memory lanes that a warp may reach, by its hardware id (PTX ISA, tcgen05.ld)."""
        return warp % 4


def _as_floats(sums: cute.Tensor) -> cute.Tensor:
    """The registers themselves, or integers rounded to FP32."""
    if sums.element_type is Float32:
        return sums
    values = cute.make_rmem_tensor(sums.layout, Float32)
    values.store(sums.load().to(Float32))
    return values
