"""docs/experiments.md: what the notes of the CUDA originals say, as data, beside what is counted here.

    python -m bench.experiments_page            writes the page
    python -m bench.experiments_page --pairs    prints the counts that each experiment changes

The text is in experiments_page.md beside this file. Its tables are in experiments_page.json: ``notes``, copied from the
notes with a column about this package; ``pairs``, what the emulator counted before and after an
experiment; ``last``, all counts of the notes' last state.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_suffix(".json")
TEXT = Path(__file__).with_suffix(".md")
PAGE = DATA.parents[1] / "docs" / "experiments.md"

Table = dict[str, Any]
"""``columns`` and ``rows`` of cells, both as text."""


def load() -> dict[str, Any]:
    """The data of the page."""
    return json.loads(DATA.read_text())


def render(data: Mapping[str, Any]) -> str:
    """The page."""
    tables = dict(data["notes"])
    tables["phases"] = with_counts(tables["phases"], data["last"])
    texts = {name: markdown(table) for name, table in tables.items()}
    text = TEXT.read_text()
    for name in re.findall(r"^\{(\w+)\}$", text, re.MULTILINE):
        text = text.replace(f"{{{name}}}", texts.pop(name))
    if texts:
        raise ValueError(f"{TEXT} has no place for {', '.join(texts)}")
    return text


def markdown(table: Table) -> str:
    """A table in the form of the page."""
    rows = [table["columns"], *table["rows"]]
    first, *others = ("|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows)
    return "\n".join([first, "|---" * len(table["columns"]) + "|", *others])


def with_counts(phases: Table, counts: Mapping[str, float]) -> Table:
    """Names of counts in braces become their numbers."""
    numbers = {name: f"{value:,g}" for name, value in counts.items()}
    rows = [[re.sub(r"\{([^}]+)\}", lambda match: numbers[match[1]], cell) for cell in row] for row in phases["rows"]]
    return {"columns": phases["columns"], "rows": rows}


def pairs_table(pairs: Mapping[str, Any]) -> str:
    """Markdown, a row per experiment that configurations could repeat when they had all of its fields: counts of a CTA
    and 128 x 256 outputs with K = 768, before and after."""
    rows = []
    for name, pair in pairs.items():
        found = [f"{what} {before:,g} -> {after:,g}" for what, (before, after) in pair["counts"].items()]
        rows.append([name, "; ".join(found) or "none", f"{pair['explained']}: {pair['why']}"])
    columns = ["experiment", "counts that differ here", "do the counts explain it"]
    return markdown({"columns": columns, "rows": rows})


def write(data: Mapping[str, Any]) -> None:
    """Data and page; a row of the data is a line."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    item = r'(?:"(?:[^"\\]|\\.)*"|[-\d.]+)'
    text = re.sub(rf"\[\s+({item}(?:,\s+{item})*)\s+\]", lambda match: _on_one_line(match[1]), text)
    DATA.write_text(text + "\n")
    PAGE.write_text(render(data))


def _on_one_line(items: str) -> str:
    return "[" + re.sub(r",\n\s+", ", ", items) + "]"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", action="store_true", help="print the counts that each experiment changes")
    options = parser.parse_args(argv)
    data = load()
    if options.pairs:
        print(pairs_table(data["pairs"]))
        return 0
    write(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
