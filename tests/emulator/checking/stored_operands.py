"""a @ b.T on Hopper: threads store both operands to shared memory, `b` by the swizzle `WRITTEN`."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import from_dlpack

M, N, K = 64, 32, 64
KIND = warpgroup.SmemLayoutAtomKind
WRITTEN = KIND.K_SW64


def layout(rows, kind):
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, BFloat16), (rows, K), order=(0, 1))


@cute.kernel
def product(mma: cute.TiledMma, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    la, lb = layout(M, KIND.K_SW128), layout(N, KIND.K_SW64)
    ma = cute.arch.alloc_smem(cutlass.Uint8, M * K * 2, alignment=1024)
    mb = cute.arch.alloc_smem(cutlass.Uint8, N * K * 2, alignment=1024)
    sa = cute.make_tensor(cute.recast_ptr(ma, la.inner, dtype=BFloat16), la.outer)
    sb = cute.make_tensor(cute.recast_ptr(mb, lb.inner, dtype=BFloat16), lb.outer)
    wb = layout(N, WRITTEN)
    tb = cute.make_tensor(cute.recast_ptr(mb, wb.inner, dtype=BFloat16), wb.outer)
    for i in cutlass.range(M * K // 128, unroll=1):
        e = i * 128 + thread
        sa[e // K, e % K] = a[e // K, e % K]
    for i in cutlass.range(N * K // 128, unroll=1):
        e = i * 128 + thread
        tb[e // K, e % K] = b[e // K, e % K]
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    part = mma.get_slice(thread)
    fa, fb = mma.make_fragment_A(part.partition_A(sa)), mma.make_fragment_B(part.partition_B(sb))
    tile = part.partition_C(c)
    acc = cute.make_rmem_tensor(tile.shape, Float32)
    acc.fill(0)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.fence()
    for step in cutlass.range_constexpr(K // 16):
        cute.gemm(mma, acc, fa[None, None, step], fb[None, None, step], acc)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    cute.autovec_copy(acc, tile)


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
    k = OperandMajorMode.K
    op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, N, 16), warpgroup.OperandSource.SMEM, k, k)
    product(cute.make_tiled_mma(op), a, b, c).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)


def main():
    a, b = torch.randn(M, K, device="cuda").bfloat16(), torch.randn(N, K, device="cuda").bfloat16()
    c = torch.empty(M, N, device="cuda")
    tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (a, b, c)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
