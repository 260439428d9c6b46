"""The registers that the warps of a CTA have, and what `setmaxnreg` moves between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_FILE = 65536  # registers of an SM, a quarter of them in each of its partitions, among which warps are dealt in turn
_GRANULARITY = 8  # registers of a thread are allocated in eights


def at_entry(threads: int, *, most: int | None, ctas_per_sm: int | None) -> int | None:
    """Registers of a thread when a kernel with `setmaxnreg` begins; None where ptxas cannot know and ignores it.

    What ptxas 13.0 gives such kernels: `.maxnreg`, or the most with which `.minnctapersm` CTAs of the declared size
    fit an SM.

    Args:
        threads: of a CTA.
        most: `.maxnreg`.
        ctas_per_sm: `.minnctapersm`; counts only beside `.reqntid` or `.maxntid`, which the caller knows.
    """
    if most is not None:
        return -(-most // _GRANULARITY) * _GRANULARITY
    if ctas_per_sm is None:
        return None
    warps_of_partition = -(-ctas_per_sm * -(-threads // 32) // 4)
    fits = _FILE // 4 // (32 * warps_of_partition) // _GRANULARITY * _GRANULARITY
    return min(fits, 256)


class RegisterPool:
    """What of a CTA's registers its warps hold; the rest is free for `setmaxnreg.inc`.

    Warps that have exited hold none: the PTX ISA does not say so, and the other reading would report more.
    """

    def __init__(self, at_entry: int, warps: list[Any], runs: Callable[[Any], bool]) -> None:
        """Args: registers of a thread, the warps of the CTA, whether a warp has not exited."""
        self.held = dict.fromkeys(warps, at_entry)
        self.total = 32 * at_entry * len(warps)
        self._runs = runs

    def free(self) -> int:
        """Registers that no warp holds."""
        return self.total - 32 * sum(count for warp, count in self.held.items() if self._runs(warp))

    def wanted(self, warp: Any, count: int) -> int:
        """Registers that a warp lacks for ``count`` per thread."""
        return 32 * (count - self.held[warp])

    def describe(self, warp: Any, count: int) -> str:
        """Who holds what, for a report."""
        holders: dict[int, int] = {}
        for each, held in self.held.items():
            if self._runs(each):
                holders[held] = holders.get(held, 0) + 1
        held = ", ".join(f"{warps} warps of {each} per thread" for each, warps in sorted(holders.items()))
        return (
            f"{self.wanted(warp, count):,} registers, to have {count} per thread instead of {self.held[warp]}; of the "
            f"CTA's {self.total:,}, {self.free():,} are free ({held})"
        )
