"""Races of memory by definition: every access that there was, byte by byte, and what a warp knows of it by its clocks.

The columns of clocks stand in `happens_before`. Nothing is forgotten but what a later write has come after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Event:
    """An access: its cluster, column and clock; ``private``: the column that the clocks of single lanes are kept by."""

    cluster: int
    column: int
    clock: int
    private: int


@dataclass(frozen=True)
class Looker:
    """Who accesses.

    Attributes:
        cluster: its number.
        known: row of clocks that earlier accesses have to be known by.
        in_order: columns that are in order whatever is known.
        private: what the lane alone knows, clocks by column.
        fenced: row of clocks that earlier writes have to be known by as well, or None.
    """

    cluster: int
    known: np.ndarray
    in_order: frozenset[int]
    private: dict[int, int]
    fenced: np.ndarray | None = None

    def is_after(self, event: Event, row: np.ndarray, in_order: frozenset[int]) -> bool:
        """Whether an access happened before."""
        if event.cluster != self.cluster:
            return False
        known = event.column in in_order or event.clock <= row[event.column]
        return known or event.clock <= self.private.get(event.private, -1)


class History:
    """All accesses to some memories since the writes that later ones have come after."""

    def __init__(self) -> None:
        self.writes: dict[Hashable, Event] = {}
        self.reads: dict[Hashable, set[Event]] = defaultdict(set)

    def races(self, who: Looker, places: Iterable[Hashable], write: bool) -> bool:
        """Whether an access to some bytes does, or lacks a fence."""
        for place in places:
            earlier = [self.writes[place]] if place in self.writes else []
            if who.fenced is not None and any(not who.is_after(one, who.fenced, frozenset()) for one in earlier):
                return True
            earlier += self.reads[place] if write else ()
            if any(not who.is_after(one, who.known, who.in_order) for one in earlier):
                return True
        return False

    def note(self, event: Event, places: Iterable[Hashable], write: bool) -> None:
        for place in places:
            if write:
                self.writes[place] = event
                self.reads[place].clear()
            else:
                self.reads[place].add(event)
