"""How many clusters of a launch a chip holds at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class _Chip:
    """Multiprocessors by GPC, of which a cluster needs one for each CTA; and what each of them holds.

    Attributes:
        gpcs: multiprocessors of each; where that is not known, all of them as if in one.
        shared, threads, ctas: bytes of shared memory, threads and CTAs of a multiprocessor.
        cluster: CTAs of a cluster at most.
    """

    gpcs: tuple[int, ...]
    shared: int
    threads: int = 2048
    ctas: int = 32
    cluster: int = 1

    @property
    def multiprocessors(self) -> int:
        """All of them."""
        return sum(self.gpcs)


#: By architecture: A100, GeForce RTX 3090 and 4090, H100 SXM, B200, GeForce RTX 5090. The GPCs are those with which
#: cuOccupancyMaxActiveClusters of one H100 agrees, for clusters of 1 to 16 CTAs with one and two on a multiprocessor.
_CHIPS = {
    80: _Chip((108,), 164 << 10),
    86: _Chip((82,), 100 << 10, 1536, 16),
    89: _Chip((128,), 100 << 10, 1536, 24),
    90: _Chip((18,) * 2 + (16,) * 5 + (8,) + (2,) * 4, 228 << 10, cluster=16),
    100: _Chip((148,), 228 << 10, cluster=16),
    120: _Chip((170,), 100 << 10, 1536, 24, cluster=16),
}
_REGISTERS = 65536  # of a multiprocessor


def chip_of(target: str) -> _Chip:
    """The chip of a target; another architecture counts as the one before it."""
    architecture = int("".join(filter(str.isdigit, target)) or 0)
    return _CHIPS[max((known for known in _CHIPS if known <= architecture), default=min(_CHIPS))]


def capacity(target: str, ctas: int, threads: int, shared_bytes: int, registers: int | None) -> int:
    """How many clusters the chip of a target holds at once, 1 at least.

    Args:
        target: of the PTX, e.g. ``"sm_90a"``.
        ctas: of a cluster.
        threads, shared_bytes: of a CTA, with the system's shared memory.
        registers: of a thread, None where the PTX does not say so and they count for nothing.
    """
    chip = chip_of(target)
    threads = -(-threads // 32) * 32
    fit = [chip.ctas, chip.threads // threads, chip.shared // shared_bytes]
    if registers is not None:
        fit.append(_REGISTERS // (registers * threads))
    return max(sum(count * min(fit) // ctas for count in chip.gpcs if ctas <= count), 1)
