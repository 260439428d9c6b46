"""a @ b.T on Blackwell by a cluster of two: each CTA multiplies alone, and half of b comes from the other one."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
import torch
from cutlass import BFloat16, Float32, Int16, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import from_dlpack

SHAPE, RING, ACCUMULATORS, CTAS = (128, 64, 32), 3, 2, 2
BYTES_A, BYTES_B = SHAPE[0] * SHAPE[2] * 2, SHAPE[1] * SHAPE[2] * 2
LOADING, MULTIPLYING, THREADS = 0, 1, 192  # warps 2 to 5 store
TMEM = 128


@cute.kernel
def gemm(mma: cute.TiledMma, tma_a: cute.CopyAtom, a: cute.Tensor, tma_b: cute.CopyAtom, b: cute.Tensor,
         c: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    al = sm100_utils.make_smem_layout_a(mma, SHAPE, BFloat16, RING)
    bl = sm100_utils.make_smem_layout_b(mma, SHAPE, BFloat16, RING)
    loaded = cute.arch.alloc_smem(cutlass.Int64, RING)
    used = cute.arch.alloc_smem(cutlass.Int64, RING)
    summed = cute.arch.alloc_smem(cutlass.Int64, ACCUMULATORS)
    drained = cute.arch.alloc_smem(cutlass.Int64, ACCUMULATORS)
    base = cute.arch.alloc_smem(Int32, 1)
    pa = cute.arch.alloc_smem(cutlass.Uint8, cute.cosize(al.outer) * 2, alignment=1024)
    pb = cute.arch.alloc_smem(cutlass.Uint8, cute.cosize(bl.outer) * 2, alignment=1024)
    sa = cute.make_tensor(cute.recast_ptr(pa, al.inner, dtype=BFloat16), al.outer)
    sb = cute.make_tensor(cute.recast_ptr(pb, bl.inner, dtype=BFloat16), bl.outer)
    if tid == 0:
        for s in cutlass.range_constexpr(RING):
            cute.arch.mbarrier_init(loaded + s, 1)
            cute.arch.mbarrier_init(used + s, CTAS)
        for s in cutlass.range_constexpr(ACCUMULATORS):
            cute.arch.mbarrier_init(summed + s, 1)
            cute.arch.mbarrier_init(drained + s, 4)
        cute.arch.mbarrier_init_fence()
    if warp == 2:
        cute.arch.alloc_tmem(TMEM, base)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    cute.arch.sync_threads()
    shape = mma.partition_shape_C(SHAPE[:2])
    layout = mma.make_fragment_C(cute.append(shape, ACCUMULATORS)).layout
    sums = cute.make_tensor(cute.arch.retrieve_tmem_ptr(Float32, 16, base), layout)
    part = mma.get_slice(0)
    ga = part.partition_A(cute.local_tile(a, (SHAPE[0], SHAPE[2]), (rank, None)))
    gb = part.partition_B(cute.local_tile(b, (SHAPE[1], SHAPE[2]), (None, None)))
    gc = part.partition_C(cute.local_tile(c, SHAPE[:2], (rank, None)))
    a_to, a_from = cpasync.tma_partition(tma_a, 0, cute.make_layout(1), cute.group_modes(sa, 0, 3),
                                         cute.group_modes(ga, 0, 3))
    b_to, b_from = cpasync.tma_partition(tma_b, rank, cute.make_layout(CTAS), cute.group_modes(sb, 0, 3),
                                         cute.group_modes(gb, 0, 3))
    steps, tiles = cute.size(a, mode=[1]) // SHAPE[2], cute.size(b, mode=[0]) // SHAPE[1]
    if warp == LOADING:
        for i in cutlass.range(steps * tiles, unroll=1):
            s, turn = i % RING, i // RING
            cute.arch.mbarrier_wait(used + s, (turn & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(loaded + s, BYTES_A + BYTES_B)
            cute.copy(tma_a, a_from[None, i % steps], a_to[None, s], tma_bar_ptr=loaded + s)
            cute.copy(tma_b, b_from[None, i // steps, i % steps], b_to[None, s], tma_bar_ptr=loaded + s,
                      mcast_mask=Int16(3))
    elif warp == MULTIPLYING:
        fa, fb = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        for tile in cutlass.range(tiles, unroll=1):
            slot, round_ = tile % ACCUMULATORS, tile // ACCUMULATORS
            cute.arch.mbarrier_wait(drained + slot, (round_ & 1) ^ 1)
            after_sync()
            target = sums[None, None, None, slot]
            for k in cutlass.range(steps, unroll=1):
                i = tile * steps + k
                s = i % RING
                cute.arch.mbarrier_wait(loaded + s, i // RING & 1)
                mma.set(tcgen05.Field.ACCUMULATE, k != 0)
                cute.gemm(mma, target, fa[None, None, None, s], fb[None, None, None, s], target)
                with cute.arch.elect_one():
                    tcgen05.commit(used + s, 3)
            with cute.arch.elect_one():
                tcgen05.commit(summed + slot)
    else:
        reader = tid % 128
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(SHAPE[1])), Float32)
        read = tcgen05.make_tmem_copy(atom, sums[(None, None), 0, 0, 0]).get_slice(reader)
        values = cute.make_rmem_tensor(read.partition_D(cute.make_identity_tensor(SHAPE[:2])).shape, Float32)
        for tile in cutlass.range(tiles, unroll=1):
            slot, round_ = tile % ACCUMULATORS, tile // ACCUMULATORS
            cute.arch.mbarrier_wait(summed + slot, round_ & 1)
            after_sync()
            cute.copy(read, read.partition_S(sums[(None, None), 0, 0, slot]), values)
            cute.arch.fence_view_async_tmem_load()
            before_sync()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(drained + slot)
            to = read.partition_D(gc[(None, None), 0, 0, tile])
            cute.autovec_copy(values, to)
    cute.arch.sync_threads()
    if warp == 2:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(sums.iterator, TMEM)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def after_sync():
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;", write_only_types=[], read_only_args=[])


def before_sync():
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;", write_only_types=[], read_only_args=[])


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
    majors = OperandMajorMode.K, OperandMajorMode.K
    mma = sm100_utils.make_trivial_tiled_mma(
        BFloat16, BFloat16, *majors, Float32, tcgen05.CtaGroup.ONE, SHAPE[:2], tcgen05.OperandSource.SMEM
    )
    al = cute.slice_(sm100_utils.make_smem_layout_a(mma, SHAPE, BFloat16, RING), (None, None, None, 0))
    bl = cute.slice_(sm100_utils.make_smem_layout_b(mma, SHAPE, BFloat16, RING), (None, None, None, 0))
    alone = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    shared = cpasync.CopyBulkTensorTileG2SMulticastOp(tcgen05.CtaGroup.ONE)
    tma_a = cute.nvgpu.make_tiled_tma_atom_A(alone, a, al, SHAPE, mma, (1, CTAS, 1, 1))
    tma_b = cute.nvgpu.make_tiled_tma_atom_B(shared, b, bl, SHAPE, mma, (1, CTAS, 1, 1))
    gemm(mma, *tma_a, *tma_b, c).launch(
        grid=(CTAS, 1, 1), cluster=(CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def main() -> None:
    a, b = torch.randn(256, 128, device="cuda").bfloat16(), torch.randn(256, 128, device="cuda").bfloat16()
    c = torch.empty(len(a), len(b), device="cuda")
    tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (a, b, c)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
