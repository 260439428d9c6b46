"""docs/emulator/programs_outcomes.md: what became of every program, from the record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from tests.programs.cases import Case, cases
from tests.programs.clones import CLONES
from tests.programs.outcome import Outcome, record, table

PAGE = Path(__file__).parents[2] / "docs" / "emulator" / "programs_outcomes.md"

HEAD = """# Outcomes of programs of others

What [programs of others](programs.md) come to in the emulator. `python -m tests.programs --page` writes this page from
`tests/programs/expected.json`.
"""


def render() -> str:
    """The page."""
    suites: list[tuple[str, Iterable[Case]]] = [("Packages", cases())]
    suites += [(clone.origin, clone.cases()) for clone in CLONES]
    known = record()
    return "\n".join([HEAD, *("\n".join(_section(title, list(suite), known)) for title, suite in suites)])


def _section(title: str, suite: list[Case], known: dict[str, Outcome]) -> list[str]:
    """How many of which verdict, the exact ones by folder, a table of the others."""
    counts = Counter(known[case.name].verdict for case in suite)
    exact = [case for case in suite if known[case.name].verdict == "exact"]
    others = [case for case in suite if case not in exact]
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    lines = [f"## {title}", "", f"{len(suite)} runs: {said}.", "", "| exact | for | programs |", "|---|---|---|"]
    folders: dict[tuple[str, str], dict[str, None]] = {}
    for case in exact:
        folder, name = _place(case)
        folders.setdefault((folder, case.arch), {})[name] = None
    shown: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (folder, arch), names in folders.items():
        shown.setdefault((folder, tuple(names)), []).append(arch)
    lines += [f"| {folder} | {', '.join(archs)} | {', '.join(names)} |" for (folder, names), archs in shown.items()]
    return [*lines, "", *table(others, known), ""]


def _place(case: Case) -> tuple[str, str]:
    """The package or the folder of a program, and its name there."""
    of, what = case.row
    path = PurePosixPath(of.strip("`"))
    if of.startswith("`"):
        return (f"`{path.parent}`" if len(path.parts) > 1 else ""), f"`{path.name}`"
    return of, what
