"""Frame of every SM100a kernel around its roles: barriers, tensor memory, views of operands, and the common end."""

import functools
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Integer
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils.blackwell_helpers import make_trivial_tiled_mma

from cute_kernels.dsl import nvvm
from cute_kernels.kernels import ptx
from cute_kernels.kernels.graph import Edge, Graph, Sm100Plan
from cute_kernels.kernels.pipes import Pipe, PipelineState, allocate, init_barriers, warp_and_rank
from cute_kernels.kernels.tiles import GroupedOrder, SnakeOrder


@cute.jit
def begin(
    plan: cutlass.Constexpr[Sm100Plan], graph: cutlass.Constexpr[Graph], warp: Int32, barriers: cute.Pointer,
    tmem_address: cute.Pointer, atoms: tuple[cute.CopyAtom, ...]
) -> None:
    """Initialises barriers and allocates tensor memory; afterwards every thread of the cluster sees both."""
    if warp == plan.load_warp:
        for atom in atoms:
            cpasync.prefetch_descriptor(atom)
        with cute.arch.elect_one():
            init_barriers(graph, barriers)
    if warp == plan.mma_warp:
        cute.arch.alloc_tmem(plan.tmem_columns, tmem_address, is_two_cta=plan.cta_group == 2)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=plan.cta_group == 2)
        ptx.tcgen05_fence_before_thread_sync()
    ptx.griddepcontrol()
    # Also the CTA's barrier: after it every thread sees initialised barriers and the tensor-memory address.
    _synchronise(plan)
    ptx.tcgen05_fence_after_thread_sync()


@cute.jit
def end(plan: cutlass.Constexpr[Sm100Plan], warp: Int32, accumulators: cute.Tensor) -> None:
    """Frees tensor memory once all CTAs of the cluster are done."""
    # No CTA may leave, or free tensor memory, while another still signals its barriers or reads its half.
    ptx.tcgen05_fence_before_thread_sync()
    _synchronise(plan)
    if warp == plan.mma_warp:
        ptx.tcgen05_fence_after_thread_sync()
        cute.arch.dealloc_tmem(accumulators.iterator, plan.tmem_columns, is_two_cta=plan.cta_group == 2)


@cute.jit
def _synchronise(plan: cutlass.Constexpr[Sm100Plan]) -> None:
    """All threads of the cluster."""
    if cutlass.const_expr(plan.ctas > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


def cta_group(plan: Sm100Plan) -> tcgen05.CtaGroup:
    """CTAs of one MMA, and of the loads for it."""
    return tcgen05.CtaGroup.TWO if plan.cta_group == 2 else tcgen05.CtaGroup.ONE


@dataclass(frozen=True)
class Frame:
    """Where a thread of a kernel is, and its CTA's regions of shared memory, pipes, and address of tensor memory."""

    warp: Int32
    place: "ClusterPlace"
    regions: list[cute.Pointer]
    pipes: "dict[str, Sm100Pipe]"
    tmem_address: cute.Pointer


def enter(plan: Sm100Plan, graph: Graph, atoms: tuple[cute.CopyAtom, ...]) -> Frame:
    """Allocates and begins a kernel; ``atoms`` are the TMA copies whose descriptors are prefetched."""
    warp, rank = warp_and_rank(plan)
    place = cluster_place(plan, rank)
    barriers, regions, pipes = allocate(plan, graph, functools.partial(Sm100Pipe, place=place))
    tmem_address = cute.recast_ptr(barriers + graph.slots, dtype=Int32)
    begin(plan, graph, warp, barriers, tmem_address, atoms)
    return Frame(warp, place, regions, pipes, tmem_address)


def tensor_memory(
    tiled_mma: cute.TiledMma, tile_mn: tuple[int, int], count: int, address: cute.Pointer, dtype: type = Float32
) -> cute.Tensor:
    """Tensor-memory view ``[.., accumulator]`` of this CTA's rows of ``count`` accumulators."""
    layout = tiled_mma.make_fragment_C(cute.append(tiled_mma.partition_shape_C(tile_mn), count)).layout
    return cute.make_tensor(cute.arch.retrieve_tmem_ptr(dtype, 16, address), layout)


def tmem_loads(accumulators: cute.Tensor, rows: int, width: int, thread: Int32) -> tuple[Any, cute.Tensor, cute.Shape]:
    """A thread's load of ``width`` columns, its source ``[.., chunk, accumulator]``, and the shape of its registers."""
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(width)), accumulators.element_type)
    # (128 rows, width columns, 1, chunks, accumulators)
    chunks = cute.flat_divide(accumulators[(None, None), 0, 0, None], (rows, width))
    load = tcgen05.make_tmem_copy(atom, chunks[None, None, 0, 0, 0]).get_slice(thread)
    return load, load.partition_S(chunks), load.partition_D(cute.make_identity_tensor((rows, width))).shape


