"""Where two warps meet and no order decides who comes first: what stands against a certificate, to be tried.

An event is known by its warp and by how many instructions the warp has executed up to the end of the event's block.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cute_kernels.emulator.steps import Step

_MOST = 32  # of two instructions
_MOST_ADDRESSES = 10_000  # at which the latest accesses are kept
_MOST_CELLS = 100_000  # of which it is kept whether accesses commute

#: Cluster, warp in it, instructions.
Event = tuple[int, int, int]


@dataclass(frozen=True, order=True)
class Meeting:
    """Two events in the order of the run."""

    # first, second: what came first, and what might have. First (): asynchronous work
    first: Event | tuple[()]
    second: Event
    words: str  # who meets, and where
    # how the launch fails where the first waits for the second; "": it does not; None: that was not tried
    shown: str | None = None

    @property
    def steps(self) -> tuple[Step, ...]:
        """Hold the first until the second has happened; (): asynchronous work has to come late."""
        if not self.first:
            return ()
        cluster, warp, count = self.first
        return (Step(cluster, "h", warp, count, self.second),)

    @property
    def schedule(self) -> str:
        """Options of the command line for the other order."""
        return "--completion lazy" if not self.first else f"--steps {self.steps[0]}"

    def facts(self) -> dict[str, object]:
        """For a report in JSON, of one that was tried."""
        return {"events": self.words, "schedule": self.schedule, "shown": bool(self.shown), "found": self.shown}

    def __str__(self) -> str:
        return f"{self.words}: " + (f"shown by {self.schedule}: {self.shown}" if self.shown else "not shown")


@dataclass(frozen=True)
class Visit:
    """A strong access, with the column of its warp and the clock then."""

    event: Event
    instruction: int
    label: str
    writes: bool
    column: int
    clock: int
    commutes: str  # with those of the same name; "" with none


class Visits:
    """The latest strong accesses of every address."""

    def __init__(self) -> None:
        self.apart: dict[int, bool] = {}  # whether an instruction met what it does not commute with, or may have
        self._cells: dict[int, tuple[str, frozenset[int]]] = {}  # of 4 bytes: `Visit.commutes`, instructions
        self._latest: dict[int, dict[bool, Visit]] = {}
        self._counts: Counter[tuple[int, int]] = Counter()
        self._met: set[tuple[Event, Event]] = set()

    def classify(self, address: int, nbytes: int, visit: Visit) -> None:
        """Notes whether an access commutes with all others of these bytes, so that their order decides nothing."""
        self.apart.setdefault(visit.instruction, False)
        for cell in range(address // 4, (address + nbytes - 1) // 4 + 1):
            name, instructions = self._cells.get(cell, (visit.commutes, frozenset()))
            full = not instructions and len(self._cells) >= _MOST_CELLS
            instructions |= {visit.instruction}
            if name != visit.commutes or not name or full:
                name = ""
                self.apart |= dict.fromkeys(instructions, True)
            if not full:
                self._cells[cell] = name, instructions

    def note(
        self, address: int, visit: Visit, ordered: Callable[[Visit], bool], where: Callable[[], str]
    ) -> Iterator[Meeting]:
        """Notes an access. Returns where it meets earlier ones.

        ``ordered``: whether one is known to have come before; ``where``: the place in words.
        """
        latest = self._latest.get(address)
        if latest is None:
            if len(self._latest) >= _MOST_ADDRESSES:
                return
            latest = self._latest[address] = {}
        for earlier in latest.values():
            pair = earlier.instruction, visit.instruction
            apart = earlier.event[:2] != visit.event[:2] and (earlier.writes or visit.writes)
            apart &= not visit.commutes or visit.commutes != earlier.commutes
            events = earlier.event, visit.event  # which may meet at several addresses
            if apart and self._counts[pair] < _MOST and events not in self._met and not ordered(earlier):
                self._counts[pair] += 1
                self._met.add(events)
                yield Meeting(earlier.event, visit.event, f"{visit.label} before {earlier.label} at {where()}")
        latest[visit.writes] = visit
