"""Persistent a @ b.T on Hopper: one producer warp, two consumer warpgroups that take turns (ping-pong)."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import from_dlpack

BM, BN, BK, DEPTH, GROUPS = 64, 16, 64, 3, 2
TX = (BM + BN) * BK * 2
GRID = 2
EPILOGUE = 1, 2  # named barriers of the two groups


def ring(rows: int, depth: int):
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    return cute.tile_to_shape(atom, (rows, BK, depth), order=(0, 1, 2))


@cute.kernel
def pingpong(mma: cute.TiledMma, tma_a: cute.CopyAtom, a: cute.Tensor, tma_b: cute.CopyAtom, b: cute.Tensor,
             tma_c: cute.CopyAtom, c: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    wid = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    la, lb = ring(BM, DEPTH), ring(BN, DEPTH)
    pa = cute.arch.alloc_smem(BFloat16, BM * BK * DEPTH, alignment=1024)
    pb = cute.arch.alloc_smem(BFloat16, BN * BK * DEPTH, alignment=1024)
    pc = cute.arch.alloc_smem(Float32, BM * BN * GROUPS, alignment=1024)
    ready = cute.arch.alloc_smem(cutlass.Int64, DEPTH)
    free = cute.arch.alloc_smem(cutlass.Int64, DEPTH)
    turn = cute.arch.alloc_smem(cutlass.Int64, GROUPS)
    sa = cute.make_tensor(cute.recast_ptr(pa, la.inner, dtype=BFloat16), la.outer)
    sb = cute.make_tensor(cute.recast_ptr(pb, lb.inner, dtype=BFloat16), lb.outer)
    sc = cute.make_tensor(pc, cute.make_layout((BM, BN, GROUPS), stride=(BN, 1, BM * BN)))
    if tid == 0:
        for s in cutlass.range_constexpr(DEPTH):
            cute.arch.mbarrier_init(ready + s, 1)
            cute.arch.mbarrier_init(free + s, 4)
        for g in cutlass.range_constexpr(GROUPS):
            cute.arch.mbarrier_init(turn + g, 128)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    kb, nt = cute.size(a, mode=[1]) // BK, cute.size(b, mode=[0]) // BN
    tiles = cute.size(a, mode=[0]) // BM * nt
    ga = cute.group_modes(cute.local_tile(a, (BM, BK), (None, None)), 0, 2)
    gb = cute.group_modes(cute.local_tile(b, (BN, BK), (None, None)), 0, 2)
    gc = cute.group_modes(cute.local_tile(c, (BM, BN), (None, None)), 0, 2)
    one = cute.make_layout(1)
    sa_t, ga_t = cpasync.tma_partition(tma_a, 0, one, cute.group_modes(sa, 0, 2), ga)
    sb_t, gb_t = cpasync.tma_partition(tma_b, 0, one, cute.group_modes(sb, 0, 2), gb)
    sc_t, gc_t = cpasync.tma_partition(tma_c, 0, one, cute.group_modes(sc, 0, 2), gc)
    mine = (tiles - cta + GRID - 1) // GRID
    if wid == 8:
        cute.arch.setmaxregister_decrease(40)
        for i in cutlass.range(mine * kb, unroll=1):
            s, tile, k = i % DEPTH, cta + i // kb * GRID, i % kb
            cute.arch.mbarrier_wait(free + s, (i // DEPTH & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ready + s, TX)
            cute.copy(tma_a, ga_t[None, tile // nt, k], sa_t[None, s], tma_bar_ptr=ready + s)
            cute.copy(tma_b, gb_t[None, tile % nt, k], sb_t[None, s], tma_bar_ptr=ready + s)
    else:
        group, member = wid // 4, tid % 128
        part = mma.get_slice(member)
        fa, fb = mma.make_fragment_A(part.partition_A(sa)), mma.make_fragment_B(part.partition_B(sb))
        where = part.partition_C(sc)
        acc = cute.make_rmem_tensor(where.shape[:3], Float32)
        own = EPILOGUE[0] + group * (EPILOGUE[1] - EPILOGUE[0])
        rounds = (mine - group + 1) // 2
        for r in cutlass.range(rounds, unroll=1):
            t = r * GROUPS + group
            tile = cta + t * GRID
            if t > 0:
                # The other group has issued its products.
                cute.arch.mbarrier_wait(turn + group, (r & 1) ^ 1 if group == 0 else r & 1)
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for k in cutlass.range(kb, unroll=1):
                i = t * kb + k
                s = i % DEPTH
                cute.arch.mbarrier_wait(ready + s, i // DEPTH & 1)
                warpgroup.fence()
                for step in cutlass.range_constexpr(BK // 16):
                    cute.gemm(mma, acc, fa[None, None, step, s], fb[None, None, step, s], acc)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(free + s)
            cute.arch.mbarrier_arrive(turn + 1 - group)
            if member < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=own, number_of_threads=128)
            cute.autovec_copy(acc, where[None, None, None, group])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=own, number_of_threads=128)  # stored
            if member < 32:
                cute.copy(tma_c, sc_t[None, group], gc_t[None, tile // nt, tile % nt])
                cute.arch.cp_async_bulk_commit_group()
        if member < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
    k = OperandMajorMode.K
    op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, BN, 16), warpgroup.OperandSource.SMEM, k, k)
    load = cpasync.CopyBulkTensorTileG2SOp()
    tma_a = cpasync.make_tiled_tma_atom(load, a, cute.slice_(ring(BM, 1), (None, None, 0)), (BM, BK))
    tma_b = cpasync.make_tiled_tma_atom(load, b, cute.slice_(ring(BN, 1), (None, None, 0)), (BN, BK))
    lc = cute.make_layout((BM, BN), stride=(BN, 1))
    tma_c = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), c, lc, (BM, BN))
    kernel = pingpong(cute.make_tiled_mma(op), *tma_a, *tma_b, *tma_c)
    kernel.launch(grid=(GRID, 1, 1), block=(288, 1, 1), stream=stream)


def main() -> None:
    a, b = torch.randn(192, 256, device="cuda").bfloat16(), torch.randn(64, 256, device="cuda").bfloat16()
    c = torch.empty(192, 64, device="cuda")
    tensors = [from_dlpack(t, assumed_align=16) for t in (a, b, c)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
