"""The page of a sweep, in a notebook or as a file of its own; docs/explore.md"""

from __future__ import annotations

import base64
import html
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels import emulator
from cute_kernels.common import extras
from cute_kernels.common.chips import DEFAULT_ARCH
from cute_kernels.explore import sweep_figure, sweep_outcomes, sweep_program, sweep_table, sweep_text, trace_figure
from cute_kernels.explore.sweep_table import Row
from cute_kernels.operations import examples
from cute_kernels.operations.runtime import emulated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEAD = (
    '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>cute-kernels explore</title>'
    "<style>body{font-family:sans-serif;max-width:70em;margin:2em auto}"
    "pre{overflow-x:auto;background:#f5f5f5;padding:.6em}</style>\n"
)


def page(rows: Sequence[Row], choice: str = "", draw: Callable[[Row], Figure] | None = None) -> str:
    """A table of configurations with its pictures, as HTML without anything outside of it.

    Args:
        rows: of one sweep.
        choice: Python that makes the rows, to be copied.
        draw: draws a timeline of a row; None leaves it out.

    Raises:
        MissingExtra: matplotlib is not installed (extra ``demo``).
    """
    return "".join([_HEAD, *_parts(rows, choice, draw), "</html>\n"])


def _parts(rows: Sequence[Row], choice: str, draw: Callable[[Row], Figure] | None) -> Iterator[str]:
    yield "<h1>Configurations of a kernel, side by side</h1>\n"
    if choice:
        yield f"<details><summary>code</summary>{_text(choice)}</details>\n"
    axes = sweep_text.AXES if any(row.design for row in rows) else ("shared", "warp instructions")
    yield _text("\n".join(sweep_text.text_of(rows, axes=axes if any(row.smem for row in rows) else sweep_text.AXES)))
    if any(row.smem for row in rows):
        yield "<h2>Memory of a CTA</h2>\n" + _picture(
            sweep_figure.draw(rows, *axes), sweep_figure.alternative(rows, *axes)
        )
    yield "<h2>Counts of the emulator</h2>\n" + _text(counts_table(rows))
    chosen = next((level[0] for level in sweep_outcomes.ranked(rows)), None)
    chosen = chosen or next((row for row in rows if row.reason is None), None)
    if chosen is None:
        return
    if configs := [f"{number}  {row.config}" for number, row in _numbered(rows) if row.config and row.reason is None]:
        yield "<h2>Configurations to copy</h2>\n" + _text("\n".join(configs))
    if draw is not None:
        number = sweep_outcomes.numbers(rows)[id(chosen)]
        yield f"<h2>A timeline of row {number}</h2>\n<p>Under a random schedule. Its axis counts steps and is not "
        yield "time: who waits for whom is real, how long is not.</p>\n"
        yield _picture(draw(chosen), "Who works and who waits for whom, in steps")


def _text(text: str) -> str:
    return f"<pre>{html.escape(text)}\n</pre>\n"


def _picture(figure: Figure, words: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f'<p><img alt="{html.escape(words)}" src="data:image/png;base64,{encoded}"></p>\n'


def _numbered(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    numbers = sweep_outcomes.numbers(rows)
    return [(numbers[id(row)], row) for row in rows]


def counts_table(rows: Sequence[Row]) -> str:
    """Counts by configuration, one line for each count; the numbers at the top are those of the sweep's table."""
    counted = [(number, row) for number, row in _numbered(rows) if row.counts]
    if not counted:
        return "no configuration was executed"
    names = [
        name
        for name in dict.fromkeys(name for _, row in counted for name in row.counts)
        if any(row.counts.get(name) for _, row in counted)
    ]
    width = max(map(len, names))
    lines = [" " * width + "".join(f"{number:>12}" for number, _ in counted)]
    lines += [f"{name:{width}}" + "".join(f"{row.counts.get(name, 0):12,.0f}" for _, row in counted) for name in names]
    if small := counted[0][1].small:
        size = f"of {small.describe_problem()}, which the kernel of the problem computes with tiles as full as there"
        lines = [f"{size}, on {small.sm_count} multiprocessors", *lines]
    missing = [number for number, row in _numbered(rows) if row.reason is None and not row.counts]
    if missing:
        lines.append(f"no smaller problem shows {sweep_outcomes.spans(missing)} beside these")
    return "\n".join(lines)


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
    """The rows as a data frame of pandas, or the records of `sweep_outcomes.records` where pandas is not installed."""
    found = sweep_outcomes.records(rows)
    try:
        import pandas
    except ModuleNotFoundError:
        return found
    return pandas.DataFrame(found).set_index("row")


# --- timelines: the first cluster of a launch in the emulator under a random schedule --------------------------------


def timeline(row: Row, *, seed: int = 1) -> Figure:
    """A timeline of a row's kernel on the smaller problem that it was counted on, of a chain its last one. Raises
    MissingExtra: matplotlib is not installed (extra ``demo``); ValueError: there is no such problem."""
    if row.small is None:
        raise ValueError(f"row = {dict(row.settings)}: must be one that was counted")
    return _drawn(lambda options: emulated.launch(row.small, examples.random_operands(row.small), options), seed)


def timeline_of_program(
    script: str, settings: Mapping[str, Any], *, arch: str = DEFAULT_ARCH, arguments: Sequence[str] = ()
) -> Figure:
    """A timeline of a program's first launch.

    Args:
        script, arch, arguments: as for `cute_kernels.explore.sweep_program.sweep_program`.
        settings: of one configuration that the program accepts.

    Raises:
        MissingExtra: matplotlib is not installed (extra ``demo``).
        ValueError: the program refuses the settings, or launches no kernel.
        EmulatorError: a kernel of it is at fault.
    """
    words = [*arguments, *(f"--{name}={value}" for name, value in settings.items())]

    def run(options: emulator.Options) -> None:
        session, reason = sweep_program.emulated(str(Path(script).resolve()), words, arch, options)
        if session.failures:
            raise session.failures[0]
        if reason is not None:
            raise ValueError(f"settings = {dict(settings)}: {reason}")

    return _drawn(run, 1)


def _drawn(run: Callable[[emulator.Options], object], seed: int) -> Figure:
    extras.require("demo", "the picture of a timeline", ("matplotlib",))
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        run(emulator.Options(trace=str(trace), completion="random", interleave="random", seed=seed))
        return trace_figure.draw_trace(trace)
