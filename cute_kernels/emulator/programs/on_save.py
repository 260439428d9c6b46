"""A command that runs anew whenever a file of its program is saved, each time in a fork that has all libraries loaded.

The first process never runs the program. Each run is a fork of it, so that it begins with the program's modules not
loaded; at its end it names what it has imported, and the first process imports the libraries of that, while nobody
waits. What is left for a run is the program itself: of docs/examples 0.2 to 1 s instead of 4 to 6 s.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import site
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

from cute_kernels.common import files, forks

_SECONDS_PER_LOOK = 0.05

Stamps = dict[str, tuple[int, int, int] | None]
"""Number, size and time of writing of each file; None if there is no such file."""


def run_on_save(run: Callable[[], int], program: str) -> int:
    """Runs a command, and again after each save of a file that its program consists of, until an interrupt.

    A run during which a file is saved ends at once, and the next one begins. ``run``: the command; its result is its
    exit status. ``program``: the file that it runs. Modules outside of Python's and this package's folders belong to it
    too, once a run has imported them. Raises KeyboardInterrupt: the interrupt that ends it; OSError: forks are not
    possible."""
    program = os.path.abspath(program)
    seen = _stamps([program])
    while True:
        began, started = time.perf_counter(), time.time_ns()
        seen = _stamps(seen)
        status, own, libraries = _run_in_fork(run, functools.partial(_differ, seen))
        # What the run has imported may have been saved since: such a file counts as saved.
        new = _stamps(own - seen.keys())
        seen |= {path: stamp if stamp is not None and stamp[2] < started else None for path, stamp in new.items()}
        if status is not None:
            seconds = time.perf_counter() - began
            count = f"{len(seen)} file{'s' if len(seen) > 1 else ''}"
            files.complain(f"status {status} after {seconds:.1f} s; runs again when {program} is saved ({count})")
        _load(libraries)
        while not _differ(seen) or None in _stamps([program]).values():  # an editor may write a file anew
            time.sleep(_SECONDS_PER_LOOK)


def _stamps(paths: Iterable[str]) -> Stamps:
    found: Stamps = {}
    for path in paths:
        found[path] = None
        with contextlib.suppress(OSError):
            state = os.stat(path)
            found[path] = state.st_ino, state.st_size, state.st_mtime_ns
    return found


def _differ(seen: Stamps) -> bool:
    return _stamps(seen) != seen


def _run_in_fork(run: Callable[[], int], outdated: Callable[[], bool]) -> tuple[int | None, set[str], list[str]]:
    """The status of a run, None if it was outdated before its end; files of the program; names of libraries."""
    with tempfile.TemporaryFile("w+") as imported:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            _run_and_leave(run, imported, parent)
        try:
            while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if outdated():
                    return None, set(), []
                time.sleep(_SECONDS_PER_LOOK)
        finally:
            os.kill(child, signal.SIGKILL)  # no matter where it has ended
            state = os.waitpid(child, 0)[1]
        imported.seek(0)
        own, libraries = json.loads(imported.read() or "[[], []]")
    return os.waitstatus_to_exitcode(state), set(own), libraries


def _run_and_leave(run: Callable[[], int], imported: TextIO, parent: int) -> None:
    """The fork's part: runs, says what was imported, and ends."""
    status = 1
    try:
        forks.end_with_parent(parent)
        try:
            status = run()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        json.dump(_imported(), imported)
        imported.flush()
    finally:
        os._exit(status & 255)


def _imported() -> tuple[list[str], list[str]]:
    """Files of the program's modules, and names of all other modules."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {site.getusersitepackages()}
    folders |= {str(Path(__file__).parents[2])}
    libraries, own = [], []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""  # torch.ops has a name that is no path
        if not os.path.isabs(path) or any(Path(path).is_relative_to(folder) for folder in folders):
            libraries.append(name)
        elif name != "__main__":
            own.append(path)
    return own, libraries


def _load(libraries: Iterable[str]) -> None:
    """Imports what the next run will import, and takes all that there is out of its garbage collections."""
    for name in libraries:
        if name not in sys.modules and name != "__mp_main__":
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()
