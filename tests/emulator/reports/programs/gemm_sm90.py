"""a @ b.T on Hopper by a cluster of two CTAs: one warp loads by TMA, ``b`` for both CTAs, one warpgroup multiplies."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int16
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import from_dlpack

ROWS, COLUMNS, K, STAGES, CTAS = 64, 32, 64, 2, 2
STAGE_BYTES = (ROWS + COLUMNS) * K * 2
CONSUMER_WARPS, THREADS = 4, 160


def operand_layout(rows: int, stages: int):
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    return cute.tile_to_shape(atom, (rows, K, stages), order=(0, 1, 2))


@cute.kernel
def gemm(mma: cute.TiledMma, load_a: cute.CopyAtom, a: cute.Tensor, load_b: cute.CopyAtom, b: cute.Tensor,
         store: cute.CopyAtom, c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    a_layout, b_layout = operand_layout(ROWS, STAGES), operand_layout(COLUMNS, STAGES)
    a_memory = cute.arch.alloc_smem(cutlass.Uint8, ROWS * K * 2 * STAGES, alignment=1024)
    b_memory = cute.arch.alloc_smem(cutlass.Uint8, COLUMNS * K * 2 * STAGES, alignment=1024)
    c_memory = cute.arch.alloc_smem(Float32, ROWS * COLUMNS, alignment=1024)
    full = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    empty = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    sa = cute.make_tensor(cute.recast_ptr(a_memory, a_layout.inner, dtype=BFloat16), a_layout.outer)
    sb = cute.make_tensor(cute.recast_ptr(b_memory, b_layout.inner, dtype=BFloat16), b_layout.outer)
    sc = cute.make_tensor(c_memory, cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1)))
    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, CONSUMER_WARPS * CTAS)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    k_blocks, n_tiles = cute.size(a, mode=[1]) // K, cute.size(b, mode=[0]) // COLUMNS
    ga = cute.group_modes(cute.local_tile(a, (ROWS, K), (rank, None)), 0, 2)
    gb = cute.group_modes(cute.local_tile(b, (COLUMNS, K), (None, None)), 0, 2)
    gc = cute.group_modes(cute.local_tile(c, (ROWS, COLUMNS), (rank, None)), 0, 2)
    sa_load, ga_load = cpasync.tma_partition(load_a, 0, cute.make_layout(1), cute.group_modes(sa, 0, 2), ga)
    sb_load, gb_load = cpasync.tma_partition(load_b, rank, cute.make_layout(CTAS), cute.group_modes(sb, 0, 2), gb)
    sc_store, gc_store = cpasync.tma_partition(store, 0, cute.make_layout(1), cute.group_modes(sc, 0, 2), gc)
    if warp == CONSUMER_WARPS:
        for i in cutlass.range(k_blocks * n_tiles, unroll=1):
            stage = i % STAGES
            k_block, n_tile = i % k_blocks, i // k_blocks
            cute.arch.mbarrier_wait(empty + stage, (i // STAGES & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, STAGE_BYTES)
            cute.copy(load_a, ga_load[None, k_block], sa_load[None, stage], tma_bar_ptr=full + stage)
            cute.copy(load_b, gb_load[None, n_tile, k_block], sb_load[None, stage], tma_bar_ptr=full + stage,
                      mcast_mask=Int16(0b11))
    else:
        part = mma.get_slice(thread)
        fa, fb = mma.make_fragment_A(part.partition_A(sa)), mma.make_fragment_B(part.partition_B(sb))
        tile = part.partition_C(sc)
        accumulator = cute.make_rmem_tensor(tile.shape, Float32)
        for n_tile in cutlass.range(n_tiles, unroll=1):
            accumulator.fill(0)
            mma.set(warpgroup.Field.ACCUMULATE, True)
            for k_block in cutlass.range(k_blocks, unroll=1):
                i = n_tile * k_blocks + k_block
                stage = i % STAGES
                cute.arch.mbarrier_wait(full + stage, i // STAGES & 1)
                warpgroup.fence()
                for step in cutlass.range_constexpr(K // 16):
                    cute.gemm(mma, accumulator, fa[None, None, step, stage], fb[None, None, step, stage], accumulator)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                if lane < CTAS:
                    cute.arch.mbarrier_arrive(empty + stage, lane)
            if thread < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            cute.autovec_copy(accumulator, tile)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            if thread < 32:
                cute.copy(store, sc_store, gc_store[None, n_tile])
                cute.arch.cp_async_bulk_commit_group()
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
    k_major = OperandMajorMode.K
    operation = warpgroup.MmaF16BF16Op(
        BFloat16, Float32, (64, COLUMNS, 16), warpgroup.OperandSource.SMEM, k_major, k_major
    )
    a_layout = cute.slice_(operand_layout(ROWS, 1), (None, None, 0))
    b_layout = cute.slice_(operand_layout(COLUMNS, 1), (None, None, 0))
    c_layout = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
    load_a = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), a, a_layout, (ROWS, K))
    load_b = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SMulticastOp(), b, b_layout, (COLUMNS, K), num_multicast=CTAS
    )
    store = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), c, c_layout, (ROWS, COLUMNS))
    kernel = gemm(cute.make_tiled_mma(operation), *load_a, *load_b, *store)
    kernel.launch(grid=(CTAS, 1, 1), cluster=(CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream)


def main() -> None:
    a, b = (torch.randn(rows, 3 * K, device="cuda").bfloat16() for rows in (ROWS * CTAS, 3 * COLUMNS))
    c = torch.empty(len(a), len(b), device="cuda")
    tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (a, b, c)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
