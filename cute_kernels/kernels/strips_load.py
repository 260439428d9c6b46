"""TMA producer warp: images -> strips in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32

from cute_kernels.kernels.load import Operand
from cute_kernels.kernels.pipes import Pipe
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.plan.patch_embed_images.strips import StripsPlan
from cute_kernels.plan.profile import Phase


@dataclass(frozen=True)
class StripLoad:
    """Fills operand stages for every tile of this cluster.

    With multicast, each CTA of a cluster loads its share of the rows of a strip for all of them, so a stage may be
    filled only when the consumers of every CTA have released it; each CTA's full barrier expects the whole stage. In a
    pair of SM100 CTAs each loads strips of its own images, and the bytes of both complete on the leader's barrier.

    Attributes:
        atom, source, strips: TMA view ``[box, tile of a grid row, images, row block, plane]`` and buffers
            ``[box, stage]``. Pixels beyond the images are loaded as zeros, so that a stage always has all its bytes.
        rest: atom, source and strips of the other part of rows that are split, or None.
        weight, slab: a weight that comes with the pixels, and which features of it this CTA computes; None if it is
            resident.
        row_tiles: tiles along a grid row.
        image_step, first_images: the images of tile t are box ``t * image_step + first_images``.
        announces: whether this CTA announces the bytes of a stage.
        multicast: CTAs of the cluster that receive what this CTA loads, as a bit mask; None without multicast.
    """

    plan: StripsPlan
    atom: cute.CopyAtom
    source: cute.Tensor
    strips: cute.Tensor
    operands: Pipe
    order: PositionOrder | ImageOrder
    row_tiles: Int32
    image_step: int = 1
    first_images: int | Int32 = 0
    announces: bool | Boolean = True
    multicast: Int16 | None = None
    rest: tuple[cute.CopyAtom, cute.Tensor, cute.Tensor] | None = None
    weight: Operand | None = None
    slab: int | Int32 = 0

    @cute.jit
    def run(self) -> None:
        per_plane, stage_blocks = self.plan.stages_per_plane, self.plan.config.stage_blocks
        state = self.operands.producer_state()
        image_tile, position_tile = self.order.start()
        stride = self.order.stride()
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            self.operands.stamps.mark(Phase.TILE)
            grid_row = position_tile // self.row_tiles
            row_tile = position_tile - grid_row * self.row_tiles
            images = image_tile * self.image_step + self.first_images
            for plane in cutlass.range_constexpr(self.plan.planes):
                for part in cutlass.range(per_plane, unroll=4):
                    self.operands.wait_empty(state)
                    if self.announces:
                        with cute.arch.elect_one():
                            self.operands.announce_bytes(state)
                    barrier = self.operands.full_barrier(state)
                    place = (None, row_tile, images, grid_row * per_plane + part, plane)
                    self._copy(self.atom, self.source[place], self.strips[None, state.index], barrier)
                    if cutlass.const_expr(self.rest is not None):
                        atom, source, strips = self.rest
                        self._copy(atom, source[place], strips[None, state.index], barrier)
                    if cutlass.const_expr(self.weight is not None):
                        features = self.weight.place(self.slab, ())
                        first = (plane * per_plane + part) * stage_blocks
                        for i in cutlass.range_constexpr(stage_blocks):
                            self.weight.fetch(features, first + i, state.index * stage_blocks + i, barrier)
                    state.advance()
            image_tile, position_tile = self.order.advance(image_tile, position_tile, stride)
        self.operands.drain(state)

    def _copy(self, atom: cute.CopyAtom, box: cute.Tensor, strip: cute.Tensor, barrier: cute.Pointer) -> None:
        if self.multicast is None:
            cute.copy(atom, box, strip, tma_bar_ptr=barrier)
        else:
            cute.copy(atom, box, strip, tma_bar_ptr=barrier, mcast_mask=self.multicast)
