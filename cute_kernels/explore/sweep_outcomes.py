"""Answers of a table of configurations: columns, rows that are alike, times that tie, effects of a field."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from cute_kernels.common.words import counted
from cute_kernels.explore.sweep_table import Row
from cute_kernels.plan.config_codec import spell

COLUMNS = {
    "registers": lambda row: row.registers,
    "stack": lambda row: row.stack_bytes,
    "shared": lambda row: row.smem_bytes or None,
    "tmem": lambda row: row.tmem_columns or None,
    "modelled": lambda row: row.microseconds,
    "measured": lambda row: row.measured,
}
"""Outcomes of a legal row by the names that commands take; whatever the emulator counts is one more."""

UNITS = {
    "registers": "registers", "stack": "stack B", "shared": "shared B", "tmem": "TMEM columns",
    "modelled": "modelled us", "measured": "measured us",
}  # fmt: skip


_NAMES = {"stack": "stack_bytes", "shared": "shared_bytes", "tmem": "tmem_columns", "modelled": "modelled_us",
          "measured": "measured_us"}  # fmt: skip


def tidy(column: str) -> str:
    """Name of a column in records: lower-case words, and units, joined by underlines."""
    return _NAMES.get(column) or re.sub(r"\W+", "_", column.lower())


def columns_of(rows: Iterable[Row]) -> list[str]:
    """Columns that some row has a value of."""
    rows = list(rows)
    counts = dict.fromkeys(name for row in rows for name in row.counts)
    return [name for name in (*COLUMNS, *counts) if any(value(row, name) is not None for row in rows)]


def value(row: Row, column: str) -> float | None:
    """Outcome of a row; None where it has none."""
    return COLUMNS[column](row) if column in COLUMNS else row.counts.get(column)


def named(rows: Sequence[Row], text: str) -> str | None:
    """The column that a text names, by its own name or by that in records; None where no row has it."""
    columns = columns_of(rows)
    return text if text in columns else {tidy(name): name for name in columns}.get(text)


def _quoted(rows: Sequence[Row]) -> str:
    """Names of columns, some of which have commas."""
    return ", ".join(map(repr, columns_of(rows)))


def records(rows: Sequence[Row], sort: str | None = None) -> list[dict[str, Any]]:
    """Every row as a flat mapping, for JSON, CSV or a data frame, with columns named by `tidy`, in the order of `by`.

    What a row does not have is None. Counts, bytes, registers and a program's options that are integers are int."""
    numbered, columns, rows = numbers(rows), columns_of(rows), by(rows, sort)
    fields = {name: _values(row.settings.get(name) for row in rows) for row in rows for name in row.settings}
    found = []
    for place, row in enumerate(rows):
        settings = {name: values[place] for name, values in fields.items()}
        made = {"row": numbered[id(row)], **settings, "design": row.design}
        made |= {tidy(name): value(row, name) for name in columns}
        if row.prediction is not None:
            made |= {"modelled_us_least": row.prediction.least, "modelled_us_most": row.prediction.most}
            made["modelled_largest_part"] = row.prediction.largest_part
        found.append(made | {"refused": row.reason})
    names = dict.fromkeys(itertools.chain(*found))
    return [{name: made.get(name) for name in names} for made in found]


def _values(values: Iterable[Any]) -> list[Any]:
    """Values of a field; as integers where a program's options spell nothing else."""
    values = list(values)
    if all(one is None or isinstance(one, str) and re.fullmatch(r"-?\d+", one) for one in values):
        return [None if one is None else int(one) for one in values]
    return values


def numbers(rows: Sequence[Row]) -> dict[int, int]:
    """Number of each row, by its ``id``: from 1 on, and 0 of what the plan chooses by itself, if that comes first."""
    first = 0 if rows and not rows[0].settings else 1
    return {id(row): number for number, row in enumerate(rows, first)}


