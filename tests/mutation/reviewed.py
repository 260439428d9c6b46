"""What has been said about mutants that survive: each a pattern, whether the mutant is equivalent, and why.

A mutant is equivalent if the PTX ISA allows no execution of it that the original does not have. Everything else that
survives is a gap of the emulator, and says which detector would have to see it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.mutation.judge import Verdict


@dataclass(frozen=True)
class Review:
    """A judgement on all mutants that match; shell patterns, ``*`` for any.

    Attributes:
        mutation, opcode: as in `Mutant`.
        place: as in `Verdict`; line numbers move, so patterns name functions.
        equivalent: no execution differs; otherwise a known gap.
        reason: why, or what is missing.
        target: name of the target.
    """

    mutation: str
    opcode: str
    place: str
    equivalent: bool
    reason: str
    target: str = "*"

    def matches(self, verdict: Verdict) -> bool:
        pairs = (
            (self.mutation, verdict.mutation),
            (self.opcode, verdict.opcode),
            (self.place, verdict.place),
            (self.target, verdict.target),
        )
        return all(fnmatchcase(value, pattern) for pattern, value in pairs)


REVIEWS: tuple[Review, ...] = ()


def review_of(verdict: Verdict, reviews: Iterable[Review] = REVIEWS) -> Review | None:
    return next((review for review in reviews if review.matches(verdict)), None)
