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

import pytest

from cute_kernels.emulator.errors import BarrierMisuse
from cute_kernels.emulator.happens_before import FULL, Offset
from cute_kernels.emulator.sync_point import Order, Row
from tests.emulator.crew import Crew, state

DATA = Path(__file__).parent / "data" / "clocks.json"
CLUSTERS = {"one CTA": [0, 0, 0], "two CTAs": [0, 1, 0, 1]}
CASES = list(itertools.product(CLUSTERS, ["strict", "default"], range(12)))
BARRIERS = (64, 1 << 24 | 64)
STEPS = 60


def digest(cluster: str, strict: str, seed: int) -> str:
    """Of everything that the race detector knows after a history, and of what it reported on the way."""
    draw, ranks = random.Random(f"{cluster} {strict} {seed}"), CLUSTERS[cluster]
    crew = Crew([256] * (1 + max(ranks)), ranks, strict=strict == "strict")
    tracker, points = crew.tracker, [crew.tracker.point() for _ in range(2)]
    phases = dict.fromkeys(BARRIERS[: 1 + max(ranks)], 0)
    for address in phases:
        tracker.initialise(crew[0], address)
    crew[0].agent.fence_init()
    reports: list[str] = []

    def mask() -> int:
        return draw.choice([FULL, FULL, 1, 0xFFFF, 1 << draw.randrange(32)])

    def order() -> Order:
        return Order(draw.randrange(4))

    def complete(address: int) -> None:
        tracker.completed(address, phases[address])
        phases[address] += 1

    def arrive(address: int) -> None:
        tracker.arrive(warp, {address: mask()}, order())

    def copy(address: int) -> None:
        tracker.enter(warp, draw.randrange(32))
        operation = tracker.copy(address, "a copy")
        tracker.complete_copy(operation, address, draw.choice(list(phases)) >> 24)

    def commit(address: int) -> None:
        tracker.enter(warp, draw.randrange(32))
        tracker.tensor.committed(tracker.tensor.commit([address]), address, warp.agent.rank)

    def synchronise() -> None:
        agent.release(draw.choice(points), mask(), order())
        if draw.random() < 0.7:
            draw.choice(points).complete()

    def bulk() -> None:
        tracker.enter(warp, draw.randrange(32))
        tracker.bulk(draw.randrange(1, 9), "a store")
        tracker.bulk_waited(agent, tracker.lane, draw.randrange(1, 9), draw.random() < 0.5)

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
            lambda agent=agent: agent.complete_tensor(draw.choice(kind)),
            lambda agent=agent: agent.new_load(draw.randrange(70)),
            lambda agent=agent: agent.loads_used([draw.randrange(70)]),
            lambda agent=agent: draw.choice([agent.fence_before, agent.fence_after])(),
            lambda address=address: arrive(address),
            lambda address=address: copy(address),
            lambda address=address: commit(address),
            lambda address=address, warp=warp: tracker.wait(warp, address, order(), phases[address] - 1),
            lambda address=address: complete(address),
        ]  # fmt: skip
        try:
            draw.choice(steps)()
        except BarrierMisuse as error:
            reports.append(str(error))
            if "two phases" in reports[-1]:  # the barrier is in the middle of one of them, where a launch ends
                break
    return hashlib.sha256(repr((state(tracker), reports)).encode()).hexdigest()[:16]


@pytest.mark.parametrize("cluster, strict, seed", CASES)
def test_clocks_are_what_they_were(cluster: str, strict: str, seed: int) -> None:
    assert digest(cluster, strict, seed) == json.loads(DATA.read_text())[f"{cluster}, {strict}, {seed}"]
