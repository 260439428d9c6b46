"""Epilogue warps of the dense GEMM: accumulators -> bias, rounding -> ring of swizzled store buffers -> TMA stores."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.kernels import ptx
from cute_kernels.kernels.elements import ELEMENT_TYPES
from cute_kernels.kernels.gemm import finish
from cute_kernels.kernels.sm100.cluster import ClusterPlace
from cute_kernels.kernels.sm100.pipes import Sm100Pipe, release_accumulator
from cute_kernels.kernels.staging import WarpStaging
from cute_kernels.kernels.tiles import GroupedOrder
from cute_kernels.plan import LANES, Sm100GemmPlan

BIAS_VECTOR = 4
"""FP32 values of one 16-byte load; all lanes of a warp read the same ones."""


@dataclass(frozen=True)
class GemmEpilogue:
    """Drains accumulators, one warp at a time: nothing but the accumulator's barriers is shared between warps.

    Attributes:
        accumulators: tensor-memory view ``[.., accumulator * waves + wave]`` of this CTA's 128 rows of each wave.
        staging: this warp's store buffers of 32 rows x 128 bytes.
        bias: FP32 values by column, or None.
        place: of this CTA in its cluster.
        warp: hardware warp id, whose remainder by 4 is the quarter of the tensor-memory lanes that it may reach.
    """

    plan: Sm100GemmPlan
    accumulators: cute.Tensor
    staging: WarpStaging
    bias: cute.Tensor | None
    accumulator: Sm100Pipe
    order: GroupedOrder
    place: ClusterPlace
    warp: Int32

    @cute.jit
    def run(self) -> None:
        plan = self.plan
        width, dtype = plan.tmem_load_width, ELEMENT_TYPES[plan.problem.out_dtype]
        lane = cute.arch.lane_idx()
        quarter = self.warp % 4

        load_atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(width)), Float32)
        # (128 rows, width columns, 1, chunks, accumulators)
        chunks = cute.flat_divide(self.accumulators[(None, None), 0, 0, None], (plan.cta_m, width))
        tmem_load = tcgen05.make_tmem_copy(load_atom, chunks[None, None, 0, 0, 0]).get_slice(quarter * LANES + lane)
        source = tmem_load.partition_S(chunks)
        fragment_shape = tmem_load.partition_D(cute.make_identity_tensor((plan.cta_m, width))).shape
        row_chunks = self.staging.row_chunks(lane)

        state = self.accumulator.consumer_state()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            m_tile, n_tile, batch = self.order.coordinates(tile)
            m_tile, n_tile = m_tile * plan.pairs[0] + self.place.m, n_tile * plan.pairs[1] + self.place.n
            first_column = n_tile * plan.config.tile_n
            for i in cutlass.range_constexpr(plan.regions_per_tile):
                wave, region = divmod(i, plan.regions_per_tile // plan.waves)
                if cutlass.const_expr(region == 0):
                    self.accumulator.wait_full(state, wave)
                    ptx.tcgen05_fence_after_thread_sync()
                buffer = i % plan.config.store_stages
                self.staging.acquire()
                for part in cutlass.range_constexpr(plan.store_columns // width):
                    column = region * plan.store_columns + part * width
                    fragment = cute.make_rmem_tensor(fragment_shape, Float32)
                    bias = self._load_bias(first_column + column, width)
                    index = self.accumulator.slot(state, wave)
                    cute.copy(tmem_load, source[None, None, None, 0, column // width, index], fragment)
                    cute.arch.fence_view_async_tmem_load()
                    if cutlass.const_expr(column + width == plan.config.tile_n):
                        release_accumulator(self.accumulator, state, wave)
                    registers = cute.make_tensor(fragment.iterator, cute.make_layout(width))
                    values = finish(registers, bias, plan.problem.activation, dtype)
                    self.staging.write_row(values, row_chunks, buffer, part * width)
                row_block = (m_tile * plan.waves + wave) * (plan.mma_m // LANES) + self.place.rank * 4 + quarter
                self.staging.store(buffer, row_block, first_column // plan.store_columns + region, batch)
            state.advance()
        self.staging.finish()

    @cute.jit
    def _load_bias(self, column: Int32, width: cutlass.Constexpr[int]) -> cute.Tensor | None:
        if cutlass.const_expr(self.bias is None):
            return None
        values = cute.make_rmem_tensor(cute.make_layout((BIAS_VECTOR, width // BIAS_VECTOR)), Float32)
        vectors = cute.logical_divide(self.bias, cute.make_layout(BIAS_VECTOR))
        for i in cutlass.range_constexpr(width // BIAS_VECTOR):
            cute.autovec_copy(vectors[None, column // BIAS_VECTOR + i], values[None, i])
        return cute.make_tensor(values.iterator, cute.make_layout(width))
