"""Where the tasks of a campaign run: the options ``--jobs`` and ``--executor`` of several commands."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cute_kernels.commands.kernel_options import count
from cute_kernels.common import executors, files

if TYPE_CHECKING:
    from cute_kernels.explore.store import Lines

JOBS = 2
"""Processes of a command that is not told how many."""


def add_store(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds the file of a campaign; ``what`` is a line of it."""
    parser.add_argument(
        "--store", type=files.from_here, metavar="FILE", help=f"append each {what} as JSON as soon as it is found"
    )
    parser.add_argument("--resume", action="store_true", help=f"take from --store each {what} that it has")


def store_of(options: argparse.Namespace) -> Lines | None:
    """The file of `add_store`; None without. Raises ValueError: --resume alone; OSError: a file that exists, or cannot
    be written."""
    if options.store is None:
        if options.resume:
            raise ValueError("--resume is for --store FILE")
        return None
    import cute_kernels.explore.store as stores  # needs torch

    files.check_output(options.store)
    return stores.Lines(options.store, resume=options.resume)


def origin_of(options: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Facts that findings on a program depend on: text and arguments, and ``words`` of the options of its runs."""
    import cute_kernels.explore.store as stores
    from cute_kernels.emulator.reports import going_on

    return {
        "program": os.path.abspath(options.script), "arguments": options.arguments, "arch": options.arch,
        "digest": stores.program_digest(Path(options.script).resolve()), "options": list(words),
        "suppressions": [str(each) for each in going_on.all_of((), options.suppressions)],  # as the files are now
    }  # fmt: skip


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say where runs are executed."""
    add_jobs(parser)
    parser.add_argument(
        "--executor", metavar="ADDRESS", help="use the workers of a cluster: dask://HOST:PORT or ray://HOST:PORT"
    )


def add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=count, metavar="N", help=f"processes (default: {JOBS})")


def check_workers(options: argparse.Namespace) -> None:
    """Checks the options of `add_worker_arguments`, before the program runs. Raises ValueError, MissingExtra: as
    `executors.connect`; both options."""
    if options.executor is not None:
        executors.check_address(options.executor)
        if options.jobs is not None:
            raise ValueError(f"--jobs {options.jobs} and --executor {options.executor}: a cluster has its own workers")


@contextlib.contextmanager
def workers_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Workers that the options of `add_worker_arguments` choose, as ``executor`` and ``jobs`` of `Workers`. Raises
    OSError: as `executors.connect`."""
    if options.executor is None:
        yield {"jobs": options.jobs or JOBS}
        return
    with executors.connect(options.executor) as executor:
        yield {"executor": executor}
