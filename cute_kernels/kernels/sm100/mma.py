"""MMA warp of the leader CTA: operand stages -> accumulators in the tensor memory of both CTAs."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from cute_kernels.kernels import ptx
from cute_kernels.kernels.clock import idle
from cute_kernels.kernels.pipes import PipelineState
from cute_kernels.kernels.sm100.pipes import Sm100Pipe
from cute_kernels.kernels.tiles import GroupedOrder, SnakeOrder
from cute_kernels.plan.profile import Phase


class IntegerMmaOp(tcgen05.MmaI8Op):
    """``tcgen05.mma.kind::i8`` of two K-major operands, which may differ in sign: `tcgen05.MmaI8Op` has one type."""

    def __init__(
        self, a: type, b: type, shape_mn: tuple[int, int], group: tcgen05.CtaGroup, a_source: tcgen05.OperandSource
    ) -> None:
        tcgen05.mma.MmaOp.__init__(
            self, a, b, Int32, (*shape_mn, 32), group, a_source, OperandMajorMode.K, OperandMajorMode.K
        )


@dataclass(frozen=True)
class Mma:
    """Issues ``tcgen05.mma.cta_group::2`` for every tile of this cluster.

    Attributes:
        tiled_mma: instruction of a CTA pair, 256 x tile_n x 32 bytes of K.
        row_fragments, column_fragments: shared-memory descriptors ``[.., k step, stage]`` of the operands along the
            rows (``stage * waves + wave``) and the columns of a tile.
        accumulators: tensor-memory view ``[.., accumulator * waves + wave]``.
        waves: instruction tiles side by side in the rows of one tile, which share a stage of the column operand and
            are handed to the epilogue one by one.
        idle_clocks: clocks to idle after the MMAs of each stage.
    """

    tiled_mma: cute.TiledMma
    row_fragments: cute.Tensor
    column_fragments: cute.Tensor
    accumulators: cute.Tensor
    operands: Sm100Pipe
    accumulator: Sm100Pipe
    order: SnakeOrder | GroupedOrder
    k_blocks: Int32
    waves: int = 1
    idle_clocks: int = 0

    @cute.jit
    def run(self) -> None:
        full = self.operands.consumer_state()
        out = self.accumulator.producer_state()
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            self.operands.stamps.mark(Phase.TILE)
            if cutlass.const_expr(self.waves == 1):
                self._wait_empty(out, 0)
            for k_block in cutlass.range(self.k_blocks, unroll=1):
                self.operands.wait_full(full)
                columns = self.column_fragments[None, None, None, full.index]
                for wave in cutlass.range_constexpr(self.waves):
                    if cutlass.const_expr(self.waves > 1):
                        # One wave is drained while the MMAs of the wave before it run.
                        if k_block == 0:
                            self._wait_empty(out, wave)
                    self.tiled_mma.set(tcgen05.Field.ACCUMULATE, k_block != 0)
                    rows = self.row_fragments[None, None, None, full.index * self.waves + wave]
                    target = self.accumulators[None, None, None, self.accumulator.slot(out, wave)]
                    cute.gemm(self.tiled_mma, target, rows, columns, target)
                    if cutlass.const_expr(wave < self.waves - 1):
                        if k_block == self.k_blocks - 1:
                            with cute.arch.elect_one():
                                self.accumulator.commit_full(out, wave)
                with cute.arch.elect_one():
                    self.operands.commit_empty(full)
                if cutlass.const_expr(self.idle_clocks > 0):
                    idle(self.idle_clocks)
                full.advance()
            self.operands.stamps.mark(Phase.COMMIT)
            with cute.arch.elect_one():
                self.accumulator.commit_full(out, self.waves - 1)
            out.advance()

    @cute.jit
    def _wait_empty(self, out: PipelineState, wave: int) -> None:
        """The epilogue's reads of this accumulator, ordered by the barrier, must precede the MMAs that overwrite it."""
        self.accumulator.wait_empty(out, wave)
        ptx.tcgen05_fence_after_thread_sync()
