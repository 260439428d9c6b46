"""relu(a @ b.T + bias) on Hopper: a loading warp, two warpgroups that multiply, and a warp that stores their tile."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import from_dlpack

M, N, K, DEPTH = 128, 32, 32, 3
A_BYTES, B_BYTES = M * K * 2, N * K * 2
MATH_THREADS, LOADER, STORER, THREADS = 256, 8, 9, 320


def ring_layout(rows: int, stages: int):
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, BFloat16)
    return cute.tile_to_shape(atom, (rows, K, stages), order=(0, 1, 2))


@cute.kernel
def linear(mma: cute.TiledMma, tma_a: cute.CopyAtom, a: cute.Tensor, tma_b: cute.CopyAtom, b: cute.Tensor,
           tma_y: cute.CopyAtom, y: cute.Tensor, bias: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    al, bl = ring_layout(M, DEPTH), ring_layout(N, DEPTH)
    pa = cute.arch.alloc_smem(cutlass.Uint8, A_BYTES * DEPTH, alignment=1024)
    pb = cute.arch.alloc_smem(cutlass.Uint8, B_BYTES * DEPTH, alignment=1024)
    tile_memory = cute.arch.alloc_smem(Float32, M * N, alignment=1024)
    offsets = cute.make_tensor(cute.arch.alloc_smem(Float32, N, alignment=128), cute.make_layout(N))
    ready = cute.arch.alloc_smem(cutlass.Int64, DEPTH)
    free = cute.arch.alloc_smem(cutlass.Int64, DEPTH)
    out_ready = cute.arch.alloc_smem(cutlass.Int64, 1)
    out_free = cute.arch.alloc_smem(cutlass.Int64, 1)
    sa = cute.make_tensor(cute.recast_ptr(pa, al.inner, dtype=BFloat16), al.outer)
    sb = cute.make_tensor(cute.recast_ptr(pb, bl.inner, dtype=BFloat16), bl.outer)
    sy = cute.make_tensor(tile_memory, cute.make_layout((M, N), stride=(N, 1)))
    if warp == LOADER:
        with cute.arch.elect_one():
            for s in cutlass.range_constexpr(DEPTH):
                cute.arch.mbarrier_init(ready + s, 1)
                cute.arch.mbarrier_init(free + s, 2)
            cute.arch.mbarrier_init(out_ready, MATH_THREADS)
            cute.arch.mbarrier_init(out_free, 1)
            cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    k_tiles, n_tiles = cute.size(a, mode=[1]) // K, cute.size(b, mode=[0]) // N
    ga = cute.group_modes(cute.local_tile(a, (M, K), (0, None)), 0, 2)
    gb = cute.group_modes(cute.local_tile(b, (N, K), (None, None)), 0, 2)
    gy = cute.group_modes(cute.local_tile(y, (M, N), (0, None)), 0, 2)
    one = cute.make_layout(1)
    a_to, a_from = cpasync.tma_partition(tma_a, 0, one, cute.group_modes(sa, 0, 2), ga)
    b_to, b_from = cpasync.tma_partition(tma_b, 0, one, cute.group_modes(sb, 0, 2), gb)
    y_from, y_to = cpasync.tma_partition(tma_y, 0, one, cute.group_modes(sy, 0, 2), gy)
    if warp == LOADER:
        slot, phase = cutlass.Int32(0), cutlass.Int32(1)
        for n in cutlass.range(n_tiles, unroll=1):
            for k in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(free + slot, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ready + slot, A_BYTES + B_BYTES)
                cute.copy(tma_a, a_from[None, k], a_to[None, slot], tma_bar_ptr=ready + slot)
                cute.copy(tma_b, b_from[None, n, k], b_to[None, slot], tma_bar_ptr=ready + slot)
                slot += 1
                if slot == DEPTH:
                    slot = cutlass.Int32(0)
                    phase ^= 1
    elif warp == STORER:
        for n in cutlass.range(n_tiles, unroll=1):
            cute.arch.mbarrier_wait(out_ready, n & 1)
            cute.copy(tma_y, y_from, y_to[None, n])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(out_free)
    else:
        part = mma.get_slice(tid)
        fa, fb = mma.make_fragment_A(part.partition_A(sa)), mma.make_fragment_B(part.partition_B(sb))
        where = part.partition_C(sy)
        columns = part.partition_C(cute.make_identity_tensor((M, N)))
        sums = cute.make_rmem_tensor(where.shape, Float32)
        slot, phase = cutlass.Int32(0), cutlass.Int32(0)
        for n in cutlass.range(n_tiles, unroll=1):
            cute.arch.barrier(barrier_id=1, number_of_threads=MATH_THREADS)
            if tid < N:
                offsets[tid] = bias[n * N + tid]
            cute.arch.barrier(barrier_id=2, number_of_threads=MATH_THREADS)
            sums.fill(0)
            mma.set(warpgroup.Field.ACCUMULATE, True)
            for _ in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(ready + slot, phase)
                warpgroup.fence()
                for step in cutlass.range_constexpr(K // 16):
                    cute.gemm(mma, sums, fa[None, None, step, slot], fb[None, None, step, slot], sums)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                if tid % 128 == 0:
                    cute.arch.mbarrier_arrive(free + slot)
                slot += 1
                if slot == DEPTH:
                    slot = cutlass.Int32(0)
                    phase ^= 1
            for i in cutlass.range_constexpr(cute.size(sums)):
                value = sums[i] + offsets[columns[i][1]]
                sums[i] = value if value > 0 else Float32(0)
            cute.arch.mbarrier_wait(out_free, (n & 1) ^ 1)
            cute.autovec_copy(sums, where)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(out_ready)


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, bias: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    major = OperandMajorMode.K
    operation = warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, N, 16), warpgroup.OperandSource.SMEM, major, major)
    mma = cute.make_tiled_mma(operation, atom_layout_mnk=(2, 1, 1))
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    tma_a = cpasync.make_tiled_tma_atom(load, a, cute.slice_(ring_layout(M, 1), (None, None, 0)), (M, K))
    tma_b = cpasync.make_tiled_tma_atom(load, b, cute.slice_(ring_layout(N, 1), (None, None, 0)), (N, K))
    tma_y = cpasync.make_tiled_tma_atom(store, y, cute.make_layout((M, N), stride=(N, 1)), (M, N))
    linear(mma, *tma_a, *tma_b, *tma_y, bias).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


def main() -> None:
    a, b = torch.randn(M, 8 * K, device="cuda").bfloat16(), torch.randn(3 * N, 8 * K, device="cuda").bfloat16()
    bias = torch.randn(3 * N, device="cuda")
    y = torch.empty(M, 3 * N, device="cuda")
    tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (a, b, bias, y)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    torch.testing.assert_close(y, torch.relu(a.float() @ b.float().T + bias), rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
