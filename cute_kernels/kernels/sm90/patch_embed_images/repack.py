"""Warps between TMA and the operand: rows of patches of 14 bytes, side by side in a strip, become rows of 16."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cute_kernels.kernels import ptx
from cute_kernels.kernels.pipes import PipelineState
from cute_kernels.kernels.sm90.pipes import Sm90Pipe
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.plan.patch_embed_images.sm90 import REPACK_WARPS, Sm90ImagesPlan
from cute_kernels.plan.patch_embed_images.strips import REPACKED, REPACKED_ROWS
from cute_kernels.plan.profile import Phase

THREADS = REPACK_WARPS * 32

ROW_BYTES = 16

WORDS = 4
"""Of 4 bytes of a row in the operand."""

PAIR_WORDS = 7
"""Of two rows of 14 bytes. An odd number: lanes that read every seventh word read different banks."""


@dataclass(frozen=True)
class Repack:
    """Fills operand stages out of raw strips, one plane of a tile at a time.

    A strip lands as ``[row][patch][14 bytes]``, the patches of all images side by side, and the operand wants ``[row]
    [patch][16 bytes]``: row i of either, counted through, begins at 14 i and at 16 i. What a thread copies does not
    depend on where rows of the images end. The last two rows of a patch in the operand are zeros from the beginning, or
    are not there.

    Attributes:
        raw, stages: buffers of both.
        strips, operands: pipes of both.
        thread: index among the threads of the role.
    """

    plan: Sm90ImagesPlan
    raw: cute.Pointer
    stages: cute.Pointer
    strips: Sm90Pipe
    operands: Sm90Pipe
    order: PositionOrder | ImageOrder
    thread: Int32

    @cute.jit
    def run(self) -> None:
        plan, lane = self.plan, self.thread % 32
        if cutlass.const_expr(not plan.drops_rows):
            self._clear()
        strip, stage = self.strips.consumer_state(), self.operands.producer_state()
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            self.strips.stamps.mark(Phase.TILE)
            for _ in cutlass.range(plan.planes, unroll=1):
                self.strips.wait_full(strip)
                raw = self.raw + cute.assume(strip.index * plan.load_pitch, divby=128)
                buffer = self.stages + cute.assume(stage.index * plan.pixel_stage_bytes, divby=128)
                if cutlass.const_expr(plan.held_pairs > 1):
                    self._copy_held(raw, buffer, strip, stage)
                else:
                    self.operands.wait_empty(stage)
                    self._copy(raw, buffer)
                # WGMMA reads the operand through the async proxy.
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                self.operands.arrive_written(stage, lane)
                if cutlass.const_expr(plan.held_pairs == 1):
                    self.strips.arrive_empty(strip, lane, plan.config.cluster)
                strip.advance()
                stage.advance()

    @cute.jit
    def _copy(self, raw: cute.Pointer, stage: cute.Pointer) -> None:
        """A pair of rows at a time: a thread stores one before it loads the next."""
        for i in cutlass.range(self.thread, self._pairs, THREADS, unroll=2):
            self._store_pair(stage, i, self._load_pair(raw, i))

    @cute.jit
    def _copy_held(
        self, raw: cute.Pointer, stage: cute.Pointer, strip_state: PipelineState, stage_state: PipelineState
    ) -> None:
        """As many pairs in registers as a thread holds, whose loads do not wait for each other.

        The strip is free when the last ones are loaded, and the stage has to be when the first ones are stored.
        """
        held = self.plan.held_pairs
        rounds = -(-self._pairs // (held * THREADS))
        for r in cutlass.range_constexpr(rounds):
            indices = [self.thread + j * THREADS for j in range(r * held, (r + 1) * held) if j * THREADS < self._pairs]
            pairs = [self._load_pair(raw, cutlass.min(i, Int32(self._pairs - 1))) for i in indices]
            if cutlass.const_expr(r == rounds - 1):
                # TMA writes the strip through the async proxy. Without the fence ptxas lets the arrival overtake the
                # loads, which wait for no result: on an H200 results were wrong.
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                self.strips.arrive_empty(strip_state, self.thread % 32, self.plan.config.cluster)
            if cutlass.const_expr(r == 0):
                self.operands.wait_empty(stage_state)
            for j in cutlass.range_constexpr(len(pairs)):
                if cutlass.const_expr((r * held + j + 1) * THREADS <= self._pairs):
                    self._store_pair(stage, indices[j], pairs[j])
                elif indices[j] < self._pairs:
                    self._store_pair(stage, indices[j], pairs[j])

    @property
    def _pairs(self) -> int:
        """Pairs of rows of a plane of a tile."""
        return REPACKED * self.plan.tile_rows // 2

    def _load_pair(self, raw: cute.Pointer, i: Int32) -> list[Uint32]:
        """The words of two rows: the first begins with a word, the second in the middle of one."""
        source = cute.recast_ptr(raw + cute.assume(i * PAIR_WORDS * 4, divby=4), dtype=Uint32)
        words = cute.make_tensor(source, cute.make_layout(PAIR_WORDS))
        return [words[j] for j in range(PAIR_WORDS)]

    @cute.jit
    def _store_pair(self, stage: cute.Pointer, i: Int32, w: list[Uint32]) -> None:
        # Of eight lanes, whose stores of 16 bytes are one wavefront, four write first rows and four second ones.
        second_first = self.thread // 4 % 2
        first = (w[0], w[1], w[2], w[3] & Uint32(0xFFFF))
        second = (*(ptx.shf_r_wrap_b32(w[j], w[j + 1], Uint32(16)) for j in (3, 4, 5)), w[6] >> Uint32(16))
        self._store(stage, i * 2 + second_first, second_first, second, first)
        self._store(stage, i * 2 + 1 - second_first, second_first, first, second)

    @cute.jit
    def _store(self, stage: cute.Pointer, i: Int32, choice: Int32, yes: tuple, no: tuple) -> None:
        row = cute.make_rmem_tensor(cute.make_layout(WORDS), Uint32)
        for j in cutlass.range_constexpr(WORDS):
            row[j] = cutlass.select_(choice != 0, yes[j], no[j])
        cute.autovec_copy(row, self._row(stage, i))

    @cute.jit
    def _clear(self) -> None:
        """Writes the rows that no strip has, of every stage; the first hand-over of each stage orders them."""
        plan = self.plan
        zeros = cute.make_rmem_tensor(cute.make_layout(WORDS), Uint32)
        zeros.fill(0)
        first, beyond = (rows * plan.tile_rows for rows in (REPACKED, REPACKED_ROWS))
        for stage in cutlass.range(plan.config.stages, unroll=1):
            buffer = self.stages + cute.assume(stage * plan.pixel_stage_bytes, divby=128)
            for i in cutlass.range(first + self.thread, beyond, THREADS, unroll=1):
                cute.autovec_copy(zeros, self._row(buffer, i))

    def _row(self, stage: cute.Pointer, i: Int32) -> cute.Tensor:
        target = stage + cute.assume(i * ROW_BYTES, divby=ROW_BYTES)
        return cute.make_tensor(cute.recast_ptr(target, dtype=Uint32), cute.make_layout(WORDS))
