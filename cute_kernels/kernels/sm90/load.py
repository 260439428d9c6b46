"""TMA producer warp: global memory -> operand stages."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32

from cute_kernels.kernels.pipes import Pipe
from cute_kernels.kernels.tiles import PositionOrder


@dataclass(frozen=True)
class Load:
    """Fills operand stages for every tile of this cluster.

    Each CTA of a cluster loads its share of the rows of ``x`` and multicasts it to all of them, so a stage may be
    filled only when the warpgroups of every CTA have released it; each CTA's full barrier expects the whole stage.

    Attributes:
        x_atom, x_source, x_stages: TMA view ``[box, row block, k_block, position]`` and stages ``[box, stage]``.
        weight: the same three for a streamed weight, ``[box, slab, k_block]``, or None if it is resident.
    """

    x_atom: cute.CopyAtom
    x_source: cute.Tensor
    x_stages: cute.Tensor
    weight: tuple[cute.CopyAtom, cute.Tensor, cute.Tensor] | None
    operands: Pipe
    order: PositionOrder
    k_blocks: Int32
    slab: Int32
    ctas: int

    @cute.jit
    def run(self) -> None:
        state = self.operands.producer_state()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            row_block, position = self.order.coordinates(tile)
            for k_block in cutlass.range(self.k_blocks, unroll=1):
                self.operands.wait_empty(state)
                with cute.arch.elect_one():
                    self.operands.announce_bytes(state)
                self._copy(
                    self.x_atom,
                    self.x_source[None, row_block, k_block, position],
                    self.x_stages[None, state.index],
                    self.operands.full_barrier(state),
                    self.ctas,
                )
                if cutlass.const_expr(self.weight is not None):
                    atom, source, stages = self.weight
                    barrier = self.operands.full_barrier(state)
                    self._copy(atom, source[None, self.slab, k_block], stages[None, state.index], barrier, 1)
                state.advance()
        self.operands.drain(state)

    @staticmethod
    def _copy(atom: cute.CopyAtom, source: cute.Tensor, stage: cute.Tensor, barrier: cute.Pointer, ctas: int) -> None:
        if ctas > 1:
            cute.copy(atom, source, stage, tma_bar_ptr=barrier, mcast_mask=Int16((1 << ctas) - 1))
        else:
            cute.copy(atom, source, stage, tma_bar_ptr=barrier)
