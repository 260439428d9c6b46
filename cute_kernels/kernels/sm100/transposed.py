"""Common parts of the device functions of kernels whose weight stays on chip: allocate, dispatch to roles.

Where two accumulators do not fit beside the weight, one is computed in MMA tiles with barriers of their own: one is
drained while the next is multiplied, over the same stages, which the last one frees. An MMA of a pair takes half of its
columns from each CTA: the first half of its columns are rows of the leader, the others of its neighbour.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05, warp

from cute_kernels.dsl import cute_ir, dsl_user_op, mlir_types
from cute_kernels.kernels import ptx
from cute_kernels.kernels.graph import Graph
from cute_kernels.kernels.host import ELEMENT_TYPES
from cute_kernels.kernels.load import WeightLoad, tma_operand
from cute_kernels.kernels.pipes import this_cluster
from cute_kernels.kernels.sm100 import cta_pair
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.kernels.tma import (
    MMA_STEPS,
    StagingBuffer,
    Tma,
    load_operation,
    shared_tensor,
    staging_buffer,
    store_tma,
    swizzled,
)
from cute_kernels.plan.base import ITEMSIZE, LANES, VECTOR_BYTES
from cute_kernels.plan.sm100_transposed import Sm100TransposedPlan
from cute_kernels.plan.tiles import CORE_COLUMNS

# --- the instruction of the transposed product, and its accumulators in tensor memory --------------------------------

LANE_STRIDE = 1 << 16
"""Tensor-memory addresses have the lane in their upper half."""


def accumulator_type(plan: Sm100TransposedPlan) -> type:
    """Type of the accumulator: of integers 32-bit integers, which are exact."""
    return Int32 if plan.weight_dtype == "int8" else Float32


def transposed_mma(plan: Sm100TransposedPlan, columns: int) -> cute.TiledMma:
    """The instruction of an MMA tile."""
    source = tcgen05.OperandSource.TMEM if plan.config.weight == "tmem" else tcgen05.OperandSource.SMEM
    shape = (plan.lanes * plan.cta_group, columns)
    group, x = cta_pair.cta_group(plan), ELEMENT_TYPES[plan.problem.in_dtype]
    return cta_pair.make_mma(_weight_type(plan), x, shape, group, source)


def mma_accumulators(plan: Sm100TransposedPlan, tmem: cute.Pointer) -> tuple[cute.Tensor, ...]:
    """Tensor-memory view ``[.., accumulator]`` of each MMA tile."""
    accumulators = []
    for first, columns in plan.mma_spans:
        shape = ((plan.lanes, columns), 1, 1, plan.config.accumulators)
        layout = cute.make_layout(shape, stride=((LANE_STRIDE, 1), 0, 0, plan.columns))
        accumulators.append(cute.make_tensor(cute.recast_ptr(tmem + first, dtype=accumulator_type(plan)), layout))
    return tuple(accumulators)


# --- the weight of a CTA's features where it stays for the whole launch: tensor memory, or shared memory -------------

_FILL_COLUMNS = 32
"""Columns of tensor memory that one tcgen05.st of a warp writes, from as many registers."""


# ---- tensor memory --------------------------------------------------------------------------------------------------

@cute.jit
def fill_tensor_memory(
    plan: cutlass.Constexpr[Sm100TransposedPlan], weight: cute.Tensor, tmem: cute.Pointer, n_tile: Int32, thread: Int32,
    pipe: cta_pair.Sm100Pipe
) -> None:
    """Epilogue warp: writes the weight of its features, K-major, four bytes to a column; and says so.

    Lanes beyond the last feature get the weight of that one: TMA clips what is computed of it.
    """
    columns = plan.weight_columns
    memory = cute.make_tensor(tmem, cute.make_layout((plan.lanes, columns), stride=(LANE_STRIDE, 1)))
    chunks = cute.flat_divide(memory, (plan.lanes, _FILL_COLUMNS))
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(_FILL_COLUMNS)), Int32)
    store = tcgen05.make_tmem_copy(atom, chunks[None, None, 0, 0]).get_slice(thread)
    target = store.partition_D(chunks)
    shape = store.partition_S(cute.make_identity_tensor((plan.lanes, _FILL_COLUMNS))).shape
    feature = min(n_tile * plan.features + thread, weight.shape[0] - 1)
    for i in cutlass.range(columns // _FILL_COLUMNS, unroll=1):
        registers = cute.make_rmem_tensor(shape, Int32)
        words = cute.make_tensor(registers.iterator, _FILL_COLUMNS)
        _load_words(_words(plan, weight, feature), i, words)
        cute.copy(store, registers, target[None, None, None, 0, i])
    cute.arch.fence_view_async_tmem_store()
    ptx.tcgen05_fence_before_thread_sync()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        pipe.arrive_full_at_leader(pipe.producer_state())


def _words(plan: Sm100TransposedPlan, weight: cute.Tensor, feature: Int32) -> cute.Tensor:
    """One feature's K, four bytes in a word."""
    k, itemsize = weight.shape[1], ITEMSIZE[plan.weight_dtype]
    divisor = k if isinstance(k, int) else VECTOR_BYTES // itemsize
    row = cute.recast_ptr(weight.iterator + cute.assume(feature * k, divby=divisor), dtype=Int32)
    return cute.make_tensor(row, k * itemsize // 4)


@cute.jit
def _load_words(words: cute.Tensor, chunk: Int32, registers: cute.Tensor) -> None:
    """Chunk ``chunk`` of a feature's words, zeros beyond them: K, in whole vectors, may end inside the last one."""
    count = cute.size(words)
    if cutlass.const_expr(isinstance(count, int) and count % _FILL_COLUMNS == 0):
        source = cute.make_tensor(words.iterator, (_FILL_COLUMNS, count // _FILL_COLUMNS))
        cute.autovec_copy(source[None, chunk], registers)
    else:
        width = cutlass.const_expr(VECTOR_BYTES // 4)
        vectors = cute.make_tensor(registers.iterator, (width, _FILL_COLUMNS // width))
        vectors.fill(0)
        for i in cutlass.range_constexpr(_FILL_COLUMNS // width):
            first = cute.assume(chunk * _FILL_COLUMNS + i * width, divby=width)
            if first < count:
                cute.autovec_copy(cute.make_tensor(words.iterator + first, width), vectors[None, i])


@dsl_user_op
def _signed_tensor(pointer: cute.Pointer, layout: cute.Layout, *, loc=None) -> cute.Tensor:
    """Tensor-memory view of si8, as integer MMAs want it: ``Int8`` is i8, and CuTe DSL 4.8.1 has no public way."""
    kind = cute_ir.PtrType.get(mlir_types.si8(), cute_ir.AddressSpace.tmem, 16)
    return cute.make_tensor(cute_ir.recast_iter(kind, pointer.value, loc=loc), layout, loc=loc)


# ---- shared memory --------------------------------------------------------------------------------------------------

def smem_layout(plan: Sm100TransposedPlan, tiled_mma: cute.TiledMma) -> cute.ComposedLayout:
    """``[.., K block]``, SWIZZLE_128B."""
    return sm100_utils.make_smem_layout_a(tiled_mma, _tile(plan), _weight_type(plan), plan.k_blocks)


def smem_tensor(plan: Sm100TransposedPlan, tiled_mma: cute.TiledMma, pointer: cute.Pointer) -> cute.Tensor:
    return shared_tensor(pointer, smem_layout(plan, tiled_mma), _weight_type(plan))


def smem_tma(plan: Sm100TransposedPlan, tiled_mma: cute.TiledMma, weight: cute.Tensor) -> Tma:
    """TMA load of one K block of a CTA's features: atom and view of ``[N, K]``."""
    block = cute.slice_(smem_layout(plan, tiled_mma), (None, None, None, 0))
    cluster_vmnk = cute.tiled_divide(cute.make_layout(plan.cluster), (tiled_mma.thr_id,))
    tma = cute.nvgpu.make_tiled_tma_atom_A(
        load_operation(1, cta_pair.cta_group(plan)), weight, block, _tile(plan), tiled_mma, cluster_vmnk.shape
    )
    return Tma(*tma)


def _tile(plan: Sm100TransposedPlan) -> tuple[int, int, int]:
    return (plan.lanes * plan.cta_group, plan.mma_spans[0][1], plan.tile_k)


def _weight_type(plan: Sm100TransposedPlan) -> type:
    return ELEMENT_TYPES[plan.weight_dtype]


def weight_load(
    plan: Sm100TransposedPlan, tma: Tma, stages: cute.Pointer, pipe: cta_pair.Sm100Pipe, group: Int32,
    place: cta_pair.ClusterPlace
) -> WeightLoad:
    """The load of this CTA's part of the weight into ``stages``, by the copy of `smem_tma`; ``group``: of features."""
    tiled_mma = transposed_mma(plan, plan.mma_spans[0][1])
    tile_m, _, tile_k = _tile(plan)
    boxes = tiled_mma.get_slice(place.rank).partition_A(cute.local_tile(tma.view, (tile_m, tile_k), (None, None)))
    weight = tma_operand(tma.atom, boxes, smem_tensor(plan, tiled_mma, stages), 3)
    blocks = tuple((weight, block) for block in range(plan.k_blocks))
    return WeightLoad(blocks, pipe, group, announces=place.leads)


# ---- the operand of the MMAs ----------------------------------------------------------------------------------------

def weight_fragments(plan: Sm100TransposedPlan, tiled_mma: cute.TiledMma, place: cute.Pointer) -> cute.Tensor:
    """The A operand ``[.., k step]`` in the memory in which it stays; ``place`` is where it begins there."""
    if plan.config.weight == "smem":
        return cute.group_modes(tiled_mma.make_fragment_A(smem_tensor(plan, tiled_mma, place)), 2, 4)
    shape = tiled_mma.partition_shape_A((plan.lanes * plan.cta_group, plan.k_blocks * plan.tile_k))
    layout = tiled_mma.make_fragment_A(shape).layout
    if plan.weight_dtype == "int8":
        return _signed_tensor(place, layout)
    return cute.make_tensor(cute.recast_ptr(place, dtype=_weight_type(plan)), layout)


# --- MMA warp of the leader CTA: rows of ``x`` and the resident weight -> accumulators -------------------------------

@dataclass(frozen=True)
class Mma:
    """Issues the MMAs of every tile of this cluster, MMA tile by MMA tile.

    All of a tile read the same stages: the first waits for them, the last frees them. While one is multiplied, the
    epilogue drains the one before. ``weight`` is where it begins, in shared or in tensor memory.
    """

    plan: Sm100TransposedPlan
    rows: Any
    weight: cute.Pointer
    accumulators: tuple[cute.Tensor, ...]
    operands: cta_pair.Sm100Pipe
    accumulator: cta_pair.Sm100Pipe
    weight_ready: cta_pair.Sm100Pipe
    order: PositionOrder | ImageOrder

    @cute.jit
    def run(self) -> None:
        plan = self.plan
        mma_tiles, blocks = len(plan.mma_spans), plan.config.stage_blocks
        # Made here: `set` rebinds them in staged code, which objects shared with other roles do not survive.
        mmas = [transposed_mma(plan, columns) for _, columns in plan.mma_spans]
        rows = [self.rows.fragments(mmas[i], *plan.mma_spans[i]) for i in range(mma_tiles)]
        weight = weight_fragments(plan, mmas[0], self.weight)
        full = self.operands.consumer_state()
        out = self.accumulator.producer_state()
        # What epilogue warps wrote to tensor memory is ordered before the MMAs by the fence of each accumulator, below.
        self.weight_ready.wait_full(self.weight_ready.consumer_state())
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            first = full.clone()
            for mma_tile in cutlass.range_constexpr(mma_tiles):
                # The epilogue's reads of these columns, ordered by the barrier, must precede MMAs that overwrite them.
                self.accumulator.wait_empty(out, mma_tile)
                ptx.tcgen05_fence_after_thread_sync()
                target = self.accumulators[mma_tile][None, None, None, out.index]
                stage = first.clone()
                for i in cutlass.range_constexpr(plan.tile_stages):
                    if cutlass.const_expr(mma_tile == 0):
                        self.operands.wait_full(stage)
                    # The last stage of a tile may have room for more blocks than K has.
                    steps = min(blocks, plan.k_blocks - i * blocks) * MMA_STEPS
                    for j in cutlass.range_constexpr(steps):
                        step = i * blocks * MMA_STEPS + j
                        mmas[mma_tile].set(tcgen05.Field.ACCUMULATE, step > 0)
                        columns = rows[mma_tile][None, None, j % MMA_STEPS, stage.index * blocks + j // MMA_STEPS]
                        cute.gemm(mmas[mma_tile], target, weight[None, None, step], columns, target)
                    if cutlass.const_expr(mma_tile == mma_tiles - 1):
                        with cute.arch.elect_one():
                            self.operands.commit_empty(stage)
                        full.advance()
                    stage.advance()
                with cute.arch.elect_one():
                    self.accumulator.commit_full(out, mma_tile)
            out.advance()


class TransposedKernel:
    """Device side of a plan. A subclass says what is loaded and multiplied beside the weight, and what is stored; its
    arguments have ``weight``, ``[N, K]`` in memory or its load into shared memory, and ``feature_groups``. It has

    * ``atoms(args)``: descriptors to be prefetched; ``order(args, first, step)``: the tiles of a cluster;
    * ``load(args, stages, pipe, order, place)``: the role of the load warp, beside that for a weight in shared memory;
    * ``operand(stages)``: the stages as MMAs read them, whose ``fragments(tiled_mma, first, columns)`` are descriptors
      ``[.., k step in block, block]`` of this CTA's rows of an MMA tile;
    * ``out_box``: an epilogue warp's part of a tile, which it stores at once, in the modes of the output, and
      ``staging_layout()``: that box in shared memory, by `transposed_layout`;
    * ``epilogue(args, drain)``: the role of an epilogue warp, from what all of them have.
    """

    plan: Sm100TransposedPlan
    graph: Graph

    def weight_tma(self, weight: cute.Tensor) -> cute.Tensor | Tma:
        """TMA load of ``[N, K]`` into shared memory; the weight itself where it goes elsewhere."""
        if self.plan.config.weight == "tmem":
            return weight
        return smem_tma(self.plan, transposed_mma(self.plan, self.plan.mma_spans[0][1]), weight)

    def out_tma(self, out: cute.Tensor) -> Tma:
        """The stores of the output."""
        return store_tma(out, self.staging_layout(), self.out_box)

    @cute.jit
    def run(self, args: Any) -> None:
        plan = self.plan
        frame = cta_pair.enter(plan, self.graph, self.atoms(args))
        warp, place, pipes = frame.warp, frame.place, frame.pipes
        weight, stages, staging = frame.regions

        tmem = cute.arch.retrieve_tmem_ptr(Int32, 16, frame.tmem_address)
        accumulators = mma_accumulators(plan, tmem)
        cluster, clusters = this_cluster(plan)
        group = cluster % args.feature_groups
        order = self.order(args, cluster // args.feature_groups, clusters // args.feature_groups)

        if warp == plan.load_warp:
            if cutlass.const_expr(plan.config.weight == "smem"):
                weight_load(plan, args.weight, weight, pipes["weight"], group, place).run()
            self.load(args, stages, pipes["operands"], order, place).run()
        elif warp == plan.mma_warp:
            if place.leads:
                resident = weight if plan.config.weight == "smem" else tmem + plan.weight_column
                Mma(
                    plan=plan, rows=self.operand(stages), weight=resident, accumulators=accumulators,
                    operands=pipes["operands"], accumulator=pipes["accumulator"], weight_ready=pipes["weight"],
                    order=order
                ).run()
        else:
            n_tile = group * plan.ctas + place.rank
            quarter = warp % 4
            if cutlass.const_expr(plan.config.weight == "tmem"):
                lane = quarter * LANES + cute.arch.lane_idx()
                fill_tensor_memory(plan, args.weight, tmem + plan.weight_column, n_tile, lane, pipes["weight"])
            block = n_tile * plan.epilogue_warps + quarter
            buffer = transposed_staging(plan, staging, self.staging_layout(), args.out, self.out_box, quarter)
            drain = TransposedEpilogue(
                plan=plan, accumulators=accumulators, staging=buffer, accumulator=pipes["accumulator"], order=order,
                feature_block=block, quarter=quarter
            )
            self.epilogue(args, drain).run()

        cta_pair.end(plan, warp, accumulators[0])


# --- a warp's staging buffer: its 32 features x the rows of a tile, transposed on their way to TMA -------------------

MATRICES = LANES // 8
"""Blocks of 8 features in the lanes of a warp: a thread has one feature of each, ``lane / 4 + 8 i``."""


def transposed_layout(box: tuple[int, ...], strides: tuple[int, ...]) -> cute.ComposedLayout:
    """A box of rows of 32 elements of 16 bits, SWIZZLE_64B."""
    return swizzled(cute.make_layout(box, stride=strides), 2)


@dataclass(frozen=True)
class TransposedStaging(StagingBuffer):
    """The buffer of a warp, of rows of 32 features, which begins on 512 bytes, the period of SWIZZLE_64B.

    A thread holds features ``lane / 4 + 8 i``, and of every 8 rows two neighbouring ones (PTX ISA, tcgen05.ld
    .16x256b). stmatrix with ``.trans`` turns that into rows of features.
    """

    lane: Int32
    dtype: type

    def addresses(self) -> tuple[cute.CopyAtom, cute.Pointer]:
        """stmatrix, and where this lane's row of the first 8 rows is.

        Lanes 8 i to 8 i + 7 give the row addresses of matrix i: features 8 i to 8 i + 7 of 8 rows. SWIZZLE_64B XORs
        address bits 4-5 with bits 7-8, which are ``row / 2 % 4`` as a buffer begins on 512 bytes.
        """
        row, chunk = self.lane % 8, self.lane // 8
        place = chunk ^ row // 2 % MATRICES
        offset = cute.assume(row * (2 * LANES) + place * VECTOR_BYTES, divby=VECTOR_BYTES)
        first = cute.recast_ptr(self.buffer + offset, dtype=self.dtype)
        return cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=MATRICES), self.dtype), first

    @cute.jit
    def acquire(self) -> None:
        """Waits until the TMA store before has read the buffer."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()

    def write(self, addresses: tuple[cute.CopyAtom, cute.Pointer], values: cute.Tensor, row: int) -> None:
        """Writes a thread's values of 8 rows, two of each of its features, from ``row`` on."""
        atom, first = addresses
        layout = cute.make_layout((2 * MATRICES, 1))
        rows = cute.make_tensor(first + row * LANES, layout)
        cute.copy(atom, cute.make_tensor(values.iterator, layout), rows)

    @cute.jit
    def store(self, *coordinates: Int32) -> None:
        """Starts the TMA store of the whole buffer to a box of the output, given its coordinates."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self.issue(*coordinates)


def transposed_staging(
    plan: Sm100TransposedPlan, storage: cute.Pointer, layout: cute.ComposedLayout, out: Tma, box: tuple[int, ...],
    quarter: Int32
) -> TransposedStaging:
    """The buffer of the warp that drains a quarter of the lanes, in the layout that ``out`` was made with."""
    dtype = ELEMENT_TYPES[plan.problem.out_dtype]
    buffer = storage + cute.assume(quarter * plan.staging_bytes, divby=512)
    own = staging_buffer(buffer, layout, dtype, out, box)
    return TransposedStaging(**vars(own), lane=cute.arch.lane_idx(), dtype=dtype)


# --- epilogue warps: the loop that drains accumulators of 32 features each, MMA tile by MMA tile ---------------------


@dataclass(frozen=True)
class TransposedEpilogue:
    """Drains accumulators, one warp at a time, 32 features each: this warp's block of them. A subclass says what
    becomes of the sums.

    ``accumulators``: of each MMA tile, tensor-memory view ``[.., accumulator]`` of this CTA's 128 lanes; ``quarter``:
    of the lanes, all that this warp may reach.
    """

    plan: Sm100TransposedPlan
    accumulators: tuple[cute.Tensor, ...]
    staging: TransposedStaging
    accumulator: cta_pair.Sm100Pipe
    order: PositionOrder | ImageOrder
    feature_block: Int32
    quarter: Int32

    @abstractmethod
    def registers(self) -> cute.Tensor | None:
        """Registers for the part of the table that a thread keeps, if any."""

    @abstractmethod
    def fetch(self, registers: cute.Tensor | None, row_block: Int32, position: Int32, held: Int32) -> Int32:
        """Before a tile: loads what the registers do not hold yet, for what `held` is of the tile before, -1 at first.
        Returns a number for `finish` and for the next tile."""

    @abstractmethod
    def finish(
        self, sums: cute.Tensor, registers: cute.Tensor | None, held: Int32, row: int, row_block: Int32, position: Int32
    ) -> cute.Tensor:
        """Rounded values of a warp's features x 8 rows, matrix by matrix of stmatrix: ``[2 rows, 4 features]``.

        Of ``sums`` ``[2 rows, +8 features, +16 features]``, from a row of the tile on, with what `fetch` filled.
        """

    @abstractmethod
    def store(self, row_block: Int32, position: Int32) -> None:
        """Starts the TMA store of a tile."""

    @cute.jit
    def run(self) -> None:
        plan = self.plan
        width = plan.config.tmem_load_width
        load_atom = cute.make_copy_atom(tcgen05.Ld16x256bOp(tcgen05.Repetition(width // CORE_COLUMNS)), self._kind)
        # (128 lanes, width columns, 1, chunks, accumulators)
        tiler = (plan.lanes, width)
        chunks = [cute.flat_divide(each[(None, None), 0, 0, None], tiler) for each in self.accumulators]
        lane = self.quarter * LANES + self.staging.lane
        load = tcgen05.make_tmem_copy(load_atom, chunks[0][None, None, 0, 0, 0]).get_slice(lane)
        sources = [load.partition_S(each) for each in chunks]
        shape = load.partition_D(cute.make_identity_tensor(tiler)).shape
        addresses = self.staging.addresses()

        registers, held = self.registers(), Int32(-1)
        state = self.accumulator.consumer_state()
        row_block, position = self.order.start()
        stride = self.order.stride()
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            held = self.fetch(registers, row_block, position, held)
            for mma_tile in cutlass.range_constexpr(len(plan.mma_spans)):
                columns = plan.mma_spans[mma_tile][1]
                self.accumulator.wait_full(state, mma_tile)
                ptx.tcgen05_fence_after_thread_sync()
                if cutlass.const_expr(mma_tile == 0):
                    self.staging.acquire()
                for chunk in cutlass.range_constexpr(columns // width):
                    fragment = cute.make_rmem_tensor(shape, self._kind)
                    cute.copy(load, sources[mma_tile][None, None, None, 0, chunk, state.index], fragment)
                    cute.arch.fence_view_async_tmem_load()
                    if cutlass.const_expr((chunk + 1) * width == columns):
                        cta_pair.release_accumulator(self.accumulator, state, mma_tile)
                    # (2 columns, +8 lanes, groups of 8 columns, +16 lanes)
                    layout = cute.make_layout((2, 2, width // CORE_COLUMNS, 2))
                    sums = cute.make_tensor(fragment.iterator, layout)
                    for group in cutlass.range_constexpr(width // CORE_COLUMNS):
                        column = chunk * width + group * CORE_COLUMNS
                        row = plan.row_of(mma_tile, column)
                        values = self.finish(sums[None, None, group, None], registers, held, row, row_block, position)
                        self.staging.write(addresses, values, plan.staged_row(mma_tile, column))
            self.store(row_block, position)
            state.advance()
            row_block, position = self.order.advance(row_block, position, stride)
        self.staging.finish()

    @property
    def _kind(self) -> type:
        return self.accumulators[0].element_type
