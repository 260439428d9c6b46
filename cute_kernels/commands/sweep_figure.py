"""Pictures of a sweep: what lies where in shared and tensor memory, and modelled time against shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cute_kernels import extras
from cute_kernels.commands.sweep_table import Row, pareto
from cute_kernels.config_codec import spell
from cute_kernels.plan import ARCHS, SmemRegion

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = max(arch.tmem_columns for arch in ARCHS.values())
_LIMIT = max(arch.smem_bytes for arch in ARCHS.values()) / 1024
_WIDTH, _ROW = 9.0, 0.32  # inches


def draw(rows: Sequence[Row]) -> Figure:
    """The memory map of every legal configuration, and beneath it the Pareto plot where there are modelled times.

    Raises:
        MissingExtra: matplotlib is not installed (extra ``demo``).
        ValueError: no row is legal.
    """
    extras.require("demo", "the picture of a sweep", ("matplotlib",))
    from matplotlib.figure import Figure

    mapped = [row for row in rows if row.smem]
    timed = [row for row in mapped if row.microseconds is not None]
    if not mapped:
        raise ValueError("rows has no legal configuration with a memory map, expected at least one")
    heights = [_ROW * len(mapped) + 1.0, *([3.6] if timed else [])]
    with_columns = any(row.tmem for row in mapped)
    if with_columns:
        heights.insert(1, heights[0])
    figure = Figure(figsize=(_WIDTH, sum(heights)), dpi=100, facecolor="white", layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    numbers = {id(row): number for number, row in enumerate(rows, 1)}  # of the table, refused ones counted
    _memory(axes[0], mapped, numbers)
    if with_columns:
        _tensor_memory(axes[1], mapped, numbers)
    if timed:
        _pareto(axes[-1], timed, numbers)
    return figure


def label(row: Row) -> str:
    """The settings of a row as a command line takes them."""
    return ", ".join(f"{name}={spell(value)}" for name, value in row.settings.items()) or "default"


def _memory(axes: Axes, rows: Sequence[Row], numbers: dict[int, int]) -> None:
    """A bar of arrays for each row; an array has one colour, however many stages it has."""
    names = list(dict.fromkeys(_array(region) for row in rows for region in row.smem))
    for number, name in enumerate(names):
        places = [(at, region) for at, row in enumerate(rows) for region in row.smem if _array(region) == name]
        axes.barh(
            [at for at, _ in places],
            [region.nbytes / 1024 for _, region in places],
            left=[region.offset / 1024 for _, region in places],
            color=f"C{number % 10}",
            edgecolor="white",
            linewidth=0.5,
            label=name,
        )
    axes.axvline(_LIMIT, color="black", linewidth=1, linestyle="--", label="limit of a CTA")
    axes.set_yticks(range(len(rows)), [f"{label(row)}   {numbers[id(row)]}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="shared memory of a CTA, KiB", xlim=(0, 1.02 * _LIMIT))
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, fontsize=7, frameon=False)


def _tensor_memory(axes: Axes, rows: Sequence[Row], numbers: dict[int, int]) -> None:
    """A bar of columns for each row; everything of one kind has one colour."""
    kinds = list(dict.fromkeys(region.name.partition(" ")[0] for row in rows for region in row.tmem))
    for number, kind in enumerate(kinds):
        places = [(at, region) for at, row in enumerate(rows) for region in row.tmem if region.name.startswith(kind)]
        axes.barh(
            [at for at, _ in places],
            [region.columns for _, region in places],
            left=[region.first for _, region in places],
            color=f"C{number + 4}",
            edgecolor="white",
            linewidth=0.5,
            label=kind,
        )
    axes.set_yticks(range(len(rows)), [f"{label(row)}   {numbers[id(row)]}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="columns of tensor memory of a CTA", xlim=(0, 1.02 * _COLUMNS))
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, fontsize=7, frameon=False)


def _array(region: SmemRegion) -> str:
    return region.name.partition(":")[0]


def _pareto(axes: Axes, rows: Sequence[Row], numbers: dict[int, int]) -> None:
    """A point for each row, by the number that it has in the memory map."""
    front = sorted(pareto(rows), key=lambda row: row.smem_bytes)
    behind = [row for row in rows if row not in front]
    for some, colour, name in ((behind, "#9a9a9a", "others"), (front, "#b22222", "Pareto front")):
        places = [row.smem_bytes / 1024 for row in some], [row.microseconds for row in some]
        axes.scatter(*places, color=colour, label=name, zorder=2)
    axes.plot(
        [row.smem_bytes / 1024 for row in front],
        [row.microseconds for row in front],
        color="#b22222",
        linewidth=0.8,
        drawstyle="steps-post",
        zorder=1,
    )
    together: dict[tuple[float, float], list[str]] = {}
    for row in rows:
        together.setdefault((row.smem_bytes / 1024, row.microseconds), []).append(str(numbers[id(row)]))
    for place, names in together.items():
        style = {"textcoords": "offset points", "fontsize": 8, "ha": "center"}
        axes.annotate(", ".join(names), place, xytext=(8, 5), **style)
    axes.margins(y=0.2)
    axes.set(xlabel="shared memory of a CTA, KiB", ylabel="modelled time, us", xlim=(0, 1.02 * _LIMIT))
    axes.legend(loc="upper left", fontsize=7, frameon=False)
