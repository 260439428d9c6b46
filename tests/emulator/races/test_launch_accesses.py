"""What processes tell each other of their accesses to global memory, against sets of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.races.launch_accesses import (
    SPAN,
    STRONGLY_WRITTEN,
    WRITES,
    Runs,
    Span,
    meeting,
)
from cute_kernels.emulator.races.launch_shadow import LaunchShadow
from cute_kernels.emulator.races.shadow import GENERIC, STRONG
from cute_kernels.emulator.races.shadow_unit import ShadowUnit

NBYTES = 2 * SPAN + 1000
ARRAY = np.zeros(NBYTES + 32, np.uint8)
FIRST = -ARRAY.ctypes.data % 32 + 8  # the array begins in the middle of a granule


@dataclass(frozen=True)
class Access:
    start: int
    nbytes: int
    write: bool
    strong: bool = False


#: Few places, so that accesses meet: at the start, on both sides of the limits of spans, at the end. Many of them are
#: the first byte of a granule.
PLACES = st.builds(
    int.__add__, st.sampled_from([0, SPAN - 48, 2 * SPAN - 32, NBYTES - 96 - NBYTES % 16]),
    st.one_of(st.sampled_from([8, 24, 40]), st.integers(0, 48)),
)  # fmt: skip
ACCESSES = st.lists(
    st.builds(Access, PLACES, st.sampled_from([1, 2, 4, 8, 16, 32, 48]), st.booleans(), st.booleans()), max_size=8
)


def shadow_after(memory: GlobalMemory, accesses: list[Access]) -> LaunchShadow:
    """What the race detector knows when one cluster has made these accesses."""
    shadow = LaunchShadow(memory)
    found, origin = shadow.shadow(0)
    core = ShadowUnit(shadow.epochs, lambda address: found)
    address = memory.regions()[0].start
    for number, access in enumerate(accesses):
        kind = STRONG if access.strong else GENERIC
        identity = shadow.epochs.new(0, number + 1, "access", kind)
        core.note(found, address + access.start - origin, access.nbytes, identity, access.write)
    return shadow


def memory_of_the_array() -> GlobalMemory:
    memory = GlobalMemory()
    memory.register_tensor(ARRAY[FIRST : FIRST + NBYTES], "array")
    return memory


def bytes_of(accesses: list[Access], *, written: bool) -> set[int]:
    chosen = (access for access in accesses if access.write or not written)
    return {byte for access in chosen for byte in range(access.start, access.start + access.nbytes)}


def places(spans: list[Span], codes: int) -> set[int]:
    """Bytes of the array with one of these codes."""
    start = memory_of_the_array().regions()[0].start
    found: set[int] = set()
    for span in spans:
        chosen = np.flatnonzero(span.by_byte() & codes)
        found |= set((span.region[0] + span.start + chosen - start).tolist())
    return found


@given(ACCESSES)
def test_accesses_are_those_that_were_made(accesses: list[Access]):
    spans = shadow_after(memory_of_the_array(), accesses).accesses()
    assert places(spans, 255) == bytes_of(accesses, written=False)
    assert places(spans, WRITES) == bytes_of(accesses, written=True)
    last = {}
    for access in accesses:
        if access.write:
            last |= dict.fromkeys(range(access.start, access.start + access.nbytes), access.strong)
    assert places(spans, STRONGLY_WRITTEN) == {byte for byte, strong in last.items() if strong}


@given(st.lists(ACCESSES, min_size=2, max_size=4))
def test_parts_meet_where_one_has_written_and_another_has_accessed(parts: list[list[Access]]):
    memory = memory_of_the_array()
    found = meeting([shadow_after(memory, accesses).accesses() for accesses in parts])
    expected = set()
    for number, one in enumerate(parts):
        for other in parts[:number] + parts[number + 1 :]:
            expected |= bytes_of(one, written=True) & bytes_of(other, written=False)
    if not expected:
        assert found is None
    else:
        (origin, _), byte = found
        assert origin + byte - memory.regions()[0].start in expected


@given(ACCESSES, st.integers(0, 2**32 - 1))
def test_bytes_that_were_written_are_taken_over_and_no_others(accesses: list[Access], seed: int):
    memory = memory_of_the_array()
    spans = shadow_after(memory, accesses).accesses()
    before, after = np.random.default_rng(seed).integers(0, 256, (2, NBYTES), np.uint8)
    array = ARRAY[FIRST : FIRST + NBYTES]
    array[:] = after
    data = [span.written() for span in spans]
    array[:] = before
    for span, each in zip(spans, data):
        span.write(each)
    chosen = np.zeros(NBYTES, bool)
    chosen[list(bytes_of(accesses, written=True))] = True
    assert np.array_equal(array, np.where(chosen, after, before))
    assert sum(map(len, data)) == chosen.sum()


def test_many_short_runs_are_taken_over():
    codes = np.tile(np.array([4, 0, 1, 8], np.uint8), SPAN // 64)
    address = memory_of_the_array().regions()[0].start
    span = Span((address - 8, SPAN), 0, Runs.of(codes), None)
    window = ARRAY[FIRST - 8 : FIRST - 8 + SPAN]
    window[:] = np.random.default_rng(1).integers(0, 256, SPAN, np.uint8)
    after, data = window.copy(), span.written()
    window[:] = 7
    span.write(data)
    assert np.array_equal(window.reshape(-1, 16)[codes & WRITES != 0], after.reshape(-1, 16)[codes & WRITES != 0])
    assert (window.reshape(-1, 16)[codes & WRITES == 0] == 7).all()


def test_what_the_launch_before_did_is_not_told():
    memory = memory_of_the_array()
    behind = shadow_after(memory, [Access(0, 64, True)]).successor()
    assert behind.accesses() == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_runs_expand_to_what_they_were_made_of(codes: list[int]):
    runs = Runs.of(np.array(codes, np.uint8))
    assert runs.expand().tolist() == codes
    assert (runs.codes[1:] != runs.codes[:-1]).all() and (runs.lengths > 0).all()
