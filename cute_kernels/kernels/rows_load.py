"""TMA producer warp of the transposed product: rows of ``x`` -> operand stages."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32

from cute_kernels.kernels.pipes import Pipe
from cute_kernels.kernels.tiles import PositionOrder
from cute_kernels.plan.profile import Phase


@dataclass(frozen=True)
class RowsLoad:
    """Fills operand stages for every tile of this cluster.

    With multicast, each CTA of a cluster loads its share of the rows of ``x`` for all of them, so a stage may be filled
    only when the consumers of every CTA have released it; each CTA's full barrier expects the whole stage. In a pair of
    SM100 CTAs each loads rows of its own, and the bytes of both complete on the leader's barrier.

    Attributes:
        x_atom, x_source, x_blocks: TMA view ``[box, row block, k_block, position block]`` and buffers ``[box, block]``,
            ``stage_blocks`` consecutive blocks of 128 bytes of K in a stage.
        weight: the same three for a streamed weight, ``[box, slab, k_block]``, or None if it is resident.
        stage_blocks: K blocks in a stage.
        slab: which features of a streamed weight.
        multicast: CTAs that share every row, 1 without multicast.
        row_step, first_rows: the rows of tile t are box ``t * row_step + first_rows``.
        announces: whether this CTA announces the bytes of a stage.
    """

    x_atom: cute.CopyAtom
    x_source: cute.Tensor
    x_blocks: cute.Tensor
    operands: Pipe
    order: PositionOrder
    tile_stages: Int32 | int
    stage_blocks: int
    weight: tuple[cute.CopyAtom, cute.Tensor, cute.Tensor] | None = None
    slab: Int32 | int = 0
    multicast: int = 1
    row_step: int = 1
    first_rows: Int32 | int = 0
    announces: Boolean | bool = True

    @cute.jit
    def run(self) -> None:
        state = self.operands.producer_state()
        row_block, position = self.order.start()
        stride = self.order.stride()
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            self.operands.stamps.mark(Phase.TILE)
            rows = row_block * self.row_step + self.first_rows
            for stage in cutlass.range(self.tile_stages, unroll=1):
                self.operands.wait_empty(state)
                if self.announces:
                    with cute.arch.elect_one():
                        self.operands.announce_bytes(state)
                barrier = self.operands.full_barrier(state)
                # A block beyond the end of K is loaded as zeros: the byte count of a stage is always the same.
                for i in cutlass.range_constexpr(self.stage_blocks):
                    k_block, block = stage * self.stage_blocks + i, state.index * self.stage_blocks + i
                    x = self.x_source[None, rows, k_block, position]
                    self._copy(self.x_atom, x, self.x_blocks[None, block], barrier, self.multicast)
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
