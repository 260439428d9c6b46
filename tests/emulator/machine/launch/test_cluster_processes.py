"""The processes that execute clusters: how they end, what is said of them, and `cute-kernels emulate --processes`."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_kernels.common import interrupts
from cute_kernels.emulator import Options
from cute_kernels.emulator.machine.launch import clusters, forked
from cute_kernels.emulator.machine.launch.scheduler import Scheduler
from cute_kernels.emulator.races.launch_accesses import Span
from cute_kernels.testing.ptx import aligned
from tests.emulator.checking.planted import SCHEDULES as FAULTS_SHOWN
from tests.emulator.checking.planted import planted, report_file
from tests.emulator.cluster_launches import CTAS, compare, outcome
from tests.processes import run_python


def children() -> set[str]:
    """Processes that this one has started and not waited for."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(stat.parent.name)
    return found


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


# --- processes that end, and callers that do --------------------------------------------------------------------------

STORE = "st.global.b32 [%d1], %r3; ret;"


@pytest.mark.usefixtures("no_process_is_left")
def test_a_process_that_ends_before_it_is_done(monkeypatch: pytest.MonkeyPatch):
    parent, in_turn = os.getpid(), clusters.in_turn

    def end(launch: Any, timeline: Any) -> Any:
        for work in in_turn(launch, timeline):
            if os.getpid() != parent:
                os._exit(0)
            yield work

    monkeypatch.setattr(clusters, "in_turn", end)
    report = compare(STORE)
    assert report.one_process == "a process ended before it was done"


@pytest.mark.usefixtures("no_process_is_left")
def test_a_system_without_room_for_another_process(monkeypatch: pytest.MonkeyPatch):
    fork, forked = os.fork, []

    def refuse() -> int:
        if len(forked) % 2:  # every second process
            forked.append(0)
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        forked.append(0)
        return fork()

    monkeypatch.setattr(os, "fork", refuse)
    report = compare(STORE, processes=(2,))
    assert report.one_process == "no process could be started: no more processes" and len(forked) == 2


@pytest.mark.usefixtures("no_process_is_left")
def test_an_error_of_the_emulator_itself_is_that_of_one_process(monkeypatch: pytest.MonkeyPatch):
    def fail(scheduler: Scheduler) -> None:
        raise ZeroDivisionError(scheduler.cluster.index)

    monkeypatch.setattr(Scheduler, "run", fail)
    with pytest.raises(ZeroDivisionError, match="0"):
        outcome(STORE, Options(processes=2), np.zeros(CTAS * 32, np.uint32))


def test_a_launch_in_a_thread_beside_others():
    over = threading.Event()
    others = [threading.Thread(target=over.wait) for _ in range(3)]
    with ThreadPoolExecutor(1) as pool:
        for other in others:
            other.start()
        report = pool.submit(compare, STORE).result()
        over.set()
    assert report.processes == 2


@pytest.mark.usefixtures("no_process_is_left")
def test_a_process_that_ends_while_its_results_are_copied(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Span, "written", lambda self: os._exit(0))
    with pytest.raises(RuntimeError, match="while its results were copied"):
        outcome(STORE, Options(processes=2), np.zeros(CTAS * 32, np.uint32))


@pytest.mark.usefixtures("no_process_is_left")
def test_a_caller_that_gives_up_leaves_no_process_and_no_result():
    out = aligned(np.zeros(CTAS * 32, np.uint32))

    def give_up(done: int, total: int) -> None:
        if done:
            raise TimeoutError

    body = f"@!%p2 {STORE} HERE: add.u32 %r9, %r9, 1; setp.lt.u32 %p5, %r9, 300000000; @%p5 bra HERE; ret;"
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        outcome(body, Options(processes=2, progress=give_up), np.zeros(CTAS * 32, np.uint32), out=out)
    assert time.monotonic() - began < 60
    assert not out.any()


def test_progress_begins_again_where_clusters_turn_out_to_be_dependent():
    calls: list[int] = []
    body = "st.relaxed.gpu.global.b32 [%d0+64], %r2; ret;"
    values = np.zeros(CTAS * 32, np.uint32)
    outcome(body, Options(processes=2, progress=lambda done, total: calls.append(done)), values)
    assert calls == [*range(CTAS + 1), *range(CTAS + 1)]


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "2", None])
def test_processes_are_a_positive_integer(wrong: object):
    with pytest.raises((TypeError, ValueError), match=f"processes = {wrong!r}: must be"):
        Options(processes=wrong)


# --- programs ---------------------------------------------------------------------------------------------------------


def emulate(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "cute_kernels", "emulate", "--arch", "sm_90a", "--processes", "2", *arguments, cwd=cwd)


def test_a_program_says_how_many_processes_each_launch_had(tmp_path: Path):
    done = emulate("--report", "report.json", planted(None, tmp_path).name, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr, lines[2]) == (0, "", "the result is right")
    assert [line.endswith(" s, 2 processes") for line in lines[:2]] == [True, True]
    launches = json.loads((tmp_path / "report.json").read_text())["launches"]
    assert [launch["report"]["processes"] for launch in launches] == [2, 2]


def test_a_program_says_why_a_launch_had_one_process(tmp_path: Path):
    done = emulate("--no-detectors", planted(None, tmp_path).name, cwd=tmp_path)
    assert ", one process: the race detector is off" in done.stdout.splitlines()[0]


@pytest.mark.parametrize("fault", ["no wait for an empty stage", "no wait for the launch before", "out of bounds"])
def test_reports_of_a_program_are_those_of_one_process(fault: str, tmp_path: Path):
    done = emulate("--quiet", *FAULTS_SHOWN.get(fault, ()), planted(fault, tmp_path).name, cwd=tmp_path)
    assert done.returncode == 3 and done.stderr == report_file(fault).read_text()


def test_a_process_that_is_forked_collects_no_garbage_of_this_one() -> None:
    """Not even while os.fork destroys what belonged to other threads there: here something that makes objects."""
    read, write = os.pipe()
    process, local = os.getpid(), threading.local()

    class Destroyed:
        def __del__(self) -> None:
            if os.getpid() != process:
                os.write(write, b"!")

    class MakesMany:
        def __del__(self) -> None:
            self.made = [[] for _ in range(100_000)]

    def fork() -> None:
        cycle = [Destroyed()]
        cycle.append(cycle)
        del cycle
        with interrupts.deferred(), forked.Forked([lambda connection: connection.send(None)]) as processes:
            assert list(processes.messages()) == []

    local.of_this_thread = MakesMany()
    was_enabled = gc.isenabled()
    gc.collect()
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    os.write(write, b".")
    assert (os.read(read, 2), gc.isenabled()) == (b".", was_enabled)
