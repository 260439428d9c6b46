"""c = a @ b.T and the sum of each row of c on Ampere: cp.async in three stages, ldmatrix, mma.sync, named barriers."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import from_dlpack

M, N, K, STAGES, THREADS = 64, 64, 32, 3, 128


def stage_layout(rows: int):
    atom = cute.make_composed_layout(cute.make_swizzle(2, 4, 3), 0, cute.make_layout((16, K), stride=(K, 1)))
    return cute.tile_to_shape(atom, (rows, K, STAGES), order=(0, 1, 2))


@cute.kernel
def gemm(mma: cute.TiledMma, fill: cute.TiledCopy, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, total: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    column, _, _ = cute.arch.block_idx()
    sl = stage_layout(M)
    pa = cute.arch.alloc_smem(BFloat16, M * K * STAGES, alignment=1024)
    pb = cute.arch.alloc_smem(BFloat16, N * K * STAGES, alignment=1024)
    sa = cute.make_tensor(cute.recast_ptr(pa, sl.inner, dtype=BFloat16), sl.outer)
    sb = cute.make_tensor(cute.recast_ptr(pb, sl.inner, dtype=BFloat16), sl.outer)
    tile_memory = cute.arch.alloc_smem(Float32, M * N, alignment=128)
    tile = cute.make_tensor(tile_memory, cute.make_layout((M, N), stride=(N, 1)))
    halves = cute.make_tensor(cute.arch.alloc_smem(Float32, 2 * M, alignment=128), cute.make_layout((M, 2)))
    ga, gb = cute.local_tile(a, (M, K), (0, None)), cute.local_tile(b, (N, K), (column, None))
    copy = fill.get_slice(tid)
    a_from, a_to = copy.partition_S(ga), copy.partition_D(sa)
    b_from, b_to = copy.partition_S(gb), copy.partition_D(sb)
    part = mma.get_slice(tid)
    ra = mma.make_fragment_A(part.partition_A(sa[None, None, 0]))
    rb = mma.make_fragment_B(part.partition_B(sb[None, None, 0]))
    where = part.partition_C(tile)
    sums = cute.make_rmem_tensor(where.shape, Float32)
    sums.fill(0)
    matrices = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), BFloat16)
    read_a, read_b = cute.make_tiled_copy_A(matrices, mma), cute.make_tiled_copy_B(matrices, mma)
    a_slice, b_slice = read_a.get_slice(tid), read_b.get_slice(tid)
    a_shared, b_shared = a_slice.partition_S(sa), b_slice.partition_S(sb)
    a_view, b_view = a_slice.retile(ra), b_slice.retile(rb)
    k_tiles = cute.size(a, mode=[1]) // K
    for k in cutlass.range_constexpr(STAGES - 1):
        cute.copy(fill, a_from[None, None, None, k], a_to[None, None, None, k])
        cute.copy(fill, b_from[None, None, None, k], b_to[None, None, None, k])
        cute.arch.cp_async_commit_group()
    for k in cutlass.range(k_tiles, unroll=1):
        cute.arch.cp_async_wait_group(STAGES - 2)
        cute.arch.sync_threads()
        ahead = k + STAGES - 1
        if ahead < k_tiles:
            cute.copy(fill, a_from[None, None, None, ahead], a_to[None, None, None, ahead % STAGES])
            cute.copy(fill, b_from[None, None, None, ahead], b_to[None, None, None, ahead % STAGES])
        cute.arch.cp_async_commit_group()
        s = k % STAGES
        cute.copy(read_a, a_shared[None, None, None, s], a_view)
        cute.copy(read_b, b_shared[None, None, None, s], b_view)
        cute.gemm(mma, sums, ra, rb, sums)
    cute.autovec_copy(sums, where)
    cute.arch.sync_threads()
    # Two teams of two warps: the first adds columns 0 to 31 of each row, the second the others, and finishes.
    row, team = tid % M, tid // M
    half = Float32(0)
    for n in cutlass.range(N // 2, unroll=1):
        half += tile[row, team * (N // 2) + n]
    if team == 0:
        halves[row, 0] = half
        cute.arch.barrier_arrive(barrier_id=3, number_of_threads=THREADS)
    else:
        halves[row, 1] = half
        cute.arch.barrier(barrier_id=3, number_of_threads=THREADS)
        total[row, column] = halves[row, 0] + halves[row, 1]
    gc = cute.local_tile(c, (M, N), (0, column))
    for i in cutlass.range(M * N // THREADS, unroll=1):
        gc[(i * THREADS + tid) // N, tid % N] = tile[(i * THREADS + tid) // N, tid % N]


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, total: cute.Tensor, stream: cuda.CUstream):
    operation = warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16))
    mma = cute.make_tiled_mma(operation, cute.make_layout((2, 2, 1)), permutation_mnk=(32, 32, 16))
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), BFloat16, num_bits_per_copy=128)
    fill = cute.make_tiled_copy_tv(atom, cute.make_layout((32, 4), stride=(4, 1)), cute.make_layout((1, 8)))
    grid = cute.size(b, mode=[0]) // N
    gemm(mma, fill, a, b, c, total).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream)


def main() -> None:
    a, b = torch.randn(M, 6 * K, device="cuda").bfloat16(), torch.randn(2 * N, 6 * K, device="cuda").bfloat16()
    c, total = torch.empty(M, 2 * N, device="cuda"), torch.empty(M, 2, device="cuda")
    tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (a, b, c, total)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    expected = a.float() @ b.float().T
    torch.testing.assert_close(c, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(total, expected.view(M, 2, N).sum(2), rtol=1e-3, atol=1e-2)


if __name__ == "__main__":
    main()
