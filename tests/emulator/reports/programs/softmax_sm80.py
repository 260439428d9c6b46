"""Row softmax on Ampere: a CTA takes rows in turn, cp.async brings the next ones, warps share their maxima and sums."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

WIDTH, AHEAD, WARPS = 512, 3, 4
THREADS, VEC = WARPS * 32, 4
LOG2E = 1.4426950408889634


@cute.kernel
def softmax(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32):
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    warp, lane = tid // 32, tid % 32
    p = cute.arch.alloc_smem(Float32, WIDTH * AHEAD, alignment=16)
    maxima = cute.make_tensor(cute.arch.alloc_smem(Float32, WARPS), cute.make_layout(WARPS))
    totals = cute.make_tensor(cute.arch.alloc_smem(Float32, WARPS), cute.make_layout(WARPS))
    rows = cute.make_tensor(p, cute.make_layout((VEC, THREADS, AHEAD), stride=(1, VEC, WIDTH)))
    gx = cute.logical_divide(x, (None, VEC))
    gy = cute.logical_divide(y, (None, VEC))
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=128)
    inside = tid * VEC < n
    mine = (cute.size(x, mode=[0]) - cta + ctas - 1) // ctas
    for j in cutlass.range_constexpr(AHEAD - 1):
        if j < mine:
            if inside:
                cute.copy(atom, gx[cta + j * ctas, (None, tid)], rows[None, tid, j])
        cute.arch.cp_async_commit_group()
    values = cute.make_rmem_tensor((VEC,), Float32)
    for i in cutlass.range(mine, unroll=1):
        cute.arch.cp_async_wait_group(AHEAD - 2)
        cute.arch.sync_threads()
        slot = i % AHEAD
        largest = Float32(-3.0e38)
        values.fill(-3.0e38)
        if inside:
            cute.autovec_copy(rows[None, tid, slot], values)
        for e in cutlass.range_constexpr(VEC):
            largest = cutlass.max(largest, values[e])
        largest = cute.arch.warp_reduction_max(largest)
        if lane == 0:
            maxima[warp] = largest
        cute.arch.sync_threads()
        for each in cutlass.range_constexpr(WARPS):
            largest = cutlass.max(largest, maxima[each])
        total = Float32(0.0)
        for e in cutlass.range_constexpr(VEC):
            values[e] = cute.math.exp2((values[e] - largest) * LOG2E, fastmath=True)
            total += values[e]
        total = cute.arch.warp_reduction_sum(total)
        if lane == 0:
            totals[warp] = total
        cute.arch.sync_threads()
        total = Float32(0.0)
        for each in cutlass.range_constexpr(WARPS):
            total += totals[each]
        later = i + AHEAD - 1
        if later < mine:
            if inside:
                cute.copy(atom, gx[cta + later * ctas, (None, tid)], rows[None, tid, later % AHEAD])
        cute.arch.cp_async_commit_group()
        for e in cutlass.range_constexpr(VEC):
            values[e] = values[e] / total
        if inside:
            cute.autovec_copy(values, gy[cta + i * ctas, (None, tid)])


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    softmax(x, y, cute.size(x, mode=[1])).launch(grid=(2, 1, 1), block=(THREADS, 1, 1), stream=stream)


def main() -> None:
    x = torch.randn(11, 400, device="cuda")
    y = torch.empty_like(x)
    launch(from_dlpack(x, assumed_align=16), from_dlpack(y, assumed_align=16),
           cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    torch.testing.assert_close(y, x.softmax(-1), rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    main()
