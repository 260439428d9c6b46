"""Asynchronous engine: orders that each policy allows, bulk groups."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.emulator.machine.state.async_engine import AsyncEngine, AsyncOp


def submit(engine: AsyncEngine, log: list, queues: list[int]) -> None:
    for number, queue in enumerate(queues):
        engine.submit(AsyncOp(queue, lambda n=number, q=queue: log.append((q, n)), f"op {number}"))


@given(st.sampled_from(["eager", "lazy", "random"]), st.integers(0, 99), st.lists(st.integers(0, 3), max_size=20))
def test_every_operation_runs_once_and_queues_keep_their_order(policy: str, seed: int, queues: list[int]):
    engine, log = AsyncEngine(policy, random.Random(seed)), []
    submit(engine, log, queues)
    for _ in range(3):
        engine.tick()
    engine.drain()
    assert sorted(n for _, n in log) == list(range(len(queues)))
    for queue in set(queues):
        numbers = [n for q, n in log if q == queue]
        assert numbers == sorted(numbers)
    assert engine.executed == len(queues) and not engine.pending() and not engine.step()


def test_eager_runs_at_issue():
    engine, log = AsyncEngine("eager"), []
    submit(engine, log, [0, 1, 0])
    assert [n for _, n in log] == [0, 1, 2] and len(engine) == 0


def test_lazy_runs_what_yields_last():
    engine, log = AsyncEngine("lazy"), []
    for name, yields in (("a1", True), ("b1", False), ("a2", True), ("c1", True), ("b2", False)):
        engine.submit(AsyncOp(name[0], lambda name=name: log.append(name), name, yields))
    engine.drain()
    assert log == ["b1", "b2", "a1", "a2", "c1"]


def test_lazy_runs_nothing_until_asked():
    engine, log = AsyncEngine("lazy"), []
    submit(engine, log, [0, 1, 0])
    for _ in range(100):
        engine.tick()
    assert not log and engine.pending() == ["op 0", "op 2", "op 1"] and len(engine) == 3
    assert engine.step() and log == [(0, 0)]
    assert engine.step() and len(log) == 2
    assert engine.step() and not engine.step() and len(log) == 3


def test_random_order_depends_on_the_seed_alone():
    def order(seed: int) -> list[int]:
        engine, log = AsyncEngine("random", random.Random(seed)), []
        submit(engine, log, list(range(8)))
        engine.drain()
        return [n for _, n in log]

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(20)}) > 10


def test_random_ticks_run_some_work():
    engine, log = AsyncEngine("random", random.Random(0)), []
    submit(engine, log, list(range(50)))
    engine.tick()
    assert len(log) <= 2
    for _ in range(20):
        engine.tick()
    assert 0 < len(log) < 50


def test_unknown_policy():
    with pytest.raises(ValueError, match="'late'"):
        AsyncEngine("late")
