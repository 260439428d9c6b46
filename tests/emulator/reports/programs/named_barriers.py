"""Rows of x + w in a cluster of two: bulk copies of w reach both CTAs, named barriers pass sums to a storing warp."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int16
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

ROW, STAGES, CTAS = 128, 2, 2
ROW_BYTES = ROW * 4
LOAD_WARP, STORE_WARP, THREADS = 2, 3, 128  # warps 0 and 1 add
READY, FREE = 2, 4  # named barriers of the stages


@cute.kernel
def add_rows(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, load: cute.CopyAtom, share: cute.CopyAtom,
             store: cute.CopyAtom):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    ring = cute.make_layout((ROW, STAGES))
    sx = cute.make_tensor(cute.arch.alloc_smem(Float32, ROW * STAGES, alignment=128), ring)
    sw = cute.make_tensor(cute.arch.alloc_smem(Float32, ROW * STAGES, alignment=128), ring)
    sums = cute.make_tensor(cute.arch.alloc_smem(Float32, ROW * STAGES, alignment=128), ring)
    full = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    empty = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, 2 * CTAS)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    rows = cute.size(x, mode=[1]) // CTAS
    if warp == LOAD_WARP:
        with cute.arch.elect_one():
            for i in cutlass.range(rows, unroll=1):
                stage = i % STAGES
                cute.arch.mbarrier_wait(empty + stage, (i // STAGES & 1) ^ 1)
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * ROW_BYTES)
                cute.copy(load, x[None, i * CTAS + rank], sx[None, stage], mbar_ptr=full + stage)
                if rank == i % CTAS:
                    cute.copy(share, w[None, i], sw[None, stage], mbar_ptr=full + stage, mcast_mask=Int16(0b11))
    elif warp == STORE_WARP:
        for i in cutlass.range(rows, unroll=1):
            stage = i % STAGES
            cute.arch.barrier(barrier_id=READY + stage, number_of_threads=96)
            with cute.arch.elect_one():
                cute.copy(store, sums[None, stage], y[None, i * CTAS + rank])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=FREE + stage, number_of_threads=96)
    else:
        for i in cutlass.range(rows, unroll=1):
            stage = i % STAGES
            cute.arch.mbarrier_wait(full + stage, i // STAGES & 1)
            if i >= STAGES:
                cute.arch.barrier(barrier_id=FREE + stage, number_of_threads=96)
            for k in cutlass.range_constexpr(2):
                sums[thread + k * 64, stage] = sx[thread + k * 64, stage] + sw[thread + k * 64, stage]
            cute.arch.sync_warp()
            if thread % 32 < CTAS:
                cute.arch.mbarrier_arrive(empty + stage, thread % 32)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier_arrive(barrier_id=READY + stage, number_of_threads=96)
        for i in cutlass.range(STAGES, unroll=1):
            cute.arch.barrier(barrier_id=FREE + (rows + i) % STAGES, number_of_threads=96)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    load = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=ROW * 32)
    share = cute.make_copy_atom(cpasync.CopyBulkG2SMulticastOp(), Float32, num_bits_per_copy=ROW * 32)
    store = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), Float32, num_bits_per_copy=ROW * 32)
    add_rows(x, w, y, load, share, store).launch(
        grid=(CTAS, 1, 1), cluster=(CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def main() -> None:
    x, w = torch.randn(12, ROW, device="cuda"), torch.randn(6, ROW, device="cuda")
    y = torch.empty_like(x)
    tensors = [from_dlpack(tensor.T, assumed_align=16) for tensor in (x, w, y)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    torch.testing.assert_close(y, x + w.repeat_interleave(2, 0))


if __name__ == "__main__":
    main()
