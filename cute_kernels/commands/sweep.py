"""``cute-kernels sweep``: configurations of a kernel side by side."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cute_kernels import extras, files
from cute_kernels.commands.kernel_options import KINDS, add_kernel, add_problem, config_of, count, problem_of
from cute_kernels.commands.sweep_table import Row, best, grid, sweep
from cute_kernels.config_codec import parse_settings, spell


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "sweep",
        help="configurations of a kernel side by side: legal or why not, memory, registers, modelled time",
        description="Evaluates every combination of the values of some tunables for one problem: whether it is legal "
        "and otherwise why not, registers, spills, shared memory, modelled time and the largest part of it. Needs no "
        "GPU, and executes nothing.",
    )
    parser.add_argument("kernel", nargs="?", choices=tuple(KINDS), default="patch-embed", help="default: %(default)s")
    parser.add_argument(
        "--vary", action="append", required=True, metavar="FIELD=VALUE,..",
        help="values of a tunable, any number of times; --set fixes others",
    )  # fmt: skip
    parser.add_argument("--jobs", type=count, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="draw memory maps and the Pareto plot, as .png")
    parser.add_argument("--best", type=count, default=3, help="configurations to name (default: %(default)s)")
    add_problem(parser)
    add_kernel(parser, *KINDS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the table; raises ValueError for tunables that the kernel does not have."""
    if options.output is not None:
        extras.require("demo", "--output", ("matplotlib",))
        files.check_output(options.output)
    varied = _texts(options.vary)
    problem = problem_of(options)
    named = copy.copy(options)  # of several kernels for the problem, the one that has all these tunables
    named.settings = [*options.settings, *(f"{name}={texts[0]}" for name, texts in varied.items())]
    base = config_of(named, options.kernel, problem)
    values = {name: [_value(type(base), name, text) for text in texts] for name, texts in varied.items()}
    rows = sweep(problem, base, grid(**values), jobs=options.jobs)
    print("\n".join(lines_of(rows)))
    for row in best(rows, options.best):
        settings = [*options.settings, *(f"{name}={spell(value)}" for name, value in row.settings.items())]
        print(f"{row.microseconds:,.1f} us (modelled): " + " ".join(f"--set {setting}" for setting in settings))
    if options.output is not None:
        import cute_kernels.commands.sweep_figure as sweep_figure

        sweep_figure.draw(rows).savefig(options.output)
    return 0


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The table for people; a configuration that is not legal has its reason in place of numbers."""
    lines = ["    registers  stack B  shared B  modelled us  largest part"]
    for number, row in enumerate(rows, 1):
        name = ", ".join(f"{field}={spell(value)}" for field, value in row.settings.items())
        lines.append(f"{number:2}  {name}" + (f": {row.reason}" if row.reason else ""))
        if row.reason is None:
            cells = ((row.registers, 9, ","), (row.stack_bytes, 7, ","), (row.smem_bytes or None, 8, ","),
                     (row.microseconds, 11, ",.1f"))  # fmt: skip
            numbers = (f"{'-' if value is None else format(value, form):>{width}}" for value, width, form in cells)
            lines.append(f"    {'  '.join(numbers)}  {row.bound or '-'}")
    return lines


def _texts(options: Iterable[str]) -> dict[str, list[str]]:
    """Values by field, from FIELD=VALUE,.. of a command line, as they are spelled."""
    values: dict[str, list[str]] = {}
    for option in options:
        name, _, texts = option.partition("=")
        name = name.strip().replace("-", "_")
        if name in values:
            raise ValueError(f"--vary {option}: {name} is varied twice")
        values[name] = texts.split(",")
    return values


def _value(kind: type, name: str, text: str) -> Any:
    return getattr(parse_settings(kind, [f"{name}={text}"], kind.__name__), name)
