"""``cute-kernels compare``: what differs between two configurations of a kernel, or between two profiles."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cute_kernels.commands import tables
from cute_kernels.commands.kernel_options import OPERATIONS, add_planned, plan_of_side
from cute_kernels.explore import comparison
from cute_kernels.explore.comparison import MOST_EMULATED


def add_parser(commands: argparse._SubParsersAction, names: Sequence[str] = tuple(OPERATIONS)) -> None:
    parser = commands.add_parser(
        "compare",
        help="what differs between two configurations of a kernel, or between two profiles",
        description="Compares two configurations of a kernel for one problem: memory, registers, the mix of machine "
        "instructions, and what the emulator counts. Or two profiles that Nsight Compute wrote with --csv, kernel by "
        "kernel. Needs no GPU.",
    )
    add_planned(parser, names)
    for name in ("a", "b"):
        parser.add_argument(
            name,
            metavar=name.upper(),
            help="FIELD=VALUE,.. of the kernel's tunables, or default; or a .csv file",
        )
    tables.add_formats(parser)
    parser.add_argument("--all", action="store_true", help="rows that are equal, too")
    parser.add_argument(
        "--threshold",
        type=_percent,
        default=5.0,
        metavar="PERCENT",
        help="of profiles, the least change of a metric that is shown (default: %(default)g)",
    )
    parser.add_argument(
        "--counters",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=f"execute the launch in the emulator and count (default: if it has at most {MOST_EMULATED} tiles)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the comparison; raises ValueError for sides that cannot be compared."""
    tables.check(options)
    sides = options.a, options.b
    files = [Path(side) for side in sides if side.endswith(".csv")]
    if len(files) == 1:
        raise ValueError(f"{options.a} and {options.b}: one is a profile and one is a configuration")
    if files:
        found = comparison.compare_profiles(*files, everything=options.all, percent=options.threshold)
    else:
        plans = (plan_of_side(options, side) for side in sides)
        found = comparison.compare_plans(*plans, sides, everything=options.all, counters=options.counters)
    titles = tuple(path.name for path in files) or sides
    tables.show(options, comparison.records(found[0], sides), comparison.lines_of(*found, titles))
    return 0


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of percent: must be 0 or more")
    return value
