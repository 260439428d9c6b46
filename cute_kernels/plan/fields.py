"""Values that a field of a configuration may have: one table a kernel, which checks, ``--help`` and docs read.

What else a value depends on (the problem, other fields, memory) is checked by the kernel's plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cute_kernels.plan.base import reject, require

CHOSEN = "chosen for the problem"
TWO_TILES = "two tiles' worth, or what fits"


@dataclass(frozen=True)
class Field:
    """A field of a configuration.

    Attributes:
        rule: why others are refused.
        legal: all values; empty where a range says which there are.
        least, most: of that range, both legal.
        open: what None, where the field's type has it, stands for.
    """

    rule: str
    legal: tuple[int | str, ...] = ()
    least: float = -math.inf
    most: float = math.inf
    open: str = CHOSEN

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError for a value that the field never has."""
        if self.legal:
            require(name, value, self.legal, self.rule)
        elif value is not None and not self.least <= value <= self.most:
            reject(name, value, self.rule, min(max(value, self.least), self.most))


Fields = Mapping[str, Field]
"""By the name of the field; a bool needs no entry."""


def check_fields(config: Any, fields: Fields) -> None:
    """Raises ValueError for the first field whose value is never legal."""
    for name, field in fields.items():
        field.check(name, getattr(config, name))
