"""TMA producer warp: images -> strips in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32

from cute_kernels.kernels.pipes import Pipe
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.plan.patch_embed_images.sm90 import Sm90ImagesPlan


@dataclass(frozen=True)
class Load:
    """Fills operand stages for every tile of this cluster.

    Each CTA of a cluster loads its share of the rows of a strip and multicasts it to all of them, so a stage may be
    filled only when the warpgroups of every CTA have released it; each CTA's full barrier expects the whole stage.

    Attributes:
        atom, source, strips: TMA view ``[box, tile of a grid row, image tile, row block, channel]`` and buffers
            ``[box, stage]``. Pixels beyond the images are loaded as zeros, so that a stage always has all its bytes.
        row_tiles: tiles along a grid row.
    """

    plan: Sm90ImagesPlan
    atom: cute.CopyAtom
    source: cute.Tensor
    strips: cute.Tensor
    operands: Pipe
    order: PositionOrder | ImageOrder
    row_tiles: Int32

    @cute.jit
    def run(self) -> None:
        per_channel = self.plan.stages_per_channel
        state = self.operands.producer_state()
        image_tile, position_tile = self.order.start()
        stride = self.order.stride()
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            grid_row = position_tile // self.row_tiles
            row_tile = position_tile - grid_row * self.row_tiles
            for stage in cutlass.range_constexpr(self.plan.tile_stages):
                channel, part = stage // per_channel, stage % per_channel
                self.operands.wait_empty(state)
                with cute.arch.elect_one():
                    self.operands.announce_bytes(state)
                box = self.source[None, row_tile, image_tile, grid_row * per_channel + part, channel]
                self._copy(box, self.strips[None, state.index], self.operands.full_barrier(state))
                state.advance()
            image_tile, position_tile = self.order.advance(image_tile, position_tile, stride)
        self.operands.drain(state)

    def _copy(self, box: cute.Tensor, strip: cute.Tensor, barrier: cute.Pointer) -> None:
        ctas = self.plan.config.cluster
        if ctas > 1:
            cute.copy(self.atom, box, strip, tma_bar_ptr=barrier, mcast_mask=Int16((1 << ctas) - 1))
        else:
            cute.copy(self.atom, box, strip, tma_bar_ptr=barrier)
