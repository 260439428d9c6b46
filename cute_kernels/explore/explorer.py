"""The page of a sweep as a file, and as a notebook that JupyterLab opens; measured times, data frames, timelines;
docs/explore.md"""

import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cute_kernels import emulator
from cute_kernels.common import files
from cute_kernels.common.chips import DEFAULT_ARCH
from cute_kernels.explore import sweep_outcomes, sweep_program, sweep_table
from cute_kernels.explore.page import Page, page
from cute_kernels.explore.store import Store
from cute_kernels.explore.sweep_table import Row
from cute_kernels.operations import registry
from cute_kernels.operations.runtime import emulated

__all__ = ["frame", "measured", "page", "timeline", "timeline_of_program"]

_TITLE = """# Configurations of a kernel, side by side

Edit the next cell and run all. Row 0 is what the problem gets without a configuration; times are modelled unless they
are called measured. docs/explore.md"""


def measured(problem: Any, rows: Sequence[Row]) -> list[Row]:
    """The rows with measured times, as of `sweep_table.measure`; the same rows where nothing can be measured. Raises
    RuntimeError: a configuration computes something else than the first one."""
    if torch.cuda.is_available():
        try:
            return sweep_table.measure(problem, rows)
        except NotImplementedError as reason:
            print(f"not measured: {reason}")
    return list(rows)


def frame(rows: Sequence[Row]) -> Any:
    """The rows as a data frame of pandas, whose integers stay integers where some are missing, or the records of
    `sweep_outcomes.records` where pandas is not installed."""
    found = sweep_outcomes.records(rows)
    try:
        import pandas
    except ModuleNotFoundError:
        return found
    return pandas.DataFrame(found).convert_dtypes().set_index("row")


# --- timelines: the first cluster of a launch in the emulator under a random schedule --------------------------------


def timeline(row: Row, *, seed: int = 1, trace: Path | None = None) -> dict[str, Any]:
    """A timeline of a row's kernel on the smaller problem that it was counted on, of a chain its last one.

    ``row``: one that was counted. ``seed``: of the schedule. ``trace``: where the file for Perfetto stays. Returns
    ``of``, what it shows; ``tracks``, their names; ``slices``: track, first step, steps, kind and words of each;
    ``arrows`` from releases to waits: step and track of both. Raises ValueError: there is no such problem."""
    if row.small is None:
        raise ValueError(f"row = {dict(row.settings)}: must be one that was counted")
    operands = registry.random_operands(row.small)
    run = _schedule(lambda options: emulated.launch(row.small, operands, options), seed, trace)
    settings = sweep_outcomes.settings_text([row]) if row.settings else "the default"
    return {**run, "of": f"{row.small.describe_problem()}, {settings}"}


def timeline_of_program(
    script: str,
    settings: Mapping[str, Any],
    *,
    arch: str = DEFAULT_ARCH,
    arguments: Sequence[str] = (),
    trace: Path | None = None,
) -> dict[str, Any]:
    """A timeline of a program's first launch, as of `timeline`.

    ``script``, ``arch``, ``arguments``: as for `cute_kernels.explore.sweep_program.sweep_program`. ``settings``: of one
    configuration that the program accepts. ``trace``: where the file for Perfetto stays. Raises ValueError: the program
    refuses the settings, or launches no kernel; EmulatorError: a kernel of it is at fault."""
    words = [*arguments, *(f"--{name}={value}" for name, value in settings.items())]

    def run(options: emulator.Options) -> None:
        session, reason = sweep_program.emulated(str(Path(script).resolve()), words, arch, options)
        if session.failures:
            raise session.failures[0]
        if reason is not None:
            raise ValueError(f"settings = {dict(settings)}: {reason}")

    return {**_schedule(run, 1, trace), "of": " ".join([Path(script).name, *words])}


def _schedule(run: Callable[[emulator.Options], Any], seed: int, trace: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = trace or Path(folder) / "trace.json"
        options = emulator.Options(trace=str(file), completion="random", interleave="random", seed=seed)
        run(options)
        return drawn(file)


_KINDS = ("work", "wait", "instruction")


def drawn(trace: str | Path, cluster: int = 0) -> dict[str, Any]:
    """A timeline of one cluster, as of `timeline`, from a file that `Options.trace` wrote. Raises ValueError: the file
    does not have that cluster."""
    events = json.loads(Path(trace).read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    chosen = {pid: name for pid, name in processes.items() if name.startswith(f"cluster {cluster},")}
    if not chosen:
        raise ValueError(f"cluster = {cluster} is not in {trace}, which has {', '.join(processes.values())}")
    names: dict[str, int] = {}
    tracks = {}
    for e in sorted((e for e in events if e["name"] == "thread_name"), key=lambda e: (e["pid"], e["tid"])):
        if e["pid"] in chosen:
            # The copies in flight at once are spread over tracks with a number, and share one here.
            unit = re.sub("^TMA .*", "TMA", e["args"]["name"])
            tracks[e["pid"], e["tid"]] = names.setdefault(f"{chosen[e['pid']].split(', ')[1]}  {unit}", len(names))
    slices = [
        (tracks[e["pid"], e["tid"]], e["ts"], e["dur"], e["cat"] if e["cat"] in _KINDS else "unit", _words(e))
        for e in events
        if e["ph"] == "X" and (e["pid"], e["tid"]) in tracks
    ]
    starts = {e["id"]: e for e in events if e["ph"] == "s" and e["name"] == "release"}
    ends = [(starts[e["id"]], e) for e in events if e["ph"] == "f" and e["name"] == "release"]
    pairs = [[(e["ts"], tracks.get((e["pid"], e["tid"]))) for e in both] for both in ends]
    arrows = [(*start, *end) for start, end in pairs if None not in (start[1], end[1])]
    return {"of": f"cluster {cluster}", "tracks": list(names), "slices": slices, "arrows": arrows}


def _words(event: Mapping[str, Any]) -> str:
    return ", ".join([event["name"], *(str(value) for key, value in event.get("args", {}).items() if key == "reason")])


# --- files -----------------------------------------------------------------------------------------------------------


def page_of(
    subject: Any,
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
    return page(rows, subject, subject.timeline(rows, trace, number), trace and trace.name)


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