# --- where a CTA is in a cluster of CTA pairs, and which other CTAs it shares operands with --------------------------

PAIR = 0b11
"""CTA mask of the first pair of a cluster."""


@dataclass(frozen=True)
class ClusterPlace:
    """A CTA of a cluster of ``pairs[0]`` x ``pairs[1]`` pairs along the rows and the columns of the output.

    CTA ``rank`` of pair (m, n) has cluster rank ``rank + 2 * (m + pairs[0] * n)``: `tcgen05` pairs neighbouring ranks,
    of which 0 leads. Pairs of one row of the cluster multiply the same rows of ``a``, pairs of one column the same rows
    of ``b``; what they share is split between the CTAs of equal ``rank``, each of which loads its part for all of them.
    With ``cta_group`` 1 there are no pairs, and the CTA is alone.
    """

    rank: Int32
    m: Int32 | int = 0
    n: Int32 | int = 0
    pairs: tuple[int, int] = (1, 1)
    cta_group: int = 2

    @property
    def leads(self) -> Boolean:
        return self.rank == 0

    @property
    def leader(self) -> Int32 | int:
        """Cluster rank of the leading CTA of this pair."""
        return 2 * (self.m + self.pairs[0] * self.n)

    @property
    def pair_mask(self) -> Int32 | int:
        """CTAs of this pair."""
        return PAIR << self.leader

    @property
    def load_mask(self) -> Int32 | int:
        """CTAs that load something for this pair: those of its row and of its column of pairs."""
        return PAIR * (self._row() | self._column())

    @property
    def a_mask(self) -> Int32:
        """CTAs that receive what this one loads of ``a``."""
        return Int32(self._row()) << self.rank

    @property
    def b_mask(self) -> Int32:
        """CTAs that receive what this one loads of ``b``."""
        return Int32(self._column()) << self.rank

    def _row(self) -> Int32 | int:
        """Leaders of the pairs with the same rows."""
        return sum(1 << 2 * self.pairs[0] * i for i in range(self.pairs[1])) << (2 * self.m)

    def _column(self) -> Int32 | int:
        """Leaders of the pairs with the same columns."""
        return sum(1 << 2 * i for i in range(self.pairs[0])) << (2 * self.pairs[0] * self.n)


