"""A CuTe DSL kernel that applies an activation to an array, for test_activations.py. CuTe DSL compiles from files."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.kernels.epilogue import activate


class ActivationKernel:
    def __init__(self, activation: str) -> None:
        self.activation = activation

    @cute.jit
    def __call__(self, source: cute.Pointer, target: cute.Pointer, count: Int32, stream: cuda.CUstream):
        self.kernel(source, target, count).launch(
            grid=(cute.ceil_div(count, 128), 1, 1), block=(128, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, source: cute.Pointer, target: cute.Pointer, count: Int32):
        i = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
        if i < count:
            value = cute.make_tensor(source, cute.make_layout((count,)))[i]
            cute.make_tensor(target, cute.make_layout((count,)))[i] = activate(
                value, cutlass.const_expr(self.activation)
            )
