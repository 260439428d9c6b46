"""Detectors of what a schedule alone may hide: missing proxy fences and overwritten sources of asynchronous reads.

The async proxy (TMA, tensor core) does not see writes made through the generic proxy (st.shared) until the writer has
executed fence.proxy.async (PTX ISA, "Async proxy"). Emulated memory is always coherent, so the bug would never show in
results; `ProxyTracker` therefore keeps, per 16-byte granule of shared memory, which warp wrote it last through the
generic proxy without a fence since.

Limit: a fence counts only when the writing warp executes it. PTX would also accept one by the reading thread after it
synchronised with the writer; that pattern is reported as missing.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels.emulator.errors import ProxyFenceMissing, SharedMemoryRace

GRANULE = 16  # bytes; the smallest unit that any asynchronous operation reads


@dataclass
class _PendingRead:
    """Bytes [start, end) of a CTA, or of these only the granules with the given indices."""

    cta_rank: int
    start: int
    end: int
    granules: np.ndarray | None
    describe: str

    def overlap(self, offsets: np.ndarray, nbytes: int) -> int | None:
        """The first of ``offsets`` at which ``nbytes`` overlap this read, or None."""
        hit = (offsets < self.end) & (offsets + nbytes > self.start)
        if self.granules is not None and hit.any():
            steps = np.arange(0, nbytes + GRANULE - 1, GRANULE)
            touched = np.minimum(offsets[..., None] + steps, offsets[..., None] + nbytes - 1) // GRANULE
            hit = np.isin(touched, self.granules).any(axis=-1)
        return int(np.atleast_1d(offsets)[np.atleast_1d(hit)][0]) if hit.any() else None


@dataclass
class _Written:
    """Bounds, in granules, of what one warp wrote in one CTA since its last fence."""

    low: int
    high: int


def _granules(offsets: Any, nbytes: int) -> Any:
    """Index of the granules of one byte range, or of one aligned granule per offset of an array."""
    if isinstance(offsets, int):
        return slice(offsets >> 4, (offsets + nbytes + GRANULE - 1) >> 4)
    if nbytes != GRANULE:
        raise ValueError(f"an array of offsets stands for granules of {GRANULE} bytes, not {nbytes}")
    return offsets >> 4


class ProxyTracker:
    """Proxy marks and pending asynchronous reads of the shared memory of one cluster.

    Args:
        sizes: bytes of shared memory per CTA, in order of rank.
    """

    def __init__(self, sizes: list[int]) -> None:
        # 0 = visible to the async proxy; n = written by warp number n since its last fence.
        self._dirty = [np.zeros(-(-size // GRANULE) + 1, np.int16) for size in sizes]
        self._numbers: dict[Hashable, int] = {}
        self._names: list[Hashable] = [None]
        self._written: dict[tuple[int, int], _Written] = {}
        self._reads: dict[int, _PendingRead] = {}
        self._next_token = 0

    def generic_write(self, cta_rank: int, offsets: Any, nbytes: int, warp: Hashable) -> None:
        """A warp wrote ``nbytes`` at each of ``offsets`` (int or int array) of a CTA through the generic proxy.

        Raises:
            SharedMemoryRace: a pending asynchronous operation still has to read one of the bytes.
        """
        offsets = np.asarray(offsets)
        if self._reads:
            self._check_reads(cta_rank, offsets, nbytes, f"a store of warp {warp}")
        number = self._numbers.get(warp)
        if number is None:
            number = self._numbers[warp] = len(self._names)
            self._names.append(warp)
        first = offsets >> 4
        dirty = self._dirty[cta_rank]
        dirty[first] = number
        low, high = int(first.min()), int(first.max()) + 1
        if nbytes > GRANULE:
            last = (offsets + (nbytes - 1)) >> 4
            for step in range(1, -(-nbytes // GRANULE) + 1):
                dirty[np.minimum(first + step, last)] = number
            high = int(last.max()) + 1
        bounds = self._written.get((number, cta_rank))
        if bounds is None:
            self._written[number, cta_rank] = _Written(low, high)
        else:
            bounds.low, bounds.high = min(bounds.low, low), max(bounds.high, high)

    def fence_async(self, warp: Hashable) -> None:
        """The warp executed fence.proxy.async: its earlier writes are visible to the async proxy."""
        number = self._numbers.get(warp)
        if number is None:
            return
        for rank, dirty in enumerate(self._dirty):
            bounds = self._written.pop((number, rank), None)
            if bounds is not None:
                part = dirty[bounds.low : bounds.high]
                part[part == number] = 0

    def async_read(self, cta_rank: int, offsets: Any, nbytes: int, describe: str = "") -> None:
        """An asynchronous operation that reads ``nbytes`` at each of ``offsets`` (int or int array) is issued.

        Raises:
            ProxyFenceMissing: part of it was last written through the generic proxy and not fenced since.
        """
        part = self._dirty[cta_rank][_granules(offsets, nbytes)]
        if part.any():
            index = int(np.argmax(part != 0))
            granule = (offsets >> 4) + index if isinstance(offsets, int) else int(offsets[index]) >> 4
            raise ProxyFenceMissing(
                f"{describe or 'asynchronous read'}: the bytes at shared offset {granule * GRANULE} of CTA {cta_rank} "
                f"were written by warp {self._names[int(part[index])]} with no fence.proxy.async since"
            )

    def async_write(self, cta_rank: int, offsets: Any, nbytes: int, describe: str = "") -> None:
        """An asynchronous operation writes the bytes; generic reads of it need no proxy fence (mbarrier completion).

        Raises:
            SharedMemoryRace: a pending asynchronous operation still has to read one of the bytes.
        """
        if self._reads:
            self._check_reads(cta_rank, np.asarray(offsets), nbytes, describe or "an asynchronous operation")
        self._dirty[cta_rank][_granules(offsets, nbytes)] = 0

    def read_begin(self, cta_rank: int, offsets: Any, nbytes: int, describe: str) -> int:
        """Marks bytes as still to be read by an asynchronous operation. Returns a token for `read_end`."""
        token = self._next_token
        self._next_token += 1
        low, high = int(np.min(offsets)), int(np.max(offsets)) + nbytes
        granules = None if isinstance(offsets, int) else _granules(offsets, nbytes)
        self._reads[token] = _PendingRead(cta_rank, low, high, granules, describe)
        return token

    def read_end(self, token: int) -> None:
        """The read is known to be done: its range may be written again."""
        self._reads.pop(token, None)

    def pending_reads(self, cta_rank: int) -> list[str]:
        """Descriptions of reads not known to be done in one CTA."""
        return [read.describe for read in self._reads.values() if read.cta_rank == cta_rank]

    def _check_reads(self, cta_rank: int, offsets: np.ndarray, nbytes: int, who: str) -> None:
        low, high = int(offsets.min()), int(offsets.max()) + nbytes
        for read in self._reads.values():
            if read.cta_rank != cta_rank or low >= read.end or high <= read.start:
                continue
            where = read.overlap(offsets, nbytes)
            if where is not None:
                raise SharedMemoryRace(
                    f"{who} overwrites {nbytes} bytes at shared offset {where} of CTA {cta_rank}, which are not known "
                    f"to have been read yet by the {read.describe}"
                )
