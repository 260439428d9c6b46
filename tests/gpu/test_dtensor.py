"""`patch_embed`, `patch_embed_images` and `gemm` on DTensor, on two GPUs with NCCL."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operations import sharded_calls
from tests.operations.sharded_calls import CASES

pytestmark = [pytest.mark.two_gpus, pytest.mark.gpu_only("two GPUs")]

SECONDS = 280
"""After which processes that wait for each other are ended."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return sharded_calls.in_two_processes("nccl", tmp_path_factory.mktemp("processes"), SECONDS)


@pytest.mark.parametrize("name", CASES)
def test_shards_give_the_bits_of_the_whole(results: dict[str, dict[str, Any]], name: str) -> None:
    """What gloo cannot exchange, NCCL can: every case is compared here."""
    found, case = results[name], CASES[name]
    assert "error" not in found, found["error"]
    assert found["equal"] and found["type"] == found["expected type"]
    if not case.exchanges and not name.startswith("gemm, partial"):  # there DTensor chooses
        assert found["placements"] == [case.out, *[None] * (len(case.mesh) - 1)]
