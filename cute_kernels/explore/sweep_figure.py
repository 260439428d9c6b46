"""Pictures of a sweep: what lies where in shared and tensor memory, and one column of the table against another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cute_kernels.common import extras
from cute_kernels.explore import sweep_outcomes
from cute_kernels.explore.sweep_table import Row
from cute_kernels.plan import ARCHS
from cute_kernels.plan.config_codec import spell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = max(arch.tmem_columns for arch in ARCHS.values())
_WIDTH, _BAR, _MOST_HEIGHT, _PLOT = 12.0, 0.32, 14.0, 4.0  # inches
_LONGEST = 24  # characters of a point's name


def draw(rows: Sequence[Row], x: str = "shared", y: str = "modelled") -> Figure:
    """A memory map of every legal configuration, one for those that have the same, and beneath it column y against x.

    Args:
        rows: of one sweep.
        x, y: names of columns, as of `sweep_outcomes.COLUMNS`; where no row has y, there are only maps.

    Raises:
        MissingExtra: matplotlib is not installed (extra ``demo``).
        ValueError: no row is legal.
    """
    extras.require("demo", "the picture of a sweep", ("matplotlib",))
    from matplotlib.figure import Figure

    maps: dict[Any, list[Row]] = {}
    for row in rows:
        if row.smem:
            maps.setdefault((row.smem, row.smem_limit, row.tmem, not row.settings), []).append(row)
    if not maps:
        raise ValueError("rows has no legal configuration with a memory map: must be at least one")
    groups, numbers = list(maps.values()), sweep_outcomes.numbers(rows)
    placed = [row for row in rows if sweep_outcomes.value(row, y) is not None]
    height = min(_BAR * len(groups), _MOST_HEIGHT)
    heights = [height + 1.0, *([_PLOT] if placed else [])]
    figure = Figure(figsize=(_WIDTH, sum(heights)), dpi=100, facecolor="white", layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    with_columns = any(group[0].tmem for group in groups)
    axes = parts[0].subplots(1, 1 + with_columns, width_ratios=[3, 2][: 1 + with_columns], squeeze=False)[0]
    _maps(axes[0], [[(_array(r.name), r.offset / 1024, r.nbytes / 1024) for r in g[0].smem] for g in groups], 0)
    limits = [group[0].smem_limit / 1024 for group in groups]
    places = range(len(groups))
    limit = {"color": "black", "linewidth": 1, "linestyle": "--", "label": "limit of a CTA"}
    axes[0].vlines(limits, [place - 0.5 for place in places], [place + 0.5 for place in places], **limit)
    axes[0].set(xlabel="shared memory of a CTA, KiB", xlim=(0, 1.02 * max(limits)))
    size = max(4.0, min(8.0, 55 * height / len(groups)))  # points
    axes[0].set_yticks(range(len(groups)), [_label(group, groups, numbers) for group in groups], fontsize=size)
    if with_columns:
        _maps(axes[1], [[(r.name.partition(" ")[0], r.first, r.columns) for r in g[0].tmem] for g in groups], 4)
        axes[1].set(xlabel="columns of tensor memory of a CTA", xlim=(0, 1.02 * _COLUMNS), yticks=[])
    for one in axes:
        one.set_ylim(len(groups) - 0.4, -0.6)
        one.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=7, frameon=False)
    if placed:
        _points(parts[-1].subplots(), placed, x, y, lambda row: numbers[id(row)])
    return figure


def alternative(rows: Sequence[Row], x: str = "shared", y: str = "modelled") -> str:
    """Words for those who do not see the picture."""
    shown, numbered = [row for row in rows if row.smem], sweep_outcomes.numbers(rows)
    text = f"Memory of {len(shown)} legal configurations"
    if not any(sweep_outcomes.value(row, y) is not None for row in rows):
        return text
    front = sweep_outcomes.spans(numbered[id(row)] for row in sweep_outcomes.pareto(rows, x, y))
    return f"{text}, {y} against {x}; on the Pareto front: {front or 'none'}"


def _label(group: Sequence[Row], groups: Sequence[Sequence[Row]], numbers: dict[int, int]) -> str:
    """Numbers of the rows, and the settings in which groups differ."""
    which = sweep_outcomes.spans(numbers[id(row)] for row in group)
    if not group[0].settings:
        return f"default   {which}"
    values = [
        [{row.settings[name] for row in each} for each in groups if each[0].settings] for name in group[0].settings
    ]
    names = [name for name, some in zip(group[0].settings, values) if any(one != some[0] for one in some)]
    shown = names or ([] if len(group) > 1 else list(group[0].settings))
    texts = ("|".join(dict.fromkeys(spell(row.settings[name]) for row in group)) for name in shown)
    return ", ".join(f"{name}={text}" for name, text in zip(shown, texts)) + f"   {which}"


def _maps(axes: Axes, bars: Sequence[Sequence[tuple[str, float, float]]], colour: int) -> None:
    """A bar of parts (name, start, length) for each group; a part has one colour wherever it is."""
    names = dict.fromkeys(name for parts in bars for name, _, _ in parts)
    for number, name in enumerate(names, colour):
        found = [(at, start, length) for at, parts in enumerate(bars) for part, start, length in parts if part == name]
        places, starts, lengths = zip(*found)
        axes.barh(places, lengths, left=starts, color=f"C{number % 10}", edgecolor="white", linewidth=0.5, label=name)


def _array(name: str) -> str:
    """Name of an array of shared memory without its stage."""
    return name.partition(":")[0]


def _points(axes: Axes, rows: Sequence[Row], x: str, y: str, number: Callable[[Row], int]) -> None:
    """A point for each row, by its number; modelled times have their range."""
    front = sorted(sweep_outcomes.pareto(rows, x, y), key=lambda row: sweep_outcomes.value(row, x) or 0)
    together: dict[tuple[float, float], list[Row]] = {}
    for row in rows:
        place = sweep_outcomes.value(row, x) or 0, sweep_outcomes.value(row, y)
        together.setdefault(place, []).append(row)
    for (here, there), some in together.items():
        best = any(row in front for row in some)
        axes.scatter(here, there, color="#b22222" if best else "#9a9a9a", zorder=2)
        if y == "modelled":
            prediction = some[0].prediction
            axes.plot([here, here], [prediction.least, prediction.most], color="#d0d0d0", linewidth=1, zorder=0)
        text = sweep_outcomes.spans(map(number, some))
        text = text if len(text) <= _LONGEST else f"{len(some)} rows"
        axes.annotate(text, (here, there), xytext=(6, 4), textcoords="offset points", fontsize=8)
    line = [(sweep_outcomes.value(row, x) or 0, sweep_outcomes.value(row, y)) for row in front]
    if line:
        axes.plot(*zip(*line), color="#b22222", linewidth=0.8, drawstyle="steps-post", zorder=1, label="Pareto front")
        axes.legend(loc="upper left", fontsize=7, frameon=False)
    axes.margins(x=0.1, y=0.1)
    names = sweep_outcomes.UNITS
    axes.set(xlabel=names.get(x, x), ylabel=names.get(y, y) + (", with its range" if y == "modelled" else ""))
