"""Cost of one warp-wide access in the load/store unit: wavefronts of shared memory, sectors of global memory.

The rules, and where they are from, stand in ``core/meter.c``, which counts for what bytecode accesses as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cute_kernels.emulator.core.library import library

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
    total = np.zeros(3, np.int64)
    for places, mask in _requests(addresses, lanes):
        cost = np.zeros(3, np.int64)
        library().shared_cost(places.ctypes.data, mask, nbytes, load, cost.ctypes.data)
        total += cost
    return SharedCost(*total.tolist())


def _requests(addresses: np.ndarray, lanes: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """(an address for each of 32 lanes, mask of those that access) of each request; none where no lane does."""
    mask = sum(1 << lane for lane in lanes.tolist())
    for request in addresses if mask else ():
        places = np.zeros(LANES, np.int64)
        places[lanes] = request
        yield places, mask


def pieces(addresses: np.ndarray, size: int) -> int:
    """Distinct aligned pieces of ``size`` bytes (sectors, cache lines) that accesses touch, summed over the requests.

    Args:
        addresses: int64 [requests, active lanes], byte addresses; no access crosses the border of a piece.
    """
    requests = _requests(addresses, np.arange(addresses.shape[1]))
    return sum(library().distinct_pieces(places.ctypes.data, mask, size) for places, mask in requests)


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
