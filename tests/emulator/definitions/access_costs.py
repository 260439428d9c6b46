"""Costs of a warp's access to memory (docs/emulator/counters.md), lane by lane, in Python integers."""

from __future__ import annotations

from collections import defaultdict

Lanes = dict[int, int]  # lane -> address


def shared(lanes: Lanes, nbytes: int, load: bool) -> tuple[int, int, int]:
    """(wavefronts, conflicts, ideal wavefronts) of a load or store of shared memory."""
    together = 128 // max(nbytes, 4)
    if load and together < 32:
        for distance in (1, 2):
            if all(lanes[lane] == lanes[lane ^ distance] for lane in lanes if lane ^ distance in lanes):
                together *= 2
                break
    wavefronts = groups = 0
    everything = set()
    for first in range(0, 32, together):
        banks = defaultdict(set)
        for lane in range(first, min(first + together, 32)):
            if lane in lanes:
                for byte in range(nbytes):
                    word = (lanes[lane] + byte) // 4
                    banks[word % 32].add(word)
                    everything.add(word)
        if banks:
            groups += 1
            wavefronts += max(map(len, banks.values()))
    return wavefronts, wavefronts - groups, -(-len(everything) // 32)


def shared_atomic(lanes: Lanes) -> tuple[int, int, int]:
    """Of an atomic: lanes of one bank go one after the other."""
    banks = [address // 4 % 32 for address in lanes.values()]
    wavefronts = max(map(banks.count, banks))
    return wavefronts, wavefronts - 1, 1


def pieces(lanes: Lanes, size: int) -> int:
    """Sectors or lines of ``size`` bytes that an access to global memory touches."""
    return len({address // size for address in lanes.values()})


def atomic_sectors(lanes: Lanes) -> int:
    """Of passes that take the first lane left at every address."""
    left, sectors = list(lanes.values()), 0
    while left:
        now = set(left)
        sectors += len({address // 32 for address in now})
        for address in now:
            left.remove(address)
    return sectors
