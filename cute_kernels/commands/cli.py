"""The command line, ``cute-kernels``: ``plan``, ``compare``, ``emulate``, .."""

import argparse
import dataclasses
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence

from cute_kernels import __version__
from cute_kernels.commands import bench, compare, kernel_options, layout, same, sweep, tables
from cute_kernels.commands.program_parser import CommandParser
from cute_kernels.common import extras, files
from cute_kernels.common.words import counted
from cute_kernels.dsl import compiling, kernel_cache
from cute_kernels.explore import plan_facts
from cute_kernels.operations.runtime import environment, tuned


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status: 0 on success, 1 if a result is wrong or nobody reads the output, 2 if
    the arguments cannot be used or a file cannot be read or written, 3 if the emulator reports a fault, 4 if it
    refuses what it does not implement, 130 after an interrupt. Of ``emulate``:
    `cute_kernels.commands.emulate.EXIT_STATUSES`."""
    # To parse them loads what the commands need, for a second or more.
    try:
        return _guarded(lambda: _run(_parser(kernel_options.named(arguments)).parse_args(arguments)))
    except BrokenPipeError:
        _discard_output()
        return 1


def _run(options: argparse.Namespace) -> int:
    files.check_apart(vars(options))
    if not getattr(options, "watch", False):
        return options.run(options)
    from cute_kernels.emulator.programs import on_save  # an extra

    files.check_program(options.script)
    options.watch = False
    return on_save.run_on_save(lambda: _guarded(lambda: _run(options)), options.script)


def _guarded(command: Callable[[], int]) -> int:
    """Exit status of a command; what it raises is said in a line."""
    try:
        files.lost.clear()
        status = command()
        return 2 if _is_output_lost() and not status else status
    except SystemExit as end:  # of --help, or a program's own
        if _is_output_lost() and not end.code:
            return 2
        raise
    except KeyboardInterrupt:
        files.complain("cute-kernels: interrupted")
        return 130
    except MemoryError as error:
        files.complain(f"cute-kernels: error: {_without_memory(error)}")
        return 2
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ModuleNotFoundError, NotImplementedError, compiling.UnsupportedVersion) as error:
        files.complain(f"cute-kernels: error: {files.printable(' '.join(str(error).split()))}")
        _is_output_lost()
        return 2
    except Exception as error:
        # The emulator is an extra: what has not been imported cannot have raised anything.
        errors = sys.modules.get("cute_kernels.emulator.errors")
        if errors is None or not isinstance(error, errors.EmulatorError):
            raise
        from cute_kernels.commands import emulate as command

        return command.report_fault(error)


def _is_output_lost() -> bool:
    """Whether stdout cannot be written, which is said; raises BrokenPipeError where nobody reads it."""
    with files.output():
        if sys.stdout is not None:  # closed by the caller's shell
            sys.stdout.flush()
    if files.lost:
        _discard_output()
        files.complain(f"cute-kernels: error: {files.lost[0]}")
    return bool(files.lost)


def _without_memory(error: MemoryError) -> str:
    """A memory limit in one line: what was asked for, and what the process may have."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    limit = "none is set" if most == resource.RLIM_INFINITY else f"{most / 2**30:.1f} GiB (ulimit -v)"
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    what = " ".join(str(error).split()) or "an allocation failed"
    return f"not enough memory: {what}. Limit of the process: {limit}; the machine has {there:.1f} GiB"


