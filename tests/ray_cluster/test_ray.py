"""Campaigns on a Ray cluster of two worker processes: `make ray`; ray is no part of `make test`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_kernels import executors
from cute_kernels.commands import cli
from cute_kernels.emulator import Options, capture
from cute_kernels.emulator.command import run_program
from cute_kernels.emulator.recorded import Recorder
from cute_kernels.executors import Workers
from cute_kernels.mutation import campaign
from tests.checking.executor_tasks import State, dies_once, fails, square
from tests.checking.planted import EXAMPLE, planted

ROOT = Path(__file__).parents[2]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The client server of a cluster of this machine with two processors."""
    port, client, agent = free_ports(3)
    # Paths of sockets are limited to 107 characters.
    folder = tmp_path_factory.getbasetemp()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "2",
               "--node-ip-address", "127.0.0.1", "--port", str(port), "--ray-client-server-port", str(client),
               "--dashboard-agent-listen-port", str(agent), "--include-dashboard", "false",
               "--object-store-memory", str(1 << 28), "--temp-dir", str(folder), "--disable-usage-stats"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with open(folder / "ray.log", "wb") as log:
        head = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            yield f"ray://127.0.0.1:{client}"
        finally:
            head.terminate()
            head.wait(60)


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray's client leaves a variable and a path behind."""
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")
    path = sys.path[:]
    yield
    sys.path[:] = path


def test_results_come_in_order_from_two_processes(address: str) -> None:
    with executors.connect(address) as executor, Workers(State, (5,), executor) as workers:
        assert executor.width == 2
        found = list(workers.each(square, [(number,) for number in range(40)]))
        results = workers.each(fails, [(number,) for number in range(5)])
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(KeyError, match="task 3"):
            next(results)
    assert [value for value, _, _ in found] == [number * number + 5 for number in range(40)]
    assert len({process for _, process, _ in found}) == len({made for _, _, made in found}) == 2


def test_tasks_of_a_lost_worker_run_again(address: str, tmp_path: Path) -> None:
    items = [(number, str(tmp_path / "mark")) for number in range(12)]
    with executors.connect(address) as executor, Workers(State, (5,), executor) as workers:
        assert list(workers.each(dies_once, items)) == [number + 5 for number in range(12)]
    assert len(list(tmp_path.iterdir())) == 2


def test_mutants_are_judged_the_same(address: str) -> None:
    recorder = Recorder()
    with capture("sm_90a", Options(), recorder=recorder) as session:
        assert run_program(str(EXAMPLE), [], session, pytest.fail) == 0
    (kernel,) = campaign.kernels(recorder.launches, 3)
    numbers = list(range(0, len(kernel.mutants), 4))
    here = campaign.judge_mutants(kernel, numbers, {})
    with executors.connect(address) as executor:
        there = campaign.judge_mutants(kernel, numbers, {}, executor=executor)
    assert [(v.key, v.killer, v.schedule, v.line) for v in here] == [
        (v.key, v.killer, v.schedule, v.line) for v in there
    ]


def test_commands(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` finds the same schedule, `mutate` the same verdicts."""
    program = planted("one try to wait", tmp_path)
    outputs = []
    for where in ([], ["--executor", address]):
        assert cli.main(["check", "--arch", "sm_90a", "--seeds", "2", *where, str(program)]) == 3
        out, error = capsys.readouterr()
        outputs.append((out.splitlines()[-1], [line for line in error.splitlines() if "replay" in line]))
    assert outputs[0] == outputs[1] and outputs[0][1]
    file = tmp_path / "out.json"
    arguments = ["--arch", "sm_90a", "--match", "fence", "--executor", address, "--output", str(file)]
    assert cli.main(["mutate", *arguments, str(EXAMPLE)]) == 0
    verdicts = json.loads(file.read_text())["mutants"]
    assert {(v["opcode"], bool(v["killer"])) for v in verdicts} == {
        ("fence.mbarrier_init.release.cluster", False), ("fence.proxy.async.shared::cta", True),
    }  # fmt: skip


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    assert cli.main(["mutate", "--arch", "sm_90a", "--executor", f"ray://127.0.0.1:{port}", str(EXAMPLE)]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err
