"""Sums of two matrices and of neighbouring columns: stages are filled by cp.async and by bulk copies."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

ROW, STAGES, THREADS, LOADERS = 128, 2, 64, 32
BULK_BYTES = ROW * 4


@cute.kernel
def add_rows(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, bulk: cute.CopyAtom):
    thread, _, _ = cute.arch.thread_idx()
    ring = cute.make_layout((ROW, STAGES))
    sx = cute.make_tensor(cute.arch.alloc_smem(Float32, ROW * STAGES, alignment=128), ring)
    sw = cute.make_tensor(cute.arch.alloc_smem(Float32, ROW * STAGES, alignment=128), ring)
    sums = cute.make_tensor(cute.arch.alloc_smem(Float32, ROW, alignment=128), cute.make_layout(ROW))
    full = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    empty = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, THREADS - LOADERS)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    rows = cute.size(x, mode=[1])
    if thread < LOADERS:
        copy = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=128)
        for i in cutlass.range(rows, unroll=1):
            stage = i % STAGES
            cute.arch.mbarrier_wait(empty + stage, (i // STAGES & 1) ^ 1)
            source = cute.local_tile(x[None, i], (4,), (thread,))
            target = cute.local_tile(sx[None, stage], (4,), (thread,))
            cute.copy(copy, source, target)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, BULK_BYTES)
                cute.copy(bulk, w[None, i], sw[None, stage], mbar_ptr=full + stage)
    else:
        reader = thread - LOADERS
        for i in cutlass.range(rows, unroll=1):
            stage = i % STAGES
            cute.arch.mbarrier_wait(full + stage, i // STAGES & 1)
            for k in cutlass.range_constexpr(4):
                column = k * 32 + reader
                sums[column] = sx[column, stage] + sw[column, stage]
            cute.arch.mbarrier_arrive(empty + stage)
            cute.arch.sync_warp()
            for k in cutlass.range_constexpr(4):
                column = k * 32 + reader
                y[column, i] = sums[column] + sums[column ^ 1]
            cute.arch.sync_warp()


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=ROW * 32)
    add_rows(x, w, y, bulk).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


def main() -> None:
    x, w = (torch.randn(5, ROW, device="cuda") for _ in range(2))
    y = torch.empty_like(x)
    tensors = [from_dlpack(tensor.T, assumed_align=16) for tensor in (x, w, y)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    expected = x + w
    columns = torch.arange(ROW) ^ 1
    torch.testing.assert_close(y, expected + expected[:, columns])


if __name__ == "__main__":
    main()
