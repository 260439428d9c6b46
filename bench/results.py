"""Results of a benchmark: one JSON schema, and the table and the plot that are drawn from it."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.cases import Case, Check
from bench.gemm_cases import GemmCase
from bench.image_cases import ImagesCase
from bench.timing import LaunchCost, Protocol, Run, Summary, summarize

SCHEMA = "cute-kernels/bench/1"

_KINDS = {"m": GemmCase, "side": ImagesCase}
"""A field by which a case of another kind than `Case` is known."""


@dataclass
class PeerResult:
    """One peer on one case. Either ``reason`` says why there is nothing, or the rest is there.

    Attributes:
        scope: a `bench.peers.Scope`.
        detail: the configuration that was chosen.
        check: against FP64; None for a copy.
        runs: every timed run.
        cost: launch cost, where it was measured.
        reason: why the peer has no runs.
    """

    name: str
    scope: str
    detail: str = ""
    check: Check | None = None
    runs: list[Run] = field(default_factory=list)
    cost: LaunchCost | None = None
    reason: str = ""

    def summary(self, mode: str, quantity: str = "ms") -> Summary | None:
        """Summary of a quantity of `Run` over the runs of a mode, None if there is none."""
        values = [getattr(run, quantity) for run in self.runs if run.mode == mode]
        values = [value for value in values if value is not None]
        return summarize(values) if values else None


@dataclass
class CaseResult:
    """One case and its peers."""

    case: Case | GemmCase | ImagesCase
    peers: list[PeerResult] = field(default_factory=list)


@dataclass
class Results:
    """Everything that one invocation measured, with what is needed to repeat it."""

    date: str
    command: str
    environment: dict[str, str]
    protocol: Protocol
    cases: list[CaseResult] = field(default_factory=list)


def to_json(results: Results) -> str:
    """The document of schema `SCHEMA`; `from_json` is its inverse."""
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(results)}, indent=1, allow_nan=False)


def from_json(text: str) -> Results:
    """Reads a document and checks it.

    Raises:
        ValueError: another schema, a missing or unknown field, or a peer with both runs and a reason, or neither.
    """
    document = json.loads(text)
    if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
        raise ValueError(f"not a document of schema {SCHEMA}")
    results = _load(Results, document)
    results.protocol = _load(Protocol, results.protocol)
    results.cases = [_load(CaseResult, case) for case in results.cases]
    for case in results.cases:
        kind = next((kind for field, kind in _KINDS.items() if field in case.case), Case)
        case.case = _load(kind, case.case)
        case.peers = [_load(PeerResult, peer) for peer in case.peers]
        for peer in case.peers:
            peer.runs = [_load(Run, run) for run in peer.runs]
            peer.check = peer.check and _load(Check, peer.check)
            peer.cost = peer.cost and _load(LaunchCost, peer.cost)
            if bool(peer.runs) == bool(peer.reason):
                raise ValueError(f"{case.case.name}, {peer.name}: needs either runs or a reason")
    return results


def _load(kind: type, values: dict[str, Any]) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__}: expected an object, got {values!r}")
    fields = dataclasses.fields(kind)
    unknown = set(values) - {f.name for f in fields}
    required = {
        f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    missing = required - set(values)
    if unknown or missing:
        raise ValueError(f"{kind.__name__}: unknown {sorted(unknown)}, missing {sorted(missing)}")
    return kind(**values)


# --- tables ----------------------------------------------------------------------------------------------------------

HEADER = (
    "peer", "computes", "burst ms", "sustained ms", "vs ours", "TFLOP/s", "TB/s", "MHz", "W", "mJ", "row error", "with",
)  # fmt: skip


def _interval(summary: Summary | None) -> str:
    if summary is None:
        return ""
    digits = 3 if summary.median >= 0.1 else 4
    return f"{summary.median:.{digits}f} [{summary.low:.{digits}f}, {summary.high:.{digits}f}]"


def _number(summary: Summary | None, digits: int = 0) -> str:
    return "" if summary is None else f"{summary.median:.{digits}f}"


def reference_ms(result: CaseResult, ours: str, mode: str = "sustained") -> float | None:
    """Median of our kernel in a mode: what the other rows are divided by."""
    for peer in result.peers:
        if peer.name == ours:
            summary = peer.summary(mode)
            return None if summary is None else summary.median
    return None


def case_rows(result: CaseResult, ours: str) -> list[tuple[str, ...]]:
    """Rows under `HEADER`, fastest sustained first, then the peers that did not run with their reasons."""
    base = reference_ms(result, ours)
    timed, missing = [], []
    for peer in result.peers:
        sustained = peer.summary("sustained")
        if sustained is None:
            missing.append((peer.name, peer.scope, *[""] * 9, f"not run: {peer.reason}"))
            continue
        seconds = sustained.median / 1e3
        rate = "" if peer.scope == "copy" else f"{result.case.flops / seconds / 1e12:.0f}"
        row = (
            peer.name, peer.scope, _interval(peer.summary("burst")), _interval(sustained),
            "" if base is None else f"{sustained.median / base:.3f}", rate, f"{result.case.bytes / seconds / 1e12:.2f}",
            _number(peer.summary("sustained", "sm_mhz")), _number(peer.summary("sustained", "watts")),
            _number(peer.summary("sustained", "millijoules"), 1 if sustained.median < 0.1 else 0),
            "" if peer.check is None else f"{peer.check.row_error:.4f}", peer.detail,
        )  # fmt: skip
        timed.append((sustained.median, row))
    return [row for _, row in sorted(timed)] + missing


def case_table(result: CaseResult, ours: str) -> Table:
    """The peers of one case. Brackets hold the quartiles of the rounds."""
    caption = r"median \[quartiles] of the rounds; clock, power, energy: sustained"
    table = Table(title=result.case.title, caption=caption)
    for index, column in enumerate(HEADER):
        table.add_column(column, justify="left" if index in (0, 1, 11) else "right")
    for row in case_rows(result, ours):
        table.add_row(*row, style="bold" if row[0] == ours else None)
    return table


def overview_rows(results: Results, ours: str, mode: str) -> tuple[list[str], list[tuple[str, ...]]]:
    """Header and rows of the table of cases: our milliseconds, then every peer's median divided by ours."""
    names = [name for name in dict.fromkeys(p.name for c in results.cases for p in c.peers) if name != ours]
    rows = []
    for result in results.cases:
        base = reference_ms(result, ours, mode)
        by_name = {peer.name: peer.summary(mode) for peer in result.peers}
        cells = []
        for name in names:
            summary = by_name.get(name)
            cells.append("-" if summary is None or base is None else f"{summary.median / base:.2f}")
        reduced = "*" if result.case.reduced else ""
        rows.append((result.case.name + reduced, "-" if base is None else f"{base:.4f}", *cells))
    return ["case", f"{ours} ms", *names], rows


