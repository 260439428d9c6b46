"""`python docs/report_picture.py` draws docs/report.png: a report of `cute-kernels emulate` on a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from cute_kernels.commands import cli

ROOT = Path(__file__).parents[1]
COMMAND = ("emulate", "--arch", "sm_90a", "docs/examples/reverse.py")
COLUMNS = 112
INDENT = 8  # of what continues a line
FONT = 9  # points
CELL = 0.602 * FONT / 72, 1.45 * FONT / 72  # inches of a character of DejaVu Sans Mono
BACKGROUND, PLAIN = "#1e1e1e", "#d4d4d4"
COLOURS = {1: "#f2777a", 4: "#7aa6e8"}  # of ANSI's


class Terminal(io.StringIO):
    """Takes what is printed, in colours."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def printed() -> str:
    """What the command prints on a terminal in the root of the repository, with ANSI colours."""
    terminal, here = Terminal(), os.getcwd()
    try:
        os.chdir(ROOT)
        with contextlib.redirect_stderr(terminal), contextlib.redirect_stdout(io.StringIO()):
            cli.main(COMMAND)
    finally:
        os.chdir(here)
    return terminal.getvalue().rstrip("\n")


def rows(text: str) -> list[tuple[int, Text]]:
    """Lines of the picture: column at which each begins, and what stands there."""
    found = []
    for line in text.split("\n"):
        whole = Text.from_ansi(line)
        gap = whole.plain.rfind("   ", INDENT)  # before the last column, who it was
        if len(whole) > COLUMNS and gap > 0:
            first, rest = whole.divide([gap])
            rest = Text(rest.plain.strip())
        else:
            first, *others = whole.wrap(Console(), COLUMNS)
            rest = Text(" ").join(others)
        found += [(0, first), *((INDENT, each) for each in rest.wrap(Console(), COLUMNS - INDENT) if each)]
    return found


def draw(path: Path, text: str) -> None:
    """Writes a picture of a terminal."""
    lines = rows(f"$ cute-kernels {' '.join(COMMAND)}\n{text}")
    width, height = (COLUMNS + 2) * CELL[0], (len(lines) + 1.5) * CELL[1]
    figure = Figure(figsize=(width, height), facecolor=BACKGROUND)
    for number, (column, line) in enumerate(lines):
        for segment in line.render(Console()):
            style = segment.style
            colour = COLOURS.get(style.color.number, PLAIN) if style is not None and style.color is not None else PLAIN
            where = (column + 1) * CELL[0] / width, 1 - (number + 1.25) * CELL[1] / height
            weight = "bold" if style is not None and style.bold else "normal"
            figure.text(*where, segment.text.rstrip("\n"), color=colour, weight=weight, size=FONT, family="monospace")
            column += len(segment.text)
    plain = "\n".join(line.plain for _, line in lines)
    figure.savefig(path, dpi=160, metadata={"Description": plain})  # by which a test knows an old picture


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "report.png", printed())
