"""Subjects of a sweep: a kernel of this package for a problem, or a program with kernels of its own."""

import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_kernels.explore import sweep_outcomes
from cute_kernels.explore.sweep_program import sweep_program
from cute_kernels.explore.sweep_table import Row, around, grid, sweep
from cute_kernels.plan.config_codec import parse_settings

SHOWN = "explorer.page(rows, subject, subject.timeline(rows))"
"""The last cell of a notebook."""


@dataclass(frozen=True)
class Kernel:
    """Configurations of a kernel of this package; arguments as of `cute_kernels.explore.sweep_table.sweep`."""

    problem: Any
    base: tuple[Any, ...]
    arch: str
    values: Mapping[str, Sequence[Any]]
    following: Sequence[str] = ()

    @property
    def title(self) -> str:
        """Problem and architecture."""
        return f"{self.problem} on {self.arch}"

    @property
    def settings(self) -> list[Mapping[str, Any] | None]:
        """Settings of each row; row 0 is what the problem gets by itself."""
        return [None, *grid(**self.values)]

    def rows(self, **how: Any) -> list[Row]:
        """The table."""
        return sweep(self.problem, self.base, self.settings, arch=self.arch, following=self.following, **how)

    def explored(self, **how: Any) -> list[Row]:
        """The table with counts, and with times where there is a GPU."""
        import cute_kernels.explore.explorer as explorer

        return explorer.measured(self.problem, self.rows(counted=True, **how))

    def timeline(
        self, rows: Sequence[Row], trace: Path | None = None, number: int | None = None
    ) -> dict[str, Any] | None:
        """Who waits for whom in a row by its number, as `explorer.timeline`; without one in the quickest; None where
        none was counted. Raises ValueError: there is no such row, or it was not counted."""
        import cute_kernels.explore.explorer as explorer

        row = _shown(rows, [row for row in rows if row.small is not None], number)
        return None if row is None else _of_row(rows, row, explorer.timeline(row, trace=trace))

    def code(self, row: Row) -> str:
        """Python that plans a row."""
        kinds = ", ".join(sorted({type(each).__name__ for each in (self.problem, row.config) if each is not None}))
        planned = f"make_plan({self.problem!r}, {row.config!r}, {self.arch!r})"
        return f"from cute_kernels.config import {kinds}\nfrom cute_kernels.plan import make_plan\n\nplan = {planned}"

    def cells(self, jobs: int) -> list[str]:
        """The code of a notebook: a cell to edit, and one that shows."""
        names = ", ".join(sorted({type(each).__name__ for each in (self.problem, *self.base)}))
        return _cells(f"from cute_kernels.config import {names}\n", self, jobs)


@dataclass(frozen=True)
class Program:
    """Configurations of a program; arguments as of `cute_kernels.explore.sweep_program.sweep_program`."""

    script: str
    arguments: Sequence[str]
    arch: str
    values: Mapping[str, Sequence[Any]]

    @property
    def title(self) -> str:
        """Program and architecture."""
        return " ".join([Path(self.script).name, *self.arguments, "on", self.arch])

    @property
    def settings(self) -> list[Mapping[str, Any]]:
        """Settings of each row."""
        return grid(**self.values)

    def rows(self, **how: Any) -> list[Row]:
        """The table."""
        return sweep_program(self.script, self.settings, arch=self.arch, arguments=self.arguments, **how)

    explored = rows

    def timeline(
        self, rows: Sequence[Row], trace: Path | None = None, number: int | None = None
    ) -> dict[str, Any] | None:
        """Who waits for whom in a row by its number, as `explorer.timeline_of_program`; without one in the first legal
        row; None where none is legal. Raises ValueError: there is no such row, or it is not legal."""
        import cute_kernels.explore.explorer as explorer

        row = _shown(rows, [row for row in rows if row.reason is None], number)
        given = {"arch": self.arch, "arguments": self.arguments, "trace": trace}
        if row is None:
            return None
        return _of_row(rows, row, explorer.timeline_of_program(self.script, row.settings, **given))

    def code(self, row: Row) -> str:
        """The command that runs a row."""
        options = (f"--{name}={value}" for name, value in row.settings.items())
        return shlex.join(["cute-kernels", "emulate", "--arch", self.arch, self.script, *self.arguments, *options])

    def cells(self, jobs: int) -> list[str]:
        """The code of a notebook: a cell to edit, and one that shows."""
        return _cells("", self, jobs)


