"""``cute-kernels compare``: what differs between two configurations of a kernel, or between two profiles."""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from cute_kernels.commands import tables
from cute_kernels.commands.kernel_options import MOST_EMULATED, OPERATIONS, add_planned, plan_of
from cute_kernels.common import extras
from cute_kernels.explore import plan_facts, profiles
from cute_kernels.plan import Plan, predict


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
    files = [Path(side) for side in (options.a, options.b) if side.endswith(".csv")]
    if len(files) == 1:
        raise ValueError(f"{options.a} and {options.b}: one is a profile and one is a configuration")
    sections, notes = compare_profiles(*files, options) if files else compare_plans(options)
    names = ("section", "name", options.a, options.b, "change")
    records = [dict(zip(names, (title, *row))) for title, rows in sections.items() for row in rows]
    heading = ("", *(Path(side).name if files else side for side in (options.a, options.b)), "change")
    lines = []
    for title, rows in sections.items():
        lines += ["", title, *(_aligned([heading, *rows]) if rows else [])]
        lines += [f"  {note}" for note in notes.get(title, ())]
    tables.show(options, records, [*notes.get("", ()), *lines] if "" in notes else lines[1:])
    return 0


# --- configurations --------------------------------------------------------------------------------------------------


Sections = dict[str, "list[Row]"]
"""Rows of tables by their titles."""

Notes = dict[str, list[str]]
"""Lines by the title that they stand under, "" in front of all."""


def compare_plans(options: argparse.Namespace) -> tuple[Sections, Notes]:
    """The comparison of two configurations."""
    if options.settings:
        raise ValueError("--set belongs to commands with one configuration; allowed here: FIELD=VALUE,.. for A and B")
    first, second = (planned(options, side) for side in (options.a, options.b))
    compared: list[tuple[str, Callable[[Plan], plan_facts.Facts]]] = [
        ("configuration", lambda plan: dataclasses.asdict(plan.config)),
        ("plan", plan_facts.planned),
        ("model, never measured", plan_facts.modelled),
    ]
    notes: Notes = {}
    chained = [plan for plan in (first, second) if plan.launches != (plan,)]
    if chained:
        notes[""] = [f"{chained[0].operation} chains kernels here: machine code is not compared"]
    else:
        extras.require("emulator", "the command compare, which reads machine code,")
        compared += [
            ("assembler", plan_facts.assembled),
            ("machine instructions by opcode (text, not executions)", plan_facts.instruction_mix),
        ]
    if _counts(options, first, second):
        compared.append(("emulator, whole launch", plan_facts.counted))
    else:
        tiles = max(plan_facts.tiles_of(plan) for plan in (first, second))
        left_out = f"counters are left out: {tiles:,} tiles; a smaller problem, or --counters, has them"
        notes.setdefault("", []).append(left_out)
    if first.runs != second.runs:
        notes.setdefault("", []).append(f"two kernels: {options.a} is {first.runs}; {options.b} is {second.runs}")
    sections: Sections = {}
    for title, facts in compared:
        sections[title] = table(facts(first), facts(second), everything=options.all)
        if not sections[title]:
            notes[title] = [_without_rows(facts, first)]
        if facts is plan_facts.modelled:
            notes.setdefault(title, []).extend(plan_facts.caveats(map(predict, (first, second))))
    return sections, notes


def _without_rows(facts: Callable[[Plan], plan_facts.Facts], plan: Plan) -> str:
    if facts is not plan_facts.modelled:
        return "no difference"
    return "the model does not see what differs" if facts(plan) else "no model knows this kernel"


def planned(options: argparse.Namespace, side: str) -> Plan:
    """The plan of a side of the comparison."""
    own = copy.copy(options)
    own.settings = [] if side == "default" else side.split(",")
    return plan_of(own, options.sm_count)


def _counts(options: argparse.Namespace, *plans: Plan) -> bool:
    few = all(plan_facts.tiles_of(plan) <= MOST_EMULATED for plan in plans)
    if options.counters or (options.counters is None and few):
        extras.require("emulator", "the command compare, which counts in the emulator,")
        return True
    return False


# --- profiles --------------------------------------------------------------------------------------------------------


def compare_profiles(first: Path, second: Path, options: argparse.Namespace) -> tuple[Sections, Notes]:
    """The comparison of two profiles: kernels of one name, or if each has one kernel, these two."""
    a, b = profiles.read_profile(first), profiles.read_profile(second)
    pairs = [(name, name) for name in a if name in b]
    if not pairs and len(a) == len(b) == 1:
        pairs = [(*a, *b)]
    if not pairs:
        raise ValueError(f"{first} has {', '.join(a)}; {second} has {', '.join(b)}: no kernel is in both")
    sections: Sections = {}
    notes: Notes = {}
    for one, other in pairs:
        title = one if one == other else f"{one} and {other}"
        sections[title] = table(a[one], b[other], everything=options.all, threshold=options.threshold / 100)
        if not sections[title]:
            notes[title] = [f"no metric changed by {options.threshold:g}% or more"]
    alone = [
        f"{name} ({path.name})"
        for path, own, pair in ((first, a, b), (second, b, a))
        for name in own
        if not any(name in names for names in pairs) and name not in pair
    ]
    if alone:
        notes[""] = [f"in one of the two only: {', '.join(alone)}"]
    return sections, notes


# --- tables ----------------------------------------------------------------------------------------------------------

Row = tuple[str, str, str, str]


def table(a: plan_facts.Facts, b: plan_facts.Facts, *, everything: bool, threshold: float = 0.0) -> list[Row]:
    """Rows of what differs, or of everything: name, both values, and the relative change of numbers.

    Args:
        a, b: values by name.
        everything: equal ones and small changes, too.
        threshold: the least relative change of a number that is shown.
    """
    rows = []
    for name in dict.fromkeys((*a, *b)):
        one, other = a.get(name, "-"), b.get(name, "-")
        numbers = [value for value in (one, other) if isinstance(value, (int, float)) and not isinstance(value, bool)]
        change = ""
        differs = one != other
        if len(numbers) == 2 and differs:
            if one:
                relative = (other - one) / abs(one)
                differs = abs(relative) >= threshold
                change = f"{relative:+.1%}"
            else:
                change = "from 0"
        if differs or everything:
            rows.append((name, _text(one), _text(other), change))
    return rows


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def _aligned(rows: Sequence[Row]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            (f"  {row[0]:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:])))
        ).rstrip()
        for row in rows
    ]


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of percent: must be 0 or more")
    return value
