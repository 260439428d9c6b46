"""Options of a command line that name a problem: each operation lists its own and makes its problem of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cute_kernels.common.facts import text


@dataclass(frozen=True)
class Option:
    """One option of the commands that take a problem, with hyphens for the underscores of its name.

    A default that is False makes it a flag, an int a positive integer; None leaves the value to
    `ProblemOptions.problem`. ``choices``: allowed words; the plan judges which of them its problem may have.
    """

    name: str
    default: int | str | bool | None
    help: str = ""
    choices: tuple[str, ...] = ()

    flag = text(lambda self: f"--{self.name.replace('_', '-')}")
    """The option as it is written."""

    @property
    def text(self) -> str:
        """The help, with the default unless there is none to name."""
        if self.default is None or self.default is False:
            return self.help
        return f"{self.help} (default: {self.default})" if self.help else f"default: {self.default}"


@dataclass(frozen=True, eq=False)
class ProblemOptions:
    """The options of an operation's problem; what several operations mean by one name is of one kind. ``problem`` makes
    the problem of the value of every option, by name."""

    options: tuple[Option, ...]
    problem: Callable[..., Any]


BATCH = Option("batch", 1, "images")
FEATURES = Option("features", 768, "output features, N")
TABLE = Option(
    "table",
    "positions",
    "what the epilogue adds: bias and position embedding; bias only (for uint8 images, the offset of the normalisation "
    "is part of the bias); nothing",
    ("positions", "bias", "none"),
)


def table_rows(table: str, positions: int) -> int:
    """Rows of the table that an epilogue adds: of no table 0, of a bias alone 1, otherwise one for each position."""
    return {"bias": 1, "none": 0}.get(table, positions)
