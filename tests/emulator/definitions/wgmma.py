"""wgmma as the PTX ISA orders it: groups and waits, and what happens before what between a warpgroup and another warp.

Knowledge is kept as sets of what it is of, for each warp; nothing is said of times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

WARPS = 4
_BESIDE = -1


def needed(events: Iterable[str], newest: int) -> int:
    """How many operations have to be complete for a warp to pass a wait.

    Args:
        events: what it did before, ``"mma"``, ``"commit"`` or anything else, in order.
        newest: so many groups may be incomplete.
    """
    issued, ends = 0, []
    for event in events:
        issued += event == "mma"
        if event == "commit":
            ends.append(issued)
    return ends[-newest - 1] if len(ends) > newest else 0


@dataclass
class Knowledge:
    """Stores that happened before, those of them that a fence.proxy.async covers, and operations that are complete."""

    stores: set[int] = field(default_factory=set)
    fenced: set[int] = field(default_factory=set)
    complete: set[int] = field(default_factory=set)

    def learn(self, *others: Knowledge) -> Knowledge:
        for other in others:
            self.stores |= other.stores
            self.fenced |= other.fenced
            self.complete |= other.complete
        return self


class Order:
    """A warpgroup that issues operations, and another warp that stores to their operands.

    Attributes:
        wrong: faults, "race" or "unfenced", whichever is noticed first in a schedule.
        overwritten: operations that read what the other warp stored.
    """

    def __init__(self) -> None:
        self._warps = [Knowledge() for _ in range(WARPS)]
        self._other = Knowledge()
        self._events: list[str] = []
        self._stored: list[set[object]] = []  # places of every store
        self._issued: list[tuple[object, Knowledge]] = []  # what is read, and what the issuing warps know together
        self.wrong: set[str] = set()
        self.overwritten: set[int] = set()

    def barrier(self) -> None:
        """All five warps meet."""
        everything = Knowledge().learn(*self._warps, self._other)
        for each in (*self._warps, self._other):
            each.learn(everything)

    def meet(self, warp: int) -> None:
        """One of the warpgroup meets the other warp."""
        self._other.learn(self._warps[warp])
        self._warps[warp].learn(self._other)

    def fence(self) -> None:
        """fence.proxy.async by the warpgroup."""
        for each in self._warps:
            each.fenced |= each.stores

    def fence_other(self) -> None:
        self._other.fenced |= self._other.stores

    def store(self, places: set[object]) -> None:
        for number, (read, _) in enumerate(self._issued):
            if read in places and number not in self._other.complete:
                self.wrong.add("race")
        self._other.stores.add(len(self._stored))
        self._stored.append(places)

    def publish(self) -> None:
        """The other warp stores beside the operands, once."""
        self._other.stores.add(_BESIDE)

    def look(self, warp: int) -> None:
        """One of the warpgroup loads that."""
        if _BESIDE not in self._warps[warp].stores:
            self.wrong.add("race")

    def mma(self, read: object) -> None:
        known = Knowledge().learn(*self._warps)
        for number, places in enumerate(self._stored):
            if read not in places:
                continue
            if number not in known.stores:
                self.wrong.add("race")
            elif number not in known.fenced:
                self.wrong.add("unfenced")
            self.overwritten.add(len(self._issued))
        self._issued.append((read, known))
        self._events.append("mma")

    def commit(self) -> None:
        self._events.append("commit")

    def wait(self, newest: int) -> None:
        """All operations that the wait is for are complete, so that all warps have issued them."""
        for number in range(needed(self._events, newest)):
            for each in self._warps:
                each.learn(self._issued[number][1])
                each.complete.add(number)
