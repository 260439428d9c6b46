"""Where the tasks of a campaign run: the options ``--jobs`` and ``--executor`` of several commands."""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from cute_kernels.commands.kernel_options import count
from cute_kernels.common import executors, files

JOBS = 2
"""Processes of a command that is not told how many."""


def add_store(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds the file of a campaign; ``what`` is a line of it."""
    parser.add_argument(
        "--store", type=files.from_here, metavar="FILE", help=f"append each {what} as JSON as soon as it is found"
    )
    parser.add_argument("--resume", action="store_true", help=f"take from --store each {what} that it has")


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
