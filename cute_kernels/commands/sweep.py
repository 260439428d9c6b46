"""``cute-kernels sweep`` and ``explore``: configurations of a kernel, or of a program with kernels of its own."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from cute_kernels.commands import tables, workers
from cute_kernels.commands.kernel_options import OPERATIONS, add_plan, arch_of, count, kernel_of, problem_of
from cute_kernels.common import extras, files
from cute_kernels.common.chips import DEFAULT_ARCH
from cute_kernels.common.progress import ProgressLine
from cute_kernels.explore import page, subjects, sweep_outcomes, sweep_table, sweep_text
from cute_kernels.explore.store import Store, merge

_VARIED = ("tile_n=128,256", "stages=2,3,4,6")
"""Values that ``explore`` tries of patch-embed on SM100 without ``--vary``."""


def add_parser(commands: argparse._SubParsersAction, names: Sequence[str] = tuple(OPERATIONS)) -> None:
    """Adds both subcommands."""
    parser = commands.add_parser(
        "sweep",
        help="tabulate configurations of a kernel: legal or why not, memory, registers, modelled time",
        description="Evaluates every combination of values of some fields for one problem: whether it is legal or why "
        "not, registers, spills, shared memory, modelled time and the largest part of it. Needs no GPU, and runs "
        "nothing without --measure. A program SCRIPT.py is run in the emulator once for every combination, with the "
        "values as its options: registers, memory, and counts of its launches.",
        epilog="Exit status: 0: at least one configuration is legal; 1: none is; 2: arguments that cannot be used; of "
        "a program, 3: a kernel is at fault with some configuration, 4: it needs what the emulator does not implement.",
    )
    _add_varied(parser, "", required=True)
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True,
        help="compile every legal configuration of a kernel, for its registers and stack (default: yes)",
    )  # fmt: skip
    parser.add_argument("--measure", action="store_true", help="also time each on the GPU at hand")
    columns = ", ".join(sweep_outcomes.COLUMNS)
    text = f"sort by {columns}, a count of the emulator or a varied field; least first; rows keep their numbers"
    parser.add_argument("--sort", metavar="COLUMN", help=text)
    tables.add_formats(parser)
    workers.add_worker_arguments(parser)
    workers.add_store(parser, "row")
    parser.add_argument("--shard", type=_shard, metavar="I/N", help="evaluate part I of N of the rows, into --store")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the page of explore, .html, without counts")
    parser.add_argument(
        "--best",
        type=count,
        default=3,
        metavar="N",
        help="name the configurations with the N lowest times (default: %(default)s)",
    )
    add_plan(parser, names)
    parser.set_defaults(run=run)

    parser = commands.add_parser(
        "merge",
        help="put the rows of several --store files into one",
        description="Writes every row of the files once; refuses files that say something else of the same row.",
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="file to write")
    parser.add_argument("stores", type=Path, nargs="+", metavar="FILE", help="files of --store")
    parser.set_defaults(run=run_merge)

    parser = commands.add_parser(
        "explore",
        help="write a page on configurations of a kernel: legality, memory maps, counts, times, a timeline",
        description="Writes a notebook about configurations of a kernel and opens it in JupyterLab (extra explore), or "
        "writes it as an HTML page. Needs no GPU; if there is one, configurations are timed.",
        epilog="Exit status: JupyterLab's; for an .html, 0, even if configurations are not legal; 2: arguments that "
        "cannot be used.",
    )
    _add_varied(parser, f". Default for patch-embed on SM100: {' '.join(_VARIED)}", required=False)
    workers.add_jobs(parser)
    workers.add_store(parser, "row")
    parser.add_argument(
        "--output", type=Path, metavar="FILE",
        help="FILE.ipynb is written and opened, FILE.html only written (default: explore.ipynb; if that exists, "
        "explore-2.ipynb, ..)",
    )  # fmt: skip
    text = "row of an .html page whose layouts and timeline are shown (default: one of the quickest)"
    parser.add_argument("--row", type=int, metavar="N", help=text)
    parser.add_argument("--no-browser", action="store_true", help="JupyterLab prints its address and opens no browser")
    parser.add_argument("--allow-root", action="store_true", help="JupyterLab runs as root, as in a container")
    add_plan(parser, names)
    parser.set_defaults(run=run_explore)


def _store_of(options: argparse.Namespace, shard: tuple[int, int] = (1, 1)) -> Store | None:
    """Raises ValueError: --resume or --shard without --store; OSError: a file that exists or cannot be written."""
    if options.store is None:
        if options.resume or shard != (1, 1):
            raise ValueError("--resume and --shard are for --store FILE")
        return None
    files.check_output(options.store)
    return Store(options.store, resume=options.resume, shard=shard)


def _shard(text: str) -> tuple[int, int]:
    """``2/3``, for argparse's ``type``."""
    first, _, second = text.partition("/")
    if not (first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise argparse.ArgumentTypeError(f"{text}: must be I/N with 1 <= I <= N")
    return int(first), int(second)


def run_merge(options: argparse.Namespace) -> int:
    """Writes the rows of all stores into one. Raises ValueError: as `store.merge`; OSError: a file."""
    files.check_output(options.output)
    files.show(f"{merge(options.stores, options.output)} rows in {options.output}")
    return 0


def _add_varied(parser: argparse.ArgumentParser, more: str, *, required: bool) -> None:
    parser.add_argument(
        "kernel",
        nargs="?",
        type=kernel_name,
        default="patch-embed",
        metavar="KERNEL",
        help=f"{', '.join(OPERATIONS)}, or a program SCRIPT.py (default: %(default)s); with --help: show its options "
        "alone",
    )
    parser.add_argument("--arguments", default="", metavar="'ARGS'", help="other arguments of a program, as one word")
    parser.add_argument(
        "--vary", action="append", required=required, default=None if required else [], metavar="FIELD=VALUE,..",
        help="values of a field, may be repeated; 3-6 means 3,4,5,6. A program gets --FIELD=VALUE; semicolons separate "
        f"values with commas: 'shape=64,64;128,128'{more}",
    )  # fmt: skip
    parser.add_argument(
        "--around", choices=("default", "class"), default="default",
        help="fields that are not varied; default: as chosen for the problem, and chosen again where the varied values "
        "need it; class: the defaults of the configuration's class, like plan --set (default: %(default)s)",
    )  # fmt: skip


def kernel_name(text: str) -> str:
    """Name of a kernel, for argparse's ``type``."""
    if text in OPERATIONS or text.endswith(".py"):
        return text
    allowed = f"{', '.join(OPERATIONS)}, or a program whose name ends with .py"
    raise argparse.ArgumentTypeError(f"{text!r}: must be {allowed}")


def subject_of(options: argparse.Namespace) -> subjects.Kernel | subjects.Program:
    """The kernel or the program that the options name. Raises ValueError: options of the other kind of subject,
    tunables that the kernel does not have, values that are none of theirs, a field varied twice; OSError: no such
    program."""
    if options.kernel.endswith(".py"):
        if options.settings or not options.vary:
            raise ValueError("a program takes --vary FIELD=VALUE,.. and --arguments, and no --set")
        files.check_program(options.kernel)
        values = subjects.values_of(options.vary, program=True)
        script = str(Path(options.kernel).resolve())
        return subjects.Program(script, shlex.split(options.arguments), options.arch or DEFAULT_ARCH, values)
    if options.arguments:
        raise ValueError("--arguments are for a program, SCRIPT.py")
    if not options.vary and (options.kernel != "patch-embed" or options.arch not in (None, DEFAULT_ARCH)):
        raise ValueError(f"--vary is missing: name the tunables of {options.kernel} to vary, as FIELD=VALUE,..")
    varied, problem = subjects.values_of(options.vary or _VARIED, program=False), problem_of(options)
    # Of several kernels for the problem, the one that has all these tunables.
    named = [*options.settings, *(f"{name}={texts[0]}" for name, texts in varied.items())]
    kind, arch = kernel_of(options, options.kernel, problem, named).config, arch_of(options, options.kernel)
    usual = options.around == "default"
    return subjects.kernel(problem, kind, arch, varied=varied, fixed=options.settings, usual=usual)


def run(options: argparse.Namespace) -> int:
    """Prints the table; raises ValueError for tunables that the kernel does not have."""
    if options.output is not None:
        files.check_output(options.output, ".html")
    workers.check_workers(options)
    tables.check(options)
    how = {"compiled": options.compile, "measured": options.measure}
    if options.kernel.endswith(".py"):
        if options.measure or not options.compile:
            raise ValueError("--measure and --no-compile are for this package's kernels")
        how = {}
    subject = subject_of(options)
    if options.measure:
        sweep_table.check_measurable(subject.problem)
    with workers.workers_of(options) as where, ProgressLine() as line:
        how |= {"store": _store_of(options, options.shard or (1, 1))}
        rows = subject.rows(seen=line.following(len(subject.settings), sweep_text.outcome), **how, **where)
    if len(rows) < len(subject.settings):
        done = f"{len(rows)} of {len(subject.settings)} rows"
        files.show(f"{done} are in {options.store}; --resume prints the table of all")
        return 0
    lines = sweep_text.text_of(rows, options.best, options.sort)
    tables.show(options, sweep_outcomes.records(rows, options.sort), lines)
    if options.output is not None:
        files.write_text(options.output, page.page(rows, subject))
    return sweep_outcomes.exit_status(rows)


def run_explore(options: argparse.Namespace) -> int:
    """Writes the page, or writes the notebook and opens it. Raises MissingExtra: JupyterLab, or what the page needs, is
    not installed; ValueError: tunables that the kernel does not have, or none to vary; another suffix than .ipynb
    and .html; FileExistsError: the notebook is there already."""
    extras.require("emulator", "the command explore")
    import cute_kernels.explore.explorer as explorer  # torch and the emulator

    output = options.output or explorer.unused(Path("explore.ipynb"))
    files.check_output(output, ".ipynb", ".html")
    jobs = options.jobs or workers.JOBS
    if output.suffix.lower() == ".html":
        subject = subject_of(options)
        trace = output.with_suffix(".trace.json")
        with ProgressLine() as line:
            seen = line.following(len(subject.settings), sweep_text.outcome)
            text = explorer.page_of(subject, jobs, seen, trace, _store_of(options), options.row)
        files.write_text(output, text)
        files.show("\n".join(str(each) for each in (output, trace) if each.exists()))
        return 0
    extras.require("explore", "the command explore without --output FILE.html", ("jupyterlab",))
    words = ["--no-browser"] * options.no_browser + ["--allow-root"] * options.allow_root
    return explorer.open_lab(subject_of(options).cells(jobs), output, words)
