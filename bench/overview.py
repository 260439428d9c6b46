"""One table of model cases from several runs of bench.patch_embed, and where some complete peer is ahead of us.

    python -m bench.overview 'bench/results/2026-11-21-h200.tar.xz/models*.json'

Runs are put in order of their dates, and a case that several runs measured is taken from the last one: every ratio is
one of peers that ran interleaved, in one run. Prints Markdown, with the number of cases in which a complete peer was
not timed at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import archive
from bench.peers import OURS
from bench.results import CaseResult, Results, from_json, markdown, reference_ms

MODES = ("burst", "sustained")


@dataclass(frozen=True)
class Row:
    """A case, the number of the run it is taken from (1 for the earliest), and its results."""

    run: int
    result: CaseResult

    def ratios(self, mode: str, scope: str | None = None) -> dict[str, float]:
        """Time of each peer that ran, relative to ours, of one scope or of all."""
        ours = reference_ms(self.result, OURS, mode)
        summaries = {
            peer.name: peer.summary(mode)
            for peer in self.result.peers
            if peer.name != OURS and scope in (None, peer.scope)
        }
        return {name: summary.median / ours for name, summary in summaries.items() if summary is not None}


def collect(runs: Sequence[Results]) -> list[Row]:
    """Every case once, in the order of its model, positions and images, as the last run measured it.

    Raises:
        ValueError: a case in which our kernel has no times.
    """
    rows = {}
    for number, run in enumerate(runs, 1):
        for result in run.cases:
            if reference_ms(result, OURS) is None:
                raise ValueError(f"run {number}, {result.case.name}: {OURS} did not run")
            rows[result.case.name] = Row(number, result)
    models = list(dict.fromkeys(row.result.case.model for row in rows.values()))

    def order(row: Row) -> tuple[int, int, int]:
        case = row.result.case
        return models.index(case.model), case.positions, case.requested_images

    return sorted(rows.values(), key=order)


def table(rows: Sequence[Row], mode: str) -> str:
    """Our milliseconds and every peer's time relative to them; a dash where a peer was not in that run."""
    names = list(dict.fromkeys(peer.name for row in rows for peer in row.result.peers if peer.name != OURS))
    lines = []
    for row in rows:
        ratios = row.ratios(mode)
        cells = [f"{ratios[name]:.2f}" if name in ratios else "-" for name in names]
        lines.append((row.result.case.name, str(row.run), f"{reference_ms(row.result, OURS, mode):.4f}", *cells))
    return markdown(("case", "run", f"{OURS} ms", *names), lines)


def behind(rows: Sequence[Row], mode: str) -> list[tuple[str, str, float]]:
    """Cases in which a complete peer is not slower than ours: case, fastest such peer, its relative time."""
    found = []
    for row in rows:
        name, ratio = min(row.ratios(mode, "complete").items(), key=lambda item: item[1])
        if ratio <= 1:
            found.append((row.result.case.name, name, ratio))
    return found


def missing(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Of every complete peer that was not timed in all cases, the cases without it: nobody is ahead of it there."""
    complete = dict.fromkeys(p.name for row in rows for p in row.result.peers if p.scope == "complete")
    without = {
        name: [row.result.case.name for row in rows if name not in row.ratios("burst")]
        for name in complete
        if name != OURS
    }
    return {name: cases for name, cases in without.items() if cases}


def by_images(rows: Sequence[Row]) -> str:
    """A line per number of images: cases, those without each peer of `missing`, the least ratio of a complete peer."""
    gaps = missing(rows)
    lines = []
    for images in sorted({row.result.case.requested_images for row in rows}):
        group = [row for row in rows if row.result.case.requested_images == images]
        names = {row.result.case.name for row in group}
        absent = [str(len(names.intersection(cases))) for cases in gaps.values()]
        least = [f"{min(min(row.ratios(mode, 'complete').values()) for row in group):.3f}" for mode in MODES]
        lines.append((str(images), str(len(group)), *absent, *least))
    header = ("images", "cases", *(f"without {name}" for name in gaps), *(f"nearest complete peer, {m}" for m in MODES))
    return markdown(header, lines)


def report(runs: Sequence[Results]) -> str:
    """Markdown: the runs, a table per mode, where ours is ahead of every complete peer, and what was not timed."""
    rows = collect(runs)
    parts = [
        f"{number}. {run.date}, source {run.environment['cute_kernels source']}: `{run.command}`"
        for number, run in enumerate(runs, 1)
    ]
    for mode in MODES:
        parts += ["", f"Time relative to {OURS}, **{mode}**:", "", table(rows, mode)]
    for mode in MODES:
        exceptions = behind(rows, mode)
        listed = "".join(f"; {case}: {name} {ratio:.3f}" for case, name, ratio in exceptions)
        parts += ["", f"{mode}: ahead of every complete peer in {len(rows) - len(exceptions)} of {len(rows)}{listed}."]
    gaps = missing(rows)
    if gaps:
        listed = ", ".join(f"{name} in {len(cases)}" for name, cases in gaps.items())
        none = set.intersection(*map(set, gaps.values()))
        parts += ["", f"Complete peers not timed, in cases of {len(rows)}: {listed}; none of these in {len(none)}."]
    parts += ["", by_images(rows)]
    return "\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    paths = [found for path in parser.parse_args(argv).files for found in archive.expand(path)]
    runs = [from_json(archive.read_text(path)) for path in paths]
    print(report(sorted(runs, key=lambda run: run.date)), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
