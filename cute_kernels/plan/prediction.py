"""Prediction of a launch's time by a model."""

from collections.abc import Mapping
from dataclasses import dataclass

from cute_kernels.common.facts import number, text


@dataclass(frozen=True)
class Prediction:
    """A modelled time, never a measured one.

    Attributes:
        microseconds: of the launch.
        parts: what it consists of: microseconds by what takes them. Where several things run beside each other and the
            longest decides, only that one is in it.
        caveat: what is known of the model's errors: a sentence that stands under every table of its times.
        error: how far off the model is to be expected, as a part of the time.
    """

    microseconds: float
    parts: Mapping[str, float]
    caveat: str
    error: float

    least = number(lambda self: self.microseconds * (1 - self.error))
    """Lower end of the range of microseconds."""
    most = number(lambda self: self.microseconds * (1 + self.error))
    """Upper end of the range of microseconds."""
    largest_part = text(lambda self: max(self.parts, key=self.parts.__getitem__))
    """The name of the part that takes most of the time. It bounds nothing: the time is the parts' sum."""

    def __str__(self) -> str:
        share = self.parts[self.largest_part] / self.microseconds
        return f"{self.time}, of which {self.largest_part} {share:.0%}"

    time = text(lambda self: f"{self.microseconds:,.1f} us (modelled, {self.least:,.0f} to {self.most:,.0f})")
    """Time and range in words."""
