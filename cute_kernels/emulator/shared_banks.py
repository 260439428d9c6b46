"""What one warp-wide access costs the load/store unit: wavefronts of shared memory, sectors of global memory.

Shared memory has 32 banks of 4 bytes; one pass through the data pipe (a wavefront, as Nsight Compute names it) delivers
one word per bank, and the same word to any number of lanes. The pipe moves at most 128 bytes of distinct words per
wavefront, so a warp with 8 bytes per lane is served by halves and with 16 bytes by quarters; a conflict is a wavefront
beyond the first of its half or quarter. Loads have an exception: when in every pair of lanes ``(i, i ^ 1)``, or in
every pair ``(i, i ^ 2)``, both read the same address, twice as many lanes are served together.

NVIDIA documents the banks; the groups and the exception are what its engineers wrote in its developer forum about
compute capability 7. `bench/counters.py` measures both on sm_90.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BANKS = 32
BANK_BYTES = 4
WAVEFRONT_BYTES = BANKS * BANK_BYTES
SECTOR_BYTES = 32
LINE_BYTES = 128
LANES = 32


@dataclass(frozen=True)
class SharedCost:
    """Cost of some warp-wide accesses to shared memory.

    Attributes:
        wavefronts: passes through the data pipe.
        conflicts: wavefronts beyond one for each group of lanes that is served together.
        ideal: wavefronts that the distinct words would need in the best arrangement, request by request.
    """

    wavefronts: int
    conflicts: int
    ideal: int


def shared_cost(addresses: np.ndarray, nbytes: int, lanes: np.ndarray | None = None, *, load: bool) -> SharedCost:
    """Cost of loads or stores that all lanes of a warp execute together.

    Args:
        addresses: int64 [requests, active lanes], byte addresses.
        nbytes: bytes per lane: 1, 2, 4, 8, 16 or 32.
        lanes: int [active lanes], lane numbers in ascending order; None: all 32.
        load: loads may be served in larger groups.
    """
    lanes = np.arange(LANES) if lanes is None else lanes
    if not len(lanes):
        return SharedCost(0, 0, 0)
    together = min(LANES, WAVEFRONT_BYTES // max(nbytes, BANK_BYTES))
    steps = np.arange(0, max(nbytes, BANK_BYTES), BANK_BYTES)
    words = (addresses[:, :, None] + steps) // BANK_BYTES
    if load and together < LANES:
        merged = _pairs_agree(addresses, lanes)
        parts = [(words[~merged], together), (words[merged], 2 * together)]
    else:
        parts = [(words, together)]
    wavefronts = groups = 0
    for part, size in parts:
        if len(part):
            for group in np.unique(lanes // size):
                wavefronts += int(_passes(part[:, lanes // size == group].reshape(len(part), -1)).sum())
                groups += len(part)
    distinct = _distinct(words.reshape(len(words), -1))
    return SharedCost(wavefronts, wavefronts - groups, int((-(-distinct // BANKS)).sum()))


def pieces(addresses: np.ndarray, size: int) -> int:
    """Distinct aligned pieces of ``size`` bytes (sectors, cache lines) that accesses touch, summed over the requests.

    Args:
        addresses: int64 [requests, active lanes], byte addresses; no access crosses the border of a piece.
    """
    return int(_distinct(addresses // size).sum()) if addresses.size else 0


def reduction_sectors(addresses: np.ndarray, size: int) -> int:
    """Sectors of atomics on global memory: lanes with one address go one after the other, each pass counts its own.

    As Nsight Compute counts them on an H200: 32 lanes at one address are 32 sectors (docs/emulator/counters.md).

    Args:
        addresses: int64 [requests, active lanes].
        size: bytes of a sector.
    """
    total = 0
    for request in addresses:
        _, first, repeats = np.unique(request, return_index=True, return_counts=True)
        sectors = request[first] // size
        total += sum(len(np.unique(sectors[repeats > before])) for before in range(repeats.max(initial=0)))
    return total


def atomic_wavefronts(addresses: np.ndarray) -> int:
    """Wavefronts of one atomic on shared memory: lanes that share a bank go one after the other, equal address or not.

    Args:
        addresses: int64 [active lanes].
    """
    return int(np.bincount(addresses // BANK_BYTES % BANKS).max()) if len(addresses) else 0


def _pairs_agree(addresses: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """Bool [requests]: whether lanes i and i ^ 1, or i and i ^ 2, have one address wherever both are active."""
    place = {int(lane): index for index, lane in enumerate(lanes)}
    result = np.zeros(len(addresses), bool)
    for distance in (1, 2):
        pairs = [(place[i], place[i ^ distance]) for i in place if i & distance == 0 and i ^ distance in place]
        first, second = np.array(pairs, np.int64).reshape(-1, 2).T
        result |= (addresses[:, first] == addresses[:, second]).all(axis=1)
    return result


def _new(items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows sorted, and where an item differs from the one before it in its row."""
    ordered = np.sort(items, axis=1)
    new = np.ones(ordered.shape, bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return ordered, new


def _distinct(items: np.ndarray) -> np.ndarray:
    return _new(items)[1].sum(axis=1)


def _passes(words: np.ndarray) -> np.ndarray:
    """Int [rows]: most distinct words in one bank."""
    ordered, new = _new(words)
    rows = np.broadcast_to(np.arange(len(words))[:, None], words.shape)
    cells = (rows * BANKS + ordered % BANKS)[new]
    return np.bincount(cells, minlength=len(words) * BANKS).reshape(-1, BANKS).max(axis=1)
