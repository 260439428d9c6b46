"""relu(x) @ w.T on Ampere: cp.async into two buffers, ldmatrix, mma.sync; K is split between two pairs of warps."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import from_dlpack

M, N, K, BUFFERS, THREADS = 32, 64, 64, 2, 128


def buffer_layout(rows: int):
    atom = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout((8, K), stride=(K, 1)))
    return cute.tile_to_shape(atom, (rows, K, BUFFERS), order=(0, 1, 2))


@cute.kernel
def gemm(mma: cute.TiledMma, fill: cute.TiledCopy, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    half, member = thread // 64, thread % 64
    lx, lw = buffer_layout(M), buffer_layout(N)
    px = cute.arch.alloc_smem(BFloat16, M * K * BUFFERS, alignment=1024)
    pw = cute.arch.alloc_smem(BFloat16, N * K * BUFFERS, alignment=1024)
    sx = cute.make_tensor(cute.recast_ptr(px, lx.inner, dtype=BFloat16), lx.outer)
    sw = cute.make_tensor(cute.recast_ptr(pw, lw.inner, dtype=BFloat16), lw.outer)
    other = cute.make_tensor(cute.arch.alloc_smem(Float32, M * N, 128), cute.make_layout((M, N), stride=(N, 1)))
    gx, gw = cute.local_tile(x, (M, K), (block, None)), cute.local_tile(w, (N, K), (0, None))
    copy = fill.get_slice(thread)
    x_from, x_to = copy.partition_S(gx), copy.partition_D(sx)
    w_from, w_to = copy.partition_S(gw), copy.partition_D(sw)
    part = mma.get_slice(member)
    rx = mma.make_fragment_A(part.partition_A(sx[None, None, 0]))
    rw = mma.make_fragment_B(part.partition_B(sw[None, None, 0]))
    where = part.partition_C(other)
    sums = cute.make_rmem_tensor(where.shape, Float32)
    sums.fill(0)
    matrices = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), BFloat16)
    read_x, read_w = cute.make_tiled_copy_A(matrices, mma), cute.make_tiled_copy_B(matrices, mma)
    x_slice, w_slice = read_x.get_slice(member), read_w.get_slice(member)
    x_shared, w_shared = x_slice.partition_S(sx), w_slice.partition_S(sw)
    x_view, w_view = x_slice.retile(rx), w_slice.retile(rw)
    steps = cute.size(x, mode=[1]) // K
    cute.copy(fill, x_from[None, None, None, 0], x_to[None, None, None, 0])
    cute.copy(fill, w_from[None, None, None, 0], w_to[None, None, None, 0])
    cute.arch.cp_async_commit_group()
    for k in cutlass.range(steps, unroll=1):
        use, next_ = k % 2, (k + 1) % 2
        if k + 1 < steps:
            cute.copy(fill, x_from[None, None, None, k + 1], x_to[None, None, None, next_])
            cute.copy(fill, w_from[None, None, None, k + 1], w_to[None, None, None, next_])
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(1)
        else:
            cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        cute.copy(read_x, x_shared[None, None, None, use], x_view)
        cute.copy(read_w, w_shared[None, None, None, use], w_view)
        for i in cutlass.range_constexpr(cute.size(rx)):
            rx[i] = cutlass.max(rx[i].to(Float32), Float32(0)).to(BFloat16)
        for block_k in cutlass.range_constexpr(K // 32):
            if half == 0:
                cute.gemm(mma, sums, rx[None, None, block_k], rw[None, None, block_k], sums)
            else:
                cute.gemm(mma, sums, rx[None, None, K // 32 + block_k], rw[None, None, K // 32 + block_k], sums)
        cute.arch.sync_threads()
    # The second pair hands its half of the sums to the first.
    if half == 1:
        cute.autovec_copy(sums, where)
        cute.arch.barrier_arrive(barrier_id=1, number_of_threads=THREADS)
    else:
        cute.arch.barrier(barrier_id=1, number_of_threads=THREADS)
        for i in cutlass.range_constexpr(cute.size(sums)):
            sums[i] += where[i]
        gy = part.partition_C(cute.local_tile(y, (M, N), (block, 0)))
        cute.autovec_copy(sums, gy)


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    operation = warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16))
    mma = cute.make_tiled_mma(operation, cute.make_layout((1, 2, 1)), permutation_mnk=(16, 32, 16))
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), BFloat16, num_bits_per_copy=128)
    fill = cute.make_tiled_copy_tv(atom, cute.make_layout((16, 8), stride=(8, 1)), cute.make_layout((1, 8)))
    gemm(mma, fill, x, w, y).launch(grid=(cute.size(x, mode=[0]) // M, 1, 1), block=(THREADS, 1, 1), stream=stream)


def main() -> None:
    x, w = torch.randn(2 * M, 4 * K, device="cuda").bfloat16(), torch.randn(N, 4 * K, device="cuda").bfloat16()
    y = torch.empty(2 * M, N, device="cuda")
    tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (x, w, y)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    torch.testing.assert_close(y, x.relu().float() @ w.float().T, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
