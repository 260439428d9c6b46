"""``cute-kernels sweep``: configurations of a kernel, or of a program with kernels of its own, side by side."""

from __future__ import annotations

import argparse
import copy
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cute_kernels.commands import tables, workers
from cute_kernels.commands.kernel_options import OPERATIONS, add_plan, arch_of, config_of, count, problem_of
from cute_kernels.commands.progress import ProgressLine
from cute_kernels.common import extras, files
from cute_kernels.common.chips import DEFAULT_ARCH
from cute_kernels.explore import plan_facts, sweep_outcomes
from cute_kernels.explore.sweep_program import sweep_program
from cute_kernels.explore.sweep_table import Row, check_measurable, grid, sweep
from cute_kernels.plan.config_codec import parse_settings, spell


def add_parser(commands: argparse._SubParsersAction, names: Sequence[str] = tuple(OPERATIONS)) -> None:
    parser = commands.add_parser(
        "sweep",
        help="configurations of a kernel side by side: legal or why not, memory, registers, modelled time",
        description="Evaluates every combination of the values of some tunables for one problem: whether it is legal "
        "and otherwise why not, registers, spills, shared memory, modelled time and the largest part of it. Needs no "
        "GPU, and executes nothing. Of a program, SCRIPT.py, every combination is a run in the emulator, with the "
        "values as its options: registers, memory, and what its launches do.",
        epilog="Exit status: 0, also where some configurations are not legal; 1: none is; 2: arguments that cannot be "
        "used; of a program, 3: a kernel is at fault with some configuration, 4: it needs what the emulator does not "
        "implement.",
    )
    add_subject(parser)
    parser.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="FIELD=VALUE,..",
        help="values of a tunable, any number of times, 3-6 for 3,4,5,6; --set fixes others. A program gets "
        "--FIELD=VALUE; where its values have commas, semicolons separate them: 'shape=64,64;128,128'",
    )  # fmt: skip
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True,
        help="of a kernel, registers and stack, for which every legal configuration is compiled (default: yes)",
    )  # fmt: skip
    parser.add_argument("--measure", action="store_true", help="time on the GPU at hand too")
    columns = ", ".join(sweep_outcomes.COLUMNS)
    parser.add_argument("--sort", metavar="COLUMN", help=f"least first: {columns}, or what the emulator counts")
    parser.add_argument("--pareto", metavar="X,Y", help="columns that the front is of (default: shared,modelled)")
    tables.add_formats(parser)
    workers.add_worker_arguments(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="draw memory maps and the Pareto plot, as .png")
    parser.add_argument("--best", type=count, default=3, metavar="N", help="least times to name (default: %(default)s)")
    add_plan(parser, names)
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
        files.check_output(options.output, ".png")
    workers.check_workers(options)
    tables.check(options)
    axes = axes_of(options.pareto)
    with workers.workers_of(options) as where, ProgressLine() as line:
        rows = (_rows_of_program if options.kernel.endswith(".py") else _rows_of_kernel)(options, line, where)
    lines = text_of(rows, options.best, options.settings, options.sort, axes)
    tables.show(options, sweep_outcomes.records(sweep_outcomes.by(rows, options.sort)), lines)
    if options.output is not None and any(row.smem for row in rows):
        import cute_kernels.explore.sweep_figure as sweep_figure

        with files.writing(options.output):
            sweep_figure.draw(rows, *axes).savefig(options.output)
    tried = [row for row in rows if row.settings]
    status = min((row.status for row in rows if row.status), default=0)  # a fault before a refusal
    return status or int(all(row.reason is not None for row in tried))


def axes_of(text: str | None) -> tuple[str, str]:
    """Columns of a front, from X,Y.

    Raises:
        ValueError: other than two.
    """
    names = tuple((text or "shared,modelled").split(","))
    if len(names) != 2:
        raise ValueError(f"--pareto {text}: expected two columns, X,Y")
    return names


def kernel_name(text: str) -> str:
    """Name of a kernel, for argparse's ``type``."""
    if text in OPERATIONS or text.endswith(".py"):
        return text
    allowed = f"{', '.join(OPERATIONS)}, or a program whose name ends with .py"
    raise argparse.ArgumentTypeError(f"{text!r}: must be {allowed}")


def _rows_of_program(options: argparse.Namespace, line: ProgressLine, where: Mapping[str, Any]) -> list[Row]:
    if options.settings or options.measure or not options.compile:
        raise ValueError("--set, --measure and --no-compile are for this package's kernels; a program gets --arguments")
    values = {name: list(texts) for name, texts in texts_of(options.vary, program=True).items()}
    settings, arguments = grid(**values), shlex.split(options.arguments)
    seen = _follow(line, len(settings))
    arch = options.arch or DEFAULT_ARCH
    return sweep_program(options.kernel, settings, arch=arch, arguments=arguments, seen=seen, **where)


def _rows_of_kernel(options: argparse.Namespace, line: ProgressLine, where: Mapping[str, Any]) -> list[Row]:
    if options.arguments:
        raise ValueError("--arguments are for a program, SCRIPT.py")
    problem, base, values = chosen(options)
    if options.measure:
        check_measurable(problem)
    settings = [None, *grid(**values)]
    seen = _follow(line, len(settings))
    if not options.compile:
        where = {}  # milliseconds: not worth a process
    arch, wanted = arch_of(options, options.kernel), {"compiled": options.compile, "measured": options.measure}
    return sweep(problem, base, settings, arch=arch, seen=seen, **wanted, **where)


