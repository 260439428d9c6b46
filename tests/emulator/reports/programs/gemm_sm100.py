"""a @ b.T on Blackwell by a pair of CTAs: tcgen05.mma.cta_group::2, accumulators in tensor memory."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
import torch
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import from_dlpack

TILE, STAGES, CTAS = (256, 64, 64), 2, 2  # M, N, K of a pair
PAIR_BYTES = (TILE[0] + TILE[1]) * TILE[2] * 2
EPILOGUE_WARPS, MMA_WARP, LOAD_WARP, THREADS = 4, 4, 5, 192
COLUMNS = 64  # of tensor memory


@cute.kernel
def gemm(mma: cute.TiledMma, load_a: cute.CopyAtom, a: cute.Tensor, load_b: cute.CopyAtom, b: cute.Tensor,
         c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    a_layout = sm100_utils.make_smem_layout_a(mma, TILE, BFloat16, STAGES)
    b_layout = sm100_utils.make_smem_layout_b(mma, TILE, BFloat16, STAGES)
    a_memory = cute.arch.alloc_smem(cutlass.Uint8, cute.cosize(a_layout.outer) * 2, alignment=1024)
    b_memory = cute.arch.alloc_smem(cutlass.Uint8, cute.cosize(b_layout.outer) * 2, alignment=1024)
    full = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    empty = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    sums_full = cute.arch.alloc_smem(cutlass.Int64, 1)
    sums_empty = cute.arch.alloc_smem(cutlass.Int64, 1)
    holder = cute.arch.alloc_smem(Int32, 1)
    sa = cute.make_tensor(cute.recast_ptr(a_memory, a_layout.inner, dtype=BFloat16), a_layout.outer)
    sb = cute.make_tensor(cute.recast_ptr(b_memory, b_layout.inner, dtype=BFloat16), b_layout.outer)
    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, 1)
        cute.arch.mbarrier_init(sums_full, 1)
        cute.arch.mbarrier_init(sums_empty, EPILOGUE_WARPS * CTAS)
        cute.arch.mbarrier_init_fence()
    if warp == MMA_WARP:
        cute.arch.alloc_tmem(COLUMNS, holder, is_two_cta=True)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    sums_layout = mma.make_fragment_C(mma.partition_shape_C(TILE[:2])).layout
    sums = cute.make_tensor(cute.arch.retrieve_tmem_ptr(Float32, 16, holder), sums_layout)
    part = mma.get_slice(rank)
    ga = part.partition_A(cute.local_tile(a, (TILE[0], TILE[2]), (0, None)))
    gb = part.partition_B(cute.local_tile(b, (TILE[1], TILE[2]), (None, None)))
    gc = part.partition_C(cute.local_tile(c, TILE[:2], (0, None)))
    one = cute.make_layout(1)
    sa_load, ga_load = cpasync.tma_partition(load_a, 0, one, cute.group_modes(sa, 0, 3), cute.group_modes(ga, 0, 3))
    sb_load, gb_load = cpasync.tma_partition(load_b, 0, one, cute.group_modes(sb, 0, 3), cute.group_modes(gb, 0, 3))
    k_blocks, n_tiles = cute.size(a, mode=[1]) // TILE[2], cute.size(b, mode=[0]) // TILE[1]
    if warp == LOAD_WARP:
        for i in cutlass.range(k_blocks * n_tiles, unroll=1):
            stage, k_block, n_tile = i % STAGES, i % k_blocks, i // k_blocks
            cute.arch.mbarrier_wait(empty + stage, (i // STAGES & 1) ^ 1)
            if rank == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, PAIR_BYTES)
            cute.copy(load_a, ga_load[None, k_block], sa_load[None, stage], tma_bar_ptr=full + stage)
            cute.copy(load_b, gb_load[None, n_tile, k_block], sb_load[None, stage], tma_bar_ptr=full + stage)
    elif warp == MMA_WARP:
        if rank == 0:
            fa, fb = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
            for n_tile in cutlass.range(n_tiles, unroll=1):
                cute.arch.mbarrier_wait(sums_empty, (n_tile & 1) ^ 1)
                tcgen05_fence_after()
                for k_block in cutlass.range(k_blocks, unroll=1):
                    i = n_tile * k_blocks + k_block
                    stage = i % STAGES
                    cute.arch.mbarrier_wait(full + stage, i // STAGES & 1)
                    mma.set(tcgen05.Field.ACCUMULATE, k_block != 0)
                    cute.gemm(mma, sums, fa[None, None, None, stage], fb[None, None, None, stage], sums)
                    with cute.arch.elect_one():
                        tcgen05.commit(empty + stage, 0b11, tcgen05.CtaGroup.TWO)
                with cute.arch.elect_one():
                    tcgen05.commit(sums_full, 0b11, tcgen05.CtaGroup.TWO)
    else:
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(TILE[1])), Float32)
        rows = sums[(None, None), 0, 0]
        read = tcgen05.make_tmem_copy(atom, rows).get_slice(thread)
        source = read.partition_S(rows)
        fragment = cute.make_rmem_tensor(read.partition_D(cute.make_identity_tensor((128, TILE[1]))).shape, Float32)
        for n_tile in cutlass.range(n_tiles, unroll=1):
            cute.arch.mbarrier_wait(sums_full, n_tile & 1)
            tcgen05_fence_after()
            cute.copy(read, source, fragment)
            cute.arch.fence_view_async_tmem_load()
            tcgen05_fence_before()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(sums_empty, 0)
            target = read.partition_D(gc[(None, None), 0, 0, n_tile])
            cute.autovec_copy(fragment, target)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if warp == MMA_WARP:
        cute.arch.dealloc_tmem(sums.iterator, COLUMNS, is_two_cta=True)


def tcgen05_fence_after():
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;", write_only_types=[], read_only_args=[])


def tcgen05_fence_before():
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;", write_only_types=[], read_only_args=[])


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
    majors = OperandMajorMode.K, OperandMajorMode.K
    mma = sm100_utils.make_trivial_tiled_mma(
        BFloat16, BFloat16, *majors, Float32, tcgen05.CtaGroup.TWO, TILE[:2], tcgen05.OperandSource.SMEM
    )
    a_layout = cute.slice_(sm100_utils.make_smem_layout_a(mma, TILE, BFloat16, STAGES), (None, None, None, 0))
    b_layout = cute.slice_(sm100_utils.make_smem_layout_b(mma, TILE, BFloat16, STAGES), (None, None, None, 0))
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
    load_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, a_layout, TILE, mma, (CTAS, 1, 1, 1))
    load_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, b_layout, TILE, mma, (CTAS, 1, 1, 1))
    kernel = gemm(mma, *load_a, *load_b, c)
    kernel.launch(grid=(CTAS, 1, 1), cluster=(CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream)


def main() -> None:
    a, b = torch.randn(256, 192, device="cuda").bfloat16(), torch.randn(128, 192, device="cuda").bfloat16()
    c = torch.empty(len(a), len(b), device="cuda")
    tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (a, b, c)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
