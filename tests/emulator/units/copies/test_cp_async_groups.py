"""Groups of cp.async against the PTX ISA: each thread has groups of its own, of which a wait leaves the newest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator.state.async_engine import AsyncOp
from cute_kernels.emulator.units.copies.cp_async import CopyUnit
from tests.nightly import examples

LANES = 4  # that take part, of 32

masks = st.integers(1, 2**LANES - 1)
events = st.one_of(
    st.tuples(st.just("copy"), masks),
    st.tuples(st.just("commit"), masks),
    st.tuples(st.just("complete"), st.integers(0, 100)),
)


class Engine:
    """Completes copies when it is told to."""

    def __init__(self) -> None:
        self.pending: list[AsyncOp] = []

    def submit(self, operation: AsyncOp) -> None:
        self.pending.append(operation)


class Warp:
    """What a unit asks of a warp."""

    label, agent = "warp 0", None


def copies() -> tuple[CopyUnit, Engine, Warp]:
    """A unit that copies nothing, its engine, and a warp."""
    engine = Engine()
    memory: Any = SimpleNamespace(load=lambda sources, nbytes: None, store=lambda targets, values: None)
    return CopyUnit(memory, memory, None, engine), engine, Warp()


def issue(unit: CopyUnit, warp: Warp, mask: int) -> None:
    lanes = np.zeros(mask.bit_count(), np.int64)
    unit.copy(warp, mask, lanes, lanes, 16, lanes + 16)


@settings(max_examples=examples(200, 5000))
@given(script=st.lists(events, max_size=40), waiting=masks, newest=st.integers(0, 4))
def test_who_has_to_wait(script: list[tuple[str, int]], waiting: int, newest: int) -> None:
    unit, engine, warp = copies()
    done: dict[int, bool] = {}
    operations: list[int] = []  # numbers of copies that are pending, as the engine has them
    open_copies = {lane: [] for lane in range(LANES)}
    groups = {lane: [] for lane in range(LANES)}
    for what, value in script:
        lanes = [lane for lane in range(LANES) if value >> lane & 1]
        if what == "copy":
            number = len(done)
            done[number] = False
            operations.append(number)
            for lane in lanes:
                open_copies[lane].append(number)
            issue(unit, warp, value)
        elif what == "commit":
            for lane in lanes:
                groups[lane].append(open_copies[lane])
                open_copies[lane] = []
            unit.commit(warp, value)
        elif operations:
            place = value % len(operations)
            done[operations.pop(place)] = True
            engine.pending.pop(place).run()
            unit.outstanding(warp, value % 15 + 1, value % 3)  # what a wait forgets is not missed by a later one
    waits = any(
        not done[number]
        for lane in range(LANES)
        if waiting >> lane & 1
        for group in groups[lane][: max(0, len(groups[lane]) - newest)]
        for number in group
    )
    assert (unit.outstanding(warp, waiting, newest) is not None) == waits
    left = any(not done[number] for lane in range(LANES) if waiting >> lane & 1 for number in open_copies[lane])
    assert (unit.uncommitted(warp, waiting) is not None) == left


def test_a_wait_looks_at_groups_that_are_not_complete() -> None:
    """However many there were: a loop that waits once in each round takes as long in the last one as in the first."""
    unit, engine, warp = copies()
    for _ in range(50):
        issue(unit, warp, 15)
        unit.commit(warp, 15)
        if len(engine.pending) > 1:
            assert unit.outstanding(warp, 15, 1) is not None
            engine.pending.pop(0).run()
        assert unit.outstanding(warp, 15, 1) is None
        (state,) = unit._warps.values()
        assert len(state.groups) <= 1
