"""MMA warp of the leader CTA: operand stages -> accumulators in the tensor memory of both CTAs."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.kernels import ptx
from cute_kernels.kernels.sm100.pipes import Sm100Pipe
from cute_kernels.kernels.tiles import SnakeOrder


@dataclass(frozen=True)
class Mma:
    """Issues ``tcgen05.mma.cta_group::2`` for every tile of this cluster.

    Attributes:
        tiled_mma: 256 x tile_n x 32 FP8 instruction of a CTA pair.
        x_fragments, weight_fragments: shared-memory descriptors ``[.., k step, stage]``.
        accumulators: tensor-memory view ``[.., accumulator]``.
    """

    tiled_mma: cute.TiledMma
    x_fragments: cute.Tensor
    weight_fragments: cute.Tensor
    accumulators: cute.Tensor
    operands: Sm100Pipe
    accumulator: Sm100Pipe
    order: SnakeOrder
    k_blocks: Int32

    @cute.jit
    def run(self) -> None:
        full = self.operands.consumer_state()
        out = self.accumulator.producer_state()
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            self.accumulator.wait_empty(out)
            # The epilogue's reads of this accumulator, ordered by the barrier, must precede the MMAs that overwrite it.
            ptx.tcgen05_fence_after_thread_sync()
            target = self.accumulators[None, None, None, out.index]
            for k_block in cutlass.range(self.k_blocks, unroll=1):
                self.operands.wait_full(full)
                self.tiled_mma.set(tcgen05.Field.ACCUMULATE, k_block != 0)
                stage = (None, None, None, full.index)
                cute.gemm(self.tiled_mma, target, self.x_fragments[stage], self.weight_fragments[stage], target)
                with cute.arch.elect_one():
                    self.operands.commit_empty(full)
                full.advance()
            with cute.arch.elect_one():
                self.accumulator.commit_full(out)
            out.advance()
