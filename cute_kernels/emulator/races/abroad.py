"""Order between clusters, by strong operations on global memory and fences (PTX ISA, "Memory Consistency Model").

Clusters number their columns alike, so what is known of others is kept apart from the clocks (`Knowledge`). Who knows
what goes by events of warps, each with a column of its own: who knows an event by its clocks has what it brought.

* A release pattern is a release, or a fence and then a strong write by the same thread; an acquire pattern is an
  acquire, or a strong read and then a fence by the same thread. Until that fence, what was read is pending.
* Two fence.sc are in Fence-SC order. If one happens before a write that a read observes, and that read before the
  other, whichever threads execute the four, the first comes first: the reverse would order the read before the write
  that it observes. So the fences synchronise.

All of these have the scope of the GPU or the system: others do not reach another cluster.
"""

import numpy as np

from cute_kernels.emulator.races.happens_before import Agent
from cute_kernels.emulator.races.launch_shadow import LaunchShadow
from cute_kernels.emulator.races.sync_point import Columns, Knowledge, Order, Row, join


def joined(first: Knowledge, second: Knowledge) -> Knowledge:
    """Union: what either knows. ``first`` itself, where it knows everything."""
    result = first
    for cluster, row in second.items():
        known = first.get(cluster)
        both = row if known is None else _union(known, row)
        if both is not known:
            result = dict(first) if result is first else result
            result[cluster] = both
    return result


def _union(known: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Union of two rows; one of the two where that covers the other, as the later one of a warp does."""
    if row is known:
        return known
    wide, narrow = (row, known) if len(row) > len(known) else (known, row)
    part = wide[: len(narrow)]
    if (narrow <= part).all():
        return wide
    if len(wide) == len(narrow) and (wide <= narrow).all():
        return narrow
    result = wide.copy()
    join(result, narrow)
    return result


class Events:
    """Events of one kind, numbered by warp, and what each and those before it brought."""

    def __init__(self, columns: Columns, kind: str) -> None:
        self._columns, self._kind = columns, kind
        self._brought: dict[int, list[Knowledge]] = {}

    def add(self, agent: Agent, brings: Knowledge) -> None:
        """A new event of a warp, which the warp knows."""
        column = self._columns.named((self._kind, agent.base))
        events = self._brought.setdefault(column, [{}])
        known = joined(events[-1], brings)
        if known is not events[-1]:
            events.append(known)
        agent.complete(column, len(events) - 1)

    def known(self, row: np.ndarray) -> Knowledge:
        """Knowledge that the events brought that are known by a row of clocks."""
        result: Knowledge = {}
        for column, events in self._brought.items():
            if column < len(row) and row[column]:
                result = joined(result, events[row[column]])
        return result


class Abroad:
    """Knowledge that a cluster passes on to others, and learns of them."""

    def __init__(self, columns: Columns, launch: LaunchShadow, cluster: int) -> None:
        self._launch, self.cluster = launch, cluster
        self._learned = Events(columns, "learned abroad")
        self._fences = Events(columns, "fence.sc")
        self._observed = Events(columns, "observed behind a fence.sc")
        self._latest: dict[Agent, Knowledge] = {}  # that it has learned
        self._pending: dict[Agent, list[tuple[int, Knowledge]]] = {}  # of lanes, for a fence of theirs to acquire
        self._fenced: dict[Agent, list[tuple[int, Knowledge]]] = {}  # by lanes, for a write of theirs to release

    def known(self, row: np.ndarray) -> Knowledge:
        """Knowledge of other clusters by a row of clocks."""
        return self._learned.known(row)

    def read(self, agent: Agent, mask: int, address: int, acquires: bool) -> None:
        """Lanes read strongly."""
        released = self._launch.released.get(address, {})
        if acquires:
            self._learn(agent, released)
        elif released:
            _note(self._pending.setdefault(agent, []), mask, released)
        behind = self._launch.fenced.get(address)
        if behind:
            self._observed.add(agent, behind)

    def write(self, agent: Agent, mask: int, address: int, releases: bool) -> None:
        """Lanes write strongly."""
        launch = self._launch
        released = self._told(agent, mask) if releases else _of_lanes(self._fenced.get(agent, ()), mask)
        if released:
            launch.released[address] = joined(launch.released.get(address, {}), released)
        behind = self._fences.known(agent.clocks[Row.VISIBLE])
        if behind:
            launch.fenced[address] = joined(launch.fenced.get(address, {}), behind)

    def fence(self, agent: Agent, mask: int, acquires: bool, releases: bool, sequential: bool) -> None:
        """Lanes execute a fence; ``sequential``: fence.sc or membar."""
        if acquires:
            pending = self._pending.get(agent, ())
            self._learn(agent, _of_lanes(pending, mask))
            self._pending[agent] = [(lanes & ~mask, what) for lanes, what in pending if lanes & ~mask]
        if sequential:
            self._learn(agent, self._observed.known(agent.clocks[Row.VISIBLE]))
            self._fences.add(agent, self._told(agent, mask))
        if releases:
            fenced = [(lanes & ~mask, what) for lanes, what in self._fenced.get(agent, ()) if lanes & ~mask]
            self._fenced[agent] = [*fenced, (mask, self._told(agent, mask))]

    def _told(self, agent: Agent, mask: int) -> Knowledge:
        """Knowledge that lanes pass on now."""
        row = agent.snapshot(mask)[Row.VISIBLE].copy()
        return {**self._learned.known(row), self.cluster: row}

    def _learn(self, agent: Agent, what: Knowledge) -> None:
        if self._latest.get(agent) is what:  # it looks again
            return
        self._latest[agent] = what
        own = what.get(self.cluster)
        if own is not None:
            for row in (Row.ORDER, Row.ACQUIRED, Row.VISIBLE):
                join(agent.clocks[row], own)
            agent.changed()
        others = {cluster: row for cluster, row in what.items() if cluster != self.cluster}
        if others:
            self._learned.add(agent, others)


def _note(kept: list[tuple[int, Knowledge]], mask: int, what: Knowledge) -> None:
    for index, (lanes, known) in enumerate(kept):
        if lanes == mask:
            kept[index] = mask, joined(known, what)
            return
    kept.append((mask, what))


def _of_lanes(kept: list[tuple[int, Knowledge]] | tuple[()], mask: int) -> Knowledge:
    result: Knowledge = {}
    for lanes, what in kept:
        if lanes & mask:
            result = joined(result, what)
    return result


def reaches_clusters(order: int | None) -> bool:
    """Whether an operation of this order has a scope that includes other clusters."""
    return order is not None and bool(order & Order.GRID)
