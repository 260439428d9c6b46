"""Consumer warpgroup: operand stages -> WGMMA accumulators in registers, and their hand-over to the epilogue.

The output is computed transposed, ``D[feature, row] = weight * x^T``: 64 features of the weight are the A operand,
which a warpgroup can keep in registers for the whole launch, and the rows of a tile are the N of the WGMMA.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int8, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from cute_kernels.dsl import cute_ir, dsl_user_op, mlir_types, tensor_of
from cute_kernels.kernels.graph import Graph
from cute_kernels.kernels.pipes import (
    PipelineState,
    Sm90Pipe,
    allocate,
    begin,
    this_cluster,
    warp_and_rank,
)
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.kernels.tma import MMA_STEPS, StagingBuffer, staging_buffer
from cute_kernels.plan.base import VECTOR_BYTES
from cute_kernels.plan.sm90_transposed import TransposedPlan


@dataclass(frozen=True)
class Mma:
    """Computes and stores this warpgroup's 64 features of every tile of its cluster, by 64 x tile_rows x 32 bytes
    instructions.

    ``weight``: A operand: register fragments ``[.., k step]`` if resident, otherwise shared-memory descriptors ``[.., k
    step in block, block]``, as ``x_fragments`` are, of each part of a stage; ``order_barrier``: first of the named
    barriers by which warpgroups hand the tensor cores to each other.
    """

    plan: TransposedPlan
    tiled_mma: cute.TiledMma
    accumulator_type: type
    weight: cute.Tensor
    x_fragments: tuple[cute.Tensor, ...]
    operands: Sm90Pipe
    epilogue: Any
    order: PositionOrder | ImageOrder
    tile_stages: Int32
    warpgroup: Int32
    thread: Int32
    order_barrier: int

    @cute.jit
    def run(self) -> None:
        plan = self.plan
        shape = self.tiled_mma.partition_shape_C((64, plan.tile_rows))
        accumulator = cute.make_rmem_tensor(shape, self.accumulator_type)
        state = self.operands.consumer_state()
        if self.warpgroup == plan.config.warpgroups - 1 and self.order.first < self.order.tiles:
            self._pass_on(0)
        row_block, position = self.order.start()
        stride = self.order.stride()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
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
        warpgroup.wait_group(outstanding)
        self.operands.arrive_empty(stage, self.thread, self.plan.stage_ctas)

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
        for fragments, blocks in zip(self.x_fragments, self.plan.part_blocks, strict=True):
            if block < blocks:
                return fragments[None, None, step, stage * blocks + block]
            block -= blocks
        raise ValueError(f"block = {block}: must be less than the blocks of a stage")

    @property
    def _ordered(self) -> bool:
        return self.plan.config.pingpong and self.plan.config.warpgroups > 1

    @cute.jit
    def _await_order(self) -> None:
        if cutlass.const_expr(self._ordered):
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
    tiled_mma: cute.TiledMma, slice_: cute.ThrMma, weight: cute.Tensor, feature_block: Int32,
    columns: cutlass.Constexpr[int]
) -> cute.Tensor:
    """This thread's fragments of 64 features x ``columns`` elements of the weight ``[N, K]``, zero beyond its end.

    A fragment register is four neighbouring bytes of K, which is a multiple of 16 bytes: a register is all inside or
    all out.
    """
    per_word = cutlass.const_expr(Int32.width // weight.element_type.width)
    shape, dtype = tiled_mma.partition_shape_A((64, columns)), weight.element_type
    fragments = _signed_fragments(shape) if dtype is Int8 else cute.make_rmem_tensor(shape, dtype)
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


@dsl_user_op
def _signed_fragments(shape: cute.Shape, *, loc=None) -> cute.Tensor:
    """Registers of si8, as integer MMAs want them: those of ``Int8`` are i8, and CuTe DSL 4.8.1 has no public way."""
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
    ones (PTX ISA, wgmma accumulator layout). stmatrix with ``.trans`` turns that into rows of features. ``staged`` is
    the warpgroup's named barrier.
    """

    thread: Int32
    staged: Int32

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
        if self.thread // 32 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self._synchronise()

    @staticmethod
    def write(addresses: tuple[cute.CopyAtom, cute.Pointer], values: cute.Tensor, block: int) -> None:
        """Writes a thread's eight BF16 values of 16 columns, ``block`` times 16 from the first ones on."""
        atom, first = addresses
        rows_16 = cute.make_tensor(first + block * (ROWS_PER_STORE * 64), (8, 1))
        cute.copy(atom, cute.make_tensor(values.iterator, (8, 1)), rows_16)

    @cute.jit
    def store(self, *coordinates: Int32) -> None:
        """Starts the TMA store of the whole buffer to a box of the output, given its coordinates."""
        cute.arch.fence_view_async_shared()
        self._synchronise()
        if self.thread // 32 == 0:
            self.issue(*coordinates)

    @cute.jit
    def _synchronise(self) -> None:
        cute.arch.barrier(barrier_id=self.staged, number_of_threads=128)


