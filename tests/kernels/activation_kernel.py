"""A CuTe DSL kernel that applies an activation to an array, in a file: CuTe DSL compiles from files."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.kernels.epilogue import activate


class ActivationKernel:
    """Two neighbours to a thread; ``dtype`` is what the results would be rounded to."""

    def __init__(self, activation: str, dtype: type, packed: bool) -> None:
        self.activation, self.dtype, self.packed = activation, dtype, packed

    @cute.jit
    def __call__(self, source: cute.Pointer, target: cute.Pointer, count: Int32, stream: cuda.CUstream):
        self.kernel(source, target, count).launch(
            grid=(cute.ceil_div(count, 256), 1, 1), block=(128, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, source: cute.Pointer, target: cute.Pointer, count: Int32):
        i = (cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]) * 2
        if i + 1 < count:
            values, results = (cute.make_tensor(pointer, cute.make_layout((count,))) for pointer in (source, target))
            pair = (values[i], values[i + 1])
            results[i], results[i + 1] = activate(pair, self.activation, self.dtype, self.packed)
