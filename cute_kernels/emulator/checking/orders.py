"""Orders of the events that stand against a certificate: which are known, which were tried.

An order is a set of holds. Each run under one has meetings of its own: with the events of one of these the other way
round, it is another order. Those of pairs that one of the places has are tried first, as places.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cute_kernels.emulator.races.meetings import Event, Meeting
from cute_kernels.emulator.steps import Step

_MOST_TRIED = 3  # meetings of a place


@dataclass
class Orders:
    """Orders of a launch."""

    left: list[tuple[Step, ...]] = field(default_factory=list)  # that are known and have not been tried, as steps
    known: int = 0  # number of all that are known, beside those of places
    words: dict[Step, str] = field(default_factory=dict)  # what each hold brings about
    _planned: set[frozenset[Step]] = field(default_factory=set)
    _seen: set[frozenset[tuple[Event, Event]]] = field(default_factory=set)

    def places(self, meetings: Iterable[Iterable[Meeting]]) -> Iterator[Meeting]:
        """Meetings that are tried for each place; others of a place are further orders."""
        everything = [list(each) for each in meetings]
        for each in everything:
            abroad = (one for one in each if one.first and one.first[0] != one.second[0])
            home = (one for one in each if not one.first or one.first[0] == one.second[0])
            mixed = (one for pair in itertools.zip_longest(abroad, home) for one in pair if one is not None)
            for meeting in itertools.islice(mixed, _MOST_TRIED):
                if (one := frozenset(meeting.steps)) not in self._planned:
                    self._planned.add(one)
                    self.words |= dict.fromkeys(meeting.steps, meeting.words)
                    yield meeting
        self.learn((), [meeting for each in everything for meeting in each])

    def learn(self, steps: tuple[Step, ...], meetings: Iterable[Meeting]) -> None:
        """A run under steps has had these meetings: other orders follow, unless it was as one before."""
        met = [each for each in meetings if each.first]
        order = frozenset((each.first, each.second) for each in met)
        if order in self._seen:
            return
        self._seen.add(order)
        held = {(step.cluster, step.who, step.count, step.until) for step in steps}
        for each in met:
            other = (*each.second, each.first)
            added = frozenset((*steps, *each.steps))
            if other not in held and added not in self._planned:
                self._planned.add(added)
                self.words |= dict.fromkeys(each.steps, each.words)
                self.left.append((*steps, *each.steps))
                self.known += 1

    def take(self) -> list[tuple[Step, ...]]:
        """All that are left, the ones with fewest holds first; they count as tried."""
        taken, self.left = self.left, []
        return taken

    def text(self, steps: Iterable[Step]) -> str:
        """An order in words."""
        return "; ".join(self.words[step] for step in steps)
