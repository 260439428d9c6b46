"""The stream of what happens in a cluster, against queues played through in Python lists."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.emulator.machine.state import events as stream
from cute_kernels.emulator.machine.state.async_engine import AsyncEngine, AsyncOp
from cute_kernels.emulator.machine.state.events import Events
from cute_kernels.emulator.machine.state.smem import ClusterMemory, SharedMemory
from tests.emulator.barriers import Barriers

BARRIER = 64


class Recorder:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []

    def at(self, place: tuple[int, int] | None) -> None:
        assert place is None  # no warp runs

    def issued(self, number: int, op: AsyncOp) -> None:
        self.heard.append(("issued", number, op.describe))

    def begins(self, number: int) -> None:
        self.heard.append(("begins", number))

    def ends(self, number: int, failed: bool) -> None:
        self.heard.append(("ends", number, failed))

    def completed(self, key: Hashable, count: int | None) -> None:
        self.heard.append(("completed", key, count))

    def passed(self, address: int, state: int, parity: bool) -> None:
        raise AssertionError("no warp waits")

    def operated(self, operation: int, address: int, words: Sequence[int]) -> None:
        raise AssertionError("no warp arrives")


Action = tuple[str, int, str]  # "issue" to a queue of an operation that does something, or "step"
ACTIONS = st.one_of(
    st.tuples(st.just("issue"), st.integers(0, 3), st.sampled_from(["arrives", "fails", ""])),
    st.just(("step", 0, "")),
    st.just(("generation", 0, "")),
)


def expected(actions: list[Action], eager: bool) -> list[tuple[object, ...]]:
    """What is heard: the operations of a queue in their order, queues in the order of having become not empty."""
    heard: list[tuple[object, ...]] = []
    queues: dict[int, list[tuple[int, str]]] = {}
    issued = phases = 0

    def run(number: int, does: str) -> None:
        nonlocal phases
        heard.append(("begins", number))
        if does == "arrives":
            phases += 1
            heard.append(("completed", ("mbarrier", BARRIER), phases))
        heard.append(("ends", number, does == "fails"))

    for action, queue, does in actions:
        if action == "generation":
            heard.append(("completed", "generation", None))
        elif action == "issue":
            issued += 1
            heard.append(("issued", issued, f"{does} {issued}"))
            if eager:
                run(issued, does)
            else:
                queues.setdefault(queue, []).append((issued, does))
        elif queues:
            first = next(iter(queues))
            run(*queues[first].pop(0))
            if not queues[first]:
                del queues[first]
    return heard


@given(
    actions=st.lists(ACTIONS, max_size=30), policy=st.sampled_from(["eager", "lazy"]),
    room=st.sampled_from([1, 2, 3, 256]), several=st.booleans(),
)  # fmt: skip
def test_observers_hear_everything_in_order(
    actions: list[Action], policy: Literal["eager", "lazy"], room: int, several: bool
) -> None:
    barriers = Barriers(ClusterMemory([SharedMemory(1024, 0)]))
    barriers.init(BARRIER, 1)
    engine = AsyncEngine(policy, tables=barriers.address)
    events = Events(barriers.tables, engine)
    engine.noted = barriers.noted = events.read
    barriers.ask = lambda what: events.read() is None
    observers = [Recorder() for _ in range(1 + several)]
    with patch.object(stream, "_ROOM", room):
        for observer in observers:
            events.observe(observer)
    issued = 0
    for action, queue, does in actions:

        def run(does: str = does) -> None:
            if does == "arrives":
                barriers.arrive(BARRIER)
            elif does == "fails":
                raise ZeroDivisionError

        try:
            if action == "generation":
                events.completed("generation")
            elif action == "issue":
                issued += 1
                engine.submit(AsyncOp(("queue", queue), run, f"{does} {issued}"))
            else:
                engine.step()
        except ZeroDivisionError:
            pass
    for observer in observers:
        assert observer.heard == expected(actions, policy == "eager")


def test_nothing_is_noted_where_nobody_observes() -> None:
    barriers = Barriers(ClusterMemory([SharedMemory(1024, 0)]))
    barriers.init(BARRIER, 1)
    engine = AsyncEngine(tables=barriers.address)
    done = np.zeros(1)
    engine.submit(AsyncOp("queue", lambda: done.fill(barriers.arrive(BARRIER) + 1), "arrives"))
    assert done[0] == 1 and not barriers.tables.event_count and barriers.completions == 1
