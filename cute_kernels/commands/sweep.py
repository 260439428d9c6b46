"""``cute-kernels sweep``: configurations of a kernel, or of a program with kernels of its own, side by side."""

from __future__ import annotations

import argparse
import copy
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cute_kernels import extras, files
from cute_kernels.commands import workers
from cute_kernels.commands.kernel_options import OPERATIONS, add_kernel, add_problem, config_of, count, problem_of
from cute_kernels.commands.sweep_program import sweep_program
from cute_kernels.commands.sweep_table import Row, differing, grid, ranked, sweep
from cute_kernels.config_codec import parse_settings, spell
from cute_kernels.plan import PLANNERS, make_plan, predict


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "sweep",
        help="configurations of a kernel side by side: legal or why not, memory, registers, modelled time",
        description="Evaluates every combination of the values of some tunables for one problem: whether it is legal "
        "and otherwise why not, registers, spills, shared memory, modelled time and the largest part of it. Needs no "
        "GPU, and executes nothing. Of a program, SCRIPT.py, every combination is a run in the emulator, with the "
        "values as its options: registers, memory, and what its launches do.",
        epilog="Exit status: 0, also where configurations are not legal; 2: arguments that cannot be used; of a "
        "program, 3: a kernel is at fault with some configuration, 4: it needs what the emulator does not implement.",
    )
    add_subject(parser)
    parser.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="FIELD=VALUE,..",
        help="values of a tunable, any number of times; --set fixes others. A program gets --FIELD=VALUE; where its "
        "values have commas, semicolons separate them: 'shape=64,64;128,128'",
    )
    parser.add_argument("--measure", action="store_true", help="time on the GPU at hand too")
    workers.add_worker_arguments(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="draw memory maps and the Pareto plot, as .png")
    parser.add_argument("--best", type=count, default=3, metavar="N", help="least times to name (default: %(default)s)")
    add_problem(parser)
    add_kernel(parser, *OPERATIONS)
    parser.set_defaults(run=run)


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Adds what configurations are of: a kernel, or a program and its arguments."""
    parser.add_argument(
        "kernel",
        nargs="?",
        type=kernel_name,
        default="patch-embed",
        metavar="KERNEL",
        help=f"{', '.join(OPERATIONS)}, or a program SCRIPT.py (default: %(default)s)",
    )
    parser.add_argument("--arguments", default="", metavar="'ARGS'", help="a program's other arguments, as one word")


def run(options: argparse.Namespace) -> int:
    """Prints the table; raises ValueError for tunables that the kernel does not have."""
    if options.output is not None:
        extras.require("demo", "--output", ("matplotlib",))
        files.check_output(options.output)
    workers.check_workers(options)
    with workers.workers_of(options) as where:
        rows = (_rows_of_program if options.kernel.endswith(".py") else _rows_of_kernel)(options, where)
    print("\n".join([*lines_of(rows), *ranking(rows, options.best, options.settings)]))
    if options.output is not None:
        import cute_kernels.commands.sweep_figure as sweep_figure

        sweep_figure.draw(rows).savefig(options.output)
    return min((row.status for row in rows if row.status), default=0)  # a fault before a refusal


def kernel_name(text: str) -> str:
    """Name of a kernel, for argparse's ``type``."""
    if text in OPERATIONS or text.endswith(".py"):
        return text
    allowed = f"{', '.join(OPERATIONS)}, or a program whose name ends with .py"
    raise argparse.ArgumentTypeError(f"{text!r}, allowed: {allowed}")


def _rows_of_program(options: argparse.Namespace, where: Mapping[str, Any]) -> list[Row]:
    if options.settings or options.measure:
        raise ValueError("--set and --measure are for this package's kernels; a program gets --arguments and --vary")
    values = {name: list(texts) for name, texts in texts_of(options.vary, program=True).items()}
    arguments = shlex.split(options.arguments)
    return sweep_program(options.kernel, grid(**values), arch=options.arch or "sm_100a", arguments=arguments, **where)


def _rows_of_kernel(options: argparse.Namespace, where: Mapping[str, Any]) -> list[Row]:
    if options.arguments:
        raise ValueError("--arguments are for a program, SCRIPT.py")
    problem, base, values = chosen(options)
    print(kernel_line(problem, base))
    return sweep(problem, base, grid(**values), measured=options.measure, **where)


