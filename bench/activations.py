"""Activations of the dense GEMM over all FP32 numbers, on the GPU at hand: bits against the reference, and errors.

    python -m bench.activations                     # about a minute on an H100

Prints the largest error over |x| of each, against FP64, and returns 1 if the kernel and the reference differ anywhere.
"""

from __future__ import annotations

import math
import sys

import cuda.bindings.driver as driver
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace

from bench.activation_kernel import ActivationKernel
from cute_kernels.operations.reference.activations import ACTIVATIONS, SHORT

CHUNK = 1 << 26
"""FP32 numbers at a time."""

SHARES = {
    "silu": torch.sigmoid,
    "quick_gelu": lambda x: torch.sigmoid(1.702 * x),
    "gelu": lambda x: torch.special.erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
}


def measure(activation: str, dtype: torch.dtype) -> tuple[int, float]:
    """Numbers whose results differ in their bits between kernel and reference, and the largest error over |x|."""
    source = torch.empty(CHUNK, device="cuda")
    target = torch.empty_like(source)
    pointers = [make_ptr(Float32, t.data_ptr(), AddressSpace.gmem, assumed_align=4) for t in (source, target)]
    arguments = (*pointers, Int32(CHUNK), driver.CUstream(torch.cuda.current_stream().cuda_stream))
    kind = BFloat16 if dtype is torch.bfloat16 else Float32
    packed = torch.cuda.get_device_capability()[0] >= 10
    run = cute.compile(ActivationKernel(activation, kind, packed), *arguments)
    differing, worst = 0, 0.0
    for first in range(-(2**31), 2**31, CHUNK):
        bits = torch.arange(first, first + CHUNK, device="cuda").to(torch.int32)
        source.copy_(bits.view(torch.float32))
        run(*arguments)
        expected = ACTIVATIONS[activation](source, dtype)
        alike = (target.view(torch.int32) == expected.view(torch.int32)) | (target.isnan() & expected.isnan())
        differing += int((~alike).sum())
        if activation in SHORT:
            x = source.double()
            error = ((expected.double() - x * SHARES[activation](x)).abs() - 2.0**-150) / x.abs()
            worst = max(worst, float(error.nan_to_num(0.0, 0.0, 0.0).max()))
    return differing, worst


def main() -> int:
    """Returns 0, 1 if something differs, or 2 without a GPU."""
    if not torch.cuda.is_available():
        print("bench.activations: no CUDA device", file=sys.stderr)
        return 2
    total = 0
    for activation in ACTIVATIONS:
        for dtype in (torch.bfloat16, torch.float32):
            differing, worst = measure(activation, dtype)
            total += differing
            print(f"{activation}, {dtype}: {differing} differ, error at most {worst:.3g} |x|", flush=True)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
