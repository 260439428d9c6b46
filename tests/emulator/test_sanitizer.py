"""Proxy tracker, against a byte-by-byte model of what it promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.emulator.errors import ProxyFenceMissing, SharedMemoryRace
from cute_kernels.emulator.sanitizer import GRANULE, ProxyTracker

SIZE = 1024
EVENTS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 1), st.integers(0, 31), st.sampled_from([4, 16, 32]), st.integers(0, 2)),
    st.tuples(st.just("fence"), st.integers(0, 2)),
    st.tuples(st.just("async_write"), st.integers(0, 1), st.integers(0, 7), st.integers(1, 8)),
    st.tuples(st.just("async_read"), st.integers(0, 1), st.integers(0, 7), st.integers(1, 8)),
)


@given(st.lists(EVENTS, max_size=40))
def test_reports_exactly_the_reads_of_unfenced_granules(events: list[tuple]):
    tracker = ProxyTracker([SIZE, SIZE])
    writers: dict[tuple[int, int], int] = {}
    for kind, *rest in events:
        if kind == "write":
            rank, item, nbytes, warp = rest
            offsets = np.array([item * nbytes % SIZE, (item * nbytes + 8 * nbytes) % SIZE])
            tracker.generic_write(rank, offsets, nbytes, warp)
            for offset in offsets:
                for byte in range(offset, offset + nbytes):
                    writers[rank, byte // GRANULE] = warp
        elif kind == "fence":
            tracker.fence_async(rest[0])
            writers = {place: warp for place, warp in writers.items() if warp != rest[0]}
        else:
            rank, start, count = rest
            granules = range(4 * start, 4 * start + 4 * count)
            offset, nbytes = GRANULE * granules.start, GRANULE * len(granules)
            if kind == "async_write":
                tracker.async_write(rank, offset, nbytes)
                writers = {place: w for place, w in writers.items() if place[0] != rank or place[1] not in granules}
            elif any((rank, granule) in writers for granule in granules):
                first = next(granule for granule in granules if (rank, granule) in writers)
                with pytest.raises(ProxyFenceMissing, match=f"offset {first * GRANULE} of CTA {rank} were written"):
                    tracker.async_read(rank, offset, nbytes)
            else:
                tracker.async_read(rank, offset, nbytes)


def test_scattered_granules():
    tracker = ProxyTracker([SIZE])
    tracker.generic_write(0, np.array([64]), 4, "w")
    tracker.async_read(0, np.array([0, 32, 96]), GRANULE)
    with pytest.raises(ProxyFenceMissing, match="TMA store: the bytes at shared offset 64 of CTA 0"):
        tracker.async_read(0, np.array([0, 64]), GRANULE, "TMA store")
    tracker.async_write(0, np.array([64]), GRANULE)
    tracker.async_read(0, np.array([0, 64]), GRANULE)
    with pytest.raises(ValueError, match="granules of 16 bytes, not 8"):
        tracker.async_read(0, np.array([0]), 8)


def test_a_fence_of_another_warp_does_not_help():
    tracker = ProxyTracker([SIZE])
    tracker.generic_write(0, 128, 16, "a")
    tracker.generic_write(0, 256, 16, "b")
    tracker.fence_async("b")
    tracker.async_read(0, 256, 16)
    with pytest.raises(ProxyFenceMissing, match="warp a"):
        tracker.async_read(0, 0, 512)


@pytest.mark.parametrize("scattered", [False, True])
def test_pending_reads_may_not_be_overwritten(scattered: bool):
    tracker = ProxyTracker([SIZE, SIZE])
    if scattered:
        token = tracker.read_begin(0, np.array([128, 224]), GRANULE, "TMA store of warp 2")
    else:
        token = tracker.read_begin(0, 128, 112, "TMA store of warp 2")
    tracker.generic_write(0, np.array([112, 240]), 16, "w")
    tracker.generic_write(1, np.array([128]), 16, "w")
    for offset, nbytes in ((128, 4), (124, 8), (236, 4)):
        with pytest.raises(SharedMemoryRace, match=rf"store of warp w .* offset {offset} .* TMA store of warp 2"):
            tracker.generic_write(0, np.array([512, offset]), nbytes, "w")
    with pytest.raises(SharedMemoryRace, match="TMA load overwrites 256 bytes at shared offset 0"):
        tracker.async_write(0, 0, 256, "TMA load")
    if scattered:
        tracker.generic_write(0, np.array([144, 192]), 32, "w")
        tracker.async_write(0, np.array([144, 208]), GRANULE, "TMA load")
    assert tracker.pending_reads(0) == ["TMA store of warp 2"] and not tracker.pending_reads(1)
    tracker.read_end(token)
    tracker.generic_write(0, 128, 4, "w")


def test_work_per_fence_is_bounded_by_what_the_warp_wrote():
    tracker = ProxyTracker([SIZE])
    tracker.fence_async("never wrote")
    tracker.generic_write(0, np.array([0, 1008]), 16, "a")
    tracker.generic_write(0, np.array([512]), 16, "b")
    tracker.fence_async("a")
    with pytest.raises(ProxyFenceMissing, match="offset 512"):
        tracker.async_read(0, 0, SIZE)