def spans(found: Iterable[int]) -> str:
    """Numbers in words: ``1-3, 7``."""
    parts: list[list[int]] = []
    for number in sorted(found):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def settings_text(rows: Sequence[Row]) -> str:
    """Settings of rows, as a command line takes them, and in parentheses what had to follow them; several values of a
    field that come in all combinations with those of the others are listed once: ``stages=3|4, store_group=1|2``."""
    if not rows[0].settings:
        return f"default: {rows[0].config}"
    fields = dict.fromkeys(rows[0].settings)
    values = {name: list(dict.fromkeys(row.settings[name] for row in rows)) for name in fields}
    if math.prod(map(len, values.values())) == len(rows) and all(row.others == rows[0].others for row in rows):
        return ", ".join(f"{name}={'|'.join(map(spell, some))}" for name, some in values.items()) + _followed(rows[0])
    return "; ".join(_settings(row) + _followed(row) for row in rows)


def _settings(row: Row) -> str:
    return ", ".join(f"{name}={spell(one)}" for name, one in row.settings.items())


def _followed(row: Row) -> str:
    text = ", ".join(f"{name}={spell(one)}" for name, one in row.others.items())
    return f" (with {text})" if text else ""


def alike(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows with the same outcome in everything that is known of them together, in the order of the first of each.

    What the plan chooses by itself stands alone.
    """
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        counts = tuple(row.counts.items())
        outcome = row.reason, row.design, row.smem, row.tmem, *(of(row) for of in COLUMNS.values()), counts
        groups.setdefault(outcome if row.settings else None, []).append(row)
    return list(groups.values())


def span(row: Row, column: str) -> tuple[float, float] | None:
    """Least and most that a column of a row stands for: of a modelled time its range; None where it has no value."""
    found = value(row, column)
    if column == "modelled" and found is not None:
        return row.prediction.least, row.prediction.most
    return None if found is None else (found, found)


def tie(a: Row, b: Row, column: str, fields: int = 2) -> bool:
    """Whether two rows' values, which both have, may be equal: where measured pairs say how far ratios of modelled
    times are off, by that, else by their ranges. ``fields``: in which the two differ, 2 for any number."""
    if column == "modelled" and (errors := _ratio_errors(a, b)) is not None:
        times = a.microseconds, b.microseconds
        return max(times) <= (1 + errors[fields > 1]) * min(times)
    (low, high), (other_low, other_high) = span(a, column), span(b, column)
    return low <= other_high and other_low <= high


def _ratio_errors(a: Row, b: Row) -> tuple[float, float] | None:
    """Errors of ratios, as `Prediction` has them; None where they are unknown, or the times of two models."""
    return a.prediction.ratio_errors if a.prediction.caveat == b.prediction.caveat else None


def ranked(rows: Iterable[Row]) -> list[list[Row]]:
    """Levels of the legal configurations whose time is known, measured where one is, else modelled, quickest first.

    A level has the rows that may be the quickest of those behind the levels before: they tie with the row whose range
    ends first. They stand in the order of the table.
    """
    rows = list(rows)
    column = "measured" if any(row.measured is not None for row in rows) else "modelled"
    left = [row for row in rows if value(row, column) is not None]
    levels = []
    while left:
        first = min(left, key=lambda row: span(row, column)[1])
        levels.append([row for row in left if tie(row, first, column)])
        left = [row for row in left if not tie(row, first, column)]
    return levels


def effects(rows: Iterable[Row]) -> list[str]:
    """Changes by each field, between its first and its last legal value: of rows that differ in it alone, and in a line
    of their own of rows in which other fields had to follow."""
    legal = [row for row in rows if row.reason is None and row.settings]
    lines = []
    for field in dict.fromkeys(name for row in legal for name in row.settings):
        groups: dict[Any, list[Row]] = {}
        for row in legal:
            groups.setdefault(tuple(item for item in row.settings.items() if item[0] != field), []).append(row)
        by_followers: dict[tuple[str, ...], list[tuple[Row, Row]]] = {}
        between = [group for group in groups.values() if len(group) > 2]
        for first, last in ((group[0], group[-1]) for group in groups.values() if len(group) > 1):
            others = dict.fromkeys((*first.others, *last.others))
            changed = tuple(name for name in others if first.others.get(name) != last.others.get(name))
            by_followers.setdefault(changed, []).append((first, last))
        for followers, pairs in sorted(by_followers.items(), key=lambda item: len(item[0])):
            ends = {(spell(a.settings[field]), spell(b.settings[field])) for a, b in pairs}
            way = " to ".join(next(iter(ends))) if len(ends) == 1 else "from the first to the last legal value"
            times_first = sorted(columns_of(legal), key=lambda column: column not in ("measured", "modelled"))
            known = [column for column in times_first if _both(pairs, column)]
            changes = ", ".join(filter(None, (_change(pairs, column, 1 + len(followers)) for column in known)))
            unchanged = f"no change of {', '.join(map(_unit, known))}" if known else "nothing is known of both"
            along = f" with {' and '.join(followers)}" if followers else ""
            lines.append(f"{field} {way}{along} ({counted(len(pairs), 'pair')}): {changes or unchanged}")
        lines += _less_between(field, between, columns_of(legal))
    return lines


def _less_between(field: str, groups: Sequence[Sequence[Row]], columns: Sequence[str]) -> list[str]:
    """Values between the first and the last at which something is less than at both, and in how many groups; not
    modelled times, which tie."""
    found: dict[tuple[str, str], int] = {}
    for group in groups:
        for column in (name for name in columns if name != "modelled"):
            numbers = {spell(row.settings[field]): value(row, column) for row in group}
            if None not in numbers.values():
                best = min(numbers, key=numbers.__getitem__)
                if numbers[best] < min(value(group[0], column), value(group[-1], column)):
                    found[best, _unit(column)] = found.get((best, _unit(column)), 0) + 1
    return [
        f"{unit} least at {field} {best}, between the ends, in {count} of {counted(len(groups), 'group')} of rows"
        for (best, unit), count in found.items()
    ]


def _both(pairs: Sequence[tuple[Row, Row]], column: str) -> list[tuple[float, float]]:
    both = [(value(a, column), value(b, column)) for a, b in pairs]
    return [each for each in both if None not in each]


def _unit(column: str) -> str:
    return UNITS.get(column, column)


def _change(pairs: Sequence[tuple[Row, Row]], column: str, fields: int) -> str:
    """How much a column changes where both rows have it, as a part of its value; "" where it does not. Modelled times
    change where they do not tie. ``fields``: as of `tie`."""
    count, within = len(_both(pairs, column)), ""
    if column == "modelled":
        pairs = [(a, b) for a, b in pairs if _both([(a, b)], column)]
        known = all(_ratio_errors(a, b) for a, b in pairs)
        within = "within the error of a ratio" if known else "within its range"
        pairs = [(a, b) for a, b in pairs if not tie(a, b, column, fields)]
        if not pairs:
            return f"{_unit(column)} {within}"
    both = _both(pairs, column)
    if all(a == b for a, b in both):
        return ""
    if not all(a for a, _ in both):
        changes, form = [b - a for a, b in both], "{:+,.0f}"
    else:
        changes, form = [b / a - 1 for a, b in both], "{:+.1%}"
    ends = dict.fromkeys(form.format(end) for end in (min(changes), max(changes)))
    beyond = f" in {counted(len(both), 'pair')} of {count}, in the rest {within}" if len(both) < count else ""
    return f"{_unit(column)} {' to '.join(ends)}{beyond}"


def by(rows: Sequence[Row], column: str | None) -> list[Row]:
    """The rows in the order of a column or of a field that is varied, those without a value last; the plan's own choice
    stays first. Raises ValueError: no row has the column."""
    if column is None:
        return list(rows)
    fields = dict.fromkeys(name for row in rows for name in row.settings)
    field = next((name for name in fields if tidy(name) == tidy(column)), None)
    if field is None and (found := named(rows, column)) is None:
        also = f", or a field: {', '.join(fields)}" if fields else ""
        raise ValueError(f"--sort {column}: no row has it: must be one of {_quoted(rows)}{also}")
    first = [row for row in rows if not row.settings]
    others = [row for row in rows if row.settings]
    values = [value(row, found) if field is None else row.settings.get(field) for row in others]
    values = values if field is None else _values(values)
    keyed = zip(((one is None, isinstance(one, str), one or 0) for one in values), itertools.count(), others)
    return first + [row for *_, row in sorted(keyed, key=lambda each: each[:2])]


def exit_status(rows: Sequence[Row]) -> int:
    """Exit status of a command: a kernel's fault before a refusal; 1 where no configuration is legal."""
    tried = [row for row in rows if row.settings]
    status = min((row.status for row in rows if row.status), default=0)
    return status or int(all(row.reason is not None for row in tried))
