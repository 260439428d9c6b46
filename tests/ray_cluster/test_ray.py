"""Campaigns on a Ray cluster of two worker processes: `make ray`; ray is no part of `make test`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_kernels.commands import cli
from tests.emulator.checking.cluster_campaigns import Campaigns
from tests.emulator.checking.planted import EXAMPLE

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


class TestRay(Campaigns):
    """On the cluster of this file."""


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    assert cli.main(["mutate", "--arch", "sm_90a", "--executor", f"ray://127.0.0.1:{port}", str(EXAMPLE)]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err
