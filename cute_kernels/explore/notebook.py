"""The page of a sweep as a file, and as a notebook that JupyterLab opens."""

import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cute_kernels.common import files
from cute_kernels.explore import explorer
from cute_kernels.explore.page import Page
from cute_kernels.explore.store import Store
from cute_kernels.explore.subjects import Kernel, Program
from cute_kernels.explore.sweep_table import Row

_TITLE = """# Configurations of a kernel, side by side

Edit the next cell and run all. Row 0 is what the problem gets without a configuration; times are modelled unless they
are called measured. docs/explore.md"""


def page(
    subject: Kernel | Program,
    jobs: int,
    seen: Callable[[Row], None],
    trace: Path | None = None,
    store: Store | None = None,
    number: int | None = None,
) -> Page:
    """The page of all rows of a subject, evaluated in ``jobs`` processes; ``seen`` and ``store`` as of
    `sweep_table.sweep`, ``trace`` as of `explorer.timeline`, ``number`` of the row that has it. Raises ValueError: no
    such row can be shown."""
    rows = subject.explored(jobs=jobs, seen=seen, store=store)
    return explorer.page(rows, subject, subject.timeline(rows, trace, number), trace and trace.name)


def unused(path: Path) -> Path:
    """The path, or one with a number, whichever is the first that no file has."""
    others = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], others) if not each.exists())


def open_lab(cells: Sequence[str], path: Path, words: Sequence[str]) -> int:
    """Writes a notebook, and becomes JupyterLab, which shows it: a child would go on where a signal ends this process.
    Raises FileExistsError: the file is there already."""
    if path.exists():
        raise FileExistsError(f"--output {path} exists; open it with jupyter lab, or name another")
    files.write_text(path, json.dumps(ipynb(cells), indent=1) + "\n")
    sys.stdout.flush()
    return os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *words, str(path.absolute())])


def ipynb(cells: Sequence[str]) -> dict[str, object]:
    """The document of version 4.5 of Jupyter's format, a title and cells of code, without outputs."""
    made = [{"cell_type": "markdown", "id": "title", "metadata": {}, "source": _TITLE.splitlines(keepends=True)}]
    for number, code in enumerate(cells):
        executed = {"cell_type": "code", "execution_count": None, "outputs": [], "metadata": {}}
        made.append({**executed, "id": f"cell-{number}", "source": code.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
