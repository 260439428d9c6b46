"""Clocks after random histories, compared with what they were when Python and NumPy computed them (data/clocks.json).

Beside it `test_happens_before` compares races with a definition by sets of events; here every clock of every kind of
order counts, of strict agents, clusters, single lanes, tensor memory and mbarriers, too.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.emulator import GlobalMemory
from cute_kernels.emulator.core.layout import STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import BarrierMisuse
from cute_kernels.emulator.observe.races.happens_before import FULL, Offset
from cute_kernels.emulator.observe.races.sync_point import Order, Row
from tests.emulator.crew import (
    Crew,
    arrive_at,
    bulk_waited,
    commit_at,
    complete_phase,
    complete_tensor,
    fence_tensor,
    state,
    wait_for,
)

DATA = Path(__file__).parents[2] / "data" / "clocks.json"
CLUSTERS = {"one CTA": [0, 0, 0], "two CTAs": [0, 1, 0, 1]}
CASES = list(itertools.product(CLUSTERS, ["strict", "default"], range(12)))
BARRIERS = (64, 1 << 24 | 64)
STEPS = 60


def digest(cluster: str, strict: str, seed: int) -> str:
    """Of everything that the race detector knows after a history, and of what it reported on the way."""
    draw, ranks = random.Random(f"{cluster} {strict} {seed}"), CLUSTERS[cluster]
    crew = Crew([256] * (1 + max(ranks)), ranks, strict=strict == "strict", begun=False)
    tracker, points = crew.tracker, [crew.tracker.point() for _ in range(2)]
    phases = dict.fromkeys(BARRIERS[: 1 + max(ranks)], 0)
    for address in phases:
        tracker.initialise(crew[0].agent, address)
    crew[0].agent.fence_init()
    reports: list[str] = []

    def mask() -> int:
        return draw.choice([FULL, FULL, 1, 0xFFFF, 1 << draw.randrange(32)])

    def order() -> Order:
        return Order(draw.randrange(4))

    def complete(address: int) -> None:
        complete_phase(tracker, address, phases[address])
        phases[address] += 1

    def arrive(address: int) -> None:
        arrive_at(tracker, warp, {address: mask()}, order())

    def copy(address: int) -> None:
        tracker.enter(warp.agent, draw.randrange(32))
        operation = tracker.copy(address, "a copy")
        tracker.complete_copy(operation, address, draw.choice(list(phases)) >> 24)

    def commit(address: int) -> None:
        commit_at(tracker, warp, draw.randrange(32), address)

    def synchronise() -> None:
        agent.release(draw.choice(points), mask(), order())
        if draw.random() < 0.7:
            draw.choice(points).complete()

    def bulk() -> None:
        tracker.enter(warp.agent, draw.randrange(32))
        tracker.bulk(draw.randrange(1, 9), "a store")
        bulk_waited(tracker, agent, tracker.lane, draw.randrange(1, 9), draw.random() < 0.5)

    rows = (Row.PROXY, Row.PROXY_GLOBAL)
    kind = (Offset.TENSOR_LOAD, Offset.TENSOR_STORE)
    for _ in range(STEPS):
        warp = crew[draw.randrange(len(ranks))]
        agent, address = warp.agent, draw.choice(list(phases))
        steps: list[Callable[[], object]] = [
            synchronise, synchronise, bulk,
            lambda agent=agent: agent.acquire(draw.choice(points), order()),
            lambda agent=agent: agent.acquire(draw.choice(points), Order.SYNC),
            lambda agent=agent: agent.converge(mask()),
            lambda agent=agent: agent.fence(mask(), order()),
            lambda agent=agent: agent.fence_proxy(mask(), draw.choice([rows, rows[:1], rows[1:]])),
            lambda agent=agent: complete_tensor(agent, draw.choice(kind)),
            lambda agent=agent: agent.new_load(draw.randrange(70)),
            lambda agent=agent: agent.loads_used([draw.randrange(70)]),
            lambda agent=agent: fence_tensor(agent, draw.choice([True, False])),
            lambda address=address: arrive(address),
            lambda address=address: copy(address),
            lambda address=address: commit(address),
            lambda address=address, warp=warp: wait_for(tracker, warp, address, order(), phases[address] - 1),
            lambda address=address: complete(address),
        ]  # fmt: skip
        try:
            draw.choice(steps)()
        except BarrierMisuse as error:
            reports.append(str(error))
            # The barrier is in the middle of a phase then, where a launch ends.
            if "two phases" in reports[-1] or "a wait that comes later" in reports[-1]:
                break
    return hashlib.sha256(repr((state(tracker), reports)).encode()).hexdigest()[:16]


@pytest.mark.parametrize("cluster, strict, seed", CASES)
def test_clocks_are_what_they_were(cluster: str, strict: str, seed: int) -> None:
    assert digest(cluster, strict, seed) == json.loads(DATA.read_text())[f"{cluster}, {strict}, {seed}"]


@pytest.mark.parametrize("ordered", [False, True])
def test_machine_code_leaves_a_barrier_that_overtakes_a_wait_to_python(ordered: bool) -> None:
    """Warp 1 has waited for phase 0; phase 1 completes by warp 0, which knows of that wait or does not."""
    memory = GlobalMemory()
    source = np.zeros(64, np.uint8)
    memory.register_tensor(source, "source", writable=False)
    crew = Crew([256], [0, 0], memory)
    tracker, address = crew.tracker, BARRIERS[0]
    first, second = (crew[i].agent for i in range(2))
    tracker.initialise(crew[0].agent, address)
    barrier, other = tracker.points[address], tracker.point()
    tracker.enter(crew[0].agent)
    first.release(other, FULL, Order.SYNC)
    other.complete()
    second.acquire(other, Order.SYNC)
    complete_phase(tracker, address, 0)
    tables = STRUCTURES["Tables"]()
    contexts = [tracker.context(agent) for agent in (first, second)]
    tables.context = ctypes.addressof(contexts[1])
    wait_for(tracker, crew[1], address, Order.SYNC, 0)
    if ordered:
        second.release(other, FULL, Order.SYNC)
        other.complete()
        first.acquire(other, Order.SYNC)
    tables.context = ctypes.addressof(contexts[0])
    before, t = state(tracker), ctypes.addressof(tables)
    copy = STRUCTURES["WatchedCopy"](
        point=barrier.address, phase=1, completes=1, shadow=tracker.shared[0].address, offset=128, nbytes=64,
        start=source.ctypes.data, count=1, row=64,
    )  # fmt: skip
    done = library().watch_load(t, ctypes.addressof(copy), 1)
    assert done == ordered
    if not ordered:
        assert state(tracker) == before
        with pytest.raises(BarrierMisuse, match="two phases"):
            complete_phase(tracker, address, 1)
