"""TMA producer warp: patches out of images, and the weight -> operand stages."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32

from cute_kernels.kernels.load import Operand
from cute_kernels.kernels.pipes import Pipe
from cute_kernels.kernels.tiles import PatchOrder
from cute_kernels.plan.patch_embed_images.gather import Sm90GatherPlan
from cute_kernels.plan.profile import Phase


@dataclass(frozen=True)
class Load:
    """Fills operand stages for every tile of this cluster.

    Each CTA of a cluster loads its share of a box of patches and multicasts it to all of them, so a stage may be filled
    only when the warpgroups of every CTA have released it; each CTA's full barrier expects the whole stage.

    Attributes:
        atom, source, patches: TMA view ``[box, tile of a grid row, of a grid column, of images, rows of pixels]`` and
            buffers ``[box, stage]``. Pixels beyond the images are loaded as zeros: a stage always has all its bytes.
        weight: this CTA's features.
        channel_blocks: blocks of rows of pixels from one channel to the next.
    """

    plan: Sm90GatherPlan
    atom: cute.CopyAtom
    source: cute.Tensor
    patches: cute.Tensor
    weight: Operand
    operands: Pipe
    order: PatchOrder
    channel_blocks: Int32

    @cute.jit
    def run(self) -> None:
        plan = self.plan
        blocks = plan.problem.patch // plan.pixel_rows
        state = self.operands.producer_state()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            self.operands.stamps.mark(Phase.TILE)
            row_tile, column_tile, image_tile, n_tile = self.order.coordinates(tile)
            weight = self.weight.place(n_tile, ())
            for channel in cutlass.range(plan.problem.channels, unroll=1):
                for block in cutlass.range(blocks, unroll=1):
                    self.operands.wait_empty(state)
                    with cute.arch.elect_one():
                        self.operands.announce_bytes(state)
                    barrier = self.operands.full_barrier(state)
                    rows = channel * self.channel_blocks + block
                    box = self.source[None, 0, row_tile, column_tile, image_tile, rows]
                    self._copy(box, self.patches[None, state.index], barrier)
                    self.weight.fetch(weight, channel * blocks + block, state.index, barrier)
                    state.advance()
        self.operands.drain(state)

    def _copy(self, box: cute.Tensor, target: cute.Tensor, barrier: cute.Pointer) -> None:
        ctas = self.plan.config.cluster
        if ctas > 1:
            cute.copy(self.atom, box, target, tma_bar_ptr=barrier, mcast_mask=Int16((1 << ctas) - 1))
        else:
            cute.copy(self.atom, box, target, tma_bar_ptr=barrier)
