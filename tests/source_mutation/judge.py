"""Runs the tests on a mutant, in a copy of the repository and a process of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tests.source_mutation.parts import Part

if TYPE_CHECKING:
    from tests.source_mutation.mutants import Mutant

Outcome = Literal["killed", "survived", "hangs"]

_LEFT_OUT = (".git", ".venv", ".gpu", "__pycache__", ".hypothesis", ".pytest_cache", ".ruff_cache", "build", "site")


@contextlib.contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """A copy of the repository, in which sources may be changed; with its compiled libraries."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if name in _LEFT_OUT and (name != "build" or Path(folder) == root)}

    with tempfile.TemporaryDirectory(prefix="source-mutation-") as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(root, copy, ignore=left_out)
        yield copy


def output_of(copy: Path) -> Path:
    """What the latest tests in a copy have printed: the names of those that fail."""
    return copy.parent / "tests.txt"


def judge(copy: Path, part: Part, mutant: Mutant | None, seconds: float) -> Outcome:
    """What the tests of a part say about a mutant, or about the unchanged sources (None).

    It hangs where they take longer than ``seconds``: more than the unchanged sources on this machine.
    """
    if mutant is None:
        return _run(copy, part, seconds)
    import tests.source_mutation.mutants as mutants  # needs Cosmic Ray

    path = copy / mutant.path
    text = path.read_text()
    try:
        path.write_text(mutants.mutated(text, mutant))
        return _run(copy, part, seconds)
    finally:
        path.write_text(text)


def _run(copy: Path, part: Part, seconds: float) -> Outcome:
    # A fork has torch, CuTe DSL and pytest already, whose imports take longer than most of these tests.
    process = os.fork()
    if process == 0:
        _tests(copy, part)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.05)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "hangs"


def _tests(copy: Path, part: Part) -> None:
    """The forked process; does not return."""
    import pytest

    code = 1
    try:
        os.setsid()
        os.chdir(copy)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(output_of(copy), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"] = str(copy)
        # A mutated file may have the size and the second of the one before, which is all that bytecode remembers.
        sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "cute_kernels", "bench")]:
            del sys.modules[name]
        options = ["-x", "-q", "-rfE", "--tb=short", "-p", "no:randomly", "-p", "no:cacheprovider"]
        code = pytest.main([*options, *part.tests])
    finally:
        sys.stdout.flush()
        os._exit(int(code))


def preload() -> None:
    """Imports what all tests need and no mutant changes, before the first fork."""
    import cutlass.cute  # noqa: F401
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import scipy.optimize  # noqa: F401
    import torch

    torch.set_num_threads(1)
