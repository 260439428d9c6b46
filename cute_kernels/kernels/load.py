"""TMA producer warp: global memory -> operand stages."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32

from cute_kernels.kernels.pipes import Pipe
from cute_kernels.kernels.tiles import GroupedOrder, SnakeOrder


@dataclass(frozen=True)
class Operand:
    """One operand as this CTA loads it.

    Attributes:
        atom: TMA load.
        source: TMA view ``[box, box row, k_block]``, with a last mode of batches if the order has them.
        stages: buffers ``[box, stage * boxes + i]``.
        boxes: row boxes of one stage.
        step, first: the first box row of tile t is ``t * step + first``.
        multicast: CTAs of the cluster that receive what this CTA loads, as a bit mask; None without multicast.
    """

    atom: cute.CopyAtom
    source: cute.Tensor
    stages: cute.Tensor
    boxes: int = 1
    step: int = 1
    first: int | Int32 = 0
    multicast: Int16 | None = None

    @cute.jit
    def fetch(self, tile: Int32, k_block: Int32, batch: tuple, stage: Int32, barrier: cute.Pointer) -> None:
        """Starts the loads of one stage; their bytes complete on ``barrier``."""
        for i in cutlass.range_constexpr(self.boxes):
            source = self.source[(None, tile * self.step + self.first + i, k_block, *batch)]
            target = self.stages[None, stage * self.boxes + i]
            if cutlass.const_expr(self.multicast is None):
                cute.copy(self.atom, source, target, tma_bar_ptr=barrier)
            else:
                cute.copy(self.atom, source, target, tma_bar_ptr=barrier, mcast_mask=self.multicast)


@dataclass(frozen=True)
class Load:
    """Fills operand stages for every tile of this cluster.

    Each CTA waits for its own stage to be free, which takes the consumers of every CTA that shares it, and loads its
    part of both operands.

    Attributes:
        rows, columns: operands along the rows and the columns of a tile.
        first_block: first K block, where CTAs share a tile along K.
        announces: whether this CTA announces the bytes of a stage. A pair of SM100 CTAs has one full barrier, the
            leader's, on which the bytes of both complete; elsewhere every CTA waits for its own stage.
    """

    rows: Operand
    columns: Operand
    operands: Pipe
    order: SnakeOrder | GroupedOrder
    k_blocks: Int32
    announces: bool | Boolean = True
    first_block: int | Int32 = 0

    @cute.jit
    def run(self) -> None:
        state = self.operands.producer_state()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            coordinates = self.order.coordinates(tile)
            batch = coordinates[2:]
            for k_block in cutlass.range(self.k_blocks, unroll=1):
                self.operands.wait_empty(state)
                if self.announces:
                    with cute.arch.elect_one():
                        self.operands.announce_bytes(state)
                barrier = self.operands.full_barrier(state)
                block = k_block + self.first_block
                self.rows.fetch(coordinates[0], block, batch, state.index, barrier)
                self.columns.fetch(coordinates[1], block, batch, state.index, barrier)
                state.advance()
        self.operands.drain(state)
