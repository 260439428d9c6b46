"""3 x + w: one warp loads rows of x and w, two compute into a second ring, one stores by bulk copies."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

WIDTH, STAGES, SLOTS, ROWS = 128, 4, 2, 9  # ROWS: of a CTA
LOAD, STORE, THREADS = 2, 3, 128  # warps 0 and 1 compute


@cute.kernel
def relay(load: cute.CopyAtom, store: cute.CopyAtom, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    ring = cute.make_layout((WIDTH, STAGES))
    sx = cute.make_tensor(cute.arch.alloc_smem(Float32, WIDTH * STAGES, 128), ring)
    sw = cute.make_tensor(cute.arch.alloc_smem(Float32, WIDTH * STAGES, 128), ring)
    sy = cute.make_tensor(cute.arch.alloc_smem(Float32, WIDTH * SLOTS, 128), cute.make_layout((WIDTH, SLOTS)))
    filled = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    used = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    ready = cute.arch.alloc_smem(cutlass.Int64, SLOTS)
    stored = cute.arch.alloc_smem(cutlass.Int64, SLOTS)
    if thread == 0:
        for s in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(filled + s, 1)
            cute.arch.mbarrier_init(used + s, 2)
        for s in cutlass.range_constexpr(SLOTS):
            cute.arch.mbarrier_init(ready + s, 64)
            cute.arch.mbarrier_init(stored + s, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp == LOAD:
        for i in cutlass.range(ROWS, unroll=1):
            s, row = i % STAGES, block * ROWS + i
            cute.arch.mbarrier_wait(used + s, (i // STAGES & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(filled + s, 2 * WIDTH * 4)
                cute.copy(load, x[None, row], sx[None, s], mbar_ptr=filled + s)
                cute.copy(load, w[None, row], sw[None, s], mbar_ptr=filled + s)
    elif warp == STORE:
        with cute.arch.elect_one():
            for i in cutlass.range(ROWS, unroll=1):
                slot = i % SLOTS
                cute.arch.mbarrier_wait(ready + slot, i // SLOTS & 1)
                cute.copy(store, sy[None, slot], y[None, block * ROWS + i])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.mbarrier_arrive(stored + slot)
    else:
        for i in cutlass.range(ROWS, unroll=1):
            s, slot = i % STAGES, i % SLOTS
            cute.arch.mbarrier_wait(filled + s, i // STAGES & 1)
            cute.arch.mbarrier_wait(stored + slot, (i // SLOTS & 1) ^ 1)
            for k in cutlass.range_constexpr(2):
                column = thread + 64 * k
                sy[column, slot] = 3 * sx[column, s] + sw[column, s]
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(ready + slot)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(used + s)


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    load = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=WIDTH * 32)
    store = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), Float32, num_bits_per_copy=WIDTH * 32)
    relay(load, store, x, w, y).launch(grid=(2, 1, 1), block=(THREADS, 1, 1), stream=stream)


def main() -> None:
    x, w = torch.randn(2, 2 * ROWS, WIDTH, device="cuda")
    y = torch.empty_like(x)
    tensors = [from_dlpack(tensor.T, assumed_align=16) for tensor in (x, w, y)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    torch.testing.assert_close(y, 3 * x + w)


if __name__ == "__main__":
    main()
