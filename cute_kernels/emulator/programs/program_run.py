"""Runs a program in this process as its own process would run it, and says what became of it as an exit status."""

import contextlib
import functools
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cute_kernels.common.files import NotWritten
from cute_kernels.emulator.errors import error_behind, exit_status
from cute_kernels.emulator.programs import ptx_files
from cute_kernels.emulator.programs.capturing import Session

_NO_MEMORY = "can't allocate memory"  # torch's words in a RuntimeError


def run_program(
    script: str,
    arguments: Sequence[str],
    session: Session,
    failed: Callable[..., object],
    show_traceback: bool = False,
) -> int:
    """Runs a program inside a session, as its own process would, and says what it or a kernel of it raised.

    Args:
        script, arguments: the program and what it gets as ``sys.argv[1:]``.
        session: of `capture`, active.
        failed: called with each error of the emulator, and notes.
        show_traceback: where in the program a launch failed.

    Returns:
        The exit status, see `command.EXIT_STATUSES`.

    Raises:
        SystemExit: the program's own.
        ValueError, OSError: a PTX or CUDA file, or a description of its launches, that cannot be used.
        NotWritten: a file of the session could not be written; faults that were found before are reported.
        MemoryError: there is not so much memory as the program asks for.
    """
    with as_program(script, arguments):
        if Path(script).suffix in ptx_files.SUFFIXES:
            program = ptx_files.program(script, arguments, session.arch, session.launch)
        else:
            program = functools.partial(runpy.run_path, os.path.abspath(script), run_name="__main__")  # as Python does
        return _run(program, session, failed, show_traceback)


@contextlib.contextmanager
def as_program(script: str, arguments: Sequence[str]) -> Iterator[None]:
    """Inside, this process has the arguments and finds the modules of a program."""
    argv, path = sys.argv, sys.path[:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _print_traceback(error: Exception) -> None:
    """Without frames of checks, which are marked as pytest has it: who called them is of interest."""
    text = traceback.TracebackException.from_exception(error)
    frames = zip(text.stack, traceback.walk_tb(error.__traceback__))
    seen = [line for line, (frame, _) in frames if "__tracebackhide__" not in frame.f_code.co_varnames]
    text.stack = traceback.StackSummary.from_list(seen)
    print("".join(text.format()), end="", file=sys.stderr)


def _run(program: Callable[[], object], session: Session, failed: Callable[..., object], show_traceback: bool) -> int:
    try:
        try:
            program()
        finally:
            session.threads.wait()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    except (ptx_files.DescriptionError, MemoryError):
        raise
    except NotWritten:
        _report_failures(session, failed)
        raise
    except Exception as error:
        if _NO_MEMORY in str(error):
            raise MemoryError(str(error).splitlines()[0]) from None
        reported = error_behind(error)
        if reported is None:
            _print_traceback(error)
            return 1
        if show_traceback or reported is not error:
            traceback.print_exc()
        failed(reported)
        return exit_status(reported)
    _report_failures(session, failed)
    if session.unwritten is not None:
        raise session.unwritten
    return min(map(exit_status, session.failures), default=0)  # a fault before a refusal


def _report_failures(session: Session, failed: Callable[..., object]) -> None:
    for error in session.failures:
        failed(error, "the program caught the error, and went on")
