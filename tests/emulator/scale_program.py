"""A program for test_capturing.py, written as for a GPU: y = factor * x + 1, checked against torch."""

from __future__ import annotations

import argparse

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack

THREADS = 64


@cute.kernel
def scale(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, count: cutlass.Int32):
    """One element per thread."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < count:
        y[i] = factor * x[i] + 1


@cute.jit
def host(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, count: cutlass.Int32, stream: cuda.CUstream):
    """Enough blocks for ``count`` elements."""
    blocks = (count + THREADS - 1) // THREADS
    scale(x, y, factor, count).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--overrun", type=int, default=0)
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--on-cpu", action="store_true")
    options = parser.parse_args()
    assert torch.cuda.is_available()
    torch.manual_seed(0)
    x = torch.randn(options.count, device="cuda")
    y = torch.zeros(options.count, device="cpu" if options.on_cpu else "cuda")
    assert y.is_cuda != options.on_cpu
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    tensors = [from_dlpack(t).mark_layout_dynamic() for t in (x, y)]
    compiled = cute.compile(host, *tensors, cutlass.Float32(2), cutlass.Int32(options.count), stream)
    factor, count = cutlass.Float32(3 if options.wrong else 2), cutlass.Int32(options.count + options.overrun)
    compiled(*tensors, factor, count, stream)
    torch.cuda.synchronize()
    torch.testing.assert_close(y.cpu(), 2 * x.cpu() + 1)
    print(f"PASS on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
