"""``cute-kernels compare``: what differs between two configurations of a kernel."""

import argparse
from collections.abc import Sequence

from cute_kernels.commands import tables
from cute_kernels.commands.kernel_options import OPERATIONS, add_planned, plan_of_side
from cute_kernels.explore import comparison
from cute_kernels.explore.comparison import MOST_EMULATED


def add_parser(commands: argparse._SubParsersAction, names: Sequence[str] = tuple(OPERATIONS)) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare two configurations of a kernel: memory, registers, machine code, counts",
        description="Compares two configurations of a kernel for one problem: memory, registers, the mix of machine "
        "instructions, and what the emulator counts. Needs no GPU.",
    )
    add_planned(parser, names)
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="FIELD=VALUE,.. of the kernel's tunables, or default")
    tables.add_formats(parser)
    parser.add_argument("--all", action="store_true", help="print equal rows, too")
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
    plans = (plan_of_side(options, side) for side in sides)
    found = comparison.compare_plans(*plans, sides, everything=options.all, counters=options.counters)
    tables.show(options, comparison.records(found[0], sides), comparison.lines_of(*found, sides))
    return 0
