"""A picture of a timeline that the emulator recorded: a row per track, arrows from releases to waits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cute_kernels.common import extras

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"work": "#4c78a8", "wait": "#e4e4e4", "instruction": "#1f3b5c"}
_UNIT_COLOUR, _UNIT_ALPHA = "#f58518", 0.5  # copies in flight at once lie over each other, and are darker
_ARROW = {"arrowstyle": "-|>", "mutation_scale": 5, "lw": 0.5, "color": "#b22222", "shrinkA": 0, "shrinkB": 0}
_ROW_HEIGHT, _BAR = 0.2, 0.78  # inches; part of a row that is bar


def draw_trace(trace: str | Path, cluster: int = 0, steps: tuple[int, int] | None = None) -> Figure:
    """Draws one cluster of a trace file.

    Args:
        trace: JSON file that `Options.trace` wrote.
        cluster: its index in the grid.
        steps: part of the axis; all of it when None.

    Raises:
        MissingExtra: matplotlib is not installed (extra ``demo``).
        ValueError: the trace does not have that cluster.
    """
    extras.require("demo", "the picture of a timeline", ("matplotlib",))
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    events = json.loads(Path(trace).read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    processes = {pid: name for pid, name in names.items() if name.startswith(f"cluster {cluster},")}
    if not processes:
        raise ValueError(f"cluster = {cluster} is not in {trace}, which has {', '.join(names.values())}")
    labels: dict[str, int] = {}
    rows = {}
    for e in sorted((e for e in events if e["name"] == "thread_name"), key=lambda e: (e["pid"], e["tid"])):
        if e["pid"] in processes:
            # The copies in flight at once are spread over tracks with a number, and share a row here.
            unit = re.sub("^TMA .*", "TMA", e["args"]["name"])
            cta = processes[e["pid"]].split(", ")[1]
            rows[e["pid"], e["tid"]] = labels.setdefault(f"{cta}  {unit}", len(labels))
    slices = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) in rows]
    first, last = steps or (0, max(e["ts"] + e["dur"] for e in slices))

    figure = Figure(figsize=(11, _ROW_HEIGHT * len(labels) + 0.9), dpi=90, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    for category in dict.fromkeys(e["cat"] for e in slices):
        colour = _COLOURS.get(category, _UNIT_COLOUR)
        for track, row in rows.items():
            spans = [(e["ts"], e["dur"]) for e in slices if e["cat"] == category and (e["pid"], e["tid"]) == track]
            order = 2 if category == "instruction" else 1
            alpha = 1 if category in _COLOURS else _UNIT_ALPHA
            axes.broken_barh(spans, (row - _BAR / 2, _BAR), color=colour, alpha=alpha, linewidth=0, zorder=order)
    for start, end in _arrows(events):
        if (start["pid"], start["tid"]) in rows and first <= start["ts"] and end["ts"] <= last:
            places = [(e["ts"], rows[e["pid"], e["tid"]]) for e in (start, end)]
            axes.annotate("", xytext=places[0], xy=places[1], zorder=3, arrowprops=_ARROW)
    axes.set(xlim=(first, last), ylim=(len(labels) - 0.5, -0.5), xlabel="steps of this schedule (not time)")
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    kinds = {"work": "work", "wait": "wait", "instruction": "instruction that synchronises or starts something"}
    patches = [Patch(color=_COLOURS[key], label=label) for key, label in kinds.items()]
    patches.append(Patch(color=_UNIT_COLOUR, alpha=_UNIT_ALPHA, linewidth=0, label="TMA copy, MMA, commit under way"))
    patches.append(Patch(color=_UNIT_COLOUR, linewidth=0, label="several of them at once"))
    style = {"color": _ARROW["color"], "lw": 0.8, "marker": ">", "markersize": 3}
    arrow = Line2D([], [], label="release -> wait that it ends", **style)
    figure.legend(handles=[*patches, arrow], loc="outside upper center", ncols=3, fontsize=7, frameon=False)
    return figure


def _arrows(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    starts = {e["id"]: e for e in events if e["ph"] == "s" and e["name"] == "release"}
    return [(starts[e["id"]], e) for e in events if e["ph"] == "f" and e["name"] == "release"]
