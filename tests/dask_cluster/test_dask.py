"""Campaigns on a Dask cluster of two worker processes: `make dask`; distributed is no part of `make test`."""

from __future__ import annotations

from collections.abc import Iterator

import dask
import distributed
import pytest

from cute_kernels.commands import cli
from tests.emulator.checking.cluster_campaigns import Campaigns
from tests.emulator.checking.planted import EXAMPLE


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        yield cluster.scheduler_address.replace("tcp://", "dask://")


class TestDask(Campaigns):
    """On the cluster of this file."""


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with dask.config.set({"distributed.comm.timeouts.connect": 1}):
        assert cli.main(["mutate", "--arch", "sm_90a", "--executor", "dask://127.0.0.1:9", str(EXAMPLE)]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err
