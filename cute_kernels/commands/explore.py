"""``cute-kernels explore``: the notebook that shows configurations of a kernel."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from cute_kernels.commands import sweep, workers
from cute_kernels.commands.kernel_options import OPERATIONS, add_plan, arch_of
from cute_kernels.common import extras, files
from cute_kernels.common.chips import DEFAULT_ARCH

_FOLDER = Path(__file__).parents[1] / "explore" / "notebooks"  # no package: whoever imports a notebook executes it
_VARIED = ["tile_n=128,256", "stages=2,3,4,6"]
"""Values that are tried of patch-embed on SM100 without ``--vary``."""


def add_parser(commands: argparse._SubParsersAction, names: Sequence[str] = tuple(OPERATIONS)) -> None:
    parser = commands.add_parser(
        "explore",
        help="a notebook of configurations: legality, memory maps, counts, modelled and measured time, a timeline",
        description="Writes a notebook about configurations of a kernel and opens it in JupyterLab (extra explore), or "
        "executes it without Jupyter and writes HTML. Needs no GPU; where there is one, configurations are timed.",
        epilog="Exit status: JupyterLab's; with an .html 0, also where configurations are not legal; 2: arguments that "
        "cannot be used.",
    )
    sweep.add_subject(parser)
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="FIELD=VALUE,..",
        help="values of a tunable, any number of times; --set fixes others. Without any, for patch-embed on SM100: "
        + " ".join(_VARIED),
    )
    workers.add_jobs(parser)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("explore.ipynb"),
        metavar="FILE",
        help="an .ipynb is written and opened, an existing one is kept; an .html is executed now (default: "
        "%(default)s)",
    )
    parser.add_argument("--no-browser", action="store_true", help="JupyterLab prints its address and opens no browser")
    add_plan(parser, names)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Opens or executes the notebook.

    Raises:
        MissingExtra: JupyterLab, or what a headless execution needs, is not installed.
        ValueError: tunables that the kernel does not have, or none to vary; another suffix than .ipynb and .html.
        FileExistsError: the notebook is there already.
    """
    extras.require("demo", "the command explore")
    import cute_kernels.explore.notebook as notebook  # torch and the emulator

    files.check_output(options.output, ".ipynb", ".html")
    executed = options.output.suffix.lower() == ".html"
    if not executed:
        extras.require("explore", "the command explore without --output FILE.html", ("jupyterlab",))
        if options.output.exists():
            raise FileExistsError(f"--output {options.output} exists; open it with jupyter lab, or name another")
    program = options.kernel.endswith(".py")
    text = (_FOLDER / ("program.py" if program else "kernel.py")).read_text()
    choice = _program_choice(options) if program else _choice(options)
    cells = notebook.with_choice(notebook.cells_of(text), choice)
    if executed:
        page, _ = notebook.execute(cells)
        files.write_text(options.output, page)
        files.show(str(options.output))
        return 0
    files.write_text(options.output, json.dumps(notebook.ipynb(cells), indent=1) + "\n")
    browser = ["--no-browser"] if options.no_browser else []
    sys.stdout.flush()
    # In place of this process: a child would go on where a signal ends this one alone.
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *browser, str(options.output.absolute())])


def _program_choice(options: argparse.Namespace) -> str:
    if options.settings or not options.vary:
        raise ValueError("a program takes --vary FIELD=VALUE,.. and --arguments, and no --set")
    files.check_program(options.kernel)
    return "\n".join(
        [
            f"script = {str(Path(options.kernel).resolve())!r}",
            f"arch = {options.arch or DEFAULT_ARCH!r}",
            f"arguments = {shlex.split(options.arguments)!r}",
            f"varied = {sweep.texts_of(options.vary, program=True)!r}",
            f"jobs = {options.jobs or workers.JOBS}",
        ]
    )


def _choice(options: argparse.Namespace) -> str:
    """The cell that a user edits: problem, configuration and values, as Python."""
    if options.arguments:
        raise ValueError("--arguments are for a program, SCRIPT.py")
    if not options.vary:
        if options.kernel != "patch-embed" or options.arch not in (None, DEFAULT_ARCH):
            raise ValueError(f"--vary is missing: name the tunables of {options.kernel} to vary, as FIELD=VALUE,..")
        options.vary = _VARIED
    problem, base, values = sweep.chosen(options)
    return "\n".join(
        [
            f"from cute_kernels.config import {', '.join(sorted({type(problem).__name__, type(base).__name__}))}",
            "",
            f"problem = {problem!r}",
            f"base = {base!r}",
            f"arch = {arch_of(options, options.kernel)!r}",
            f"varied = {values!r}",
            f"jobs = {options.jobs or workers.JOBS}",
        ]
    )
