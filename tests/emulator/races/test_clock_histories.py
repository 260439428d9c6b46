"""Clocks after random histories, compared with what they were when Python and NumPy computed them (data/clocks.json).

Beside it `test_happens_before` compares races with a definition by sets of events; here every clock of every kind of
order counts, of strict agents, clusters, single lanes, tensor memory and mbarriers, too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.emulator import TensorMap
from cute_kernels.emulator.errors import BarrierMisuse
from cute_kernels.emulator.machine.units.copies.tensor_map import encode
from cute_kernels.emulator.races.happens_before import FULL, Offset
from cute_kernels.emulator.races.sync_point import Order, Row
from tests.emulator.copies import BARRIER, DATA, Machine
from tests.emulator.crew import (
    Crew,
    arrive_at,
    bulk_store,
    bulk_waited,
    commit_at,
    complete_phase,
    complete_tensor,
    converge,
    fence_proxy,
    fence_tensor,
    state,
    wait_for,
)

CLOCKS = Path(__file__).parents[1] / "data" / "clocks.json"
CLUSTERS = {"one CTA": [0, 0, 0], "two CTAs": [0, 1, 0, 1]}
CASES = list(itertools.product(CLUSTERS, ["strict", "default"], range(12)))
BARRIERS = (64, 1 << 24 | 64)
STEPS = 60


def digest(cluster: str, strict: str, seed: int) -> str:
    """Of everything that the race detector knows after a history, and of what it reported on the way."""
    draw, ranks = random.Random(f"{cluster} {strict} {seed}"), CLUSTERS[cluster]
    crew = Crew([256] * (1 + max(ranks)), ranks, strict=strict == "strict", begun=False)
    tracker, points = crew.tracker, [crew.tracker.point() for _ in range(2)]
    tracker.stands_against = lambda error: None  # histories are random
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
        bulk_store(tracker, draw.randrange(1, 9), "a store")
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
            lambda agent=agent: converge(agent, mask()),
            lambda agent=agent: agent.fence(mask(), order()),
            lambda agent=agent: fence_proxy(agent, mask(), draw.choice([rows, rows[:1], rows[1:]])),
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
    assert digest(cluster, strict, seed) == json.loads(CLOCKS.read_text())[f"{cluster}, {strict}, {seed}"]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_copy_that_completes_a_phase_ahead_of_a_wait(ordered: bool) -> None:
    """Warp 1 has waited for phase 0; a copy of warp 0, which knows of that wait or does not, completes phase 1."""
    array = np.zeros((16, 128), np.uint8)
    machine = Machine(array)
    tracker, crew, point = machine.crew.tracker, machine.crew, machine.crew.tracker.points[BARRIER]
    first, second, other = crew[0].agent, crew[1].agent, machine.crew.tracker.point()
    converge(crew[0].agent, FULL)
    first.release(other, FULL, Order.SYNC)
    other.complete()
    second.acquire(other, Order.SYNC)
    machine.barriers.arrive(BARRIER)
    wait_for(tracker, crew[1], BARRIER, Order.SYNC, 0)
    if ordered:
        second.release(other, FULL, Order.SYNC)
        other.complete()
        first.acquire(other, Order.SYNC)
    machine.barriers.expect_tx(BARRIER, 512)
    machine.barriers.arrive(BARRIER)
    descriptor = encode(TensorMap(array.ctypes.data, "u8", (128, 16), (128,), (64, 8), (1, 1)))
    if ordered:
        machine.load(descriptor, (0, 0), DATA, BARRIER)
        assert point.completed == 2
        return
    with pytest.raises(BarrierMisuse, match="two phases"):
        machine.load(descriptor, (0, 0), DATA, BARRIER)
