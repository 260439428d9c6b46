"""Subjects of a sweep: a kernel of this package for a problem, or a program with kernels of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cute_kernels.explore.sweep_program import sweep_program
from cute_kernels.explore.sweep_table import Row, around, grid, sweep
from cute_kernels.plan.config_codec import parse_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = "from IPython.display import HTML\n\nHTML(explorer.page(rows, draw={draw}))"
"""The last cell of a notebook."""


@dataclass(frozen=True)
class Kernel:
    """Configurations of a kernel of this package; arguments as of `cute_kernels.explore.sweep_table.sweep`."""

    problem: Any
    base: tuple[Any, ...]
    arch: str
    values: Mapping[str, Sequence[Any]]

    def rows(self, **how: Any) -> list[Row]:
        """The table; row 0 is what the problem gets by itself."""
        return sweep(self.problem, self.base, [None, *grid(**self.values)], arch=self.arch, **how)

    @property
    def count(self) -> int:
        """Rows of the table."""
        return 1 + len(grid(**self.values))

    def timeline(self, row: Row) -> Figure:
        """A picture of who waits for whom, of one row."""
        import cute_kernels.explore.explorer as explorer

        return explorer.timeline(row)

    def cells(self, jobs: int) -> list[str]:
        """The code of a notebook: a cell to edit, and one that shows."""
        names = ", ".join(sorted({type(each).__name__ for each in (self.problem, *self.base)}))
        rows = "problem, base, [None, *sweep_table.grid(**varied)], arch=arch, counted=True, jobs=jobs"
        edited = f"""from cute_kernels.config import {names}
from cute_kernels.explore import explorer, sweep_table

problem = {self.problem!r}
base = {self.base!r}
arch = {self.arch!r}
varied = {dict(self.values)!r}
jobs = {jobs}

rows = explorer.measured(problem, sweep_table.sweep({rows}))
table = explorer.frame(rows)  # of pandas, where it is installed"""
        return [edited, SHOWN.format(draw="explorer.timeline")]


@dataclass(frozen=True)
class Program:
    """Configurations of a program; arguments as of `cute_kernels.explore.sweep_program.sweep_program`."""

    script: str
    arguments: Sequence[str]
    arch: str
    values: Mapping[str, Sequence[Any]]

    def rows(self, **how: Any) -> list[Row]:
        """The table."""
        return sweep_program(self.script, grid(**self.values), arch=self.arch, arguments=self.arguments, **how)

    @property
    def count(self) -> int:
        """Rows of the table."""
        return len(grid(**self.values))

    def timeline(self, row: Row) -> Figure:
        """A picture of who waits for whom, of one row."""
        import cute_kernels.explore.explorer as explorer

        return explorer.timeline_of_program(self.script, row.settings, arch=self.arch, arguments=self.arguments)

    def cells(self, jobs: int) -> list[str]:
        """The code of a notebook: a cell to edit, and one that shows."""
        given = "arch=arch, arguments=arguments"
        edited = f"""from cute_kernels.explore import explorer, sweep_program, sweep_table

script = {self.script!r}
arch = {self.arch!r}
arguments = {list(self.arguments)!r}
varied = {dict(self.values)!r}
jobs = {jobs}

rows = sweep_program.sweep_program(script, sweep_table.grid(**varied), {given}, jobs=jobs)
table = explorer.frame(rows)  # of pandas, where it is installed"""
        draw = f"lambda row: explorer.timeline_of_program(script, row.settings, {given})"
        return [edited, SHOWN.format(draw=draw)]


def kernel(
    problem: Any, kind: type, arch: str, *, varied: Mapping[str, Sequence[str]], fixed: Sequence[str], usual: bool
) -> Kernel:
    """Configurations of a kernel by texts of a command line.

    Args:
        problem, arch: what is planned.
        kind: class of the kernel's configurations.
        varied: values by field.
        fixed: settings that all rows but row 0 have, as FIELD=VALUE.
        usual: other fields have the values of what the problem gets; otherwise those that the class has.

    Raises:
        ValueError: a value that is none of its field's.
    """
    owner = f"{arch}, {kind.__name__}"
    given = parse_settings(kind, fixed, owner) if fixed else kind()
    names = [text.partition("=")[0].strip().replace("-", "_") for text in fixed]
    base = (given,)
    if usual:
        try:
            put = {name: getattr(given, name) for name in names}
            base = tuple(dataclasses.replace(each, **put) for each in dict.fromkeys(around(problem, kind, arch)))
        except (ValueError, NotImplementedError):
            pass  # every row says why
    values = {
        name: [getattr(parse_settings(kind, [f"{name}={text}"], owner), name) for text in texts]
        for name, texts in varied.items()
    }
    return Kernel(problem, base, arch, values)


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
