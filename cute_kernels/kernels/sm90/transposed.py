"""Consumer warpgroup: operand stages -> WGMMA accumulators in registers, and their hand-over to the epilogue.

The output is computed transposed, ``D[feature, row] = weight * x^T``: 64 features of the weight are the A operand,
which a warpgroup can keep in registers for the whole launch, and the rows of a tile are the N of the WGMMA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int8, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from cute_kernels.dsl import cute_ir, dsl_user_op, mlir_types, tensor_of
from cute_kernels.kernels.pipes import PipelineState, Sm90Pipe, Stamps
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.kernels.tma import MMA_STEPS, StagingBuffer, Tma, staging_buffer
from cute_kernels.plan.base import VECTOR_BYTES, Phase
from cute_kernels.plan.sm90_transposed import TransposedPlan


class TileEpilogue(Protocol):
    """Epilogue of a tile's accumulators. ``row_block`` and ``position`` are what the tile order gives."""

    def prefetch(self, row_block: Int32, position: Int32) -> Any:
        """Fetches, before the WGMMAs of a tile, what is handed to `store`."""

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
        order_barrier: first of the named barriers by which warpgroups hand the tensor cores to each other.
    """

    plan: TransposedPlan
    tiled_mma: cute.TiledMma
    accumulator_type: type
    weight: cute.Tensor
    x_fragments: cute.Tensor
    operands: Sm90Pipe
    epilogue: TileEpilogue
    order: PositionOrder | ImageOrder
    tile_stages: Int32
    warpgroup: Int32
    thread: Int32
    order_barrier: int

    @cute.jit
    def run(self) -> None:
        plan = self.plan
        accumulator = cute.make_rmem_tensor(self._accumulator_shape(), self.accumulator_type)
        state = self.operands.consumer_state()
        if self.warpgroup == plan.config.warpgroups - 1 and self.order.first < self.order.tiles:
            self._pass_on(0)
        row_block, position = self.order.start()
        stride = self.order.stride()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            self.operands.stamps.mark(Phase.TILE)
            fetched = self.epilogue.prefetch(row_block, position)
            is_last = tile + self.order.step >= self.order.tiles
            self._await_order()
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
                    self._release(released, 1)
                    released.advance()
            else:
                for stage in cutlass.range(1, self.tile_stages, unroll=1):
                    self._stage(accumulator, 1, state)
                    state.advance()
                    if stage == plan.handover_stage:
                        self._hand_over(is_last)
                    self._release(released, 1)
                    released.advance()
            self._release(released, 0)
            self.epilogue.store(accumulator, fetched, row_block, position)
            row_block, position = self.order.advance(row_block, position, stride)
        self.epilogue.finish()

    def _release(self, stage: PipelineState, outstanding: int) -> None:
        """Frees a stage once at most so many of the newest groups of WGMMAs are outstanding."""
        self.operands.stamps.mark(Phase.MMA)
        warpgroup.wait_group(outstanding)
        self.operands.arrive_empty(stage, self.thread, self.plan.stage_ctas)

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
    def _ordered(self) -> bool:
        return self.plan.config.pingpong and self.plan.config.warpgroups > 1

    @cute.jit
    def _await_order(self) -> None:
        if cutlass.const_expr(self._ordered):
            self.operands.stamps.mark(Phase.ORDER_BARRIER)
            cute.arch.barrier(barrier_id=self.order_barrier + self.warpgroup, number_of_threads=256)

    @cute.jit
    def _hand_over(self, is_last: cutlass.Boolean) -> None:
        """Lets the next warpgroup begin this tile, or the first one the next tile if there is one."""
        if cutlass.const_expr(self._ordered):
            groups = self.plan.config.warpgroups
            if self.warpgroup < groups - 1:
                self._pass_on(self.warpgroup + 1)
            elif not is_last:
                self._pass_on(0)

    @cute.jit
    def _pass_on(self, to: Int32) -> None:
        if cutlass.const_expr(self._ordered):
            cute.arch.barrier_arrive(barrier_id=self.order_barrier + to, number_of_threads=256)


# --- the weight as a warpgroup keeps it: fragments of the A operand in registers -------------------------------------


FRAGMENT_WORDS = 4
"""Registers per thread of a 64 x 32 byte A operand."""

FRAGMENT_K_BYTES = 32
"""Bytes of K in a fragment."""

_REGISTER_BYTES = 32


@cute.jit
def resident_weight(
    tiled_mma: cute.TiledMma,
    slice_: cute.ThrMma,
    weight: cute.Tensor,
    feature_block: Int32,
    columns: cutlass.Constexpr[int],
) -> cute.Tensor:
    """This thread's fragments of 64 features x ``columns`` elements of the weight, zero beyond its end.

    A fragment register is four neighbouring bytes of K, which is a multiple of 16 bytes: a register is all inside or
    all out.

    Args:
        tiled_mma, slice_: the operation, and this thread's part of it.
        weight: ``[N, K]`` of 8- or 16-bit elements.
        feature_block: which 64 features.
        columns: K, rounded up to whole blocks.
    """
    per_word = cutlass.const_expr(Int32.width // weight.element_type.width)
    fragments = _fragments(tiled_mma.partition_shape_A((64, columns)), weight.element_type)
    words = cute.recast_tensor(fragments, Int32)
    coordinates = slice_.partition_A(cute.make_identity_tensor((64, columns)))
    for step in cutlass.range_constexpr(columns // (FRAGMENT_K_BYTES // 4 * per_word)):
        for j in cutlass.range_constexpr(FRAGMENT_WORDS):
            i = step * FRAGMENT_WORDS + j
            row, column = coordinates[i * per_word]
            row = feature_block * 64 + row
            words[i] = Int32(0)
            if row < weight.shape[0] and column < weight.shape[1]:
                address = weight.iterator + cute.crd2idx((row, cute.assume(column, divby=per_word)), weight.layout)
                words[i] = cute.make_tensor(cute.recast_ptr(address, dtype=Int32), 1)[0]
    return fragments


def _fragments(shape: cute.Shape, dtype: type) -> cute.Tensor:
    return _signed_fragments(shape) if dtype is Int8 else cute.make_rmem_tensor(shape, dtype)


@dsl_user_op
def _signed_fragments(shape: cute.Shape, *, loc=None) -> cute.Tensor:
    """Registers of si8, as an integer MMA wants them. Those of ``make_rmem_tensor(.., Int8)`` are i8, which it refuses.

    CuTe DSL 4.8.1 has no public way to them.
    """
    layout = cute.make_layout(shape, loc=loc)
    pointer = cute_ir.PtrType.get(mlir_types.si8(), cute_ir.AddressSpace.rmem, _REGISTER_BYTES)
    memory = cute_ir.memref_alloca(cute_ir.MemRefType.get(pointer, layout.type), layout=layout, loc=loc)
    return tensor_of(memory.value, Int8)


# --- a warpgroup's staging buffer: accumulators of 64 features x columns, transposed on their way to a TMA store -----


ROWS_PER_STORE = 16
"""Rows of the output (WGMMA columns) that one stmatrix.x4 of a warp covers, with the warp's 16 features."""


