"""The table of a sweep as text for people: rows, levels of time, effects of the fields."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from cute_kernels.explore import plan_facts, sweep_outcomes
from cute_kernels.explore.sweep_table import Row
from cute_kernels.plan.config_codec import spell

_SHOWN = {  # of what a program's launches do
    "warp instructions": "warp instructions", "MMA instructions": "MMAs", "shared: bank conflicts": "bank conflicts",
    "L2 bytes read": "B read", "L2 bytes written": "B written",
}  # fmt: skip


def outcome(row: Row) -> str:
    """A row in a line, as soon as it is known."""
    known = row.reason or ", ".join(
        f"{value:,.0f} {sweep_outcomes.UNITS[name]}"
        for name in ("registers", "shared") if (value := sweep_outcomes.value(row, name)) is not None
    )  # fmt: skip
    return f"{sweep_outcomes.settings_text([row])}: {known}"


def text_of(rows: Sequence[Row], best: int = 3, sort: str | None = None) -> list[str]:
    """The whole answer: table, levels of time, effects of the fields, what is known of the model's errors.

    ``rows``: of one sweep. ``best``: levels of time to name. ``sort``: column of the order, which
    leaves rows their numbers. Raises ValueError: a column that no row has."""
    lines = [*lines_of(rows, sort), *ranking(rows, best)]
    lines += [f"varying {effect}" for effect in sweep_outcomes.effects(rows)]
    return lines + plan_facts.caveats(row.prediction for row in rows if row.measured is None)


def lines_of(rows: Sequence[Row], sort: str | None = None) -> list[str]:
    """The table in the order of `sweep_outcomes.by`: rows with one outcome together, refused ones behind all others."""
    shown = [name for name in sweep_outcomes.columns_of(rows) if name in sweep_outcomes.COLUMNS]
    cells = {name: [_cell(row, name) for row in rows] for name in shown}
    widths = {name: max(len(sweep_outcomes.UNITS[name]), *map(len, cells[name])) for name in shown}
    titles = [sweep_outcomes.UNITS[name].rjust(widths[name]) for name in shown]
    last = "largest part of the sum; design" if any(row.design for row in rows) else ""
    lines = [f"    {'  '.join([*titles, last])}".rstrip()]
    numbered, rows = sweep_outcomes.numbers(rows), sweep_outcomes.by(rows, sort)
    for group in sorted(sweep_outcomes.alike(rows), key=lambda group: group[0].reason is not None):
        row, which = group[0], sweep_outcomes.spans(numbered[id(each)] for each in group)
        name = f"{which}  {sweep_outcomes.settings_text(group)}"
        if row.reason is not None:
            lines.append(f"{name}: {row.reason}")
            continue
        facts = [_cell(row, column).rjust(widths[column]) for column in shown]
        if row.design:
            unknown = "-" if row.measured is not None else "time unknown: no model knows this kernel"
            facts.append(f"{row.prediction.largest_part if row.prediction else unknown}; {row.design}")
        lines += [name, f"    {'  '.join(facts)}".rstrip()]
        if row.config is None and row.counts:
            does = (f"{row.counts[what]:,.0f} {unit}" for what, unit in _SHOWN.items() if what in row.counts)
            lines.append("    " + ", ".join(does))
    return lines


def _cell(row: Row, column: str) -> str:
    """A value as the table has it, a modelled time with its range."""
    found = sweep_outcomes.value(row, column)
    if found is None:
        return "-"
    if column == "modelled":
        return f"{found:,.1f} ({row.prediction.least:,.0f} to {row.prediction.most:,.0f})"
    return f"{found:,.1f}" if column == "measured" else f"{found:,.0f}"


def ranking(rows: Sequence[Row], count: int) -> list[str]:
    """The ``count`` first levels of time: what has them, and the settings that all of a level have."""
    numbered = sweep_outcomes.numbers(rows)
    lines = []
    for level in sweep_outcomes.ranked(rows)[:count]:
        which = sweep_outcomes.spans(numbered[id(row)] for row in level)
        if level[0].measured is not None:
            time = f"{level[0].measured:,.1f} us (measured)"
        else:
            times = sorted({f"{row.microseconds:,.1f}" for row in level}, key=lambda text: float(text.replace(",", "")))
            least, most = (of(end(row.prediction) for row in level) for of, end in _ENDS)
            time = f"{' to '.join(dict.fromkeys((times[0], times[-1])))} us (modelled, {least:,.0f} to {most:,.0f})"
        tie = f", of which the model does not say which is quickest: {which}" if len(level) > 1 else f": {which}"
        lines.append(time + tie)
        if settings := spelled(level):
            lines.append(f"    {settings}")
        if len(level) == 1 and level[0].measured is None:
            parts = sorted(level[0].prediction.parts.items(), key=lambda part: -part[1])
            lines.append("    " + ", ".join(f"{name} {time:,.1f}" for name, time in parts if time))
    return lines


_ENDS = ((min, lambda prediction: prediction.least), (max, lambda prediction: prediction.most))


def spelled(rows: Sequence[Row]) -> str:
    """Words of a command line for what the configurations of rows share and their class does not have by itself."""
    if len({type(row.config) for row in rows}) > 1:
        return ""
    shared = [_own(row.config) for row in rows]
    common = {name: one for name, one in shared[0].items() if all(own.get(name) == one for own in shared)}
    return " ".join(f"--set {name}={spell(one)}" for name, one in common.items())


def _own(config: Any) -> dict[str, Any]:
    fields = dataclasses.fields(config)
    return {each.name: getattr(config, each.name) for each in fields if getattr(config, each.name) != each.default}
