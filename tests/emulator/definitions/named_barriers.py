"""Named barriers of the PTX ISA ("bar", "barrier"): threads are counted by whole warps, in Python integers."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.emulator.definitions.mbarriers import Wrong

WARP = 32


@dataclass
class NamedBarrier:
    """A generation is complete with ``expected`` threads; ``results`` has the votes and voters of those that are."""

    expected: int = 0
    whole: bool = False
    arrived: int = 0
    votes: list[int] = field(default_factory=lambda: [0, 0])
    results: list[tuple[int, int]] = field(default_factory=list)

    def settle(self) -> None:
        if self.arrived >= self.expected:
            self.results.append((self.votes[0], self.votes[1]))
            self.arrived, self.votes = 0, [0, 0]


@dataclass
class Cta:
    """Its barriers, by number, and the warps that have not exited."""

    running: int
    barriers: dict[int, NamedBarrier] = field(default_factory=dict)

    def arrive(self, number: int, threads: int | None, votes: int = 0) -> int:
        """A warp, of which so many threads vote; returns the generation that it counts for."""
        if not 0 <= number < 16:
            raise Wrong("number")
        if threads is not None and (threads < 1 or threads % WARP):
            raise Wrong("threads")
        barrier = self.barriers.setdefault(number, NamedBarrier())
        expected = WARP * self.running if threads is None else threads
        if barrier.arrived and (barrier.expected, barrier.whole) != (expected, threads is None):
            raise Wrong("threads")
        barrier.expected, barrier.whole = expected, threads is None
        barrier.arrived += WARP
        barrier.votes[0] += votes
        barrier.votes[1] += WARP
        generation = len(barrier.results)
        barrier.settle()
        return generation

    def exit(self) -> None:
        """A warp exits: barriers for all threads expect it no more."""
        self.running -= 1
        for barrier in self.barriers.values():
            if barrier.arrived and barrier.whole:
                barrier.expected = WARP * self.running
                barrier.settle()


def run(programs: list[list[tuple[str, int, int | None, int]]]) -> list[int | None]:
    """What warps count together that execute operations in turn, each until it waits: (kind, number, threads, votes).

    Returns for each warp the sum of what it is told, times the number of the operation; None: it waits for ever.

    Raises:
        Wrong: an operation must not be.
    """
    cta, places, waits = Cta(len(programs)), [0] * len(programs), [None] * len(programs)
    sums, running = [0] * len(programs), list(range(len(programs)))
    while running:
        moved = False
        for warp in list(running):
            while places[warp] < len(programs[warp]):
                kind, number, threads, votes = programs[warp][places[warp]]
                if waits[warp] is None:
                    moved = True
                    generation = cta.arrive(number, threads, votes)
                else:
                    generation = waits[warp]
                results = cta.barriers[number].results
                if kind != "arrive" and generation == len(results):
                    waits[warp] = generation
                    break
                waits[warp], moved = None, True
                places[warp] += 1
                if kind not in ("arrive", "sync"):
                    votes, voters = results[generation]
                    told = {"popc": votes, "and": votes == voters, "or": votes > 0}[kind]
                    sums[warp] += told * places[warp]
            else:
                running.remove(warp)
                cta.exit()
                moved = True
        if not moved:
            break
    return [None if warp in running else sums[warp] for warp in range(len(programs))]
