"""Dot products of rows: two warps load x and w, one multiplies, one keeps the sums of each lane and adds them up."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

WIDTH, STAGES, SLOTS, ROWS = 64, 2, 3, 8  # ROWS: of a CTA
LOAD_X, LOAD_W, MULTIPLY, SUM = 0, 1, 2, 3  # warps


@cute.kernel
def dot(load: cute.CopyAtom, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    ring = cute.make_layout((WIDTH, STAGES))
    sx = cute.make_tensor(cute.arch.alloc_smem(Float32, WIDTH * STAGES, 128), ring)
    sw = cute.make_tensor(cute.arch.alloc_smem(Float32, WIDTH * STAGES, 128), ring)
    parts = cute.make_tensor(cute.arch.alloc_smem(Float32, 32 * SLOTS, 128), cute.make_layout((32, SLOTS)))
    loaded = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    read = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    made = cute.arch.alloc_smem(cutlass.Int64, SLOTS)
    gone = cute.arch.alloc_smem(cutlass.Int64, SLOTS)
    if thread == 0:
        for s in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(loaded + s, 2)
            cute.arch.mbarrier_init(read + s, 32)
        for s in cutlass.range_constexpr(SLOTS):
            cute.arch.mbarrier_init(made + s, 32)
            cute.arch.mbarrier_init(gone + s, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp == LOAD_X:
        with cute.arch.elect_one():
            for i in cutlass.range(ROWS, unroll=1):
                s = i % STAGES
                cute.arch.mbarrier_wait(read + s, (i // STAGES & 1) ^ 1)
                cute.arch.mbarrier_arrive_and_expect_tx(loaded + s, WIDTH * 4)
                cute.copy(load, x[None, block * ROWS + i], sx[None, s], mbar_ptr=loaded + s)
    elif warp == LOAD_W:
        with cute.arch.elect_one():
            for i in cutlass.range(ROWS, unroll=1):
                s = i % STAGES
                cute.arch.mbarrier_wait(read + s, (i // STAGES & 1) ^ 1)
                cute.arch.mbarrier_arrive_and_expect_tx(loaded + s, WIDTH * 4)
                cute.copy(load, w[None, block * ROWS + i], sw[None, s], mbar_ptr=loaded + s)
    elif warp == MULTIPLY:
        for i in cutlass.range(ROWS, unroll=1):
            s, slot = i % STAGES, i % SLOTS
            cute.arch.mbarrier_wait(loaded + s, i // STAGES & 1)
            total = sx[lane, s] * sw[lane, s] + sx[lane + 32, s] * sw[lane + 32, s]
            cute.arch.mbarrier_arrive(read + s)
            cute.arch.mbarrier_wait(gone + slot, (i // SLOTS & 1) ^ 1)
            parts[lane, slot] = total
            cute.arch.mbarrier_arrive(made + slot)
    else:
        for i in cutlass.range(ROWS, unroll=1):
            slot = i % SLOTS
            cute.arch.mbarrier_wait(made + slot, i // SLOTS & 1)
            total = Float32(0)
            for k in cutlass.range_constexpr(32):
                total += parts[k, slot]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(gone + slot)
                y[block * ROWS + i] = total


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    load = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=WIDTH * 32)
    dot(load, x, w, y).launch(grid=(2, 1, 1), block=(128, 1, 1), stream=stream)


def main() -> None:
    x, w = torch.randint(-9, 9, (2, 2 * ROWS, WIDTH), device="cuda").float()
    y = torch.empty(2 * ROWS, device="cuda")
    tensors = [from_dlpack(tensor.T, assumed_align=16) for tensor in (x, w)]
    launch(*tensors, from_dlpack(y), cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    assert torch.equal(y, (x * w).sum(1))


if __name__ == "__main__":
    main()
