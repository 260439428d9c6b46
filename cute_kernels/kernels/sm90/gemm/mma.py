"""Consumer warpgroup of the dense GEMM: operand stages -> WGMMA accumulators -> bias, rounding, store buffers, TMA."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from cute_kernels.kernels.elements import ELEMENT_TYPES
from cute_kernels.kernels.gemm import finish
from cute_kernels.kernels.pipes import PipelineState
from cute_kernels.kernels.sm90.gemm.split_k import PartialSums
from cute_kernels.kernels.sm90.pipes import Sm90Pipe
from cute_kernels.kernels.staging import WarpStaging
from cute_kernels.kernels.tiles import GroupedOrder
from cute_kernels.plan import Sm90GemmPlan
from cute_kernels.plan.profile import Phase

MMA_STEPS = 4
"""WGMMAs of 16 elements of K in one K block of 64."""

COLUMN_GROUP = 16
"""Columns of which a thread has eight values: rows ``lane / 4`` and ``lane / 4 + 8``, columns ``lane % 4 * 2`` and the
next one, and the same eight columns on (PTX ISA, wgmma accumulator layout)."""


@dataclass(frozen=True)
class GemmMma:
    """Computes and stores this warpgroup's rows of the tiles of its cluster.

    Attributes:
        tiled_mma: 64 x tile_n x 16 instruction of one warpgroup.
        a_fragments, b_fragments: shared-memory descriptors ``[.., wave, k step, stage]`` of this warpgroup's rows, and
            ``[.., k step, stage]``.
        staging: store buffers of this warp, 16 rows x 128 bytes each.
        bias: FP32 values by column, or None.
        warpgroup, thread: index of the warpgroup, and of the thread in it.
        rank_m, rank_n: this CTA among those of its cluster that share operands.
        first_cta: the first of them.
        partials: what this warp and those of other CTAs do with slices of K; None without a split.
        turn: first of the named barriers by which warpgroups hand the tensor cores to each other.
    """

    plan: Sm90GemmPlan
    tiled_mma: cute.TiledMma
    a_fragments: cute.Tensor
    b_fragments: cute.Tensor
    operands: Sm90Pipe
    staging: WarpStaging
    bias: cute.Tensor | None
    order: GroupedOrder
    k_blocks: Int32
    warpgroup: Int32
    thread: Int32
    rank_m: Int32
    rank_n: Int32
    first_cta: Int32 | int
    partials: PartialSums | None
    turn: int

    @cute.jit
    def run(self) -> None:
        plan = self.plan
        shape = self.tiled_mma.partition_shape_C((plan.warpgroup_rows, plan.config.tile_n))
        accumulator = cute.make_rmem_tensor(shape, Float32)
        state = self.operands.consumer_state()
        first, step = self.order.first, self.order.step
        if cutlass.const_expr(plan.config.pingpong):
            # Tiles go to the warpgroups in turn, and the stages of the other one's tile are not ours.
            if self.warpgroup > 0:
                state.advance(self.k_blocks)
            first += self.warpgroup * step
            step *= 2
        phase = Int32(0)
        for tile in cutlass.range(first, self.order.tiles, step, unroll=1):
            self.operands.stamps.mark(Phase.TILE)
            self._await_turn(tile)
            released = state.clone()
            self._stage(accumulator, False, state)
            state.advance()
            for _ in cutlass.range(1, self.k_blocks, unroll=1):
                self._stage(accumulator, True, state)
                state.advance()
                # At most the newest group outstanding: the one that read the stage before is complete.
                self.operands.stamps.mark(Phase.MMA)
                warpgroup.wait_group(1)
                self.operands.arrive_empty(released, self.thread, plan.sharing_ctas, self.first_cta)
                released.advance()
            self._hand_over(tile)
            if cutlass.const_expr(plan.config.pingpong):
                state.advance(self.k_blocks)
            self.operands.stamps.mark(Phase.MMA)
            warpgroup.wait_group(0)
            self.operands.arrive_empty(released, self.thread, plan.sharing_ctas, self.first_cta)
            if cutlass.const_expr(self.partials is None):
                self._store(accumulator, tile)
            else:
                if self.partials.slice == self.partials.finisher:
                    self.partials.receive(phase)
                    self._store(accumulator, tile)
                    self.partials.release()
                else:
                    self.partials.send(accumulator, phase)
                phase ^= 1
        self.staging.finish()
        if cutlass.const_expr(self.partials is not None):
            self.partials.drain(phase)

    @cute.jit
    def _stage(self, accumulator: cute.Tensor, accumulate: cutlass.Constexpr[bool], state: PipelineState) -> None:
        """Issues the WGMMAs of one stage as one group."""
        self.operands.wait_full(state)
        warpgroup.fence()
        for step in cutlass.range_constexpr(MMA_STEPS):
            self.tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate or step > 0)
            a = self.a_fragments[None, None, step, state.index]
            b = self.b_fragments[None, None, step, state.index]
            cute.gemm(self.tiled_mma, accumulator, a, b, accumulator)
        warpgroup.commit_group()

    @cute.jit
    def _await_turn(self, tile: Int32) -> None:
        """The first tile of a cluster needs no permission."""
        if cutlass.const_expr(self.plan.config.pingpong):
            self.operands.stamps.mark(Phase.TURN)
            if tile != self.order.first:
                cute.arch.barrier(barrier_id=self.turn + self.warpgroup, number_of_threads=256)

    @cute.jit
    def _hand_over(self, tile: Int32) -> None:
        """The last WGMMA of this tile is issued: lets the other warpgroup begin the next tile, if there is one."""
        if cutlass.const_expr(self.plan.config.pingpong):
            if tile + self.order.step < self.order.tiles:
                cute.arch.barrier_arrive(barrier_id=self.turn + 1 - self.warpgroup, number_of_threads=256)

    @cute.jit
    def _store(self, accumulator: cute.Tensor, tile: Int32) -> None:
        """Adds the bias, rounds, stages and stores one tile; returns as soon as the last TMA store is issued."""
        plan, config = self.plan, self.plan.config
        place = self._place(tile)
        groups, dtype = plan.store_columns // COLUMN_GROUP, ELEMENT_TYPES[plan.problem.out_dtype]
        for i in cutlass.range_constexpr(plan.regions_per_tile):
            wave, region = divmod(i, plan.regions_per_tile // plan.waves)
            buffer = i % config.store_stages
            # Before the wait for a buffer, which the loads may then overlap.
            biases = [self._addends(place, wave, (region * groups + j) * COLUMN_GROUP) for j in range(groups)]
            self.operands.stamps.mark(Phase.BUFFER)
            self.staging.acquire()
            self.operands.stamps.mark(Phase.MATH)
            for group in cutlass.range_constexpr(groups):
                column = (region * groups + group) * COLUMN_GROUP
                values = cute.make_rmem_tensor(cute.make_layout(8), Float32)
                for j in cutlass.range_constexpr(8):
                    # Accumulators of a wave: pair, row half, 8 columns.
                    values[j] = accumulator[(j % 2, j // 2 % 2, column // 8 + j // 4), wave, 0]
                if cutlass.const_expr(self.partials is not None):
                    self.partials.add(values, (wave * config.tile_n + column) // 8)
                rounded = finish(values, biases[group], self.activation, dtype)
                self._stage_group(rounded, buffer, group)
            self.operands.stamps.mark(Phase.STORE)
            self.staging.store(buffer, *self._block(place, wave, region))

    @property
    def activation(self) -> str:
        return self.plan.problem.activation

    @cute.jit
    def _place(self, tile: Int32) -> tuple[Int32, ...]:
        """Where a tile is: this warp's first row, the first column, the batch."""
        plan, config = self.plan, self.plan.config
        m_tile, n_tile, batch = self.order.coordinates(tile)
        row = (m_tile * config.cluster_m + self.rank_m) * config.tile_m + self.thread // 32 * plan.store_rows
        if cutlass.const_expr(not config.pingpong):
            row += self.warpgroup * plan.warpgroup_rows
        return row, (n_tile * config.cluster_n + self.rank_n) * config.tile_n, batch

    def _addends(self, place: tuple[Int32, ...], wave: int, column: int) -> cute.Tensor | None:
        """What is added to the eight accumulators of a column group that begins at ``column`` of the tile."""
        return self._load_bias(place[1] + column)

    def _block(self, place: tuple[Int32, ...], wave: int, region: int) -> tuple[Int32, ...]:
        """The box of the output that a store buffer goes to."""
        row, first_column, batch = place
        row_block = row // self.plan.store_rows + wave * (64 // self.plan.store_rows)
        return row_block, first_column // self.plan.store_columns + region, batch

    @cute.jit
    def _load_bias(self, column: Int32) -> cute.Tensor | None:
        """Values of the eight accumulators of one column group; both rows have the same ones."""
        if cutlass.const_expr(self.bias is None):
            return None
        values = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        pairs = cute.logical_divide(self.bias, cute.make_layout(2))
        for half in cutlass.range_constexpr(2):
            cute.autovec_copy(pairs[None, column // 2 + half * 4 + self.thread % 4], pair)
            for row in cutlass.range_constexpr(2):
                values[half * 4 + row * 2], values[half * 4 + row * 2 + 1] = pair[0], pair[1]
        return values

    @cute.jit
    def _stage_group(self, values: cute.Tensor, buffer: cutlass.Constexpr[int], group: cutlass.Constexpr[int]) -> None:
        """Writes 16 rows x 16 columns of the warp to a store buffer."""
        lane = self.thread % 32
        if cutlass.const_expr(values.element_type is Float32):
            # Two neighbouring columns are half of a 16-byte chunk; stmatrix moves 16-bit elements only.
            for half in cutlass.range_constexpr(2):
                for row_half in cutlass.range_constexpr(2):
                    chunk = group * 4 + half * 2 + lane % 4 // 2
                    target = self.staging.chunk(lane // 4 + row_half * 8, chunk) + self.staging.offset(buffer)
                    target = cute.recast_ptr(target + cute.assume(lane % 2 * 8, divby=8), dtype=Float32)
                    pair = cute.make_tensor(values.iterator + half * 4 + row_half * 2, cute.make_layout(2))
                    cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(2)))
        else:
            # Lanes 8 i to 8 i + 7 give the row addresses of matrix i: rows 0-7, rows 8-15, and both 8 columns on.
            address = self.staging.chunk(lane % 16, group * 2 + lane // 16) + self.staging.offset(buffer)
            target = cute.make_tensor(cute.recast_ptr(address, dtype=values.element_type), cute.make_layout((8, 1)))
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), values.element_type)
            cute.copy(atom, cute.make_tensor(values.iterator, cute.make_layout((8, 1))), target)
