"""Two configurations of a kernel side by side."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cute_kernels.common import extras
from cute_kernels.explore import plan_facts
from cute_kernels.plan import Plan, predict

if TYPE_CHECKING:
    from cute_kernels.emulator.checking.sameness import LaunchMemory

MOST_EMULATED = 64
"""Tiles of a problem that is executed in the emulator without being asked for."""

Row = tuple[str, str, str, str]
Sections = dict[str, "list[Row]"]
"""Rows of tables by their titles."""

Notes = dict[str, "list[str]"]
"""Lines by the title that they stand under, "" in front of all."""


def compare_plans(
    first: Plan, second: Plan, names: tuple[str, str], *, everything: bool, counters: bool | None
) -> tuple[Sections, Notes]:
    """The comparison of two configurations.

    ``first``, ``second``: plans of one problem. ``names``: of the configurations. ``everything``: rows that are equal,
    too. ``counters``: execute both in the emulator; None: if neither has more than `MOST_EMULATED` tiles. Raises
    MissingExtra: machine code cannot be read, or nothing counted."""
    compared: list[tuple[str, Callable[[Plan], plan_facts.Facts]]] = [
        ("configuration", lambda plan: dataclasses.asdict(plan.config)),
        ("plan", plan_facts.planned),
        ("model, never measured", plan_facts.modelled),
    ]
    before: list[str] = []
    chained = [plan for plan in (first, second) if plan.launches != (plan,)]
    if chained:
        before.append(f"{chained[0].operation} chains kernels here: machine code is not compared")
    else:
        extras.require("emulator", "the command compare, which reads machine code,")
        compared += [
            ("assembler", plan_facts.assembled),
            ("machine instructions by opcode (text, not executions)", plan_facts.instruction_mix),
        ]
    tiles = max(map(plan_facts.tiles_of, (first, second)))
    if counters or (counters is None and tiles <= MOST_EMULATED):
        extras.require("emulator", "the command compare, which counts in the emulator,")
        compared.append(("emulator, whole launch", plan_facts.counted))
    else:
        before.append(f"counters are left out: {tiles:,} tiles; a smaller problem, or --counters, has them")
    if first.runs != second.runs:
        before.append(f"two kernels: {names[0]} is {first.runs}; {names[1]} is {second.runs}")
    sections: Sections = {}
    notes: Notes = {"": before} if before else {}
    for title, facts in compared:
        sections[title] = table(facts(first), facts(second), everything=everything)
        if not sections[title]:
            notes[title] = [_without_rows(facts, first)]
        if facts is plan_facts.modelled:
            notes.setdefault(title, []).extend(plan_facts.caveats(map(predict, (first, second))))
    return sections, notes


def _without_rows(facts: Callable[[Plan], plan_facts.Facts], plan: Plan) -> str:
    if facts is not plan_facts.modelled:
        return "no difference"
    return "the model does not see what differs" if facts(plan) else "no model knows this kernel"


def lines_of(sections: Sections, notes: Notes, names: tuple[str, str]) -> list[str]:
    """The tables, with their notes, for people; ``names`` of the two sides."""
    lines = list(notes.get("", ()))
    for title, rows in sections.items():
        lines += [*([""] if lines else []), title, *(_aligned([("", *names, "change"), *rows]) if rows else [])]
        lines += [f"  {note}" for note in notes.get(title, ())]
    return lines


def records(sections: Sections, names: tuple[str, str]) -> list[dict[str, str]]:
    """Every row as a flat mapping."""
    keys = ("section", "name", *names, "change")
    return [dict(zip(keys, (title, *row))) for title, rows in sections.items() for row in rows]


def table(a: plan_facts.Facts, b: plan_facts.Facts, *, everything: bool) -> list[Row]:
    """Rows of what differs, or of everything: name, both values, and the relative change of numbers. ``a``, ``b``:
    values by name; ``everything``: equal ones, too."""
    rows = []
    for name in dict.fromkeys((*a, *b)):
        one, other = a.get(name, "-"), b.get(name, "-")
        numbers = [value for value in (one, other) if isinstance(value, (int, float)) and not isinstance(value, bool)]
        change = ""
        differs = one != other
        if len(numbers) == 2 and differs:
            change = f"{(other - one) / abs(one):+.1%}" if one else "from 0"
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


def written_by_plans(first: Plan, second: Plan) -> "tuple[list[LaunchMemory], list[LaunchMemory]]":
    """Arrays that two plans write on random operands, which are the same for equal problems; no workspaces. Raises
    MissingExtra: the emulator is not installed."""
    extras.require("emulator", "the command same")
    import torch

    import cute_kernels.emulator.checking.sameness as sameness
    import cute_kernels.operations.registry as registry
    import cute_kernels.operations.runtime.emulated as emulated

    written: list[dict[str, torch.Tensor]] = []
    for plan in (first, second):
        operands = registry.random_operands(plan)
        emulated.launch(plan, operands)
        names = {name for part in plan.launches for name in operands.written(part)}
        written.append({name: tensor for name, tensor in operands.tensors().items() if name in names})
    both = tuple(name for name in written[0] if name in written[1])
    bits = [tuple(each[name].contiguous().view(torch.uint8).flatten().numpy() for name in both) for each in written]
    a, b = ([sameness.LaunchMemory(plan.operation, (), after, both)] for plan, after in zip((first, second), bits))
    return a, b
