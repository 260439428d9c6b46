"""x + w of the other CTA's rows: each CTA of a cluster of two multicasts half of every row to both, which add them."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int16
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

WIDTH, CTAS, STAGES, ROWS = 64, 2, 3, 8
ADDERS = 2  # warps 0 and 1; warp 2 loads


@cute.kernel
def add_rows(load: cute.CopyAtom, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    sx = cute.make_tensor(cute.arch.alloc_smem(Float32, WIDTH * STAGES, 128), cute.make_layout((WIDTH, STAGES)))
    arrived = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    vacant = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    if thread == 0:
        for s in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(arrived + s, 1)
            cute.arch.mbarrier_init(vacant + s, ADDERS * CTAS)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    if warp == ADDERS:
        with cute.arch.elect_one():
            for i in cutlass.range(ROWS, unroll=1):
                s = i % STAGES
                cute.arch.mbarrier_wait(vacant + s, (i // STAGES & 1) ^ 1)
                cute.arch.mbarrier_arrive_and_expect_tx(arrived + s, WIDTH * 4)
                half = cute.local_tile(x[None, i], (WIDTH // CTAS,), (rank,))
                place = cute.local_tile(sx[None, s], (WIDTH // CTAS,), (rank,))
                cute.copy(load, half, place, mbar_ptr=arrived + s, mcast_mask=Int16(3))
    else:
        for i in cutlass.range(ROWS, unroll=1):
            s = i % STAGES
            cute.arch.mbarrier_wait(arrived + s, i // STAGES & 1)
            y[thread, i, rank] = sx[thread, s] + w[thread, rank]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                for cta in cutlass.range_constexpr(CTAS):
                    cute.arch.mbarrier_arrive(vacant + s, cta)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    load = cute.make_copy_atom(cpasync.CopyBulkG2SMulticastOp(), Float32, num_bits_per_copy=WIDTH // CTAS * 32)
    add_rows(load, x, w, y).launch(grid=(CTAS, 1, 1), cluster=(CTAS, 1, 1), block=(96, 1, 1), stream=stream)


def main() -> None:
    x, w = torch.randn(ROWS, WIDTH, device="cuda"), torch.randn(CTAS, WIDTH, device="cuda")
    y = torch.empty(CTAS, ROWS, WIDTH, device="cuda")
    tensors = [from_dlpack(x.T, assumed_align=16), from_dlpack(w.T), from_dlpack(y.permute(2, 1, 0))]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    torch.testing.assert_close(y, x + w[:, None])


if __name__ == "__main__":
    main()
