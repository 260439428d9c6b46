"""Copies to several CTAs, in the core.

They are compared with the Python units, and what the race detector records of them with what it records in Python.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import GlobalMemory
from cute_kernels.emulator.core.layout import STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.state.smem import shared_address
from cute_kernels.emulator.units.sm import Cluster
from cute_kernels.testing.ptx import aligned
from tests.emulator.crew import Crew, complete_phase, state
from tests.emulator.units.copies.test_tma import BARRIER, DATA, GLOBAL_BYTES, SHARED_BYTES, Machine, noise
from tests.emulator.units.test_core_units import (
    BYTES,
    NativeMachine,
    function,
    operands,
    placed,
)
from tests.emulator.units.test_core_units import state as state_of_units

CTAS = 4


@settings(max_examples=200)
@given(
    st.integers(0, 31), st.booleans(), st.integers(0, CTAS - 1), st.lists(st.booleans(), min_size=CTAS, max_size=CTAS)
)  # fmt: skip
def test_multicast_as_the_python_unit_does_it(mask: int, pair: bool, signal: int, expected: list[bool]) -> None:
    """A mask of CTAs; what is refused does nothing, and is what Python refuses or what ends a phase in the middle."""
    memories = [aligned(noise(3, GLOBAL_BYTES)) for _ in range(2)]
    native, python = NativeMachine(memories[0], CTAS), Machine(memories[1], CTAS, detectors=False)
    for machine in (native, python):
        for rank, bytes_first in enumerate(expected):
            machine.fill(noise(rank, SHARED_BYTES), rank)
            address = shared_address(rank, BARRIER)
            machine.barriers.expect_tx(address, 256 if bytes_first else 512)
            machine.barriers.arrive(address)  # a phase completes with its bytes
    before = state_of_units(native, memories[0])
    descriptor = placed(BYTES, memories[0])
    native.descriptor[:] = np.frombuffer(descriptor, np.uint8)
    native.units.learn(native.descriptor.ctypes.data, descriptor)
    barrier = shared_address(signal, BARRIER)
    words = operands(native.descriptor.ctypes.data, shared_address(1, DATA), barrier, (64, 2), mask)
    done = function("tensor_load")(native.tables.address, words.ctypes.data, 2, pair)
    Cluster.count(native.cluster)
    if not done:
        assert state_of_units(native, memories[0]) == before
    targets = [rank for rank in range(CTAS) if mask >> rank & 1]
    signalled = [rank & ~1 | signal & 1 if pair else rank for rank in targets]
    ends_between = any(expected[rank] and signalled.count(rank) > 1 for rank in signalled)
    assert bool(done) == (0 < mask < 1 << CTAS and not ends_between)
    if done:
        python.tma.load(
            placed(BYTES, memories[1]), (64, 2), shared_address(1, DATA), barrier, rank=0,
            cta_group=2 if pair else None, multicast=mask,
        )  # fmt: skip
        assert state_of_units(native, memories[0]) == state_of_units(python, memories[1])


@pytest.mark.parametrize("place, signal", [(shared_address(CTAS, DATA), 0), (DATA, shared_address(CTAS, BARRIER))])
def test_multicast_from_a_cta_that_is_not_there_is_left_to_python(place: int, signal: int) -> None:
    memory = aligned(noise(3, GLOBAL_BYTES))
    machine = NativeMachine(memory, CTAS)
    descriptor = placed(BYTES, memory)
    machine.descriptor[:] = np.frombuffer(descriptor, np.uint8)
    machine.units.learn(machine.descriptor.ctypes.data, descriptor)
    words = operands(machine.descriptor.ctypes.data, place, signal or BARRIER, (0, 0), 3)
    assert not function("tensor_load")(machine.tables.address, words.ctypes.data, 2, 0)


class Watched:
    """A race detector of two CTAs with a warp in each, the mbarriers at offset 64 of both initialised by the first."""

    OFFSET, NBYTES = 128, 64

    def __init__(self, native: bool, strict: bool) -> None:
        self.source = aligned(np.zeros(128, np.uint8))
        memory = GlobalMemory()
        memory.register_tensor(self.source, "source", writable=True)
        self.crew = Crew([256, 256], [0, 1], memory, strict=strict)
        self.tracker = self.crew.tracker
        self.addresses = [shared_address(rank, 64) for rank in range(2)]
        for address in self.addresses:
            self.tracker.initialise(self.crew[0].agent, address)
        self.region, self.origin = self.tracker.launch.shadow(0)
        self.region.coarse.expect_reads()  # the core records reads where there is one
        self.tables = STRUCTURES["Tables"]()
        self.context = self.tracker.context(self.crew[0].agent)
        self.tables.context = ctypes.addressof(self.context)
        self.text = self.tracker.epochs.text("a copy")

    def load(self, native: bool, completes: list[bool], offset: int = OFFSET) -> bool:
        """A copy by warp 0 to both CTAs. False: the core has left it to Python."""
        tracker, start = self.tracker, self.source.ctypes.data
        if native:
            copies = (STRUCTURES["WatchedCopy"] * 2)()
            for rank, each in enumerate(copies):
                each.lane, each.instruction, each.text = 3, -1, self.text
                each.point, each.completes = tracker.points[self.addresses[rank]].address, completes[rank]
                each.shadow, each.offset, each.nbytes = tracker.shared[rank].address, offset, self.NBYTES
                each.start, each.count, each.row = start, 1, self.NBYTES
            return bool(library().watch_load(ctypes.addressof(self.tables), ctypes.addressof(copies), 2))
        tracker.enter(self.crew[0].agent, 3)
        for rank, address in enumerate(self.addresses):
            operation = tracker.copy(address, "a copy")
            tracker.async_write(rank, offset, self.NBYTES, operation)
            if not rank:
                tracker.global_rows(np.array([start]), self.NBYTES, operation, False)
            tracker.complete_copy(operation, address, rank)
            if completes[rank]:
                complete_phase(tracker, address, 0)
        return True


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("completes", [[False, False], [True, False], [False, True], [True, True]])
def test_multicast_is_recorded_as_in_python(completes: list[bool], strict: bool) -> None:
    states = []
    for native in (True, False):
        made = Watched(native, strict)
        assert made.load(native, completes)
        states.append(state(made.tracker))
    assert states[0] == states[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_multicast_that_races_in_one_cta_changes_nothing(rank: int) -> None:
    made = Watched(True, False)
    made.tracker.enter(made.crew[1].agent)
    made.crew.touch(1, np.array([shared_address(rank, Watched.OFFSET + 16)]), 4, write=False)
    before = state(made.tracker)
    assert not made.load(True, [True, True])
    assert state(made.tracker) == before
