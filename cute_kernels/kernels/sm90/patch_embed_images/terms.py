"""Weights in shared memory, K block by K block; of two terms, what of them stays there, and the products with both."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int8, Int32, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from cute_kernels.kernels.gemm import Tma
from cute_kernels.kernels.load import Operand, tma_operand
from cute_kernels.kernels.pipes import PipelineState
from cute_kernels.kernels.sm90.pipes import Sm90Pipe
from cute_kernels.kernels.sm90.transposed.mma import MMA_STEPS, Mma
from cute_kernels.plan.patch_embed_images.sm90 import Sm90ImagesPlan


def integer_mma(plan: Sm90ImagesPlan, source: warpgroup.OperandSource) -> cute.TiledMma:
    """64 features x a tile's patches x 32 bytes; ``source`` is where the features' weight comes from."""
    op = warpgroup.MmaI8Op(
        Int8, Uint8, Int32, (64, plan.tile_rows, 32), source, OperandMajorMode.K, OperandMajorMode.K
    )
    return cute.make_tiled_mma(op)


# ---- the weight in shared memory -----------------------------------------------------------------------------------


def weight_layout(plan: Sm90ImagesPlan, blocks: int) -> cute.ComposedLayout:
    """``[features, 128 bytes of K, blocks]``, K-major, SWIZZLE_128B; without the last mode for a single block."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Int8)
    layout = cute.tile_to_shape(atom, (plan.features, plan.k_block_bytes, blocks), order=(0, 1, 2))
    return layout if blocks > 1 else cute.slice_(layout, (None, None, 0))


def weight_tensor(plan: Sm90ImagesPlan, memory: cute.Pointer, blocks: int) -> cute.Tensor:
    """`weight_layout` of so many blocks over shared memory."""
    layout = weight_layout(plan, blocks)
    return cute.make_tensor(cute.recast_ptr(memory, layout.inner, dtype=Int8), layout.outer)


def weight_tma(plan: Sm90ImagesPlan, weight: cute.Tensor) -> Tma:
    """TMA load of one K block of a CTA's features: atom and view of ``[N, K]``."""
    tma = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), weight, weight_layout(plan, 1), (plan.features, plan.k_block_bytes)
    )
    return tma.atom, tma.tma_tensor


@dataclass(frozen=True)
class WeightLoad:
    """Load warp: fetches what stays in shared memory, once.

    Attributes:
        low: the low term.
        high: the high term, of which the K blocks are fetched that registers do not hold; None if there are none.
        slab: which features of the weight this CTA computes.
    """

    plan: Sm90ImagesPlan
    low: Operand
    high: Operand | None
    pipe: Sm90Pipe
    slab: Int32

    @cute.jit
    def run(self) -> None:
        plan = self.plan
        state = self.pipe.producer_state()
        with cute.arch.elect_one():
            self.pipe.announce_bytes(state)
        for block in cutlass.range_constexpr(plan.shared_blocks):
            term = self.low if block < plan.k_blocks else self.high
            k_block = block if block < plan.k_blocks else block - plan.k_blocks + plan.held_blocks
            term.fetch(term.place(self.slab, ()), k_block, block, self.pipe.full_barrier(state))


def weight_operand(plan: Sm90ImagesPlan, tma: Tma, memory: cute.Pointer, blocks: int) -> Operand:
    """What loads K blocks of a CTA's features, given atom and view, into buffers in shared memory."""
    boxes = cute.local_tile(tma[1], (plan.features, plan.k_block_bytes), (None, None))
    return tma_operand((tma[0], boxes), weight_tensor(plan, memory, blocks), 2)


def weight_load(
    plan: Sm90ImagesPlan, terms: tuple[Tma, Tma | None], memory: cute.Pointer, pipe: Sm90Pipe, slab: Int32
) -> WeightLoad:
    """What `WeightLoad` needs of both terms' TMA, the low one's first, and of the shared memory of the weight."""

    low, high = (None if tma is None else weight_operand(plan, tma, memory, plan.shared_blocks) for tma in terms)
    return WeightLoad(plan, low, high, pipe, slab)


def shared_weight(
    plan: Sm90ImagesPlan, memory: cute.Pointer, warpgroup_index: Int32
) -> tuple[cute.TiledMma, cute.Tensor]:
    """The instruction that reads it, and this warpgroup's descriptors ``[.., k step in block, block]``."""
    tiled_mma = integer_mma(plan, warpgroup.OperandSource.SMEM)
    slice_ = tiled_mma.get_slice(cute.arch.thread_idx()[0] % 128)
    fragments = tiled_mma.make_fragment_A(slice_.partition_A(weight_tensor(plan, memory, plan.shared_blocks)))
    return tiled_mma, cute.local_tile(fragments, (1, 1, MMA_STEPS, plan.shared_blocks), (0, warpgroup_index, 0, 0))


# ---- products ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TermsMma(Mma):
    """As `Mma`, with the same patches multiplied by both terms of the weight; accumulators ``[.., term]``.

    Attributes:
        shared_mma: the instruction whose weight comes from shared memory.
        shared: descriptors of that weight, ``[.., k step in block, block]``: the low term's blocks, then those of the
            high term that registers do not hold.
    """

    shared_mma: cute.TiledMma
    shared: cute.Tensor

    def _accumulator_shape(self) -> cute.Shape:
        return (*self.tiled_mma.partition_shape_C((64, self.plan.tile_rows)), self.plan.terms)

    @cute.jit
    def _stage(self, accumulator: cute.Tensor, stage: cutlass.Constexpr[int], state: PipelineState) -> None:
        """Issues the WGMMAs of one stage as one group; stage 0 overwrites the accumulators.

        The terms take turns, so that every other WGMMA leaves shared memory's bandwidth to the rest of the kernel.
        """
        self.operands.wait_full(state)
        warpgroup.fence()
        plan, blocks = self.plan, self.plan.config.stage_blocks
        for i in cutlass.range_constexpr(blocks * MMA_STEPS):
            k_block, step = stage * blocks + i // MMA_STEPS, i % MMA_STEPS
            if cutlass.const_expr(k_block < plan.k_blocks):
                patches = self.x_fragments[None, None, step, state.index * blocks + i // MMA_STEPS]
                first = stage == 0 and i == 0
                high, low = (accumulator[None, None, None, term] for term in range(2))
                if cutlass.const_expr(k_block < plan.held_blocks):
                    self.tiled_mma.set(warpgroup.Field.ACCUMULATE, not first)
                    weight = self.weight[None, None, k_block * MMA_STEPS + step]
                    cute.gemm(self.tiled_mma, high, weight, patches, high)
                else:
                    block = plan.k_blocks + k_block - plan.held_blocks
                    self.shared_mma.set(warpgroup.Field.ACCUMULATE, not first)
                    cute.gemm(self.shared_mma, high, self.shared[None, None, step, block], patches, high)
                self.shared_mma.set(warpgroup.Field.ACCUMULATE, not first)
                cute.gemm(self.shared_mma, low, self.shared[None, None, step, k_block], patches, low)
        warpgroup.commit_group()
