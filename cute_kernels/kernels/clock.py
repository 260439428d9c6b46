"""Time on a multiprocessor."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def idle(clocks: Int32) -> None:
    """Passes SM clocks; the difference is right across a wrap of the 32-bit counter."""
    start = cute.arch.clock()
    now = start
    while now - start < clocks:
        now = cute.arch.clock()