@dataclass(frozen=True)
class WarpgroupStaging(StagingBuffer):
    """The buffer of a warpgroup, of rows of 64 BF16 features; it begins on 1024 bytes, the period of SWIZZLE_128B.

    A thread holds features ``lane / 4`` and ``lane / 4 + 8`` of its warp's 16, and of every 8 columns two neighbouring
    ones (PTX ISA, wgmma accumulator layout). stmatrix with ``.trans`` turns that into rows of features.

    Attributes:
        thread: index in the warpgroup.
        staged: named barrier of this warpgroup.
        stamps: of the warp.
    """

    thread: Int32
    staged: Int32
    stamps: Stamps

    def addresses(self) -> tuple[cute.CopyAtom, cute.Pointer]:
        """stmatrix, and where this lane's row of the first 16 rows is.

        Lanes 8 i to 8 i + 7 give the row addresses of matrix i; matrices 0, 1 are features 0-7, 8-15 of rows 0-7,
        matrices 2, 3 of rows 8-15. SWIZZLE_128B: chunk XOR row % 8.
        """
        lane, warp_index = self.thread % 32, self.thread // 32
        row = lane // 16 * 8 + lane % 8
        chunk = (warp_index * 2 + lane // 8 % 2) ^ lane % 8
        offset = cute.assume(row * 128 + chunk * VECTOR_BYTES, divby=VECTOR_BYTES)
        first = cute.recast_ptr(self.buffer + offset, dtype=BFloat16)
        return cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), BFloat16), first

    @cute.jit
    def acquire(self) -> None:
        """Waits until the TMA store before has read the buffer; what is written to it is computed from now on."""
        self.stamps.mark(Phase.BUFFER)
        if self.thread // 32 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self._synchronise()
        self.stamps.mark(Phase.MATH)

    @staticmethod
    def write(addresses: tuple[cute.CopyAtom, cute.Pointer], values: cute.Tensor, block: int) -> None:
        """Writes a thread's eight BF16 values of 16 columns, ``block`` times 16 from the first ones on."""
        atom, first = addresses
        rows_16 = cute.make_tensor(first + block * (ROWS_PER_STORE * 64), (8, 1))
        cute.copy(atom, cute.make_tensor(values.iterator, (8, 1)), rows_16)

    @cute.jit
    def store(self, *coordinates: Int32) -> None:
        """Starts the TMA store of the whole buffer to a box of the output, given its coordinates."""
        self.stamps.mark(Phase.STORE)
        cute.arch.fence_view_async_shared()
        self._synchronise()
        if self.thread // 32 == 0:
            self.issue(*coordinates)

    @cute.jit
    def _synchronise(self) -> None:
        cute.arch.barrier(barrier_id=self.staged, number_of_threads=128)


def warpgroup_staging(
    plan: TransposedPlan,
    storage: cute.Pointer,
    layout: cute.ComposedLayout,
    out: Tma,
    box: tuple[int, ...],
    warpgroup: Int32,
    staged: int,
    stamps: Stamps,
) -> WarpgroupStaging:
    """The buffer of a consumer warpgroup.

    Args:
        plan: says how large it is.
        storage: staging of the CTA.
        layout: of a box in it.
        out: TMA store made with that layout, and its view of the output.
        box: what is stored at once.
        warpgroup: which one.
        staged: named barrier of the first of them.
        stamps: of the warp.
    """
    buffer = storage + cute.assume(warpgroup * plan.staging_bytes, divby=plan.swizzle_period)
    own, thread = staging_buffer(buffer, layout, BFloat16, out, box), cute.arch.thread_idx()[0] % 128
    return WarpgroupStaging(**vars(own), thread=thread, staged=staged + warpgroup, stamps=stamps)
