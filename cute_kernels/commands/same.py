"""``cute-kernels same A B``: do two programs, or two configurations of a kernel, leave the same bits?"""

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from cute_kernels.commands.kernel_options import OPERATIONS, add_planned, plan_of_side
from cute_kernels.common import extras, files
from cute_kernels.common.chips import DEFAULT_ARCH
from cute_kernels.explore import comparison

_HELP = (
    "Exit status: 0: the same bits; 1: they differ; 2: arguments that cannot be used, or runs that cannot be compared, "
    "such as equal results of other inputs; 3: a kernel is at fault; 4: the emulator does not implement something."
)

_PROGRAMS = (".py", ".ptx", ".cu")


def add_parser(commands: argparse._SubParsersAction, names: Sequence[str] = tuple(OPERATIONS)) -> None:
    parser = commands.add_parser(
        "same",
        help="compare the results of two programs, or of two configurations of a kernel, bit by bit",
        description="Runs A and B in the emulator, compares device memory after each launch, and names the first "
        "launch, array and byte that differ. A and B are command lines of programs that make the same inputs "
        "('bench.py --rows 64', or a .ptx with its description), or two configurations of a kernel (FIELD=VALUE,.. or "
        "default). If a program fails, its launches until then are compared.",
        epilog=_HELP,
    )
    add_planned(parser, names, "operation of the two configurations (default: %(default)s)")
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="'SCRIPT ARGS..', or FIELD=VALUE,.. or default")
    parser.add_argument(
        "--prefix",
        action="store_true",
        help="compare arrays of different sizes up to the end of the smaller one: is a row the same in a larger batch?",
    )
    parser.add_argument("--json", type=files.from_here, metavar="FILE", help="write the answer as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the answer; returns the exit status. Raises ValueError: sides that cannot be compared; OSError: a file
    that cannot be read or written."""
    extras.require("emulator", "the command same")
    import cute_kernels.emulator.checking.sameness as sameness

    if options.json is not None:
        files.check_output(options.json)
    sides = options.a, options.b
    programs = [Path((shlex.split(side) or [""])[0]).suffix in _PROGRAMS for side in sides]
    if programs[0] != programs[1]:
        raise ValueError(f"{options.a} and {options.b}: one is a program and one is a configuration")
    failed: list[str] = []
    if programs[0]:
        found = [sameness.memory_of_program(side, options.arch or DEFAULT_ARCH, failed) for side in sides]
        if statuses := [each for each in found if isinstance(each, int)]:
            return statuses[0]
    else:
        found = comparison.written_by_plans(*(plan_of_side(options, side) for side in sides))
    answer = sameness.compared(*found, prefix=options.prefix, failed=failed)
    files.show("\n".join(answer.lines()))
    if options.json is not None:
        document = {"a": options.a, "b": options.b, **answer.facts()}
        files.write_text(options.json, json.dumps(document, indent=1) + "\n")
    return answer.status
