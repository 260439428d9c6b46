"""Running sums over rows: one warp loads them, two others take every second row each and hand on what they have."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

WIDTH, STAGES, GROUPS, ROWS = 128, 3, 2, 10  # ROWS: of a CTA
LOAD, THREADS = 2, 96


@cute.kernel
def add_up(load: cute.CopyAtom, x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    rows = cute.make_tensor(cute.arch.alloc_smem(Float32, WIDTH * STAGES, 128), cute.make_layout((WIDTH, STAGES)))
    sums = cute.make_tensor(cute.arch.alloc_smem(Float32, WIDTH, 128), cute.make_layout(WIDTH))
    full = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    empty = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    turn = cute.arch.alloc_smem(cutlass.Int64, GROUPS)
    if thread == 0:
        for s in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + s, 1)
            cute.arch.mbarrier_init(empty + s, 32)
        for s in cutlass.range_constexpr(GROUPS):
            cute.arch.mbarrier_init(turn + s, 32)
        cute.arch.mbarrier_init_fence()
    for k in cutlass.range_constexpr(2):
        if warp < GROUPS:
            sums[thread + 64 * k] = Float32(0)
    cute.arch.sync_threads()
    if warp == LOAD:
        with cute.arch.elect_one():
            for i in cutlass.range(ROWS, unroll=1):
                s = i % STAGES
                cute.arch.mbarrier_wait(empty + s, (i // STAGES & 1) ^ 1)
                cute.arch.mbarrier_arrive_and_expect_tx(full + s, WIDTH * 4)
                cute.copy(load, x[None, block * ROWS + i], rows[None, s], mbar_ptr=full + s)
    else:
        values = cute.make_rmem_tensor((4,), Float32)
        for j in cutlass.range(ROWS // GROUPS, unroll=1):
            i = j * GROUPS + warp
            s = i % STAGES
            cute.arch.mbarrier_wait(full + s, i // STAGES & 1)
            for k in cutlass.range_constexpr(4):
                values[k] = rows[lane + 32 * k, s]
            cute.arch.mbarrier_arrive(empty + s)
            cute.arch.mbarrier_wait(turn + warp, (j + warp + 1) & 1)
            for k in cutlass.range_constexpr(4):
                values[k] += sums[lane + 32 * k]
                sums[lane + 32 * k] = values[k]
                y[lane + 32 * k, block * ROWS + i] = values[k]
            cute.arch.mbarrier_arrive(turn + (1 - warp))


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    load = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=WIDTH * 32)
    add_up(load, x, y).launch(grid=(2, 1, 1), block=(THREADS, 1, 1), stream=stream)


def main() -> None:
    x = torch.randint(-99, 99, (2 * ROWS, WIDTH), device="cuda").float()
    y = torch.empty_like(x)
    tensors = [from_dlpack(tensor.T, assumed_align=16) for tensor in (x, y)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    assert torch.equal(y, x.view(2, ROWS, WIDTH).cumsum(1).view_as(x))


if __name__ == "__main__":
    main()
