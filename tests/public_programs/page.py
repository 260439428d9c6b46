"""docs/emulator/programs_outcomes.md: what became of every program, from the record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from tests.public_programs.cases import Case, cases
from tests.public_programs.clones import CLONES
from tests.public_programs.outcome import Outcome, record

PAGE = Path(__file__).parents[2] / "docs" / "emulator" / "programs_outcomes.md"

VERDICTS = ("exact", "reported", "stopped", "refused", "unchecked")
"""In the order of rows."""

HEAD = """# Outcomes of programs of others

What [programs of others](programs.md) come to in the emulator. `python -m tests.public_programs --page` writes this
page from `expected.json` there, which has the line of every report. In brackets: the number of runs, if several; exact
ones are counted by folder.
"""


def render() -> str:
    """The page."""
    suites: list[tuple[str, Iterable[Case]]] = [("Packages", cases())]
    suites += [(clone.origin, clone.cases()) for clone in CLONES]
    known = record()
    return "\n".join([HEAD, *("\n".join(_section(title, list(suite), known)) for title, suite in suites)])


def _section(title: str, suite: list[Case], known: dict[str, Outcome]) -> list[str]:
    """How many of which verdict, and the programs by what is said of them; of exact ones, what they are programs of."""
    counts = Counter(known[case.name].verdict for case in suite)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    found: dict[str, dict[str, list[str]]] = {}
    for case in suite:
        result = _result(known[case.name])
        folder, name = _place(case)
        what = folder if result == "exact" and folder else name if folder[:1] in ("", "`") else f"{folder} {name}"
        found.setdefault(result, {}).setdefault(what, []).append(case.arch)
    rows = sorted(found.items(), key=lambda item: VERDICTS.index(item[0].partition(":")[0]))
    lines = [f"| {result} | {'; '.join(map(_counted, programs.items()))} |" for result, programs in rows]
    return [f"## {title}", "", f"{len(suite)} runs: {said}.", "", "| result | programs |", "|---|---|", *lines, ""]


def _counted(program: tuple[str, list[str]]) -> str:
    """A program or folder, and how many runs of it if several."""
    name, archs = program
    return name if len(archs) == 1 else f"{name} ({len(archs)})"


def _result(outcome: Outcome) -> str:
    """The verdict, and the kinds of reports or why it is refused."""
    if outcome.verdict == "refused":
        return f"refused: {outcome.reports[0]}"
    kinds = dict.fromkeys(report.partition(" at ")[0] for report in outcome.reports)
    return f"{outcome.verdict}: {', '.join(f'`{kind}`' for kind in sorted(kinds))}" if kinds else outcome.verdict


def _place(case: Case) -> tuple[str, str]:
    """The package or the folder of a program, and its name there."""
    of, what = case.row
    path = PurePosixPath(of.strip("`"))
    if of.startswith("`"):
        return (f"`{path.parent}`" if len(path.parts) > 1 else ""), f"`{path.name}`"
    return of, what
