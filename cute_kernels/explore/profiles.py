"""Metrics of a profile that Nsight Compute wrote as CSV (``ncu --csv``)."""

from __future__ import annotations

import csv
from pathlib import Path

Metrics = dict[str, "float | str"]

_LONG = ("Metric Name", "Metric Unit", "Metric Value")
_KERNEL = ("ID", "Kernel Name")


def read_profile(path: Path) -> dict[str, Metrics]:
    """Metrics by kernel, in the order in which they ran; kernels of one name are numbered from the second on.

    Both forms are read: a row per kernel with a column per metric and a row of units (``--page raw``), and a row per
    metric (``--page details``, the default). What ncu prints around the table is passed over.

    Raises:
        ValueError: there is no such table in the file, or no kernel in it.
        OSError: the file cannot be read.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f'{path}: no table of Nsight Compute, which begins with "ID"; written with ncu --csv?')
    header, *rows = csv.reader(lines[start:])
    rows = [row for row in rows if len(row) == len(header)]
    missing = [name for name in _KERNEL if name not in header]
    if missing:
        raise ValueError(f"{path}: the table has no column {' and '.join(missing)}")
    kernels = _from_long(header, rows) if set(_LONG) <= set(header) else _from_wide(header, rows)
    if not kernels:
        raise ValueError(f"{path}: no kernel in the table")
    return kernels


def _from_long(header: list[str], rows: list[list[str]]) -> dict[str, Metrics]:
    place = {name: header.index(name) for name in (*_KERNEL, *_LONG)}
    by_id: dict[str, Metrics] = {}
    names: dict[str, str] = {}
    for row in rows:
        identity = row[place["ID"]]
        names.setdefault(identity, row[place["Kernel Name"]])
        metric, unit = row[place["Metric Name"]], row[place["Metric Unit"]]
        if metric:  # rules of a section have rows, too
            by_id.setdefault(identity, {})[_with_unit(metric, unit)] = _value(row[place["Metric Value"]])
    return _named([(names[identity], metrics) for identity, metrics in by_id.items()])


def _from_wide(header: list[str], rows: list[list[str]]) -> dict[str, Metrics]:
    if not rows:
        return {}
    units, *rows = rows
    columns = [i for i, name in enumerate(header) if "__" in name]
    place = header.index("Kernel Name")
    return _named([(row[place], {_with_unit(header[i], units[i]): _value(row[i]) for i in columns}) for row in rows])


def _named(kernels: list[tuple[str, Metrics]]) -> dict[str, Metrics]:
    result: dict[str, Metrics] = {}
    for kernel, metrics in kernels:
        name, number = kernel.split("(")[0], 1
        while (key := name if number == 1 else f"{name} #{number}") in result:
            number += 1
        result[key] = metrics
    return result


def _with_unit(metric: str, unit: str) -> str:
    return f"{metric} [{unit}]" if unit else metric


def _value(text: str) -> float | str:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text
