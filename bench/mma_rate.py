"""How fast a device's ``mma.sync`` is by itself: operands in registers, nothing loaded and nothing stored."""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from cute_kernels.kernels.sm80.instructions import accumulator_type, mma_sync
from cute_kernels.plan.base import ITEMSIZE, LANES
from cute_kernels.plan.sm80 import STEP_BYTES

WARPS, CHAINS, REPEATS = 8, 16, 2
"""Of a CTA; products of a warp that do not wait for each other; each of them in a turn of the loop."""


class Rate:
    """A loop of products of one type, on operands that come from memory once."""

    def __init__(self, kind: str, turns: int) -> None:
        self.kind, self.turns, self.sum = kind, turns, accumulator_type(kind)

    @property
    def flops(self) -> int:
        """Of a CTA."""
        return 2 * 16 * 8 * (STEP_BYTES // ITEMSIZE[self.kind]) * WARPS * CHAINS * REPEATS * self.turns

    @cute.jit
    def __call__(self, out: cute.Pointer, operands: cute.Pointer, ctas: Int32, stream) -> None:
        """Launches the CTAs on ``stream``."""
        self.kernel(out, operands).launch(grid=(ctas, 1, 1), block=(LANES * WARPS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Pointer, operands: cute.Pointer) -> None:
        lane = cute.arch.thread_idx()[0] % LANES
        values = cute.make_tensor(operands, cute.make_layout(6 * LANES))
        a, b = ([values[i * LANES + lane] for i in part] for part in (range(4), range(4, 6)))
        sums = cute.make_rmem_tensor(cute.make_layout(CHAINS * 4), self.sum)
        for i in cutlass.range_constexpr(CHAINS * 4):
            sums[i] = self.sum(i)  # equal chains would be one
        for _ in cutlass.range(self.turns, unroll=1):
            for _ in cutlass.range_constexpr(REPEATS):
                for chain in cutlass.range_constexpr(CHAINS):
                    found = mma_sync(self.kind, [sums[4 * chain + e] for e in range(4)], a, b)
                    for e in cutlass.range_constexpr(4):
                        sums[4 * chain + e] = found[e]
        total = sums[0]
        for i in cutlass.range_constexpr(1, CHAINS * 4):
            total = total + sums[i]
        if total == 12345:  # all products are needed, and the memory hardly is
            cute.make_tensor(out, cute.make_layout(1))[0] = Float32(total)


def compiled(kind: str, arch: str, turns: int = 4096) -> tuple[Callable[[], None], int]:
    """A launch on every multiprocessor of the current device, and its floating-point (or integer) operations.

    Args:
        kind: element type of A, as torch names it.
        arch: of the binary.
        turns: of the loop.
    """
    import cuda.bindings.driver as driver
    from cutlass.cute.runtime import make_ptr

    out = torch.zeros(4, device="cuda")
    # Power depends on the operands: bits at random, of floating point without infinities and NaN.
    mask = -1 if accumulator_type(kind) is Int32 else 0x3F7F3F7F
    operands = torch.randint(-(2**31), 2**31, (6 * LANES,), device="cuda").to(torch.int32) & mask
    rate, ctas = Rate(kind, turns), torch.cuda.get_device_properties(0).multi_processor_count
    pointers = [
        make_ptr(element, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)
        for element, tensor in ((Float32, out), (Int32, operands))
    ]

    def stream() -> driver.CUstream:
        return driver.CUstream(torch.cuda.current_stream().cuda_stream)

    function = cute.compile(rate, *pointers, Int32(ctas), stream(), options=f"--gpu-arch={arch}")
    kept = (out, operands)

    def launch(slot: int = 0) -> None:
        assert kept
        function(*pointers, Int32(ctas), stream())

    return launch, rate.flops * ctas
