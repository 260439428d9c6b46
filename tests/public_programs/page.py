"""Outcomes of all programs, counted from the record, as a table in docs/emulator/programs.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.public_programs.cases import Case, cases
from tests.public_programs.clones import CLONES
from tests.public_programs.outcome import record

PAGE = Path(__file__).parents[2] / "docs" / "emulator" / "programs.md"

VERDICTS = ("exact", "reported", "stopped", "refused", "unchecked")
"""In the order of columns."""

BEGIN, END = "<!-- outcomes: written by `python -m tests.public_programs --page` -->\n", "<!-- end -->"


def render() -> str:
    """The page with the table as the record has them."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{outcomes()}\n{END}{rest.partition(END)[2]}"


def outcomes() -> str:
    """Runs of each suite by verdict."""
    suites: list[tuple[str, Iterable[Case]]] = [("packages", cases())]
    suites += [(clone.origin, clone.cases()) for clone in CLONES]
    known = record()
    lines = [_row("suite", "runs", *VERDICTS), "|---" * (len(VERDICTS) + 2) + "|"]
    for title, suite in suites:
        found = [known[case.name] for case in suite]
        verdicts = Counter(outcome.verdict for outcome in found)
        lines.append(_row(title, len(found), *(verdicts[verdict] for verdict in VERDICTS)))
    return "\n".join(lines) + "\n"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