@dataclass(frozen=True)
class Frame:
    """Where a thread of a kernel is, and what its CTA has: features, regions behind the barriers, pipes, tiles."""

    rank: Int32
    n_tile: Int32
    memory: list[cute.Pointer]
    pipes: dict[str, Sm90Pipe]
    order: PositionOrder | ImageOrder


class TransposedKernel:
    """Device side of a plan. A subclass says what is loaded and multiplied, and what is stored; its arguments are the
    instruction, ``tiled_mma``, and ``operands``: TMA copies, weight, table and sizes in tiles. It has

    * ``atoms(operands)``: descriptors to be prefetched; ``order(operands, first, step)``: the tiles of a cluster;
    * ``load(args, frame)``: the role of the load warp, and ``repack(frame)`` that of warps between it and the
      consumers, if the plan has them;
    * ``weight_stages(frame)``: ``[features, 128 bytes of K, block]`` of a streamed weight, ``x_stages(frame)``: ``[rows
      of a tile, 128 bytes of K, block]`` of each part of a stage, ``staging(frame)``: the staging of all warpgroups;
    * ``out_box``: a warpgroup's part of a tile, which it stores at once, in the modes of the output, and
      ``staging_layout()``: that box in shared memory, SWIZZLE_128B: rows of 64 features, ordered as a tile's columns;
    * ``epilogue(operands, staging, feature_block)`` of a warpgroup's 64 features: ``prefetch(row_block, position)``
      fetches, before the WGMMAs of a tile, what ``store(accumulator, fetched, row_block, position)`` is handed, and
      ``finish()`` comes at the end of the kernel.
    """

    plan: TransposedPlan
    graph: Graph

    def tile_stages(self, args: Any) -> Int32:
        """Stages of a tile."""
        return Int32(self.plan.tile_stages)

    def tiled_mma(self, weight: type, x: type) -> cute.TiledMma:
        """WGMMA of 64 features, the rows of a tile and 32 bytes of K."""
        source = warpgroup.OperandSource.RMEM if self.plan.resident else warpgroup.OperandSource.SMEM
        shape = (64, self.plan.tile_rows, self.plan.mma_k_bytes * 8 // x.width)
        majors = (OperandMajorMode.K, OperandMajorMode.K)
        if self.plan.sums_integers:
            return cute.make_tiled_mma(warpgroup.MmaI8Op(weight, x, Int32, shape, source, *majors))
        if x.width == 16:
            return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(x, Float32, shape, source, *majors))
        return cute.make_tiled_mma(warpgroup.MmaF8Op(weight, x, Float32, shape, source, *majors))

    @cute.jit
    def run(self, args: Any) -> None:
        plan, o = self.plan, args.operands
        warp_index, rank = warp_and_rank(plan)
        barriers, memory, pipes = allocate(plan, self.graph, Sm90Pipe)
        begin(self.graph, warp_index == plan.load_warp, barriers, self.atoms(o))

        cluster, clusters = this_cluster(plan)
        n_tile = cluster % o.feature_groups * plan.config.cluster + rank
        order = self.order(o, cluster // o.feature_groups, clusters // o.feature_groups)
        frame = Frame(rank, n_tile, memory, pipes, order)

        if warp_index >= plan.load_warp:
            cute.arch.setmaxregister_decrease(plan.producer_registers)
            if warp_index == plan.load_warp:
                self.load(args, frame).run()
            elif cutlass.const_expr("repack" in plan.roles):
                self.repack(frame).run()
        else:
            cute.arch.setmaxregister_increase(plan.consumer_registers)
            self._mma(args, frame, warp_index // 4).run()

    def _mma(self, args: Any, frame: Frame, group: Int32) -> Mma:
        plan, mma, pipe = self.plan, args.tiled_mma, frame.pipes["operands"]
        thread = cute.arch.thread_idx()[0] % 128
        own = mma.get_slice(thread)
        feature_block = frame.n_tile * plan.config.warpgroups + group
        if plan.resident:
            weight = resident_weight(mma, own, args.operands.weight, feature_block, plan.k_blocks * plan.tile_k)
        else:
            stages = self.weight_stages(frame)
            mine = cute.local_tile(stages, (64, plan.tile_k, plan.ring_blocks), (group, 0, 0))
            weight = mma.make_fragment_A(own.partition_A(mine))
        x_fragments = tuple(mma.make_fragment_B(own.partition_B(part)) for part in self.x_stages(frame))
        buffer = self.staging(frame) + cute.assume(group * plan.staging_bytes, divby=plan.swizzle_period)
        stored = staging_buffer(buffer, self.staging_layout(), BFloat16, args.operands.out, self.out_box)
        staged = self.graph.named_barrier("staged 0") + group
        staging = WarpgroupStaging(**vars(stored), thread=thread, staged=staged)
        return Mma(
            plan=plan,
            tiled_mma=mma,
            accumulator_type=Int32 if plan.sums_integers else Float32,
            weight=weight,
            x_fragments=x_fragments,
            operands=pipe,
            epilogue=self.epilogue(args.operands, staging, feature_block),
            order=frame.order,
            tile_stages=self.tile_stages(args),
            warpgroup=group,
            thread=thread,
            order_barrier=self.graph.named_barrier("order barrier 0"),
        )
