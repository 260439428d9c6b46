"""a @ b.T on Blackwell by single CTAs: one array has all mbarriers, sums alternate in tensor memory, TMA stores."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
import torch
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import from_dlpack

TILE, STAGES, SUMS = (128, 32, 32), 2, 2  # M, N, K
STAGE_BYTES = (TILE[0] + TILE[1]) * TILE[2] * 2
MMA_WARP, LOAD_WARP, THREADS = 4, 5, 192
EMPTY, SUMS_FULL, SUMS_EMPTY = STAGES, 2 * STAGES, 2 * STAGES + SUMS  # places in the array; full ones come first
COLUMNS = 64  # of tensor memory


@cute.kernel
def gemm(mma: cute.TiledMma, load_a: cute.CopyAtom, a: cute.Tensor, load_b: cute.CopyAtom, b: cute.Tensor,
         store: cute.CopyAtom, c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    a_layout = sm100_utils.make_smem_layout_a(mma, TILE, BFloat16, STAGES)
    b_layout = sm100_utils.make_smem_layout_b(mma, TILE, BFloat16, STAGES)
    a_memory = cute.arch.alloc_smem(cutlass.Uint8, cute.cosize(a_layout.outer) * 2, alignment=1024)
    b_memory = cute.arch.alloc_smem(cutlass.Uint8, cute.cosize(b_layout.outer) * 2, alignment=1024)
    c_memory = cute.arch.alloc_smem(Float32, TILE[0] * TILE[1], alignment=1024)
    bars = cute.arch.alloc_smem(cutlass.Int64, 2 * STAGES + 2 * SUMS)
    holder = cute.arch.alloc_smem(Int32, 1)
    sa = cute.make_tensor(cute.recast_ptr(a_memory, a_layout.inner, dtype=BFloat16), a_layout.outer)
    sb = cute.make_tensor(cute.recast_ptr(b_memory, b_layout.inner, dtype=BFloat16), b_layout.outer)
    sc = cute.make_tensor(c_memory, cute.make_layout(TILE[:2], stride=(TILE[1], 1)))
    if warp == 0:
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(bars + stage, 1)
                cute.arch.mbarrier_init(bars + EMPTY + stage, 1)
            for which in cutlass.range_constexpr(SUMS):
                cute.arch.mbarrier_init(bars + SUMS_FULL + which, 1)
                cute.arch.mbarrier_init(bars + SUMS_EMPTY + which, 128)
            cute.arch.mbarrier_init_fence()
    if warp == MMA_WARP:
        cute.arch.alloc_tmem(COLUMNS, holder)
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.sync_threads()
    shape = mma.partition_shape_C(TILE[:2])
    sums = cute.make_tensor(
        cute.arch.retrieve_tmem_ptr(Float32, 16, holder), mma.make_fragment_C(cute.append(shape, SUMS)).layout
    )
    part = mma.get_slice(0)
    ga = part.partition_A(cute.local_tile(a, (TILE[0], TILE[2]), (0, None)))
    gb = part.partition_B(cute.local_tile(b, (TILE[1], TILE[2]), (None, None)))
    gc = cute.group_modes(cute.local_tile(c, TILE[:2], (0, None)), 0, 2)
    one = cute.make_layout(1)
    sa_load, ga_load = cpasync.tma_partition(load_a, 0, one, cute.group_modes(sa, 0, 3), cute.group_modes(ga, 0, 3))
    sb_load, gb_load = cpasync.tma_partition(load_b, 0, one, cute.group_modes(sb, 0, 3), cute.group_modes(gb, 0, 3))
    sc_store, gc_store = cpasync.tma_partition(store, 0, one, cute.group_modes(sc, 0, 2), gc)
    k_blocks, n_tiles = cute.size(a, mode=[1]) // TILE[2], cute.size(b, mode=[0]) // TILE[1]
    if warp == LOAD_WARP:
        for i in cutlass.range(k_blocks * n_tiles, unroll=1):
            stage, k_block, n_tile = i % STAGES, i % k_blocks, i // k_blocks
            cute.arch.mbarrier_wait(bars + EMPTY + stage, (i // STAGES & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars + stage, STAGE_BYTES)
            cute.copy(load_a, ga_load[None, k_block], sa_load[None, stage], tma_bar_ptr=bars + stage)
            cute.copy(load_b, gb_load[None, n_tile, k_block], sb_load[None, stage], tma_bar_ptr=bars + stage)
    elif warp == MMA_WARP:
        fa, fb = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        for n_tile in cutlass.range(n_tiles, unroll=1):
            which = n_tile % SUMS
            cute.arch.mbarrier_wait(bars + SUMS_EMPTY + which, (n_tile // SUMS & 1) ^ 1)
            tcgen05_fence_after()
            target = sums[None, None, None, which]
            for k_block in cutlass.range(k_blocks, unroll=1):
                i = n_tile * k_blocks + k_block
                stage = i % STAGES
                cute.arch.mbarrier_wait(bars + stage, i // STAGES & 1)
                mma.set(tcgen05.Field.ACCUMULATE, k_block != 0)
                cute.gemm(mma, target, fa[None, None, None, stage], fb[None, None, None, stage], target)
                with cute.arch.elect_one():
                    tcgen05.commit(bars + EMPTY + stage)
            with cute.arch.elect_one():
                tcgen05.commit(bars + SUMS_FULL + which)
    else:
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(TILE[1])), Float32)
        read = tcgen05.make_tmem_copy(atom, sums[(None, None), 0, 0, 0]).get_slice(thread)
        fragment = cute.make_rmem_tensor(read.partition_D(cute.make_identity_tensor(TILE[:2])).shape, Float32)
        row = read.partition_D(sc)
        for n_tile in cutlass.range(n_tiles, unroll=1):
            which = n_tile % SUMS
            cute.arch.mbarrier_wait(bars + SUMS_FULL + which, n_tile // SUMS & 1)
            tcgen05_fence_after()
            cute.copy(read, read.partition_S(sums[(None, None), 0, 0, which]), fragment)
            cute.arch.fence_view_async_tmem_load()
            tcgen05_fence_before()
            cute.arch.mbarrier_arrive(bars + SUMS_EMPTY + which)
            if warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            cute.autovec_copy(fragment, row)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            if warp == 0:
                cute.copy(store, sc_store, gc_store[None, n_tile])
                cute.arch.cp_async_bulk_commit_group()
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.sync_threads()
    if warp == MMA_WARP:
        cute.arch.dealloc_tmem(sums.iterator, COLUMNS)


def tcgen05_fence_after():
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;", write_only_types=[], read_only_args=[])


def tcgen05_fence_before():
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;", write_only_types=[], read_only_args=[])


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
    majors = OperandMajorMode.K, OperandMajorMode.K
    mma = sm100_utils.make_trivial_tiled_mma(
        BFloat16, BFloat16, *majors, Float32, tcgen05.CtaGroup.ONE, TILE[:2], tcgen05.OperandSource.SMEM
    )
    a_layout = cute.slice_(sm100_utils.make_smem_layout_a(mma, TILE, BFloat16, STAGES), (None, None, None, 0))
    b_layout = cute.slice_(sm100_utils.make_smem_layout_b(mma, TILE, BFloat16, STAGES), (None, None, None, 0))
    c_layout = cute.make_layout(TILE[:2], stride=(TILE[1], 1))
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    load_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, a_layout, TILE, mma, (1, 1, 1, 1))
    load_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, b_layout, TILE, mma, (1, 1, 1, 1))
    store = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), c, c_layout, TILE[:2])
    kernel = gemm(mma, *load_a, *load_b, *store)
    kernel.launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


def main() -> None:
    a, b = torch.randn(128, 96, device="cuda").bfloat16(), torch.randn(128, 96, device="cuda").bfloat16()
    c = torch.empty(len(a), len(b), device="cuda")
    tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (a, b, c)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
