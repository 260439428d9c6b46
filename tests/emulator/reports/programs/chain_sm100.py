"""relu(q @ k.T) @ v on Blackwell by a pair of CTAs, which loads k and v together: scores alternate in TMEM."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
import torch
from cutlass import BFloat16, Float32, Int16, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import from_dlpack

TILE, RING, TURNS, CTAS = (128, 32, 32), 3, 2, 2
Q_BYTES, BYTES = TILE[0] * TILE[2] * 2, TILE[1] * TILE[2] * 2
MMA_WARP, LOAD_WARP, THREADS = 4, 5, 192  # warps 0 to 3 apply relu and store
COLUMNS = 128


@cute.jit
def initialise(q_full, o_full, full, empty, s_full, p_full, p_empty):
    cute.arch.mbarrier_init(q_full, 1)
    cute.arch.mbarrier_init(o_full, 1)
    for s in cutlass.range_constexpr(RING):
        cute.arch.mbarrier_init(full + s, 1)
        cute.arch.mbarrier_init(empty + s, CTAS)
    for t in cutlass.range_constexpr(TURNS):
        cute.arch.mbarrier_init(s_full + t, 1)
        cute.arch.mbarrier_init(p_full + t, 128)
        cute.arch.mbarrier_init(p_empty + t, 1)
    cute.arch.mbarrier_init_fence()


@cute.kernel
def attend(mma: cute.TiledMma, load_q: cute.CopyAtom, q: cute.Tensor, load_k: cute.CopyAtom, k: cute.Tensor,
           load_v: cute.CopyAtom, v: cute.Tensor, o: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    q_layout = sm100_utils.make_smem_layout_a(mma, TILE, BFloat16, 1)
    p_layout = sm100_utils.make_smem_layout_a(mma, TILE, BFloat16, TURNS)
    b_layout = sm100_utils.make_smem_layout_b(mma, TILE, BFloat16, RING)
    q_memory = cute.arch.alloc_smem(cutlass.Uint8, cute.cosize(q_layout.outer) * 2, alignment=1024)
    p_memory = cute.arch.alloc_smem(cutlass.Uint8, cute.cosize(p_layout.outer) * 2, alignment=1024)
    b_memory = cute.arch.alloc_smem(cutlass.Uint8, cute.cosize(b_layout.outer) * 2, alignment=1024)
    q_full = cute.arch.alloc_smem(cutlass.Int64, 1)
    full = cute.arch.alloc_smem(cutlass.Int64, RING)
    empty = cute.arch.alloc_smem(cutlass.Int64, RING)
    s_full = cute.arch.alloc_smem(cutlass.Int64, TURNS)
    p_full = cute.arch.alloc_smem(cutlass.Int64, TURNS)
    p_empty = cute.arch.alloc_smem(cutlass.Int64, TURNS)
    o_full = cute.arch.alloc_smem(cutlass.Int64, 1)
    holder = cute.arch.alloc_smem(Int32, 1)
    sq = cute.make_tensor(cute.recast_ptr(q_memory, q_layout.inner, dtype=BFloat16), q_layout.outer)
    sp = cute.make_tensor(cute.recast_ptr(p_memory, p_layout.inner, dtype=BFloat16), p_layout.outer)
    sb = cute.make_tensor(cute.recast_ptr(b_memory, b_layout.inner, dtype=BFloat16), b_layout.outer)
    rows = cute.tile_to_shape(
        tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW64, BFloat16), (TILE[0], TILE[2], TURNS),
        order=(0, 1, 2),
    )
    sp_rows = cute.make_tensor(cute.recast_ptr(p_memory, rows.inner, dtype=BFloat16), rows.outer)
    if thread == 0:
        initialise(q_full, o_full, full, empty, s_full, p_full, p_empty)
    if warp == MMA_WARP:
        cute.arch.alloc_tmem(COLUMNS, holder)
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    cute.arch.sync_threads()
    shape = mma.partition_shape_C(TILE[:2])
    layout = mma.make_fragment_C(cute.append(shape, TURNS + 1)).layout
    tensor = cute.make_tensor(cute.arch.retrieve_tmem_ptr(Float32, 16, holder), layout)
    part = mma.get_slice(0)
    gq = part.partition_A(cute.local_tile(q, (TILE[0], TILE[2]), (rank, 0)))
    gk = part.partition_B(cute.local_tile(k, (TILE[1], TILE[2]), (None, 0)))
    gv = part.partition_B(cute.local_tile(v, (TILE[1], TILE[2]), (0, None)))
    q_to, q_from = cpasync.tma_partition(load_q, 0, cute.make_layout(1), cute.group_modes(sq, 0, 3),
                                         cute.group_modes(gq, 0, 3))
    both = cute.make_layout(CTAS)
    b_to, k_from = cpasync.tma_partition(load_k, rank, both, cute.group_modes(sb, 0, 3), cute.group_modes(gk, 0, 3))
    _, v_from = cpasync.tma_partition(load_v, rank, both, cute.group_modes(sb, 0, 3), cute.group_modes(gv, 0, 3))
    blocks = cute.size(k, mode=[0]) // TILE[1]
    if warp == LOAD_WARP:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(q_full, Q_BYTES)
        cute.copy(load_q, q_from, q_to[None, 0], tma_bar_ptr=q_full)
        for i in cutlass.range(2 * blocks, unroll=1):
            stage, j = i % RING, i // 2
            cute.arch.mbarrier_wait(empty + stage, (i // RING & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, BYTES)
            if i % 2 == 0:
                cute.copy(load_k, k_from[None, j], b_to[None, stage], tma_bar_ptr=full + stage, mcast_mask=Int16(3))
            else:
                cute.copy(load_v, v_from[None, j], b_to[None, stage], tma_bar_ptr=full + stage, mcast_mask=Int16(3))
    elif warp == MMA_WARP:
        fq, fp, fb = mma.make_fragment_A(sq), mma.make_fragment_A(sp), mma.make_fragment_B(sb)
        sums = tensor[None, None, None, TURNS]
        cute.arch.mbarrier_wait(q_full, 0)
        for j in cutlass.range(blocks, unroll=1):
            t = j % TURNS
            stage = 2 * j % RING
            scores = tensor[None, None, None, t]
            cute.arch.mbarrier_wait(full + stage, 2 * j // RING & 1)
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for step in cutlass.range_constexpr(TILE[2] // 16):
                cute.gemm(mma, scores, fq[None, None, step, 0], fb[None, None, step, stage], scores)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(empty + stage, 3)
                tcgen05.commit(s_full + t)
            v_stage = (2 * j + 1) % RING
            cute.arch.mbarrier_wait(p_full + t, j // TURNS & 1)
            after_sync()
            cute.arch.mbarrier_wait(full + v_stage, (2 * j + 1) // RING & 1)
            mma.set(tcgen05.Field.ACCUMULATE, j != 0)
            for step in cutlass.range_constexpr(TILE[2] // 16):
                cute.gemm(mma, sums, fp[None, None, step, t], fb[None, None, step, v_stage], sums)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(empty + v_stage, 3)
                tcgen05.commit(p_empty + t)
        with cute.arch.elect_one():
            tcgen05.commit(o_full)
    else:
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(TILE[1])), Float32)
        read = tcgen05.make_tmem_copy(atom, tensor[(None, None), 0, 0, 0]).get_slice(thread)
        values = cute.make_rmem_tensor(read.partition_D(cute.make_identity_tensor(TILE[:2])).shape, Float32)
        for j in cutlass.range(blocks, unroll=1):
            t = j % TURNS
            cute.arch.mbarrier_wait(s_full + t, j // TURNS & 1)
            after_sync()
            cute.copy(read, read.partition_S(tensor[(None, None), 0, 0, t]), values)
            cute.arch.fence_view_async_tmem_load()
            cute.arch.mbarrier_wait(p_empty + t, (j // TURNS & 1) ^ 1)
            for n in cutlass.range_constexpr(TILE[1]):
                sp_rows[thread, n, t] = cutlass.max(values[n], Float32(0)).to(BFloat16)
            cute.arch.fence_proxy("async.shared", space="cta")
            before_sync()
            cute.arch.mbarrier_arrive(p_full + t)
        cute.arch.mbarrier_wait(o_full, 0)
        after_sync()
        cute.copy(read, read.partition_S(tensor[(None, None), 0, 0, TURNS]), values)
        cute.arch.fence_view_async_tmem_load()
        before_sync()
        for n in cutlass.range_constexpr(TILE[1]):
            o[rank * TILE[0] + thread, n] = values[n]
    cute.arch.sync_threads()
    if warp == MMA_WARP:
        after_sync()
        cute.arch.dealloc_tmem(tensor.iterator, COLUMNS)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def after_sync():
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;", write_only_types=[], read_only_args=[])


def before_sync():
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;", write_only_types=[], read_only_args=[])


@cute.jit
def launch(q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, stream: cuda.CUstream):
    majors = OperandMajorMode.K, OperandMajorMode.K
    mma = sm100_utils.make_trivial_tiled_mma(
        BFloat16, BFloat16, *majors, Float32, tcgen05.CtaGroup.ONE, TILE[:2], tcgen05.OperandSource.SMEM
    )
    al = cute.slice_(sm100_utils.make_smem_layout_a(mma, TILE, BFloat16, 1), (None, None, None, 0))
    bl = cute.slice_(sm100_utils.make_smem_layout_b(mma, TILE, BFloat16, RING), (None, None, None, 0))
    alone = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    shared = cpasync.CopyBulkTensorTileG2SMulticastOp(tcgen05.CtaGroup.ONE)
    load_q = cute.nvgpu.make_tiled_tma_atom_A(alone, q, al, TILE, mma, (1, CTAS, 1, 1))
    load_k = cute.nvgpu.make_tiled_tma_atom_B(shared, k, bl, TILE, mma, (1, CTAS, 1, 1))
    load_v = cute.nvgpu.make_tiled_tma_atom_B(shared, v, bl, TILE, mma, (1, CTAS, 1, 1))
    attend(mma, *load_q, *load_k, *load_v, o).launch(
        grid=(CTAS, 1, 1), cluster=(CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def main() -> None:
    q, k = torch.randn(256, 32, device="cuda").bfloat16(), torch.randn(5 * 32, 32, device="cuda").bfloat16()
    v = torch.randn(32, 5 * 32, device="cuda").bfloat16()  # transposed
    o = torch.empty(256, 32, device="cuda")
    tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (q, k, v, o)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    expected = (q.float() @ k.float().T).relu().bfloat16().float() @ v.float().T
    torch.testing.assert_close(o, expected, rtol=1e-2, atol=1)


if __name__ == "__main__":
    main()
