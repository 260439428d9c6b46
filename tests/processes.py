"""`python -m MODULE ..`, `python FILE ..` and `python -c TEXT ..` in a process that has the libraries already.

Importing torch and CuTe DSL takes four seconds, more than most commands do with them. A server that has imported the
libraries, and nothing of this package, forks the process in which a command runs as in a new one: with its arguments,
directory, environment and exit status, and with modules of ours that nobody has imported or replaced. What is imported,
and when, is tested in real processes.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

LIBRARIES = (
    "numpy", "hypothesis", "pytest", "torch", "torch._dynamo", "cutlass", "cutlass.cute", "scipy.optimize", "PIL.Image",
)  # fmt: skip
"""Imported once, by the server and by `tests.random_orders`."""

_server = multiprocessing.get_context("forkserver")
# Without hypothesis, whose plugin pytest wants to import itself.
_server.set_forkserver_preload(["tests.uncollected", *(name for name in LIBRARIES if name != "hypothesis"), __name__])
inspect.getmodule(sys._getframe())  # looks through all modules, as torch does for each operator: 0.1 s, once


def run_python(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Runs ``python arguments``, which begin with ``-m``, ``-c`` or a file; returns exit status and what it wrote.

    Raises:
        subprocess.TimeoutExpired: it has not ended after ``timeout`` seconds, and was killed.
    """
    with tempfile.TemporaryDirectory(prefix="cute-kernels-process-") as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        if arguments[0] == "-c":
            program = Path(folder) / "program.py"
            program.write_text(arguments[1])
            arguments = (str(program), *arguments[2:])
        environment = dict(os.environ if env is None else env)
        where = str(cwd or Path.cwd())
        process = _server.Process(target=_main, args=(arguments, where, environment, [str(path) for path in outputs]))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout)
        written = [path.read_text() if path.exists() else "" for path in outputs]
        status = process.exitcode
        process.close()
    return subprocess.CompletedProcess(arguments, status, *written)


def pool(processes: int) -> ProcessPoolExecutor:
    """Worker processes that have the libraries already, in which nobody has imported anything of ours."""
    return ProcessPoolExecutor(processes, _server, initializer=gc.enable)


def _main(arguments: Sequence[str], cwd: str, environment: Mapping[str, str], outputs: Sequence[str]) -> None:
    """The forked process: never returns to what multiprocessing does at the end of one."""
    gc.freeze()
    gc.enable()
    for descriptor, path in ((0, os.devnull), *zip((1, 2), outputs, strict=True)):
        opened = os.open(path, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (open(n, "w" if n else "r", closefd=False) for n in range(3))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))  # which Python reads when it starts
    tempfile.tempdir = None  # as TMPDIR says now
    os.chdir(cwd)
    ours = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [cwd, *ours, *(path for path in sys.path if path not in ("", cwd, *ours))]
    importlib.invalidate_caches()
    status = 0
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        status = _status(end)
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _status(end: SystemExit) -> int:
    """As Python ends with it: a number, or a message."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1
