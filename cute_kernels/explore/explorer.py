"""Views of the notebook of ``cute-kernels explore`` beside the table of a sweep; docs/explore.md"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels import emulator
from cute_kernels.common import extras
from cute_kernels.common.chips import DEFAULT_ARCH
from cute_kernels.explore import sweep_outcomes, sweep_program, sweep_table, trace_figure
from cute_kernels.explore.sweep_table import Row
from cute_kernels.operations import examples
from cute_kernels.operations.registry import operation_of
from cute_kernels.operations.runtime import emulated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SM_COUNT = 2  # as in a sweep: few tiles fill them
_SINKS: list[Callable[[tuple[bytes, str]], None]] = []


# --- problems and their execution ------------------------------------------------------------------------------------


def smaller(problem: Any) -> Any:
    """A problem of the same kind that the emulator executes in seconds: a few tiles.

    Raises:
        TypeError: of a problem of no operation.
    """
    return operation_of(problem).smaller(problem)


def timeline(problem: Any, row: Row, *, seed: int = 1) -> Figure:
    """The first cluster of a launch in the emulator under a random schedule, of a chain its last kernel.

    Args:
        problem: a small one: every tile of it is executed.
        row: a legal configuration for it.
        seed: of the schedule.

    Raises:
        MissingExtra: matplotlib is not installed (extra ``demo``).
    """
    extras.require("demo", "the picture of a timeline", ("matplotlib",))
    plan = row.plan(problem, sm_count=_SM_COUNT)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        options = emulator.Options(trace=str(trace), completion="random", interleave="random", seed=seed)
        emulated.launch(plan, examples.random_operands(plan), options)
        return trace_figure.draw_trace(trace)


def measured(problem: Any, rows: Sequence[Row]) -> tuple[list[Row], str | None]:
    """The rows with measured times, as of `sweep_table.measure`, and None; or the same rows, and why nothing can be.

    Raises:
        RuntimeError: a configuration computes something else than the first one.
    """
    if not torch.cuda.is_available():
        return list(rows), "no GPU"
    try:
        timed = sweep_table.measure(problem, rows)
    except NotImplementedError as reason:
        return list(rows), str(reason)
    measured = any(row.measured for row in timed)
    return timed, None if measured else "no configuration is for this GPU"


# --- what a notebook shows -------------------------------------------------------------------------------------------


def counts_table(rows: Sequence[Row]) -> str:
    """Counts by configuration, one line for each count; the numbers at the top are those of the sweep's table."""
    numbers = sweep_outcomes.numbers(rows)
    counted = [(numbers[id(row)], row) for row in rows if row.counts]
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
    return "\n".join(lines)


def timeline_of_program(
    script: str, settings: Mapping[str, Any], *, arch: str = DEFAULT_ARCH, arguments: Sequence[str] = ()
) -> Figure:
    """The first cluster of a program's first launch in the emulator under a random schedule.

    Args:
        script, arch, arguments: as for `cute_kernels.explore.sweep_program.sweep_program`.
        settings: of one configuration that the program accepts.

    Raises:
        MissingExtra: matplotlib is not installed (extra ``demo``).
        ValueError: the program refuses the settings, or launches no kernel.
        EmulatorError: a kernel of it is at fault.
    """
    extras.require("demo", "the picture of a timeline", ("matplotlib",))
    words = [*arguments, *(f"--{name}={value}" for name, value in settings.items())]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        options = emulator.Options(trace=str(trace), completion="random", interleave="random", seed=1)
        session, reason = sweep_program.emulated(str(Path(script).resolve()), words, arch, options)
        if session.failures:
            raise session.failures[0]
        if reason is not None:
            raise ValueError(f"settings = {dict(settings)}: {reason}")
        return trace_figure.draw_trace(trace)


def frame(rows: Sequence[Row]) -> Any:
    """The rows as a data frame of pandas, or the records of `sweep_outcomes.records` where pandas is not installed."""
    found = sweep_outcomes.records(rows)
    try:
        import pandas
    except ModuleNotFoundError:
        return found
    return pandas.DataFrame(found).set_index("row")


def show(figure: Figure, alternative: str) -> None:
    """Shows a picture in a notebook, or gives it to `showing_to`; elsewhere there is nowhere to show it.

    Args:
        figure: of matplotlib.
        alternative: what it says, in words, for those who do not see it.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    if _SINKS:
        _SINKS[-1]((buffer.getvalue(), alternative))
        return
    try:
        from IPython.display import Image, display
    except ModuleNotFoundError:
        return
    display(Image(buffer.getvalue(), alt=alternative))


@contextmanager
def showing_to(sink: Callable[[tuple[bytes, str]], None]) -> Iterator[None]:
    """Inside, `show` calls ``sink`` with the bytes of a PNG and its words."""
    _SINKS.append(sink)
    try:
        yield
    finally:
        _SINKS.pop()
