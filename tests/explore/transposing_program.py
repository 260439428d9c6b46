"""A warp transposes a tile of 32 x 32 through shared memory, whose rows lie --pitch elements apart."""

import argparse

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

parser = argparse.ArgumentParser()
parser.add_argument("--pitch", type=int, default=32)
PITCH = parser.parse_args().pitch


@cute.kernel
def transpose(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    tile = cute.make_tensor(
        cute.arch.alloc_smem(cutlass.Float32, 32 * PITCH), cute.make_layout((32, 32), stride=(PITCH, 1))
    )
    kept = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, 32 * 32), cute.make_layout((32, 32), stride=(32, 1)))
    for i in cutlass.range_constexpr(32):
        tile[i, thread] = x[i, thread]
    cute.arch.sync_warp()
    for i in cutlass.range_constexpr(32):
        kept[i, thread] = tile[thread, i]
    for i in cutlass.range_constexpr(32):
        y[i, thread] = kept[i, thread]


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor):
    transpose(x, y).launch(grid=(1, 1, 1), block=(32, 1, 1))


x = torch.randn(32, 32, device="cuda")
y = torch.empty_like(x)
launch(from_dlpack(x), from_dlpack(y))
assert torch.equal(y, x.T)
