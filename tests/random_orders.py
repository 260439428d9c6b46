"""Runs the whole suite in several random orders and fails unless every order was complete and clean.

`python -m tests.random_orders --seeds 10 --processes 6 [pytest's arguments]`, which `make orders` calls. Each seed is
one order, that of `make test ARGS=--randomly-seed=SEED`. The processes of one order take its tests from the front, a
block at a time, so that each of them runs a part of the order in order.

Processes are forked after the libraries have been imported once: reading torch and CuTe DSL anew in each of sixty
processes takes longer than the tests. Nothing of the package or of the tests is imported before the fork, because the
order of such imports is what a random order varies.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import pytest

from tests.processes import LIBRARIES

KERNELS = "CUTE_KERNELS_TEST_RUN"
"""Environment variable: the folder of compiled kernels that the processes of one run, and those they start, share.

Compiling a kernel takes seconds, and many tests need the same one. The folder is new in every run, so that tests run
what the present sources compile to, and the user's cache is left alone. Without the variable a run makes a folder.
"""
BLOCK = 24  # tests: small beside a process's share, and large beside a module's fixtures


class Share:
    """A pytest plugin: of the tests of one order, runs the blocks that no other process of that order has taken.

    What a test was found to be is written at once, so that a run that is cut short still says what it saw.
    """

    def __init__(self, taken: Synchronized[int], collected: Synchronized[int], record: Path) -> None:
        self.taken, self.collected, self.record = taken, collected, record

    def _tests(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        while True:
            with self.taken.get_lock():
                start = self.taken.value
                self.taken.value += BLOCK
            if start >= len(items):
                return
            yield from items[start : start + BLOCK]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.collected.value = len(session.items)
        tests = self._tests(session.items)
        test = next(tests, None)
        while test is not None:
            following = next(tests, None)
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            test = following
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            found = {"test": report.nodeid, "found": report.outcome, "seconds": round(report.duration, 2)}
            with self.record.open("a") as file:
                file.write(json.dumps(found) + "\n")


def run_share(seed: int, process: int, share: Share, folder: Path, kernels: str, arguments: list[str]) -> None:
    """The body of one process: runs one share of one order, its output and its results in files of ``folder``."""
    name = f"{seed}-{process}"
    output = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.modules["torch"].set_num_threads(1)
    os.environ[KERNELS] = kernels
    options = [f"--randomly-seed={seed}", "-p", "no:cacheprovider", f"--basetemp={folder / f'{name}.tmp'}"]
    status = pytest.main([*options, *arguments], plugins=[share])
    sys.stdout.flush()
    os._exit(int(status))  # what libraries do at exit is for the process that imported them


def result(seed: int, statuses: Sequence[int | None], collected: int, records: Sequence[Path]) -> tuple[bool, str]:
    """Whether an order was complete and clean, and what is to be said of it."""
    lines = [line for record in records if record.exists() for line in record.read_text().splitlines()]
    found = [json.loads(line) for line in lines if line.endswith("}")]  # a killed process may leave half of one
    ran = len({entry["test"] for entry in found})
    wrong = [f"{entry['found']}: {entry['test']}" for entry in found if entry["found"] != "passed"]
    wrong += [f"process {process}: exit status {status}" for process, status in enumerate(statuses) if status]
    clean = not wrong and ran == collected > 0
    return clean, "\n  ".join([f"seed {seed}: {ran} of {collected} tests ran, {len(wrong)} findings", *wrong])


def main() -> int:
    parser = argparse.ArgumentParser(description="The suite in several random orders.")
    parser.add_argument("--seeds", type=int, default=10, help="how many orders (10)")
    parser.add_argument("--first", type=int, default=1, help="the first seed (1)")
    parser.add_argument("--together", type=int, default=1, help="how many orders run at the same time (1)")
    parser.add_argument("--processes", type=int, default=2, help="processes of each order (2)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="limit of all orders together")
    parser.add_argument("--folder", type=Path, default=Path("random-orders"), help="for logs and results")
    options, arguments = parser.parse_known_args()
    options.folder = options.folder.resolve()  # results are written while a test may have another current directory
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cute-kernels-test-") as kernels:
        return run_orders(options, Path(kernels), arguments)


def run_orders(options: argparse.Namespace, kernels: Path, arguments: list[str]) -> int:
    """Runs all orders, each with a folder of compiled kernels of its own; whether one of them was not clean."""
    for library in LIBRARIES:
        importlib.import_module(library)
    deadline = time.monotonic() + options.seconds
    fork = multiprocessing.get_context("fork")
    seeds = range(options.first, options.first + options.seeds)
    dirty = []
    for start in range(0, len(seeds), options.together):
        running = {}
        for seed in seeds[start : start + options.together]:
            taken, collected = fork.Value("i", 0), fork.Value("i", 0)
            records = [options.folder / f"{seed}-{process}.jsonl" for process in range(options.processes)]
            jobs = []
            compiled = kernels / str(seed)
            compiled.mkdir(mode=0o700)
            for process, record in enumerate(records):
                record.unlink(missing_ok=True)
                share = Share(taken, collected, record)
                arguments_of_share = (seed, process, share, options.folder, str(compiled), arguments)
                jobs.append(fork.Process(target=run_share, args=arguments_of_share))
            for job in jobs:
                job.start()
            # `taken` too: a counter that nobody here keeps would give its shared memory to the next order's.
            running[seed] = taken, collected, records, jobs
        for seed, (_, collected, records, jobs) in running.items():
            for job in jobs:
                job.join(min(max(0.0, deadline - time.monotonic()), 1e6))
                if job.is_alive():
                    job.kill()
                    job.join()
            clean, text = result(seed, [job.exitcode for job in jobs], collected.value, records)
            print(text, flush=True)
            if not clean:
                dirty.append(seed)
    print(f"{len(seeds) - len(dirty)} of {len(seeds)} orders were complete and clean")
    return bool(dirty)


if __name__ == "__main__":
    sys.exit(main())