def _cells(imports: str, subject: Kernel | Program, jobs: int) -> list[str]:
    given = ",\n".join(f"    {each.name}={getattr(subject, each.name)!r}" for each in dataclasses.fields(subject))
    edited = f"""{imports}from cute_kernels.explore import explorer, subjects

subject = subjects.{type(subject).__name__}(
{given},
)
rows = subject.explored(jobs={jobs})
table = explorer.frame(rows)  # of pandas, where it is installed"""
    return [edited, SHOWN]


def _shown(rows: Sequence[Row], able: Sequence[Row], number: int | None) -> Row | None:
    """The row of a number, of those that can be shown; without one the first of the first level of time, or the first
    legal one."""
    numbered = {sweep_outcomes.numbers(rows)[id(row)]: row for row in able}
    if number is not None and number not in numbered:
        allowed = sweep_outcomes.spans(numbered) or "none, since no row can be run"
        raise ValueError(f"--row {number}: must be one of {allowed}")
    levels = sweep_outcomes.ranked(able)
    return numbered[number] if number is not None else levels[0][0] if levels else next(iter(able), None)


def _of_row(rows: Sequence[Row], row: Row, found: dict[str, Any]) -> dict[str, Any]:
    number = sweep_outcomes.numbers(rows)[id(row)]
    return found | {"of": f"row {number}: {found['of']}"}


def kernel(
    problem: Any, kind: type, arch: str, *, varied: Mapping[str, Sequence[str]], fixed: Sequence[str], usual: bool
) -> Kernel:
    """Configurations of a kernel by texts of a command line.

    ``problem``, ``arch``: what is planned. ``kind``: class of the kernel's configurations. ``varied``: values by field.
    ``fixed``: settings that all rows but row 0 have, as FIELD=VALUE. ``usual``: other fields have the values of what
    the problem gets; otherwise those that the class has. Raises ValueError: a value that is none of its field's."""
    owner = f"{arch}, {kind.__name__}"
    given = parse_settings(kind, fixed, owner) if fixed else kind()
    names = [text.partition("=")[0].strip().replace("-", "_") for text in fixed]
    base, following = (given,), ()
    if usual:
        following = tuple(each.name for each in dataclasses.fields(kind) if each.name not in names)
        try:
            put = {name: getattr(given, name) for name in names}
            base = tuple(dataclasses.replace(each, **put) for each in dict.fromkeys(around(problem, kind, arch)))
        except (ValueError, NotImplementedError):
            pass  # every row says why
    values = {
        name: [getattr(parse_settings(kind, [f"{name}={text}"], owner), name) for text in texts]
        for name, texts in varied.items()
    }
    return Kernel(problem, base, arch, values, following)


def values_of(options: Iterable[str], *, program: bool) -> dict[str, list[str]]:
    """Values by field, from FIELD=VALUE,.. of a command line, as they are spelled; of ``3-6`` each number.

    The names of a program's options are, too; those of tunables may have hyphens for underscores. Where a semicolon
    stands, it separates values, which may have commas then: ``shape=64,64;128,128``. Raises ValueError: a field varied
    twice."""
    values: dict[str, list[str]] = {}
    for option in options:
        name, _, texts = option.partition("=")
        name = name.strip() if program else name.strip().replace("-", "_")
        if name in values:
            raise ValueError(f"--vary {option}: {name} is varied twice")
        values[name] = texts.removesuffix(";").split(";") if ";" in texts else texts.split(",")
        values[name] = [each for text in values[name] for each in _range(text)]
    return values


def _range(text: str) -> list[str]:
    """``3-6`` as the integers from 3 to 6; anything else as it is."""
    first, _, last = text.strip().partition("-")
    if not (first.isdecimal() and last.isdecimal()):
        return [text]
    return [str(number) for number in range(int(first), int(last) + 1)] or [text]
