"""Epilogue warps: the loop that drains accumulators of 32 features each, part by part, through transposed staging."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.kernels import ptx
from cute_kernels.kernels.sm100.pipes import Sm100Pipe, release_accumulator
from cute_kernels.kernels.sm100.transposed.staging import TransposedStaging
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.plan import LANES
from cute_kernels.plan.feature_slabs import COLUMN_GROUP
from cute_kernels.plan.profile import Phase
from cute_kernels.plan.sm100_transposed import Sm100TransposedPlan

MATRICES = LANES // 8
"""Blocks of 8 features in the lanes of a warp: a thread has one feature of each, ``lane / 4 + 8 i``."""


@dataclass(frozen=True)
class TransposedEpilogue:
    """Drains accumulators, one warp at a time, 32 features each, or both sums of 16.

    A subclass says what becomes of the sums.

    Attributes:
        accumulators: of each part, tensor-memory view ``[.., accumulator]`` of this CTA's 128 lanes.
        staging: this warp's buffer.
        accumulator: pipe of the accumulators.
        feature_block: this warp's block of 32 or 16 features.
        quarter: of the lanes of tensor memory, all that this warp may reach.
    """

    plan: Sm100TransposedPlan
    accumulators: tuple[cute.Tensor, ...]
    staging: TransposedStaging
    accumulator: Sm100Pipe
    order: PositionOrder | ImageOrder
    feature_block: Int32
    quarter: Int32

    @abstractmethod
    def registers(self) -> cute.Tensor | None:
        """What a thread keeps of the table, if anything."""

    @abstractmethod
    def fetch(self, registers: cute.Tensor | None, row_block: Int32, position: Int32, held: Int32) -> Int32:
        """Before a tile: loads what the registers do not hold yet.

        Args:
            registers: to be filled.
            row_block, position: what the tile order gives.
            held: what was returned for the tile before, -1 at first.

        Returns:
            A number for `finish` and for the next tile.
        """

    @abstractmethod
    def finish(
        self, sums: cute.Tensor, registers: cute.Tensor | None, held: Int32, row: int, row_block: Int32,
        position: Int32,
    ) -> cute.Tensor:  # fmt: skip
        """Rounded values of a warp's features x 8 rows, matrix by matrix of stmatrix: ``[2 rows, 4 or 2 features]``.

        Args:
            sums: ``[2 rows, +8 features, +16 features]``, or with two terms ``[2 rows, +8 features, term]``.
            registers, held: as filled and returned by `fetch`.
            row: of the tile, the first of the 8.
            row_block, position: what the tile order gives.
        """

    @abstractmethod
    def store(self, row_block: Int32, position: Int32) -> None:
        """Starts the TMA store of a tile."""

    @cute.jit
    def run(self) -> None:
        plan = self.plan
        width = plan.config.tmem_load_width
        load_atom = cute.make_copy_atom(tcgen05.Ld16x256bOp(tcgen05.Repetition(width // COLUMN_GROUP)), self._kind)
        # (128 lanes, width columns, 1, chunks, accumulators)
        tiler = (plan.lanes, width)
        chunks = [cute.flat_divide(part[(None, None), 0, 0, None], tiler) for part in self.accumulators]
        lane = self.quarter * LANES + self.staging.lane
        load = tcgen05.make_tmem_copy(load_atom, chunks[0][None, None, 0, 0, 0]).get_slice(lane)
        sources = [load.partition_S(part) for part in chunks]
        shape = load.partition_D(cute.make_identity_tensor(tiler)).shape
        addresses = self.staging.addresses()

        registers, held = self.registers(), Int32(-1)
        state = self.accumulator.consumer_state()
        row_block, position = self.order.start()
        stride = self.order.stride()
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            self.accumulator.stamps.mark(Phase.TILE)
            held = self.fetch(registers, row_block, position, held)
            for part in cutlass.range_constexpr(len(plan.parts)):
                columns = plan.parts[part][1]
                self.accumulator.wait_full(state, part)
                ptx.tcgen05_fence_after_thread_sync()
                if cutlass.const_expr(part == 0):
                    self.accumulator.stamps.mark(Phase.BUFFER)
                    self.staging.acquire()
                for chunk in cutlass.range_constexpr(columns // width):
                    if cutlass.const_expr(part == 0 or chunk > 0):
                        self.accumulator.stamps.mark(Phase.READ)
                    fragment = cute.make_rmem_tensor(shape, self._kind)
                    cute.copy(load, sources[part][None, None, None, 0, chunk, state.index], fragment)
                    cute.arch.fence_view_async_tmem_load()
                    self.accumulator.stamps.mark(Phase.MATH)
                    if cutlass.const_expr((chunk + 1) * width == columns):
                        release_accumulator(self.accumulator, state, part)
                    # (2 columns, +8 lanes, groups of 8 columns, +16 lanes)
                    layout = cute.make_layout((2, 2, width // COLUMN_GROUP, 2))
                    sums = cute.make_tensor(fragment.iterator, layout)
                    for group in cutlass.range_constexpr(width // COLUMN_GROUP):
                        column = chunk * width + group * COLUMN_GROUP
                        row = plan.row_of(part, column)
                        values = self.finish(sums[None, None, group, None], registers, held, row, row_block, position)
                        self.staging.write(addresses, values, plan.staged_row(part, column))
            self.accumulator.stamps.mark(Phase.STORE)
            self.store(row_block, position)
            state.advance()
            row_block, position = self.order.advance(row_block, position, stride)
        self.staging.finish()

    @property
    def _kind(self) -> type:
        """Element type of the accumulators."""
        return self.accumulators[0].element_type
