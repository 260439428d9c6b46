"""The weight of a CTA's features where it stays for the whole launch: tensor memory, or shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from cute_kernels.dsl import cute_ir, dsl_user_op, mlir_types
from cute_kernels.kernels import ptx
from cute_kernels.kernels.elements import ELEMENT_TYPES
from cute_kernels.kernels.sm100.cluster import ClusterPlace
from cute_kernels.kernels.sm100.pipes import Sm100Pipe
from cute_kernels.kernels.sm100.transposed.instruction import LANE_STRIDE, make_mma
from cute_kernels.plan.base import ITEMSIZE, LANES, VECTOR_BYTES
from cute_kernels.plan.sm100_transposed import Sm100TransposedPlan

_FILL_COLUMNS = 32
"""Columns of tensor memory that one tcgen05.st of a warp writes, from as many registers."""


# ---- tensor memory --------------------------------------------------------------------------------------------------


@cute.jit
def fill_tensor_memory(
    plan: cutlass.Constexpr[Sm100TransposedPlan], terms: tuple[cute.Tensor, cute.Tensor | None], tmem: cute.Pointer,
    slab: Int32, thread: Int32, pipe: Sm100Pipe,
) -> None:  # fmt: skip
    """Epilogue warp: writes the weight of its features, K-major, four bytes to a column; and says so.

    Of two terms, the first half of its lanes gets the high one of as many features and the other half their low one.
    Lanes beyond the last feature get the weight of that one: TMA clips what is computed of it.

    Args:
        plan: says where.
        terms: ``[N, K]`` each in global memory, the high one first; the other one is None where there is one.
        tmem: the columns of the weight.
        slab: which features of the weight.
        thread: lane of tensor memory.
        pipe: of the weight.
    """
    columns = plan.weight_columns
    memory = cute.make_tensor(tmem, cute.make_layout((plan.lanes, columns), stride=(LANE_STRIDE, 1)))
    chunks = cute.flat_divide(memory, (plan.lanes, _FILL_COLUMNS))
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(_FILL_COLUMNS)), Int32)
    store = tcgen05.make_tmem_copy(atom, chunks[None, None, 0, 0]).get_slice(thread)
    target = store.partition_D(chunks)
    shape = store.partition_S(cute.make_identity_tensor((plan.lanes, _FILL_COLUMNS))).shape
    own = plan.warp_features
    feature = thread if plan.terms == 1 else thread // LANES * own + thread % own
    feature = min(slab * plan.features + feature, terms[0].shape[0] - 1)
    for i in cutlass.range(columns // _FILL_COLUMNS, unroll=1):
        registers = cute.make_rmem_tensor(shape, Int32)
        words = cute.make_tensor(registers.iterator, cute.make_layout(_FILL_COLUMNS))
        _load_words(_words(plan, terms[0], feature), i, words)
        if cutlass.const_expr(plan.terms == 2):
            if thread % LANES >= own:
                _load_words(_words(plan, terms[1], feature), i, words)
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
    return cute.make_tensor(row, cute.make_layout(k * itemsize // 4))


@cute.jit
def _load_words(words: cute.Tensor, chunk: Int32, registers: cute.Tensor) -> None:
    """Chunk ``chunk`` of a feature's words, zeros beyond them: K, in whole vectors, may end inside the last one."""
    count = cute.size(words)
    if cutlass.const_expr(isinstance(count, int) and count % _FILL_COLUMNS == 0):
        source = cute.make_tensor(words.iterator, cute.make_layout((_FILL_COLUMNS, count // _FILL_COLUMNS)))
        cute.autovec_copy(source[None, chunk], registers)
    else:
        width = cutlass.const_expr(VECTOR_BYTES // 4)
        vectors = cute.make_tensor(registers.iterator, cute.make_layout((width, _FILL_COLUMNS // width)))
        vectors.fill(0)
        for i in cutlass.range_constexpr(_FILL_COLUMNS // width):
            first = cute.assume(chunk * _FILL_COLUMNS + i * width, divby=width)
            if first < count:
                cute.autovec_copy(
                    cute.make_tensor(words.iterator + first, cute.make_layout(width)), vectors[None, i]
                )


@dsl_user_op
def _signed_tensor(pointer: cute.Pointer, layout: cute.Layout, *, loc=None, ip=None) -> cute.Tensor:
    """Tensor-memory view of si8, as an integer MMA wants it. Elements of ``Int8`` are i8, which it refuses.

    CuTe DSL 4.8.1 has no public way to them.
    """
    kind = cute_ir.PtrType.get(mlir_types.si8(), cute_ir.AddressSpace.tmem, 16)
    return cute.make_tensor(cute_ir.recast_iter(kind, pointer.value, loc=loc, ip=ip), layout, loc=loc, ip=ip)


# ---- shared memory --------------------------------------------------------------------------------------------------


def smem_layout(plan: Sm100TransposedPlan, tiled_mma: cute.TiledMma) -> cute.ComposedLayout:
    """``[.., K block]``, SWIZZLE_128B."""
    return sm100_utils.make_smem_layout_a(tiled_mma, _tile(plan), _weight_type(plan), plan.k_blocks)


def smem_tensor(plan: Sm100TransposedPlan, tiled_mma: cute.TiledMma, pointer: cute.Pointer) -> cute.Tensor:
    layout = smem_layout(plan, tiled_mma)
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=_weight_type(plan)), layout.outer)


def smem_tma(
    plan: Sm100TransposedPlan, tiled_mma: cute.TiledMma, weight: cute.Tensor
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """TMA load of one K block of a CTA's features: atom and view of ``[N, K]``."""
    group = tcgen05.CtaGroup.TWO if plan.cta_group == 2 else tcgen05.CtaGroup.ONE
    block = cute.slice_(smem_layout(plan, tiled_mma), (None, None, None, 0))
    cluster_vmnk = cute.tiled_divide(cute.make_layout(plan.cluster), (tiled_mma.thr_id,))
    tma = cute.nvgpu.make_tiled_tma_atom_A(
        cpasync.CopyBulkTensorTileG2SOp(group), weight, block, _tile(plan), tiled_mma, cluster_vmnk.shape
    )
    return tma.atom, tma.tma_tensor


def _tile(plan: Sm100TransposedPlan) -> tuple[int, int, int]:
    return (plan.lanes * plan.cta_group, plan.parts[0][1], plan.tile_k)


def _weight_type(plan: Sm100TransposedPlan) -> type:
    return ELEMENT_TYPES[plan.weight_dtype]


@dataclass(frozen=True)
class WeightLoad:
    """Load warp: fetches the weight into shared memory, once.

    Attributes:
        atom, source, blocks: TMA view ``[box, group of features, K block]`` and buffers ``[box, K block]``.
        group: of this cluster.
        announces: whether this CTA announces the bytes; those of a pair complete on the leader's barrier.
    """

    plan: Sm100TransposedPlan
    atom: cute.CopyAtom
    source: cute.Tensor
    blocks: cute.Tensor
    pipe: Sm100Pipe
    group: Int32
    announces: Boolean

    @cute.jit
    def run(self) -> None:
        state = self.pipe.producer_state()
        if self.announces:
            with cute.arch.elect_one():
                self.pipe.announce_bytes(state)
        for block in cutlass.range_constexpr(self.plan.k_blocks):
            barrier = self.pipe.full_barrier(state)
            cute.copy(self.atom, self.source[None, self.group, block], self.blocks[None, block], tma_bar_ptr=barrier)


def weight_load(
    plan: Sm100TransposedPlan, tma: tuple[cute.CopyAtom, cute.Tensor], stages: cute.Pointer, pipe: Sm100Pipe,
    group: Int32, place: ClusterPlace,
) -> WeightLoad:  # fmt: skip
    """The load of this CTA's part of the weight.

    Args:
        plan: what is loaded.
        tma: of `smem_tma`.
        stages: the weight in shared memory.
        pipe: of the weight.
        group: of features, of this cluster.
        place: of this CTA.
    """
    tiled_mma = make_mma(plan, plan.parts[0][1])
    tile_m, _, tile_k = _tile(plan)
    boxes = tiled_mma.get_slice(place.rank).partition_A(cute.local_tile(tma[1], (tile_m, tile_k), (None, None)))
    blocks, source = cpasync.tma_partition(
        tma[0], 0, cute.make_layout(1), cute.group_modes(smem_tensor(plan, tiled_mma, stages), 0, 3),
        cute.group_modes(boxes, 0, 3),
    )  # fmt: skip
    return WeightLoad(plan, tma[0], source, blocks, pipe, group, place.leads)


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
