"""The mbarrier of the PTX ISA ("mbarrier": expected and pending arrivals, tx-count, phases), in Python integers."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 2**20 - 1
"""The valid range of arrival counts ends here, that of the tx-count at both signs of it."""


class Wrong(Exception):
    """The kind of what a program must not do."""


@dataclass
class Mbarrier:
    """``expected`` arrivals of each phase; of the current one ``pending`` arrivals and ``tx`` bytes are missing."""

    expected: int
    pending: int
    tx: int = 0
    phase: int = 0

    def arrive(self, count: int) -> int:
        """arrive-on; returns the phase that it counts for."""
        if not 1 <= count <= self.pending:
            raise Wrong("extra-arrivals")
        self.pending -= count
        if self.pending == 0 and self.tx < 0:
            raise Wrong("extra-bytes")
        return self._complete()

    def arrive_drop(self, count: int) -> int:
        """Arrives, and later phases expect less."""
        if 1 <= count <= self.pending:
            self.expected -= count
        return self.arrive(count)

    def expect_tx(self, nbytes: int) -> int:
        self.tx += nbytes
        return self._in_range()

    def complete_tx(self, nbytes: int) -> int:
        self.tx -= nbytes
        self._in_range()
        if self.tx < 0 and self.pending == 0:
            raise Wrong("extra-bytes")
        return self._complete()

    def expect_arrivals(self, count: int) -> int:
        """The pending count goes up, as by cp.async.mbarrier.arrive without .noinc."""
        self.pending += count
        return self._in_range()

    def passed(self, parity: int) -> bool:
        """Whether the phase of a parity is complete, if it is the current one or the one before."""
        return self.phase % 2 != parity

    def _in_range(self) -> int:
        if abs(self.tx) > LIMIT or self.pending > LIMIT:
            raise Wrong("barrier-count")
        return self.phase

    def _complete(self) -> int:
        phase = self.phase
        if self.pending == 0 and self.tx == 0:
            self.phase, self.pending = phase + 1, self.expected
        return phase