def cost_rows(results: Results) -> list[tuple[str, ...]]:
    """Launch costs: case, peer, microseconds of host per call, microseconds per launch in a graph."""
    rows = []
    for result in results.cases:
        for peer in result.peers:
            if peer.cost is not None:
                graph = peer.cost.graph
                shown = f"{graph:.2f}" if graph is not None else f"no graph: {peer.cost.graph_reason}"
                rows.append((result.case.name, peer.name, f"{peer.cost.host:.1f}", shown))
    return rows


COST_HEADER = ("case", "peer", "host us per call", "us per launch in a graph")


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    header = list(header)
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def report(results: Results, ours: str) -> str:
    """The tables of a result in Markdown, one that a bench writes beside its JSON."""
    parts = [f"{results.date}, `{results.command}`", ""]
    parts += [f"- {key}: {value}" for key, value in results.environment.items()]
    for result in results.cases:
        if len(results.cases) <= 3:
            parts += ["", result.case.title, "", markdown(HEADER, case_rows(result, ours))]
    if len(results.cases) > 3:
        for mode in ("burst", "sustained"):
            parts += ["", f"Time relative to {ours}, {mode} (* reduced to fit memory)", ""]
            parts.append(markdown(*overview_rows(results, ours, mode)))
    costs = cost_rows(results)
    if costs:
        parts += ["", "Launch cost", "", markdown(COST_HEADER, costs)]
    return "\n".join(parts) + "\n"