def _discard_output() -> None:
    """Discards what is in the buffer: it cannot be written, and the interpreter's own attempt at exit must not fail."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except io.UnsupportedOperation:  # not a file
        return


def _parser(names: Sequence[str] = tuple(kernel_options.OPERATIONS)) -> argparse.ArgumentParser:
    """The parser of all commands; ``names``: the operations whose options are shown."""
    parser = CommandParser(prog="cute-kernels", description="GPU kernels in CuTe DSL, and an emulator for them.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_plan(commands, names)
    bench.add_parser(commands)
    compare.add_parser(commands, names)
    same.add_parser(commands, names)
    sweep.add_parser(commands, names)
    layout.add_parser(commands)
    for name in _EMULATED:
        _add_emulated(commands, name)
    _add_cache(commands)
    _add_doctor(commands)
    return parser


def _add_plan(commands: argparse._SubParsersAction, names: Sequence[str]) -> None:
    parser = commands.add_parser(
        "plan",
        help="show how a kernel would run a problem: tiles, memory, modelled time; or why none can",
        description="Plans a launch and prints kernel, tiles, warp roles, shared and tensor memory, and modelled time. "
        "Compiles nothing and needs no GPU.",
    )
    kernel_options.add_planned(parser, names)
    tables.add_formats(parser)
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    tables.check(options)
    rows = plan_facts.described(kernel_options.plan_of(options, options.sm_count))
    width = max(len(name) for name, _ in rows)
    records = [{"name": name, "value": value} for name, value in rows]
    tables.show(options, records, [f"{name:{width}}  {value}" for name, value in rows])
    return 0


# --- commands of the emulator ----------------------------------------------------------------------------------------

_EMULATED = {
    "emulate": ("cute_kernels.commands.emulate", "run a program without a GPU"),
    "check": ("cute_kernels.commands.check", "run a program's launches under many schedules"),
    "debug": ("cute_kernels.commands.debug", "run a launch of a program step by step, with breakpoints"),
    "mutate": ("cute_kernels.commands.mutate", "drop or weaken synchronisation of a program's kernels"),
}
"""Command -> its module, and what it does."""


def _add_emulated(commands: argparse._SubParsersAction, name: str) -> None:
    """Adds a command of the emulator; where its dependencies are missing, the command says so."""
    module, what = _EMULATED[name]
    if not extras.missing("emulator"):
        importlib.import_module(module).add_parser(commands)
        return
    text = f"{what} (needs the extra emulator, which is not installed)"
    parser = commands.add_parser(name, help=text, add_help=False, prefix_chars="\0")  # takes options as they come
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=lambda _: extras.require("emulator", f"the command {name}"))


def _add_cache(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "cache",
        help="count or clear the compiled kernels on disk",
        description="Counts the compiled kernels, tuned configurations and runs of programs on disk, or deletes them. "
        "CUTE_KERNELS_CACHE_DIR chooses the directory, an absolute path; off keeps kernels in memory only.",
    )
    parser.add_argument("--clear", action="store_true", help="delete all of them and their locks, and no other file")
    parser.set_defaults(run=_cache)


def _cache(options: argparse.Namespace) -> int:
    root = kernel_cache.directory()
    if root is None:
        files.show("the cache is off (CUTE_KERNELS_CACHE_DIR=off)")
        return 0
    if options.clear:
        forgotten, runs = tuned.clear(), kernel_cache.runs(root)
        deleted = kernel_cache.clear(root)
        more = f"{counted(forgotten, 'tuned configuration')} and {counted(runs, 'run')} of programs too"
        files.show(f"{counted(deleted, 'kernel')} deleted from {root}; {more}; other files stay")
        return 0
    most, (number, nbytes) = kernel_cache.limit(), kernel_cache.entries(root)
    kernels = f"{counted(number, 'kernel')}, {nbytes:,} bytes of at most {most:,} (CUTE_KERNELS_CACHE_MB)"
    runs = counted(kernel_cache.runs(root), "run")
    files.show(f"{kernels}, {counted(len(tuned.files()), 'tuned configuration')} and {runs} of programs in {root}")
    return 0


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="describe the environment, and what is wrong with it",
        description="Prints GPU, driver, CUDA and package versions, the cache, and how to mend what is wrong. Exits "
        "with 1 if something is wrong.",
    )
    tables.add_formats(parser)
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    tables.check(options)
    findings = environment.diagnose(environment.inspect_environment())
    tables.show(options, [dataclasses.asdict(finding) for finding in findings], environment.lines_of(findings))
    return 1 if any(finding.status == "wrong" for finding in findings) else 0
