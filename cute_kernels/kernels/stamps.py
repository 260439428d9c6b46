"""Clock stamps of the warps of a kernel that is compiled for profiling; of any other kernel, nothing at all."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.kernels import ptx
from cute_kernels.plan import Plan
from cute_kernels.plan.base import BEGIN, COUNT, FINISH, HEADER, PHASE_BITS, SM, Phase, row_words


class Stamps:
    """Stamps of one warp, as `cute_kernels.plan.base` says. All its lanes call every method, one of them stores.

    Without a row nothing is generated.
    """

    def __init__(self, row: cute.Pointer | None = None, capacity: int = 0) -> None:
        self._row = row
        if row is not None:
            self._count = cute.make_rmem_tensor(cute.make_layout(1), Int32)
            self._count[0] = Int32(0)
            self._stores = Int32(cute.arch.lane_idx() == 0)
            self._limit = self._stores * capacity
            self._store_clock_and_time(BEGIN)

    def mark(self, phase: int) -> None:
        """A phase begins now, and the one before it ends."""
        if self._row is not None:
            stamp = cute.arch.clock64() << PHASE_BITS | int(phase)
            count = self._count[0]
            ptx.st_global_b64_if(self._row + (HEADER + count), stamp, Int32(count < self._limit))
            self._count[0] = count + 1

    def finish(self) -> None:
        """The warp's role is over."""
        if self._row is not None:
            self.mark(Phase.END)
            self._store_clock_and_time(FINISH)
            self._store(COUNT, Int64(self._count[0]))
            self._store(SM, Int64(cute.arch.smid()))

    def _store_clock_and_time(self, word: int) -> None:
        self._store(word, cute.arch.clock64())
        self._store(word + 1, cute.arch.globaltimer())

    def _store(self, word: int, value: Int64) -> None:
        ptx.st_global_b64_if(self._row + word, value, self._stores)


NO_STAMPS = Stamps()
"""Stamps of a kernel that is not profiled."""


def make_stamps(plan: Plan, profile: cute.Pointer | None, warp: Int32) -> Stamps:
    """Stamps of this warp.

    Args:
        plan: what was compiled for so many stamps.
        profile: the buffer of `cute_kernels.plan.base.profile_shape`, or None.
        warp: index in the CTA.
    """
    if profile is None:
        return NO_STAMPS
    row = cute.arch.block_idx()[0] * len(plan.roles) + warp
    return Stamps(profile + row * row_words(plan), plan.profile)


# --- time on a multiprocessor ----------------------------------------------------------------------------------------


@cute.jit
def idle(clocks: Int32) -> None:
    """Passes SM clocks; the difference is right across a wrap of the 32-bit counter."""
    start = cute.arch.clock()
    now = start
    while now - start < clocks:
        now = cute.arch.clock()
