"""MMA warp of the leader CTA: rows of ``x`` and the resident weight -> accumulators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.kernels import ptx
from cute_kernels.kernels.sm100.pipes import Sm100Pipe
from cute_kernels.kernels.sm100.transposed.instruction import MMA_STEPS, make_mma
from cute_kernels.kernels.sm100.transposed.weight import weight_fragments
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.plan.profile import Phase
from cute_kernels.plan.sm100_transposed import Sm100TransposedPlan


class RowsOperand(Protocol):
    """The N operand as it lies in shared memory."""

    def fragments(self, tiled_mma: cute.TiledMma, first: int, columns: int) -> cute.Tensor:
        """Shared-memory descriptors ``[.., k step in block, block]`` of this CTA's rows of a part of the columns."""


@dataclass(frozen=True)
class Mma:
    """Issues the MMAs of every tile of this cluster, part by part.

    All parts read the same stages: the first waits for them, the last frees them. While the MMAs of one part run, the
    epilogue drains the part before.

    Attributes:
        rows: operand stages in shared memory.
        weight: where it begins, in shared or in tensor memory.
        accumulators: of each part, tensor-memory view ``[.., accumulator]``.
        weight_ready: pipe of the weight, filled once.
    """

    plan: Sm100TransposedPlan
    rows: RowsOperand
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
        rows = [self.rows.fragments(mmas[i], *plan.parts[i]) for i in range(parts)]
        weight = weight_fragments(plan, mmas[0], self.weight)
        full = self.operands.consumer_state()
        out = self.accumulator.producer_state()
        # What epilogue warps wrote to tensor memory is ordered before the MMAs by the fence of each accumulator, below.
        self.weight_ready.wait_full(self.weight_ready.consumer_state())
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            self.operands.stamps.mark(Phase.TILE)
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
                    # The last stage of a tile may have room for more blocks than K has.
                    steps = min(blocks, plan.k_blocks - i * blocks) * MMA_STEPS
                    for j in cutlass.range_constexpr(steps):
                        step = i * blocks * MMA_STEPS + j
                        mmas[part].set(tcgen05.Field.ACCUMULATE, step > 0)
                        columns = rows[part][None, None, j % MMA_STEPS, stage.index * blocks + j // MMA_STEPS]
                        cute.gemm(mmas[part], target, weight[None, None, step], columns, target)
                    if cutlass.const_expr(part == parts - 1):
                        with cute.arch.elect_one():
                            self.operands.commit_empty(stage)
                        full.advance()
                    stage.advance()
                self.operands.stamps.mark(Phase.COMMIT)
                with cute.arch.elect_one():
                    self.accumulator.commit_full(out, part)
            out.advance()
