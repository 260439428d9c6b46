"""a @ b.T on Blackwell by one CTA: two accumulators in tensor memory, so that products and epilogue overlap."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
import torch
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import from_dlpack

TILE, SLOTS, ACCS = (128, 32, 64), 2, 2
BYTES = (TILE[0] + TILE[1]) * TILE[2] * 2
TMEM = 64


@cute.kernel
def twoacc(mma: cute.TiledMma, tma_a: cute.CopyAtom, a: cute.Tensor, tma_b: cute.CopyAtom, b: cute.Tensor,
           c: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    wid = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    la = sm100_utils.make_smem_layout_a(mma, TILE, BFloat16, SLOTS)
    lb = sm100_utils.make_smem_layout_b(mma, TILE, BFloat16, SLOTS)
    pa = cute.arch.alloc_smem(cutlass.Uint8, cute.cosize(la.outer) * 2, alignment=1024)
    pb = cute.arch.alloc_smem(cutlass.Uint8, cute.cosize(lb.outer) * 2, alignment=1024)
    ab_full = cute.arch.alloc_smem(cutlass.Int64, SLOTS)
    ab_empty = cute.arch.alloc_smem(cutlass.Int64, SLOTS)
    acc_full = cute.arch.alloc_smem(cutlass.Int64, ACCS)
    acc_empty = cute.arch.alloc_smem(cutlass.Int64, ACCS)
    holder = cute.arch.alloc_smem(Int32, 1)
    sa = cute.make_tensor(cute.recast_ptr(pa, la.inner, dtype=BFloat16), la.outer)
    sb = cute.make_tensor(cute.recast_ptr(pb, lb.inner, dtype=BFloat16), lb.outer)
    if tid == 0:
        for s in cutlass.range_constexpr(SLOTS):
            cute.arch.mbarrier_init(ab_full + s, 1)
            cute.arch.mbarrier_init(ab_empty + s, 1)
        for s in cutlass.range_constexpr(ACCS):
            cute.arch.mbarrier_init(acc_full + s, 1)
            cute.arch.mbarrier_init(acc_empty + s, 128)
        cute.arch.mbarrier_init_fence()
    if wid == 4:
        cute.arch.alloc_tmem(TMEM, holder)
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.sync_threads()
    shape = cute.append(mma.partition_shape_C(TILE[:2]), ACCS)
    acc = cute.make_tensor(cute.arch.retrieve_tmem_ptr(Float32, 16, holder), mma.make_fragment_C(shape).layout)
    part = mma.get_slice(0)
    ga = part.partition_A(cute.local_tile(a, (TILE[0], TILE[2]), (None, None)))
    gb = part.partition_B(cute.local_tile(b, (TILE[1], TILE[2]), (None, None)))
    gc = part.partition_C(cute.local_tile(c, TILE[:2], (None, None)))
    one = cute.make_layout(1)
    sa_t, ga_t = cpasync.tma_partition(tma_a, 0, one, cute.group_modes(sa, 0, 3), cute.group_modes(ga, 0, 3))
    sb_t, gb_t = cpasync.tma_partition(tma_b, 0, one, cute.group_modes(sb, 0, 3), cute.group_modes(gb, 0, 3))
    kb, nt = cute.size(a, mode=[1]) // TILE[2], cute.size(b, mode=[0]) // TILE[1]
    tiles = cute.size(a, mode=[0]) // TILE[0] * nt
    if wid == 5:
        for i in cutlass.range(tiles * kb, unroll=1):
            s, tile, k = i % SLOTS, i // kb, i % kb
            cute.arch.mbarrier_wait(ab_empty + s, (i // SLOTS & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ab_full + s, BYTES)
            cute.copy(tma_a, ga_t[None, tile // nt, k], sa_t[None, s], tma_bar_ptr=ab_full + s)
            cute.copy(tma_b, gb_t[None, tile % nt, k], sb_t[None, s], tma_bar_ptr=ab_full + s)
    elif wid == 4:
        fa, fb = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        for tile in cutlass.range(tiles, unroll=1):
            w = tile % ACCS
            cute.arch.mbarrier_wait(acc_empty + w, (tile // ACCS & 1) ^ 1)
            tcgen05_fence_after()
            mma.set(tcgen05.Field.ACCUMULATE, False)
            target = acc[None, None, None, w]
            for k in cutlass.range(kb, unroll=1):
                i = tile * kb + k
                s = i % SLOTS
                cute.arch.mbarrier_wait(ab_full + s, i // SLOTS & 1)
                for step in cutlass.range_constexpr(TILE[2] // 16):
                    cute.gemm(mma, target, fa[None, None, step, s], fb[None, None, step, s], target)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                with cute.arch.elect_one():
                    tcgen05.commit(ab_empty + s)
            with cute.arch.elect_one():
                tcgen05.commit(acc_full + w)
    else:
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(TILE[1])), Float32)
        rows = acc[(None, None), 0, 0, None]
        read = tcgen05.make_tmem_copy(atom, rows[None, None, 0]).get_slice(tid)
        source = read.partition_S(rows)
        values = cute.make_rmem_tensor(read.partition_D(cute.make_identity_tensor(TILE[:2])).shape, Float32)
        for tile in cutlass.range(tiles, unroll=1):
            w = tile % ACCS
            cute.arch.mbarrier_wait(acc_full + w, tile // ACCS & 1)
            tcgen05_fence_after()
            cute.copy(read, source[None, None, None, w], values)
            cute.arch.fence_view_async_tmem_load()
            tcgen05_fence_before()
            cute.arch.mbarrier_arrive(acc_empty + w)
            cute.autovec_copy(values, read.partition_D(gc[(None, None), 0, 0, tile // nt, tile % nt]))
    cute.arch.sync_threads()
    if wid == 4:
        cute.arch.dealloc_tmem(acc.iterator, TMEM)


def tcgen05_fence_after():
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;", write_only_types=[], read_only_args=[])


def tcgen05_fence_before():
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;", write_only_types=[], read_only_args=[])


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
    majors = OperandMajorMode.K, OperandMajorMode.K
    mma = sm100_utils.make_trivial_tiled_mma(
        BFloat16, BFloat16, *majors, Float32, tcgen05.CtaGroup.ONE, TILE[:2], tcgen05.OperandSource.SMEM
    )
    la = cute.slice_(sm100_utils.make_smem_layout_a(mma, TILE, BFloat16, SLOTS), (None, None, None, 0))
    lb = cute.slice_(sm100_utils.make_smem_layout_b(mma, TILE, BFloat16, SLOTS), (None, None, None, 0))
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    tma_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, la, TILE, mma, (1, 1, 1, 1))
    tma_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, lb, TILE, mma, (1, 1, 1, 1))
    twoacc(mma, *tma_a, *tma_b, c).launch(grid=(1, 1, 1), block=(192, 1, 1), stream=stream)


def main() -> None:
    a, b = torch.randn(256, 192, device="cuda").bfloat16(), torch.randn(192, 192, device="cuda").bfloat16()
    c = torch.empty(len(a), len(b), device="cuda")
    tensors = [from_dlpack(t, assumed_align=16) for t in (a, b, c)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
