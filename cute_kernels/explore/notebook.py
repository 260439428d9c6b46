"""Notebooks kept as Python with ``# %%`` cells: written as .ipynb, or executed and written as HTML without Jupyter."""

from __future__ import annotations

import base64
import code
import contextlib
import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cute_kernels.explore import explorer

_HEAD = (
    '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>cute-kernels explore</title>'
    "<style>body{font-family:sans-serif;max-width:70em;margin:2em auto}"
    "pre{overflow-x:auto;background:#f5f5f5;padding:.6em}</style>"
)


@dataclass(frozen=True)
class Cell:
    """One cell: Markdown or Python, without its marker."""

    source: str
    markdown: bool = False


def cells_of(text: str) -> list[Cell]:
    """Cells of a Python file in which ``# %%`` begins code and ``# %% [markdown]`` text in comments."""
    cells = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        kind, _, body = part.partition("\n")
        if "[markdown]" in kind:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            cells.append(Cell("\n".join(lines), markdown=True))
        else:
            cells.append(Cell(body.strip()))
    return cells


def with_choice(cells: Sequence[Cell], choice: str) -> list[Cell]:
    """The notebook with another first cell of code."""
    first = next(index for index, cell in enumerate(cells) if not cell.markdown)
    return [*cells[:first], Cell(choice), *cells[first + 1 :]]


def ipynb(cells: Sequence[Cell]) -> dict[str, Any]:
    """The document of version 4.5 of Jupyter's format, without outputs."""
    made: list[dict[str, Any]] = []
    for number, cell in enumerate(cells):
        common = {"id": f"cell-{number}", "metadata": {}, "source": cell.source.splitlines(keepends=True)}
        executed = {"cell_type": "code", "execution_count": None, "outputs": []}
        made.append({"cell_type": "markdown", **common} if cell.markdown else {**executed, **common})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


class _Interpreter(code.InteractiveInterpreter):
    """Runs cells in one namespace; what a cell raises is raised instead of printed."""

    def showtraceback(self) -> None:
        """Called while the exception is handled."""
        raise


def execute(cells: Sequence[Cell]) -> tuple[str, Mapping[str, Any]]:
    """Runs all cells in one namespace.

    Returns:
        HTML with code, what it printed and its pictures inside; and the names that the cells left.

    Raises:
        Exception: whatever a cell raises.
    """
    names: dict[str, Any] = {"__name__": "notebook"}
    run, parts = _Interpreter(names), []
    for number, cell in enumerate(cells):
        if cell.markdown:
            parts.append(_markdown(cell.source))
            continue
        printed = io.StringIO()
        pictures: list[tuple[bytes, str]] = []
        with contextlib.redirect_stdout(printed), explorer.showing_to(pictures.append):
            run.runcode(compile(cell.source, f"<cell {number}>", "exec"))
        parts.append(f"<details><summary>code</summary><pre>{html.escape(cell.source)}</pre></details>")
        if printed.getvalue():
            parts.append(f"<pre>{html.escape(printed.getvalue())}</pre>")
        parts += [
            f'<p><img alt="{html.escape(words)}" src="data:image/png;base64,{base64.b64encode(png).decode()}"></p>'
            for png, words in pictures
        ]
    return _HEAD + "\n" + "\n".join(parts) + "</html>\n", names


def _markdown(text: str) -> str:
    """Headings and paragraphs, which is all that the notebook has."""
    made = []
    for block in re.split(r"\n\s*\n", text):
        marks = re.match(r"(#+) ", block)
        tag = f"h{len(marks[1])}" if marks else "p"
        made.append(f"<{tag}>{html.escape(block[marks.end() if marks else 0 :])}</{tag}>")
    return "\n".join(made)
