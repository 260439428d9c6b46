"""Epilogue warps: accumulators -> scale, bias + position, BF16 -> swizzled staging -> TMA stores."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.kernels import ptx
from cute_kernels.kernels.epilogue_math import scale_add_round
from cute_kernels.kernels.sm100.pipes import Sm100Pipe, release_accumulator
from cute_kernels.kernels.table_rows import TableRows
from cute_kernels.kernels.tiles import SnakeOrder
from cute_kernels.plan import LANES, VECTOR_BYTES, Sm100Plan

CHUNK = VECTOR_BYTES // 2
"""BF16 values in one 16-byte shared-memory store."""


@dataclass(frozen=True)
class Epilogue:
    """Drains accumulators, one warp at a time: nothing but the accumulator's barriers is shared between warps.

    Attributes:
        accumulators: tensor-memory view ``[.., accumulator]`` of this CTA's 128 rows.
        staging: this CTA's staging buffer, ``store_region_bytes`` regions of 32 rows x 64 columns.
        store_atom, store_source, store_target: TMA store of region ``[.., region]`` to ``[.., 32-row block, 64-column
            block]`` of the output; TMA clips rows and columns beyond its end.
        table: ``[(32, row blocks), (V, column chunks)]`` view of the bias + position table, or None.
        table_rows: which of its rows a row of the output gets.
        scale: dequantisation multiplier.
    """

    plan: Sm100Plan
    accumulators: cute.Tensor
    staging: cute.Pointer
    store_atom: cute.CopyAtom
    store_source: cute.Tensor
    store_target: cute.Tensor
    table: cute.Tensor | None
    table_rows: TableRows
    scale: Float32
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

        load_atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(width)), Float32)
        # (128 rows, width columns, 1, chunks, accumulators)
        chunks = cute.flat_divide(self.accumulators[(None, None), 0, 0, None], (plan.cta_m, width))
        tmem_load = tcgen05.make_tmem_copy(load_atom, chunks[None, None, 0, 0, 0]).get_slice(row)
        source = tmem_load.partition_S(chunks)
        fragment_shape = tmem_load.partition_D(cute.make_identity_tensor((plan.cta_m, width))).shape
        stores = self._staging_chunks(lane, first_region)

        state = self.accumulator.consumer_state()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            m_tile, n_tile = self.order.coordinates(tile)
            cta_row = (m_tile * plan.cta_group + self.cta_rank) * plan.cta_m
            table_row = cta_row + row if self.table is None else self.table_rows.of(cta_row + row)
            self.accumulator.wait_full(state)
            ptx.tcgen05_fence_after_thread_sync()
            for region in cutlass.range_constexpr(regions):
                # Groups complete in order: all but the newest `regions - 1` being read means that the store which used
                # this region for the tile before is done with it.
                cute.arch.cp_async_bulk_wait_group(regions - 1, read=True)
                cute.arch.sync_warp()
                for part in cutlass.range_constexpr(plan.store_columns // width):
                    column = region * plan.store_columns + part * width
                    fragment = cute.make_rmem_tensor(fragment_shape, Float32)
                    chunk = (first_column + column) // width
                    table = self._load_table(table_row, n_tile * plan.tile_n + first_column + column, width)
                    cute.copy(tmem_load, source[None, None, None, 0, chunk, state.index], fragment)
                    cute.arch.fence_view_async_tmem_load()
                    if cutlass.const_expr(column + width == columns):
                        release_accumulator(self.accumulator, state)
                    registers = cute.make_tensor(fragment.iterator, cute.make_layout(width))
                    values = scale_add_round(registers, table, self.scale, plan.config.epilogue, packed_f32=True)
                    _stage(values, stores, region * plan.store_region_bytes, part * width)
                self._store(first_region + region, cta_row // LANES + quarter,
                            (n_tile * plan.tile_n + first_column) // plan.store_columns + region)  # fmt: skip
            state.advance()
        # Staging is read asynchronously: the CTA must not exit before TMA is done with it.
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    @staticmethod
    def lane_quarter(warp: Int32) -> Int32:
        """Quarter of the tensor-memory lanes that a warp may reach, by its hardware id (PTX ISA, tcgen05.ld)."""
        return warp % 4

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

    @cute.jit
    def _staging_chunks(self, lane: Int32, first_region: Int32) -> tuple[cute.Pointer, ...]:
        """Where this lane's row keeps each 16-byte chunk of a region.

        SWIZZLE_128B XORs address bits 4-6 with bits 7-9; a region begins on a multiple of 1024 bytes and its rows are
        128 bytes long, so bits 7-9 are ``row % 8``.
        """
        row_bytes = self.plan.store_region_bytes // LANES
        row = first_region * self.plan.store_region_bytes + lane * row_bytes
        offsets = [row + (Int32(chunk) ^ lane % 8) * VECTOR_BYTES for chunk in range(row_bytes // VECTOR_BYTES)]
        return tuple(self.staging + cute.assume(offset, divby=VECTOR_BYTES) for offset in offsets)

    @cute.jit
    def _store(self, region: Int32, row_block: Int32, column_block: Int32) -> None:
        """TMA store of one staged region, once every lane has fenced its own writes and the warp agrees."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        cute.copy(self.store_atom, self.store_source[None, region], self.store_target[None, row_block, column_block])
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _stage(values: cute.Tensor, chunks: tuple[cute.Pointer, ...], region_offset: cutlass.Constexpr[int],
           column: cutlass.Constexpr[int]) -> None:  # fmt: skip
    """Writes one thread's BF16 registers to its row of a staging region, 16 bytes at a time."""
    packed = cute.make_tensor(values.iterator, cute.make_layout((CHUNK, cute.size(values) // CHUNK)))
    for i in cutlass.range_constexpr(cute.size(values) // CHUNK):
        target = cute.recast_ptr(chunks[column // CHUNK + i] + region_offset, dtype=BFloat16)
        cute.autovec_copy(packed[None, i], cute.make_tensor(target, cute.make_layout(CHUNK)))
