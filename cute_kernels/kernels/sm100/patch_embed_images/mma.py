"""MMA warp of the leader CTA: strips of images and the resident weight -> accumulators."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int8, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from cute_kernels.kernels import ptx
from cute_kernels.kernels.elements import ELEMENT_TYPES
from cute_kernels.kernels.sm100.mma import IntegerMmaOp
from cute_kernels.kernels.sm100.patch_embed_images.weight import weight_fragments
from cute_kernels.kernels.sm100.pipes import Sm100Pipe
from cute_kernels.kernels.strips import operand_layout, row_swizzle
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.plan import Sm100ImagesPlan
from cute_kernels.plan.patch_embed_images.base import STRIP_PATCH

MMA_STEPS = 4
"""MMAs of K = 32 bytes in one K block of 128 bytes."""


def make_mma(plan: Sm100ImagesPlan, columns: int) -> cute.TiledMma:
    """The instruction of one part of a tile: ``kind::i8``, or ``kind::f16`` of 16-bit pixels."""
    group = tcgen05.CtaGroup.TWO if plan.cta_group == 2 else tcgen05.CtaGroup.ONE
    source = tcgen05.OperandSource.TMEM if plan.config.weight == "tmem" else tcgen05.OperandSource.SMEM
    shape = (plan.features * plan.cta_group, columns)
    if plan.pixel_bytes == 1:
        return cute.make_tiled_mma(IntegerMmaOp(Int8, Uint8, shape, group, source))
    dtype = ELEMENT_TYPES[plan.problem.in_dtype]
    return cute.make_tiled_mma(
        tcgen05.MmaF16BF16Op(
            dtype, Float32, (*shape, STRIP_PATCH), group, source, OperandMajorMode.K, OperandMajorMode.K
        )
    )


@dataclass(frozen=True)
class Mma:
    """Issues the MMAs of every tile of this cluster, part by part.

    All parts read the same stages: the first waits for them, the last frees them. While the MMAs of one part run, the
    epilogue drains the part before.

    Attributes:
        strips: operand stages in shared memory.
        weight: where it begins, in shared or in tensor memory.
        accumulators: of each part, tensor-memory view ``[.., accumulator]``.
        weight_ready: pipe of the weight, filled once.
    """

    plan: Sm100ImagesPlan
    strips: cute.Pointer
    weight: cute.Pointer
    accumulators: tuple[cute.Tensor, ...]
    operands: Sm100Pipe
    accumulator: Sm100Pipe
    weight_ready: Sm100Pipe
    order: PositionOrder | ImageOrder

    @cute.jit
    def run(self) -> None:
        plan = self.plan
        parts, blocks = len(plan.parts), plan.config.stage_blocks
        # Made here: `set` rebinds them in staged code, which objects shared with other roles do not survive.
        mmas = [make_mma(plan, columns) for _, columns in plan.parts]
        patches = [self._patches(mmas[i], *plan.parts[i]) for i in range(parts)]
        weight = weight_fragments(plan, mmas[0], self.weight)
        full = self.operands.consumer_state()
        out = self.accumulator.producer_state()
        # What epilogue warps wrote to tensor memory is ordered before the MMAs by the fence of each accumulator, below.
        self.weight_ready.wait_full(self.weight_ready.consumer_state())
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            first = full.clone()
            for part in cutlass.range_constexpr(parts):
                # The epilogue's reads of these columns, ordered by the barrier, must precede MMAs that overwrite them.
                self.accumulator.wait_empty(out, part)
                ptx.tcgen05_fence_after_thread_sync()
                target = self.accumulators[part][None, None, None, out.index]
                stage = first.clone()
                for i in cutlass.range_constexpr(plan.tile_stages):
                    if cutlass.const_expr(part == 0):
                        self.operands.wait_full(stage)
                    for j in cutlass.range_constexpr(blocks * MMA_STEPS):
                        step = i * blocks * MMA_STEPS + j
                        mmas[part].set(tcgen05.Field.ACCUMULATE, step > 0)
                        columns = patches[part][None, None, j % MMA_STEPS, stage.index * blocks + j // MMA_STEPS]
                        cute.gemm(mmas[part], target, weight[None, None, step], columns, target)
                    if cutlass.const_expr(part == parts - 1):
                        with cute.arch.elect_one():
                            self.operands.commit_empty(stage)
                        full.advance()
                    stage.advance()
                with cute.arch.elect_one():
                    self.accumulator.commit_full(out, part)
            out.advance()

    def _patches(self, tiled_mma: cute.TiledMma, first: int, columns: int) -> cute.Tensor:
        """Shared-memory descriptors ``[.., k step in block, block]`` of this CTA's patches of a part."""
        plan = self.plan
        count, first = columns // plan.cta_group, first // plan.cta_group
        if plan.pixel_bytes == 2:
            rows, blocks = STRIP_PATCH * plan.cta_patches, plan.config.stages * plan.config.stage_blocks
            layout = cute.make_layout(
                ((count, STRIP_PATCH), 1, MMA_STEPS, blocks), stride=((STRIP_PATCH, 1), 0, rows, MMA_STEPS * rows)
            )
            strips = self.strips + plan.pixel_bytes * STRIP_PATCH * first
            strips = cute.recast_ptr(strips, row_swizzle(plan), dtype=ELEMENT_TYPES[plan.problem.in_dtype])
            return tiled_mma.make_fragment_B(cute.make_tensor(strips, layout))
        whole = operand_layout(plan)
        chunks, step, block = whole.stride[1], 2 * whole.stride[1][1], whole.stride[2]
        layout = cute.make_layout(
            ((count, (STRIP_PATCH, 2)), 1, MMA_STEPS, whole.shape[2]), stride=((STRIP_PATCH, chunks), 0, step, block)
        )
        strips = self.strips + STRIP_PATCH * first
        return tiled_mma.make_fragment_B(cute.make_tensor(strips, layout))
