"""Reverses blocks of 64 numbers through shared memory, two blocks per CTA. One of its barriers is missing."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

THREADS, BLOCKS = 64, 2


@cute.kernel
def reverse(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    buffer = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, THREADS), cute.make_layout(THREADS))
    for block in cutlass.range(BLOCKS):
        first = (cta * BLOCKS + block) * THREADS
        buffer[thread] = x[first + thread]
        cute.arch.sync_threads()
        y[first + thread] = buffer[THREADS - 1 - thread]
        # Missing: cute.arch.sync_threads(). The other warp may still read the buffer when this one writes it again.


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    reverse(x, y).launch(grid=(cute.size(x) // (THREADS * BLOCKS), 1, 1), block=(THREADS, 1, 1), stream=stream)


x = torch.randn(512, device="cuda")
y = torch.empty_like(x)
launch(from_dlpack(x), from_dlpack(y), cuda.CUstream(torch.cuda.current_stream().cuda_stream))
torch.testing.assert_close(y, x.view(-1, THREADS).flip(1).flatten())
print("the result is right")