def cluster_place(plan: Sm100Plan, cluster_rank: Int32) -> ClusterPlace:
    """The place of the CTA of a cluster rank; masks are constants where the cluster is one pair."""
    if plan.ctas == plan.cta_group:
        return ClusterPlace(cluster_rank, cta_group=plan.cta_group)
    pair = cluster_rank // 2
    return ClusterPlace(cluster_rank % 2, pair % plan.pairs[0], pair // plan.pairs[0], plan.pairs)


# --- signals of SM100a: tcgen05.commit to the CTAs of pairs, or to the one CTA, and arrivals at the leader -----------

class Sm100Pipe(Pipe):
    def __init__(self, edge: Edge, full: cute.Pointer, empty: cute.Pointer | None, place: ClusterPlace) -> None:
        super().__init__(edge, full, empty)
        self.place = place

    def commit_full(self, state: PipelineState, part: int = 0) -> None:
        """tcgen05 producer, one thread: full in both CTAs once every MMA issued so far has completed."""
        self._commit(self.full + self.slot(state, part), self.place.pair_mask)

    def commit_empty(self, state: PipelineState) -> None:
        """tcgen05 consumer, one thread: empty, as far as this pair is concerned, in all CTAs that load for it, once
        every MMA issued so far has read its operands."""
        self._commit(self.empty + state.index, self.place.load_mask)

    def _commit(self, barrier: cute.Pointer, mask: Int32 | int) -> None:
        if self.place.cta_group == 1:
            tcgen05.commit(barrier)
        else:
            tcgen05.commit(barrier, mask, tcgen05.CtaGroup.TWO)

    def arrive_full_at_leader(self, state: PipelineState) -> None:
        """Producer warp, one lane: what it wrote to tensor memory is there for the MMAs that the leader issues."""
        self._arrive(self.full + self.slot(state))

    def arrive_empty_at_leader(self, state: PipelineState, part: int = 0) -> None:
        """Consumer warp, one lane: releases a part of the stage to the leader CTA, which alone waits for it."""
        self._arrive(self.empty + self.slot(state, part))

    def _arrive(self, barrier: cute.Pointer) -> None:
        # Relaxed: what is handed over is tensor memory, which tcgen05.fence orders on both sides; no ordinary memory
        # access needs ordering here. A release at cluster scope would compile to MEMBAR.ALL.GPU in every warp and tile.
        cute.arch.mbarrier_arrive(barrier, self.place.leader, relaxed=True, scope=nvvm.MemScopeKind.CLUSTER)


@cute.jit
def release_accumulator(pipe: Sm100Pipe, state: PipelineState, part: int = 0) -> None:
    """Epilogue warp: hands the accumulator back once its last column is in registers, before the stores end."""
    ptx.tcgen05_fence_before_thread_sync()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        pipe.arrive_empty_at_leader(state, part)


# --- MMA warp of the leader CTA: operand stages -> accumulators in the tensor memory of both CTAs --------------------

class IntegerMmaOp(tcgen05.MmaI8Op):
    """``tcgen05.mma.kind::i8`` of two K-major operands, which may differ in sign: `tcgen05.MmaI8Op` has one type."""

    def __init__(
        self, a: type, b: type, shape_mn: tuple[int, int], group: tcgen05.CtaGroup, a_source: tcgen05.OperandSource
    ) -> None:
        tcgen05.mma.MmaOp.__init__(
            self, a, b, Int32, (*shape_mn, 32), group, a_source, OperandMajorMode.K, OperandMajorMode.K
        )


def make_mma(
    a: type, b: type, shape_mn: tuple[int, int], group: tcgen05.CtaGroup,
    a_source: tcgen05.OperandSource = tcgen05.OperandSource.SMEM
) -> cute.TiledMma:
    """The instruction of two K-major operands: ``kind::i8``, ``kind::f8f6f4``, or ``kind::f16`` of 16-bit elements."""
    if issubclass(a, Integer):
        return cute.make_tiled_mma(IntegerMmaOp(a, b, shape_mn, group, a_source))
    majors = (OperandMajorMode.K, OperandMajorMode.K)
    return make_trivial_tiled_mma(a, b, *majors, Float32, group, shape_mn, a_source)


@dataclass(frozen=True)
class Mma:
    """Issues ``tcgen05.mma.cta_group::2``, 256 x tile_n x 32 bytes of K, for every tile of this cluster.

    ``row_fragments``, ``column_fragments``: shared-memory descriptors ``[.., k step, stage]`` of the operands along the
    rows (``stage * mma_tiles + mma_tile``) and the columns of a tile; ``accumulators``: tensor-memory view ``[..,
    accumulator * mma_tiles + mma_tile]``; ``mma_tiles``: instruction tiles side by side in the rows of one tile, which
    share a stage of the column operand and are handed to the epilogue one by one.
    """

    tiled_mma: cute.TiledMma
    row_fragments: cute.Tensor
    column_fragments: cute.Tensor
    accumulators: cute.Tensor
    operands: Sm100Pipe
    accumulator: Sm100Pipe
    order: SnakeOrder | GroupedOrder
    k_blocks: Int32
    mma_tiles: int = 1

    @cute.jit
    def run(self) -> None:
        full = self.operands.consumer_state()
        out = self.accumulator.producer_state()
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            if cutlass.const_expr(self.mma_tiles == 1):
                self._wait_empty(out, 0)
            for k_block in cutlass.range(self.k_blocks, unroll=1):
                self.operands.wait_full(full)
                columns = self.column_fragments[None, None, None, full.index]
                for mma_tile in cutlass.range_constexpr(self.mma_tiles):
                    if cutlass.const_expr(self.mma_tiles > 1):
                        # One MMA tile is drained while the MMAs of the MMA tile before it run.
                        if k_block == 0:
                            self._wait_empty(out, mma_tile)
                    self.tiled_mma.set(tcgen05.Field.ACCUMULATE, k_block != 0)
                    rows = self.row_fragments[None, None, None, full.index * self.mma_tiles + mma_tile]
                    target = self.accumulators[None, None, None, self.accumulator.slot(out, mma_tile)]
                    cute.gemm(self.tiled_mma, target, rows, columns, target)
                    if cutlass.const_expr(mma_tile < self.mma_tiles - 1):
                        if k_block == self.k_blocks - 1:
                            with cute.arch.elect_one():
                                self.accumulator.commit_full(out, mma_tile)
                with cute.arch.elect_one():
                    self.operands.commit_empty(full)
                full.advance()
            with cute.arch.elect_one():
                self.accumulator.commit_full(out, self.mma_tiles - 1)
            out.advance()

    @cute.jit
    def _wait_empty(self, out: PipelineState, mma_tile: int) -> None:
        """The epilogue's reads of this accumulator, ordered by the barrier, must precede the MMAs that overwrite it."""
        self.accumulator.wait_empty(out, mma_tile)
        ptx.tcgen05_fence_after_thread_sync()
