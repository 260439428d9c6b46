"""TMA producer warp: global memory -> operand stages."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32

from cute_kernels.kernels.pipes import Pipe
from cute_kernels.kernels.tiles import PositionOrder
from cute_kernels.plan import Sm90PatchEmbedPlan


@dataclass(frozen=True)
class Load:
    """Fills operand stages for every tile of this cluster.

    Each CTA of a cluster loads its share of the rows of ``x`` and multicasts it to all of them, so a stage may be
    filled only when the warpgroups of every CTA have released it; each CTA's full barrier expects the whole stage.

    Attributes:
        x_atom, x_source, x_blocks: TMA view ``[box, row block, k_block, position block]`` and buffers ``[box, block]``,
            ``stage_blocks`` consecutive blocks of 128 bytes of K in a stage.
        weight: the same three for a streamed weight, ``[box, slab, k_block]``, or None if it is resident.
    """

    x_atom: cute.CopyAtom
    x_source: cute.Tensor
    x_blocks: cute.Tensor
    weight: tuple[cute.CopyAtom, cute.Tensor, cute.Tensor] | None
    operands: Pipe
    order: PositionOrder
    tile_stages: Int32
    slab: Int32
    plan: Sm90PatchEmbedPlan

    @cute.jit
    def run(self) -> None:
        state = self.operands.producer_state()
        row_block, position = self.order.start()
        stride = self.order.stride()
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            for stage in cutlass.range(self.tile_stages, unroll=1):
                self.operands.wait_empty(state)
                with cute.arch.elect_one():
                    self.operands.announce_bytes(state)
                barrier = self.operands.full_barrier(state)
                stage_blocks = self.plan.config.stage_blocks
                # A block beyond the end of K is loaded as zeros: the byte count of a stage is always the same.
                for i in cutlass.range_constexpr(stage_blocks):
                    k_block, block = stage * stage_blocks + i, state.index * stage_blocks + i
                    x = self.x_source[None, row_block, k_block, position]
                    self._copy(self.x_atom, x, self.x_blocks[None, block], barrier, self.plan.config.cluster)
                    if cutlass.const_expr(self.weight is not None):
                        atom, source, blocks = self.weight
                        self._copy(atom, source[None, self.slab, k_block], blocks[None, block], barrier, 1)
                state.advance()
            row_block, position = self.order.advance(row_block, position, stride)
        self.operands.drain(state)

    @staticmethod
    def _copy(atom: cute.CopyAtom, source: cute.Tensor, block: cute.Tensor, barrier: cute.Pointer, ctas: int) -> None:
        if ctas > 1:
            cute.copy(atom, source, block, tma_bar_ptr=barrier, mcast_mask=Int16((1 << ctas) - 1))
        else:
            cute.copy(atom, source, block, tma_bar_ptr=barrier)
