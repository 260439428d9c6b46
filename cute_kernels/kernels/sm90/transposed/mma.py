"""Consumer warpgroup: operand stages -> WGMMA accumulators in registers, and their hand-over to the epilogue.

The output is computed transposed, ``D[feature, row] = weight * x^T``: 64 features of the weight are the A operand,
which a warpgroup can keep in registers for the whole launch, and the rows of a tile are the N of the WGMMA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.kernels.pipes import PipelineState
from cute_kernels.kernels.sm90.pipes import Sm90Pipe
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.plan.profile import Phase
from cute_kernels.plan.sm90_transposed import TransposedPlan

MMA_STEPS = 4
"""WGMMAs of K = 32 bytes in one K block of 128 bytes."""


class Epilogue(Protocol):
    """What becomes of a tile's accumulators. ``row_block`` and ``position`` are what the tile order gives."""

    def prefetch(self, row_block: Int32, position: Int32) -> Any:
        """What is fetched before the WGMMAs of a tile, to be handed to `store`."""

    def store(self, accumulator: cute.Tensor, fetched: Any, row_block: Int32, position: Int32) -> None:
        """Stores one tile."""

    def finish(self) -> None:
        """At the end of the kernel."""


@dataclass(frozen=True)
class Mma:
    """Computes and stores this warpgroup's 64 features of every tile of its cluster.

    Attributes:
        tiled_mma: 64 x tile_rows x 32 bytes instruction of one warpgroup.
        accumulator_type: of its result.
        weight: A operand: register fragments ``[.., k step]`` if resident, otherwise shared-memory descriptors
            ``[.., k step in block, block]``.
        x_fragments: shared-memory descriptors ``[.., k step in block, block]``.
        turn: first of the named barriers by which warpgroups hand the tensor cores to each other.
    """

    plan: TransposedPlan
    tiled_mma: cute.TiledMma
    accumulator_type: type
    weight: cute.Tensor
    x_fragments: cute.Tensor
    operands: Sm90Pipe
    epilogue: Epilogue
    order: PositionOrder | ImageOrder
    tile_stages: Int32
    warpgroup: Int32
    thread: Int32
    turn: int

    @cute.jit
    def run(self) -> None:
        plan = self.plan
        accumulator = cute.make_rmem_tensor(self._accumulator_shape(), self.accumulator_type)
        state = self.operands.consumer_state()
        if self.warpgroup == plan.config.warpgroups - 1 and self.order.first < self.order.tiles:
            self._pass_turn(0)
        row_block, position = self.order.start()
        stride = self.order.stride()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            self.operands.stamps.mark(Phase.TILE)
            fetched = self.epilogue.prefetch(row_block, position)
            is_last = tile + self.order.step >= self.order.tiles
            self._await_turn()
            released = state.clone()
            self._stage(accumulator, 0, state)
            state.advance()
            if cutlass.const_expr(plan.handover_stage == 0):
                self._hand_over(is_last)
            if cutlass.const_expr(plan.resident):
                for stage in cutlass.range_constexpr(1, plan.tile_stages):
                    self._stage(accumulator, stage, state)
                    state.advance()
                    if cutlass.const_expr(stage == plan.handover_stage):
                        self._hand_over(is_last)
                    # At most the newest group outstanding: the one that read the stage before is complete.
                    self.operands.stamps.mark(Phase.MMA)
                    warpgroup.wait_group(1)
                    self.operands.arrive_empty(released, self.thread, plan.stage_ctas)
                    released.advance()
            else:
                for stage in cutlass.range(1, self.tile_stages, unroll=1):
                    self._stage(accumulator, 1, state)
                    state.advance()
                    if stage == plan.handover_stage:
                        self._hand_over(is_last)
                    self.operands.stamps.mark(Phase.MMA)
                    warpgroup.wait_group(1)
                    self.operands.arrive_empty(released, self.thread, plan.stage_ctas)
                    released.advance()
            self.operands.stamps.mark(Phase.MMA)
            warpgroup.wait_group(0)
            self.operands.arrive_empty(released, self.thread, plan.stage_ctas)
            self.epilogue.store(accumulator, fetched, row_block, position)
            row_block, position = self.order.advance(row_block, position, stride)
        self.epilogue.finish()

    def _accumulator_shape(self) -> cute.Shape:
        return self.tiled_mma.partition_shape_C((64, self.plan.tile_rows))

    @cute.jit
    def _stage(self, accumulator: cute.Tensor, stage: cutlass.Constexpr[int], state: PipelineState) -> None:
        """Issues the WGMMAs of one stage as one group; stage 0 overwrites the accumulators."""
        self.operands.wait_full(state)
        warpgroup.fence()
        blocks, resident = self.plan.config.stage_blocks, self.plan.resident
        for i in cutlass.range_constexpr(blocks * MMA_STEPS):
            k_block, step = stage * blocks + i // MMA_STEPS, i % MMA_STEPS
            exists = not resident or k_block < self.plan.k_blocks
            if cutlass.const_expr(exists and self.plan.multiplies(i // MMA_STEPS, step)):
                block = state.index * blocks + i // MMA_STEPS
                if cutlass.const_expr(resident):
                    weight = self.weight[None, None, k_block * MMA_STEPS + step]
                else:
                    weight = self.weight[None, None, step, block]
                self.tiled_mma.set(warpgroup.Field.ACCUMULATE, stage > 0 or i > 0)
                x = self._columns(state.index, i // MMA_STEPS, step)
                cute.gemm(self.tiled_mma, accumulator, weight, x, accumulator)
        warpgroup.commit_group()

    def _columns(self, stage: Int32, block: int, step: int) -> cute.Tensor:
        """The B operand of a step of a block of a stage."""
        return self.x_fragments[None, None, step, stage * self.plan.config.stage_blocks + block]

    @property
    def _takes_turns(self) -> bool:
        return self.plan.config.pingpong and self.plan.config.warpgroups > 1

    @cute.jit
    def _await_turn(self) -> None:
        if cutlass.const_expr(self._takes_turns):
            self.operands.stamps.mark(Phase.TURN)
            cute.arch.barrier(barrier_id=self.turn + self.warpgroup, number_of_threads=256)

    @cute.jit
    def _hand_over(self, is_last: cutlass.Boolean) -> None:
        """Lets the next warpgroup begin this tile, or the first one the next tile if there is one."""
        if cutlass.const_expr(self._takes_turns):
            groups = self.plan.config.warpgroups
            if self.warpgroup < groups - 1:
                self._pass_turn(self.warpgroup + 1)
            elif not is_last:
                self._pass_turn(0)

    @cute.jit
    def _pass_turn(self, to: Int32) -> None:
        if cutlass.const_expr(self._takes_turns):
            cute.arch.barrier_arrive(barrier_id=self.turn + to, number_of_threads=256)
