"""What a model says of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """A modelled time, never a measured one.

    Attributes:
        microseconds: of the launch.
        parts: what it consists of: microseconds by what takes them. Where several things run beside each other and the
            longest decides, only that one is in it.
    """

    microseconds: float
    parts: Mapping[str, float]

    @property
    def bound(self) -> str:
        """The largest part."""
        return max(self.parts, key=self.parts.__getitem__)

    def __str__(self) -> str:
        share = self.parts[self.bound] / self.microseconds
        return f"{self.microseconds:,.1f} us (modelled), of which {self.bound} {share:.0%}"
