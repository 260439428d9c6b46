"""Exits: what accesses the shared memory of a CTA must be over before the CTA exits (PTX ISA, "Shared State Space").

Each event that needs the shared memory of a CTA is noted. In the end every CTA must have known that it was over by the
time its last warp exited. What counts as knowing depends on the event:

* An asynchronous operation is over for those to whom its completion was passed on, by whatever synchronisation.
* An access or an arrival of a thread of another CTA is over if it happens before what a thread of the CTA saw.
* What arrives at an mbarrier is over for those who have seen that phase of this mbarrier complete.

`Options.strict` takes causality order for the second: release and acquire whose scopes include both CTAs. And that a
signal came proves nothing of an earlier one at another mbarrier: several arrivals of a thread, or several commits, are
not ordered by that alone. NVIDIA's kernels rely on such an order (the producer's tail of CuTe DSL's pipelines waits for
the last stage only); otherwise the later signal counts as proof.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cute_kernels.emulator.errors import EmulatorError, IllegalAccess
from cute_kernels.emulator.facts import WarpName
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.races.happens_before import FULL, Agent
from cute_kernels.emulator.races.sync_point import Columns, Row, join, widened

Signal = tuple[int, int]
"""Column that counts the phases of an mbarrier, and the phase."""

_ROWS = (Row.ORDER, Row.VISIBLE)


@dataclass(frozen=True)
class _Event:
    """Event that must be known: ``clock`` in ``column`` of one of `_ROWS` (None: that proves nothing), or the signal.

    ``place`` is the index of the instruction, -1 if it is not known.
    """

    row: int | None
    clock: int
    what: str
    signal: Signal | None
    place: int = -1


class ExitChecks:
    """Events that need the shared memory of each CTA of a cluster, and what its warps knew when they exited."""

    def __init__(self, columns: Columns, ranks: int, strict: bool) -> None:
        self._columns, self._strict = columns, strict
        self._events: dict[tuple[int, int, int], _Event] = {}  # by CTA, column, and column of the signal or -1
        self._known: list[np.ndarray | None] = [None] * ranks

    def access(
        self, rank: int, column: int, clock: int, what: str, signal: Signal | None = None, place: int = -1
    ) -> None:
        """A thread of another CTA accesses shared memory of CTA ``rank``, or (``signal``) arrives at an mbarrier there.
        ``rank``: the CTA. ``column``, ``clock``: of the access, in the columns of its warp. ``what``: for reports.
        ``signal``: the phase that the arrival belongs to. ``place``: index of the instruction, -1 if it is not known.
        """
        self._note(rank, column, _Event(1 if self._strict else 0, clock, what, signal, place))

    def operation(
        self, rank: int, column: int, clock: int, what: str, signal: Signal | None = None, place: int = -1
    ) -> None:
        """An asynchronous operation accesses shared memory of CTA ``rank``, or (``signal``) a commit arrives there."""
        row = None if self._strict and signal is not None else 0
        self._note(rank, column, _Event(row, clock, what, signal, place))

    def _note(self, rank: int, column: int, event: _Event) -> None:
        # Clocks of one column only grow, and so do phases: the last event stands for those before it.
        key = (rank, column, event.signal[0] if self._strict and event.signal is not None else -1)
        last = self._events.get(key)
        if last is None or last.clock < event.clock:
            self._events[key] = event

    def exit(self, agent: Agent) -> None:
        """A warp exits: its CTA ends with the last one."""
        clocks = agent.snapshot(FULL)[_ROWS, :]
        known = self._known[agent.rank]
        if known is None:
            known = np.zeros_like(clocks)
        elif known.shape != clocks.shape:
            known = widened(known, clocks.shape[1])
        join(known, clocks)
        self._known[agent.rank] = known

    def check(self, report: Callable[[EmulatorError], None], instruction: Callable[[int], Instruction | None]) -> None:
        """At the end of the cluster. ``report``: called with what is found. ``instruction``: of an index, None for -1.
        Raises IllegalAccess: a CTA may exit while something still accesses its shared memory."""
        for (rank, column, _), event in self._events.items():
            known = self._known[rank]
            known = np.zeros((len(_ROWS), self._columns.width), np.int32) if known is None else known
            over = event.row is not None and column < known.shape[1] and known[event.row, column] >= event.clock
            if not over and self._strict and event.signal is not None:
                signal, phase = event.signal
                over = signal < known.shape[1] and known[0, signal] >= phase
            if not over:
                error = IllegalAccess(
                    f"CTA {rank} may exit before {event.what} is over, which accesses its shared memory: none of its "
                    "warps waits for that"
                ).know("exit-in-use")
                name = WarpName.of(event.what)
                report(error.at(instruction(event.place), str(name) if name is not None else None))
