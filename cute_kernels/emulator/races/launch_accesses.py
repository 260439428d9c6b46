"""Accesses of clusters to global memory, as data that one process tells another: which bytes they read and wrote.

It is made of the race detector's shadow memory, in spans of 1 MiB: codes of the granules of 16 bytes, and of the bytes
of granules that were accessed in pieces, as runs of equal codes.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cute_kernels.emulator.races.shadow import GRANULE, LANE_BITS, STRONG, Epochs, Plane, Shadow

Region = tuple[int, int]
"""First address and bytes."""
SPAN = 1 << 20
"""Bytes of memory that are looked at together."""
READ, STRONG_READ, WRITTEN, STRONGLY_WRITTEN = 1, 2, 4, 8
"""Codes of a place, which are added."""
WRITES = WRITTEN | STRONGLY_WRITTEN
MAP_BYTES = 128
"""Bytes of a tensor map."""
_GRANULE = np.dtype(f"V{GRANULE}")  # items, which NumPy moves faster than rows of bytes


@dataclass(frozen=True)
class Runs:
    """Codes of places side by side: uint8 [runs], and how many places have each, int32 [runs]."""

    codes: np.ndarray
    lengths: np.ndarray

    @staticmethod
    def of(codes: np.ndarray) -> Runs:
        """Runs of equal codes, of a code for each place, uint8 [places]."""
        starts = np.concatenate([[0], np.flatnonzero(codes[1:] != codes[:-1]) + 1])
        return Runs(codes[starts], np.diff(starts, append=len(codes)).astype(np.int32))

    def expand(self) -> np.ndarray:
        """A code for each place, uint8 [places]."""
        return np.repeat(self.codes, self.lengths)


@dataclass(frozen=True)
class Span:
    """Accesses to a span of a region."""

    region: Region  # first address and bytes of the region's window
    start: int  # first byte of the span in the window
    granules: Runs  # codes of granules; 0 for those that are kept by bytes
    single: Runs | None  # codes of bytes, 0 for those of other granules; None where no granule is kept by bytes

    def by_granule(self) -> np.ndarray:
        """A code for each granule, which has everything that was done to a byte of it, uint8 [granules]."""
        codes = self.granules.expand()
        if self.single is None:
            return codes
        return codes | np.bitwise_or.reduce(self.single.expand().reshape(-1, GRANULE), axis=1)

    def by_byte(self) -> np.ndarray:
        """A code for each byte, uint8 [bytes]."""
        codes = np.repeat(self.granules.expand(), GRANULE)
        return codes if self.single is None else codes | self.single.expand()

    def overwrites(self, address: int, nbytes: int) -> bool:
        """Whether bytes from an address on were written."""
        first = address - self.region[0] - self.start
        if not -nbytes < first < SPAN:
            return False
        return bool((self.by_byte()[max(first, 0) : first + nbytes] & WRITES).any())

    def written(self) -> bytes:
        """The bytes that were written, as memory has them now."""
        return b"".join(cells[chosen].tobytes() for cells, chosen in self._written())

    def write(self, data: bytes) -> None:
        """Puts what `written` returned into this process's memory."""
        start = 0
        for cells, chosen in self._written():
            count = np.count_nonzero(chosen)
            cells[chosen] = np.frombuffer(data, cells.dtype, count, start)
            start += count * cells.itemsize

    def _written(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Memory by granules, then by bytes, and which of them were written there."""
        origin, nbytes = self.region
        size = min(nbytes - self.start, SPAN)
        cells = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(origin + self.start))
        whole = size // GRANULE  # an access of a whole granule does not leave the region
        yield cells[: whole * GRANULE].view(_GRANULE), self.granules.expand()[:whole] & WRITES != 0
        if self.single is not None:
            yield cells, self.single.expand()[:size] & WRITES != 0


def spans_of(region: Region, memory: Shadow, epochs: Epochs, first: int) -> Iterator[Span]:
    """Accesses to a region with this shadow since an epoch, by span."""
    low, high = memory.accessed  # a launch uses little of all memory, and shadows of the rest have no pages yet
    used = slice(low // GRANULE, -(-high // GRANULE))
    used_bytes = slice(used.start * GRANULE, used.stop * GRANULE)
    for start in range(low // SPAN * SPAN, high, SPAN):
        granules = slice(start // GRANULE, (start + SPAN) // GRANULE)
        codes, single = _codes(memory.coarse, granules, used, epochs, first), None
        if memory.fine is not None:
            split = memory.split_granules()[granules]
            if split.any():
                codes[split] = 0
                places = slice(granules.start * GRANULE, granules.stop * GRANULE)
                single = _codes(memory.fine, places, used_bytes, epochs, first)
        if codes.any() or (single is not None and single.any()):
            yield Span(region, start, Runs.of(codes), None if single is None else Runs.of(single))


def _codes(plane: Plane, places: slice, used: slice, epochs: Epochs, first: int) -> np.ndarray:
    """Codes of places, uint8 [places]; all that was accessed is among those that were used."""
    all_codes = np.zeros(len(plane.writes[places]), np.uint8)
    chosen = slice(max(places.start, used.start), min(places.stop, used.stop))
    codes = all_codes[chosen.start - places.start : chosen.stop - places.start]
    for layers, weak, strong in (([plane.writes], WRITTEN, STRONGLY_WRITTEN), (plane.readers(), READ, STRONG_READ)):
        for layer in layers:
            numbers = layer[chosen] >> LANE_BITS
            mine = numbers >= first
            if mine.any():
                kinds = np.where(epochs.generic[numbers] == STRONG, strong, weak).astype(np.uint8)
                codes |= np.where(mine, kinds, np.uint8(0))
    return all_codes


def meeting(parts: Sequence[Sequence[Span]]) -> tuple[Region, int] | None:
    """Region and byte of it that one part has written and another one has accessed; None: there is none."""
    together: dict[tuple[Region, int], list[Span]] = defaultdict(list)
    for spans in parts:
        for span in spans:
            together[span.region, span.start].append(span)
    for (region, start), spans in together.items():
        if len(spans) > 1 and _meet([span.by_granule() for span in spans]) is not None:
            # Parts may have written bytes of a granule each.
            byte = _meet([span.by_byte() for span in spans])
            if byte is not None:
                return region, start + byte
    return None


@dataclass(frozen=True)
class Meeting:
    """A place that two launches have accessed: region, byte of it, and the codes of what each did to it."""

    region: Region
    byte: int
    codes: tuple[int, int]


def racing(first: Sequence[Span], second: Sequence[Span]) -> Meeting | None:
    """Where two launches that nothing orders race: one has written, not both atomically; None: nowhere."""
    earlier = {(span.region, span.start): span for span in first}
    for span in second:
        other = earlier.get((span.region, span.start))
        if other is None or not _race(other.by_granule(), span.by_granule()).any():
            continue
        codes = other.by_byte(), span.by_byte()
        places = np.flatnonzero(_race(*codes))  # pieces of a granule may be of one launch each
        if len(places):
            byte = int(places[0])
            return Meeting(span.region, span.start + byte, (int(codes[0][byte]), int(codes[1][byte])))
    return None


def _race(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where the codes of two launches are a race, bool [places]."""
    one_way = [((one & WRITTEN) != 0) & (other != 0) | ((one & WRITES) != 0) & ((other & READ) != 0)
               for one, other in ((a, b), (b, a))]  # fmt: skip
    return one_way[0] | one_way[1]


def _meet(parts: Sequence[np.ndarray]) -> int | None:
    """The first place that one part has written and another has accessed."""
    accessed, written = np.zeros(len(parts[0]), bool), np.zeros(len(parts[0]), bool)
    for codes in parts:
        own, writes = codes != 0, codes & WRITES != 0
        meet = (writes & accessed) | (own & written)
        if meet.any():
            return int(np.argmax(meet))
        accessed |= own
        written |= writes
    return None