def _follow(line: ProgressLine, count: int) -> Callable[[Row], None]:
    """Shows each row on a terminal as it is known."""
    done = 0

    def seen(row: Row) -> None:
        nonlocal done
        done += 1
        outcome = row.reason or ", ".join(
            f"{value:,.0f} {sweep_outcomes.UNITS[name]}"
            for name in ("registers", "shared") if (value := sweep_outcomes.value(row, name)) is not None
        )  # fmt: skip
        line.row(f"{sweep_outcomes.settings_text([row])}: {outcome}")
        line.show(f"{done}/{count}", done / count)

    return seen


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


def text_of(
    rows: Sequence[Row],
    best: int = 3,
    fixed: Sequence[str] = (),
    sort: str | None = None,
    axes: tuple[str, str] = ("shared", "modelled"),
) -> list[str]:
    """The whole answer: table, least times, front, effects of the fields, what is known of the model's errors.

    Args:
        best: least times to name.
        fixed: settings that all rows have, as FIELD=VALUE.
        sort: column of the order.
        axes: columns of the front, which is left out where no row has them.
    """
    lines = [*lines_of(sweep_outcomes.by(rows, sort)), *ranking(rows, best, fixed)]
    if all(axis in sweep_outcomes.columns_of(rows) for axis in axes):
        numbered = sweep_outcomes.numbers(rows)
        front = sweep_outcomes.spans(numbered[id(row)] for row in sweep_outcomes.pareto(rows, *axes))
        none = "none: those of least time tie" if "modelled" in axes else "none"
        lines.append(f"Pareto front of {' and '.join(axes)}: {front or none}")
    elif axes != ("shared", "modelled"):
        for axis in axes:
            sweep_outcomes.check_column(rows, axis, "--pareto")
    lines += [f"varying {effect}" for effect in sweep_outcomes.effects(rows)]
    return lines + caveats(rows)


def caveats(rows: Iterable[Row]) -> list[str]:
    """Known errors of the modelled times of rows that were not measured."""
    return plan_facts.caveats(row.prediction for row in rows if row.measured is None)


def _time(row: Row) -> str:
    return row.prediction.time if row.measured is None else f"{row.measured:,.1f} us (measured)"


_SHOWN = {  # of what a program's launches do
    "warp instructions": "warp instructions", "MMA instructions": "MMAs", "shared: bank conflicts": "bank conflicts",
    "L2 bytes read": "B read", "L2 bytes written": "B written",
}  # fmt: skip


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The table for people: rows with one outcome together, and those with one refusal behind all others."""
    shown = [name for name in sweep_outcomes.COLUMNS if name != "measured" or any(row.measured for row in rows)]
    titles = [sweep_outcomes.UNITS[name] for name in shown]
    lines = ["    " + "  ".join(titles) + "  largest part of the sum; design"]
    numbered = sweep_outcomes.numbers(rows)
    for group in sorted(sweep_outcomes.alike(rows), key=lambda group: group[0].reason is not None):
        row, which = group[0], sweep_outcomes.spans(numbered[id(each)] for each in group)
        name = f"{which}  {sweep_outcomes.settings_text(group)}"
        if row.reason is not None:
            lines.append(f"{name}: {row.reason}")
            continue
        lines.append(name)
        cells = []
        for column, title in zip(shown, titles, strict=True):
            found = sweep_outcomes.value(row, column)
            cells.append(("-" if found is None else f"{found:,.{int(column in _TIMES)}f}").rjust(len(title)))
        largest = "-"
        if row.prediction is not None:
            largest = f"{row.prediction.largest_part} ({row.prediction.least:,.0f} to {row.prediction.most:,.0f} us)"
        lines.append(f"    {'  '.join(cells)}  {largest}" + (f"; {row.design}" if row.design else ""))
        if row.config is None and row.counts:
            lines.append(
                "    "
                + ", ".join(f"{row.counts[what]:,.0f} {unit}" for what, unit in _SHOWN.items() if what in row.counts)
            )
    return lines


_TIMES = ("modelled", "measured")


def ranking(rows: Sequence[Row], count: int, fixed: Sequence[str] = ()) -> list[str]:
    """The ``count`` least times and what has them; ``fixed`` as of `text_of`."""
    numbered = sweep_outcomes.numbers(rows)
    lines = []
    for group in sweep_outcomes.ranked(rows)[:count]:
        alike = [row for row in group if row.settings]
        if len(alike) < len(group):
            lines.append(f"{_time(group[0])}: without any --set")
        if not alike:
            continue
        names = sweep_outcomes.differing(alike)
        common = [f"{name}={spell(value)}" for name, value in sweep_outcomes.common(alike).items()]
        settings = " ".join(f"--set {setting}" for setting in (*fixed, *common))
        line = f"{_time(alike[0])}: {settings or 'any of these'}"
        if names:
            which = sweep_outcomes.spans(numbered[id(row)] for row in alike)
            line += f" ({len(alike)} tie, {which}: the model does not see {', '.join(names)} here)"
        lines.append(line)
        if alike[0].measured is None:
            parts = sorted(alike[0].prediction.parts.items(), key=lambda part: -part[1])
            lines.append("    " + ", ".join(f"{name} {time:,.1f}" for name, time in parts if time))
    return lines


def texts_of(options: Iterable[str], program: bool = False) -> dict[str, list[str]]:
    """Values by field, from FIELD=VALUE,.. of a command line, as they are spelled; of ``3-6`` each number.

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
        values[name] = [each for text in values[name] for each in _range(text)]
    return values


def _range(text: str) -> list[str]:
    """``3-6`` as the integers from 3 to 6; anything else as it is."""
    first, _, last = text.strip().partition("-")
    if not (first.isdecimal() and last.isdecimal()):
        return [text]
    return [str(number) for number in range(int(first), int(last) + 1)] or [text]


def _value(kind: type, name: str, text: str) -> Any:
    return getattr(parse_settings(kind, [f"{name}={text}"], kind.__name__), name)
