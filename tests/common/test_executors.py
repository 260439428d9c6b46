"""Work on any executor: the same results, in order; what becomes of workers that end; addresses of clusters."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import pytest

from cute_kernels.commands import cli
from cute_kernels.common import executors, extras
from cute_kernels.common.executors import WorkerLost, Workers
from tests.common.executor_tasks import State, dies, dies_once, fails, square
from tests.emulator.checking.planted import EXAMPLE

NUMBERS = [(number,) for number in range(12)]
EXPECTED = [number * number + 5 for number in range(12)]


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        yield pool


def test_processes(processes: Executor) -> None:
    with Workers(State, (5,), processes) as workers:
        found = list(workers.each(square, NUMBERS))
        more = list(workers.each(square, NUMBERS))
    assert [value for value, _, _ in found] == [value for value, _, _ in more] == EXPECTED
    assert os.getpid() not in {process for _, process, _ in found}
    assert len({made for _, _, made in found + more}) == len({process for _, process, _ in found + more})
    assert [value for value, _, _ in Workers(State, (0,), processes).each(square, [(3,)])] == [9]  # another state


def test_threads_and_this_process() -> None:
    with ThreadPoolExecutor(4) as pool, Workers(State, (5,), pool) as workers:
        found = list(workers.each(square, NUMBERS))
    with Workers(State, (5,)) as workers:
        here = list(workers.each(square, NUMBERS))
    assert [value for value, _, _ in found] == [value for value, _, _ in here] == EXPECTED
    assert len({made for _, _, made in found}) == len({made for _, _, made in here}) == 1
    assert not executors._states


@pytest.mark.parametrize("make", [lambda: None, lambda: ThreadPoolExecutor(2)])
def test_what_is_not_needed_is_not_begun(make: Callable[[], Executor | None]) -> None:
    """Items are drawn as workers are free; a caller may stop."""
    drawn = []

    def items() -> Iterator[tuple[int]]:
        for number in range(1000):
            drawn.append(number)
            yield (number,)

    pool = make()
    with Workers(State, (0,), pool) as workers:
        results = workers.each(square, items())
        assert [next(results)[0] for _ in range(3)] == [0, 1, 4]
        results.close()
    assert len(drawn) <= 3 + 2 * 2
    if pool is not None:
        pool.shutdown()


def test_tasks_of_a_lost_process_run_again(tmp_path: Path) -> None:
    """The pool is made anew as often as that is needed while there is progress."""
    items = [(number, str(tmp_path / "mark")) for number in range(22)]
    pools = []

    def make() -> Executor:
        pools.append(ProcessPoolExecutor(2, get_context("spawn")))
        return pools[-1]

    with Workers(State, (5,), make) as workers:
        assert list(workers.each(dies_once, items)) == [number + 5 for number in range(22)]
    assert len(pools) == 5 and len(list(tmp_path.iterdir())) == 4


def test_a_task_that_always_ends_its_process_is_named() -> None:
    with Workers(State, (0,), jobs=1) as workers, pytest.raises(ValueError, match="jobs = 2 and an executor"):
        Workers(State, (0,), ThreadPoolExecutor(1), jobs=2)
    with Workers(State, (0,), executor=None, jobs=2) as workers, pytest.raises(WorkerLost, match=r"3 times.*\(3,\)"):
        list(workers.each(dies, [(2,), (3,)]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_process_that_a_signal_ends(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.common.executor_tasks"]
    root = Path(executors.__file__).parents[2]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        begun = {process.stdout.readline() for _ in range(2)}
        process.send_signal(number)
        rest, _ = process.communicate(timeout=30)  # the end of the output, which workers hold open, too
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (begun, rest, process.returncode) == ({"task 0\n", "task 1\n"}, "", -number)


def test_an_executor_that_is_given_is_not_replaced() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool, Workers(State, (0,), pool) as workers:
        with pytest.raises(BrokenProcessPool):
            list(workers.each(dies, [(3,)]))


def test_what_a_task_raises_comes_out(processes: Executor) -> None:
    for executor in (None, processes):
        with Workers(State, (0,), executor) as workers:
            results = workers.each(fails, NUMBERS)
            assert [next(results) for _ in range(3)] == [0, 1, 2]
            with pytest.raises(KeyError, match="task 3"):
                next(results)


@pytest.mark.parametrize("command", ["check", "mutate"])
@pytest.mark.parametrize("scheme", executors.SCHEMES)
def test_a_missing_client_is_named(
    scheme: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = extras._is_there
    missing = ("distributed", "ray", "grpc")
    monkeypatch.setattr(extras, "_is_there", lambda module: module not in missing and there(module))
    assert cli.main([command, "--executor", f"{scheme}://host:8786", str(EXAMPLE)]) == 2  # and it has not run
    error = capsys.readouterr().err
    package = {"dask": "distributed", "ray": "ray, grpcio"}[scheme]
    assert f"{scheme}:// needs {package}: pip install 'cute-kernels[{scheme}]'" in error


def test_a_cluster_has_its_own_workers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_is_there", lambda module: True)
    assert cli.main(["check", "--jobs", "2", "--executor", "dask://host:8786", str(EXAMPLE)]) == 2
    assert "--jobs 2 and --executor dask://host:8786: a cluster has its own workers" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["", "dask", "dask://", "dask://host", "dask://:1", "dask://host:x", "mpi://host:1"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match="must be dask://HOST:PORT or ray://HOST:PORT"), executors.connect(address):
        pass
