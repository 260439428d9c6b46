"""TMA producer warp: global memory -> operand stages."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.kernels.pipes import Pipe
from cute_kernels.kernels.sm100.pipes import LEADER_CTA
from cute_kernels.kernels.tiles import SnakeOrder


@dataclass(frozen=True)
class Operand:
    """One operand as this CTA loads it: TMA atom, TMA view ``[box, tile, k_block]`` and stages ``[box, stage]``."""

    atom: cute.CopyAtom
    source: cute.Tensor
    stages: cute.Tensor


@dataclass(frozen=True)
class Load:
    """Fills operand stages for every tile of this cluster.

    Each CTA waits for its own stage to be free (tcgen05.commit frees it in both CTAs) and loads its half of both
    operands. The bytes of both CTAs complete on the leader's barrier, the only one that an MMA warp waits for.
    """

    x: Operand
    weight: Operand
    operands: Pipe
    order: SnakeOrder
    k_blocks: Int32
    cta_rank: Int32

    @cute.jit
    def run(self) -> None:
        state = self.operands.producer_state()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            m_tile, n_tile = self.order.coordinates(tile)
            for k_block in cutlass.range(self.k_blocks, unroll=1):
                self.operands.wait_empty(state)
                if self.cta_rank == LEADER_CTA:
                    with cute.arch.elect_one():
                        self.operands.announce_bytes(state)
                barrier = self.operands.full_barrier(state)
                for operand, row in ((self.x, m_tile), (self.weight, n_tile)):
                    cute.copy(
                        operand.atom,
                        operand.source[None, row, k_block],
                        operand.stages[None, state.index],
                        tma_bar_ptr=barrier,
                    )
                state.advance()
        self.operands.drain(state)
