"""Functions of CuTe DSL with constexpr parameters, for `cute_kernels.explore.tune`."""

import cutlass
import cutlass.cute as cute


@cute.kernel
def double(x: cute.Tensor, y: cute.Tensor, per_thread: cutlass.Constexpr, wrong: cutlass.Constexpr):
    """Each thread doubles some neighbouring numbers."""
    first = (cute.arch.block_idx()[0] * 32 + cute.arch.thread_idx()[0]) * per_thread
    for i in cutlass.range_constexpr(per_thread):
        y[first + i] = x[first + i] * (3 if wrong else 2)


@cute.jit
def doubled(x: cute.Tensor, y: cute.Tensor, per_thread: cutlass.Constexpr = 1, wrong: cutlass.Constexpr = False):
    """y = 2 x, of a number of elements that CTAs of 32 threads share without a rest."""
    if cutlass.const_expr(cute.size(x) % (32 * per_thread)):
        raise ValueError(f"per_thread = {per_thread}: must divide {cute.size(x) // 32}")
    double(x, y, per_thread, wrong).launch(grid=(cute.size(x) // (32 * per_thread), 1, 1), block=(32, 1, 1))
