"""relu(q @ k.T) @ v on Hopper: one warp loads k and v into two rings, one warpgroup multiplies twice."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import from_dlpack

TOKENS, D, K_STAGES, V_STAGES = 64, 32, 3, 2  # 64 queries as well
TILE_BYTES = TOKENS * D * 2
LOAD_WARP, THREADS = 4, 160


def tile_layout(rows: int, columns: int, stages: int):
    kinds = warpgroup.SmemLayoutAtomKind
    atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if columns == 64 else kinds.K_SW64, BFloat16)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def tiles(rows: int, columns: int, stages: int):
    layout = tile_layout(rows, columns, stages)
    memory = cute.arch.alloc_smem(BFloat16, rows * columns * stages, alignment=1024)
    return cute.make_tensor(cute.recast_ptr(memory, layout.inner, dtype=BFloat16), layout.outer)


@cute.kernel
def attend(mma_s: cute.TiledMma, mma_o: cute.TiledMma, load_q: cute.CopyAtom, q: cute.Tensor,
           load_k: cute.CopyAtom, k: cute.Tensor, load_v: cute.CopyAtom, v: cute.Tensor, o: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    sq, sk = tiles(64, D, 1), tiles(TOKENS, D, K_STAGES)
    sv, sp = tiles(D, TOKENS, V_STAGES), tiles(64, TOKENS, 1)
    q_full = cute.arch.alloc_smem(cutlass.Int64, 1)
    k_full = cute.arch.alloc_smem(cutlass.Int64, K_STAGES)
    k_empty = cute.arch.alloc_smem(cutlass.Int64, K_STAGES)
    v_full = cute.arch.alloc_smem(cutlass.Int64, V_STAGES)
    v_empty = cute.arch.alloc_smem(cutlass.Int64, V_STAGES)
    if thread == 0:
        cute.arch.mbarrier_init(q_full, 1)
        for s in cutlass.range_constexpr(K_STAGES):
            cute.arch.mbarrier_init(k_full + s, 1)
            cute.arch.mbarrier_init(k_empty + s, 4)
        for s in cutlass.range_constexpr(V_STAGES):
            cute.arch.mbarrier_init(v_full + s, 1)
            cute.arch.mbarrier_init(v_empty + s, 4)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    gq = cute.group_modes(cute.local_tile(q, (64, D), (block, 0)), 0, 2)
    gk = cute.group_modes(cute.local_tile(k, (TOKENS, D), (None, 0)), 0, 2)
    gv = cute.group_modes(cute.local_tile(v, (D, TOKENS), (0, None)), 0, 2)
    one = cute.make_layout(1)
    q_to, q_from = cpasync.tma_partition(load_q, 0, one, cute.group_modes(sq, 0, 2), gq)
    k_to, k_from = cpasync.tma_partition(load_k, 0, one, cute.group_modes(sk, 0, 2), gk)
    v_to, v_from = cpasync.tma_partition(load_v, 0, one, cute.group_modes(sv, 0, 2), gv)
    steps = cute.size(k, mode=[0]) // TOKENS
    if warp == LOAD_WARP:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(q_full, TILE_BYTES)
        cute.copy(load_q, q_from, q_to[None, 0], tma_bar_ptr=q_full)
        for i in cutlass.range(steps, unroll=1):
            ks, vs = i % K_STAGES, i % V_STAGES
            cute.arch.mbarrier_wait(k_empty + ks, (i // K_STAGES & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(k_full + ks, TILE_BYTES)
            cute.copy(load_k, k_from[None, i], k_to[None, ks], tma_bar_ptr=k_full + ks)
            cute.arch.mbarrier_wait(v_empty + vs, (i // V_STAGES & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(v_full + vs, TILE_BYTES)
            cute.copy(load_v, v_from[None, i], v_to[None, vs], tma_bar_ptr=v_full + vs)
    else:
        part, o_part = mma_s.get_slice(thread), mma_o.get_slice(thread)
        fq, fk = mma_s.make_fragment_A(part.partition_A(sq)), mma_s.make_fragment_B(part.partition_B(sk))
        fp, fv = mma_o.make_fragment_A(o_part.partition_A(sp)), mma_o.make_fragment_B(o_part.partition_B(sv))
        p_tile = part.partition_C(sp[None, None, 0])
        scores = cute.make_rmem_tensor(p_tile.shape, Float32)
        o_tile = o_part.partition_C(cute.local_tile(o, (64, D), (block, 0)))
        sums = cute.make_rmem_tensor(o_tile.shape, Float32)
        p = cute.make_rmem_tensor(p_tile.shape, BFloat16)
        sums.fill(0)
        mma_s.set(warpgroup.Field.ACCUMULATE, True)
        mma_o.set(warpgroup.Field.ACCUMULATE, True)
        cute.arch.mbarrier_wait(q_full, 0)
        for i in cutlass.range(steps, unroll=1):
            ks, vs = i % K_STAGES, i % V_STAGES
            scores.fill(0)
            cute.arch.mbarrier_wait(k_full + ks, i // K_STAGES & 1)
            warpgroup.fence()
            for step in cutlass.range_constexpr(D // 16):
                cute.gemm(mma_s, scores, fq[None, None, step, 0], fk[None, None, step, ks], scores)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(k_empty + ks)
            for j in cutlass.range_constexpr(cute.size(p)):
                p[j] = cutlass.max(scores[j], Float32(0)).to(BFloat16)
            cute.arch.barrier(barrier_id=2, number_of_threads=128)
            cute.autovec_copy(p, p_tile)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            cute.arch.mbarrier_wait(v_full + vs, i // V_STAGES & 1)
            warpgroup.fence()
            for step in cutlass.range_constexpr(TOKENS // 16):
                cute.gemm(mma_o, sums, fp[None, None, step, 0], fv[None, None, step, vs], sums)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(v_empty + vs)
        cute.autovec_copy(sums, o_tile)


@cute.jit
def launch(q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, stream: cuda.CUstream):
    k_major = OperandMajorMode.K
    mma_s, mma_o = (
        cute.make_tiled_mma(warpgroup.MmaF16BF16Op(
            BFloat16, Float32, (64, columns, 16), warpgroup.OperandSource.SMEM, k_major, k_major))
        for columns in (TOKENS, D)
    )
    load = cpasync.CopyBulkTensorTileG2SOp()
    loads = []
    for each, shape in ((q, (64, D)), (k, (TOKENS, D)), (v, (D, TOKENS))):
        layout = cute.slice_(tile_layout(*shape, 1), (None, None, 0))
        loads += cpasync.make_tiled_tma_atom(load, each, layout, shape)
    kernel = attend(mma_s, mma_o, *loads, o)
    kernel.launch(grid=(cute.size(q, mode=[0]) // 64, 1, 1), block=(THREADS, 1, 1), stream=stream)


def main() -> None:
    q, k = (torch.randn(n * TOKENS, D, device="cuda").bfloat16() for n in (1, 5))
    v = torch.randn(D, 5 * TOKENS, device="cuda").bfloat16()  # transposed
    o = torch.empty(64, D, device="cuda")
    tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (q, k, v, o)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    expected = (q.float() @ k.float().T).relu().bfloat16().float() @ v.float().T
    torch.testing.assert_close(o, expected, rtol=1e-2, atol=1)


if __name__ == "__main__":
    main()
