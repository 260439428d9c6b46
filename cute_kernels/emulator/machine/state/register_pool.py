"""The registers that the warps of a CTA have, and what `setmaxnreg` moves between them."""

from cute_kernels.emulator.facts import ranges

_FILE = 65536  # registers of an SM, a quarter of them in each of its partitions, among which warps are dealt in turn
_GRANULARITY = 8  # registers of a thread are allocated in eights


def at_entry(threads: int, *, most: int | None, ctas_per_sm: int | None) -> int | None:
    """Registers of a thread when a kernel with `setmaxnreg` begins; None where ptxas cannot know and ignores it.

    What ptxas 13.0 gives such kernels: ``most`` (`.maxnreg`), or the most with which ``ctas_per_sm`` (`.minnctapersm`)
    CTAs of the declared size, so many ``threads``, fit an SM. The latter counts only beside `.reqntid` or `.maxntid`,
    which the caller knows."""
    if most is not None:
        return -(-most // _GRANULARITY) * _GRANULARITY
    if ctas_per_sm is None:
        return None
    warps_of_partition = -(-ctas_per_sm * -(-threads // 32) // 4)
    fits = _FILE // 4 // (32 * warps_of_partition) // _GRANULARITY * _GRANULARITY
    return min(fits, 256)


class RegisterPool:
    """Registers of a CTA by the warps, their numbers in it, that hold them; the rest is free for `setmaxnreg.inc`.

    There are as many as the CTA begins with, whatever else an SM has, and warps that have exited keep theirs: of 14
    kernels on an H100 those hang that ask for more, among them one of 384 threads that enter with 168 and would have
    65,536 together. The PTX ISA says neither.
    """

    def __init__(self, at_entry: int, warps: int) -> None:
        """Args: registers of a thread when the kernel begins, the number of warps of the CTA."""
        self.held = dict.fromkeys(range(warps), at_entry)
        self.total = 32 * at_entry * warps
        self.changed: set[int] = set()  # warps that have given or taken
        self.takers: list[tuple[int, int]] = []  # column and clock of each setmaxnreg.inc, of the race detector

    def free(self) -> int:
        """Registers that no warp holds."""
        return self.total - 32 * sum(self.held.values())

    def lacks(self, warp: int, count: int) -> int:
        """Registers that a warp does not hold of ``count`` per thread."""
        return 32 * max(count - self.held[warp], 0)

    def has_room(self, warp: int, count: int) -> bool:
        return self.lacks(warp, count) <= self.free()

    def describe(self, warp: int, count: int) -> str:
        """The wait of a warp that has no room, in words: registers that it lacks, and who holds how many."""
        holders: dict[int, list[int]] = {}
        for each, held in self.held.items():
            holders.setdefault(held, []).append(each)
        held = ", ".join(f"warps {ranges(warps)} hold {each} per thread" for each, warps in holders.items())
        return (
            f"waits at setmaxnreg.inc for {self.lacks(warp, count):,} registers: it has {self.held[warp]} per thread "
            f"and asks for {count}; of the CTA's {self.total:,} {self.free():,} are free ({held})"
        )