# --- plot ------------------------------------------------------------------------------------------------------------

_COLORS = {"complete": "#4c72b0", "rows given": "#55a868", "GEMM only": "#bbbbbb", "copy": "#dddddd"}
_OURS, _VARIANT = "#c44e52", "#e6b1b3"
_LABEL_CHARACTERS = 48
"""Of a line beside a bar: half of the picture's width is left for the bars."""


def _label_and_color(peer: PeerResult, ours: str) -> tuple[str, str]:
    """What the legend calls a bar; other configurations of our kernel are named ``ours`` and the fields."""
    if peer.name == ours:
        return ours, _OURS
    if peer.name.startswith(f"{ours} "):
        return f"{ours}, another configuration", _VARIANT
    return peer.scope, _COLORS[peer.scope]


def bar_names(names: Iterable[str], ours: str) -> list[str]:
    """What bars are called: peers as they are, variants of ours by the settings in which they differ, on several lines.

    Args:
        names: of peers; variants are ``ours``, a space and ``FIELD=VALUE,..``.
        ours: name of our kernel.
    """
    names = list(names)
    settings = {name: name[len(ours) + 1 :].split(",") for name in names if name.startswith(f"{ours} ")}
    if len(settings) < 2:
        return names
    common = set.intersection(*map(set, settings.values()))
    shown = {
        name: textwrap.fill(", ".join(setting for setting in given if setting not in common), _LABEL_CHARACTERS)
        for name, given in settings.items()
    }
    return [shown.get(name, name) for name in names]


def _panel_inches(names: list[str], ours: str) -> float:
    """Height of a panel whose labels of 7 points do not touch."""
    lines = max(name.count("\n") + 1 for name in bar_names(names, ours))
    return max(3.4, 1.0 + len(names) * max(0.3, 0.06 + 0.13 * lines))


def plot(results: Results, ours: str, path: Path) -> None:
    """One panel per case, up to six: burst and sustained medians with quartiles, fastest on top."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    cases = [result for result in results.cases if any(p.runs for p in result.peers)][:6]
    if not cases:
        return
    heights = [_panel_inches([p.name for p in result.peers if p.runs], ours) for result in cases]
    figure, axes = pyplot.subplots(
        len(cases), 1, figsize=(9, 1.1 + sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    shown: dict[str, str] = {}
    for axis, result in zip(axes[:, 0], cases, strict=True):
        peers = [p for p in result.peers if p.summary("sustained")]
        peers.sort(key=lambda p: p.summary("sustained").median, reverse=True)
        for y, peer in enumerate(peers):
            sustained, burst = peer.summary("sustained"), peer.summary("burst")
            label, color = _label_and_color(peer, ours)
            shown[label] = color
            spread = [[sustained.median - sustained.low], [sustained.high - sustained.median]]
            axis.barh(y, sustained.median, color=color, xerr=spread, ecolor="black", capsize=2)
            right = max(sustained.high, 0 if burst is None else burst.median)
            axis.text(right, y, f"  {sustained.median:.3g}", va="center", fontsize=8)
            if burst is not None:
                axis.plot(burst.median, y, marker="|", color="black", markersize=14)
        axis.set_yticks(range(len(peers)), bar_names([p.name for p in peers], ours), fontsize=7)
        axis.set_title(result.case.title, fontsize=9)
        axis.set_xlabel("ms per launch: bar = sustained, tick = burst", fontsize=8)
        axis.margins(x=0.12)
    order = sorted(shown, key=lambda label: [_OURS, _VARIANT, *_COLORS.values()].index(shown[label]))
    handles = [Patch(color=shown[label], label=label) for label in order]
    figure.legend(handles=handles, fontsize=7, loc="outside upper center", ncols=len(handles))
    figure.supxlabel(f"{results.environment.get('gpu', '')}, {results.date}", fontsize=7, x=0.01, ha="left")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