def chosen(options: argparse.Namespace) -> tuple[Any, Any, dict[str, list[Any]]]:
    """Problem, configuration and values by field, of ``--vary`` and the options of a kernel and its problem.

    Raises:
        ValueError: tunables that the kernel does not have, values that are none of theirs, or a field varied twice.
    """
    varied = texts_of(options.vary)
    problem = problem_of(options)
    named = copy.copy(options)  # of several kernels for the problem, the one that has all these tunables
    named.settings = [*options.settings, *(f"{name}={texts[0]}" for name, texts in varied.items())]
    base = config_of(named, options.kernel, problem)
    return problem, base, {name: [_value(type(base), name, text) for text in texts] for name, texts in varied.items()}


def _time(row: Row) -> str:
    if row.measured is not None:
        return f"{row.measured:,.1f} us (measured)"
    return f"{row.microseconds:,.1f} us (modelled)"


_SHOWN = {  # of what a program's launches do
    "warp instructions": "warp instructions",
    "MMA instructions": "MMAs",
    "shared: bank conflicts": "bank conflicts",
    "L2 bytes read": "B read",
    "L2 bytes written": "B written",
}


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The table for people; a configuration that is not legal has its reason in place of numbers."""
    measured = any(row.measured is not None for row in rows)
    title = "    registers  stack B  shared B  TMEM columns  modelled us  "
    lines = [title + ("measured us  " if measured else "") + "largest part of the sum"]
    for number, row in enumerate(rows, 1):
        name = ", ".join(f"{field}={spell(value)}" for field, value in row.settings.items())
        lines.append(f"{number:2}  {name}" + (f": {row.reason}" if row.reason else ""))
        if row.reason is None:
            cells = [
                (row.registers, 9, ","),
                (row.stack_bytes, 7, ","),
                (row.smem_bytes or None, 8, ","),
                (row.tmem_columns or None, 12, ","),
                (row.microseconds, 11, ",.1f"),
            ]
            if measured:
                cells.append((row.measured, 11, ",.1f"))
            numbers = (f"{'-' if value is None else format(value, form):>{width}}" for value, width, form in cells)
            lines.append(f"    {'  '.join(numbers)}  {row.largest_part or '-'}")
            if row.config is None:
                lines.append("    " + ", ".join(f"{row.counts[what]:,.0f} {unit}" for what, unit in _SHOWN.items()))
    return lines


def kernel_line(problem: Any, base: Any) -> str:
    """Which kernel the rows are of, and which one the problem gets where nobody names a configuration."""
    arch = next(planner.kinds[type(base)] for planner in PLANNERS.values() if type(base) in planner.kinds)
    usual = make_plan(problem, arch=arch)
    prediction = predict(usual)
    time = "" if prediction is None else f", {prediction.microseconds:,.1f} us (modelled)"
    return f"all rows are of {type(base).__name__}; without options this problem gets {usual.config}{time}"


def ranking(rows: Sequence[Row], count: int, fixed: Sequence[str] = ()) -> list[str]:
    """The ``count`` least times and what has them, then what is known of the model's errors.

    Args:
        fixed: settings that all rows have, as FIELD=VALUE.
    """
    numbers = {id(row): number for number, row in enumerate(rows, 1)}  # of the table, refused ones counted
    lines = []
    for alike in ranked(rows)[:count]:
        names = differing(alike)
        common = [f"{name}={spell(value)}" for name, value in alike[0].settings.items() if name not in names]
        settings = " ".join(f"--set {setting}" for setting in (*fixed, *common))
        line = f"{_time(alike[0])}: {settings or 'any of these'}"
        if names:
            which = ", ".join(str(numbers[id(row)]) for row in alike)
            line += f" ({len(alike)} tie, {which}: the model does not see {', '.join(names)} here)"
        lines.append(line)
    return lines + list(dict.fromkeys(row.caveat for row in rows if row.caveat is not None and row.measured is None))


def texts_of(options: Iterable[str], program: bool = False) -> dict[str, list[str]]:
    """Values by field, from FIELD=VALUE,.. of a command line, as they are spelled.

    The names of a program's options are, too; those of tunables may have hyphens for underscores.
    Where a semicolon stands, it separates values, which may have commas then: ``shape=64,64;128,128``.
    """
    values: dict[str, list[str]] = {}
    for option in options:
        name, _, texts = option.partition("=")
        name = name.strip() if program else name.strip().replace("-", "_")
        if name in values:
            raise ValueError(f"--vary {option}: {name} is varied twice")
        values[name] = texts.removesuffix(";").split(";") if ";" in texts else texts.split(",")
    return values


def _value(kind: type, name: str, text: str) -> Any:
    return getattr(parse_settings(kind, [f"{name}={text}"], kind.__name__), name)
