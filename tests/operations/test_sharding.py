"""`patch_embed`, `patch_embed_images` and `gemm` on DTensor: two processes with gloo, and what is registered when."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from cute_kernels.operations.gemm import GEMM
from cute_kernels.operations.patch_embed import PATCH_EMBED
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES
from cute_kernels.operations.sharding import register
from tests.operations import sharded_calls
from tests.operations.sharded_calls import CASES

SECONDS = 240
"""After which processes that wait for each other are ended."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return sharded_calls.in_two_processes("gloo", tmp_path_factory.mktemp("processes"), SECONDS)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.exchanges])
def test_shards_give_the_bits_of_the_whole(results: dict[str, dict[str, Any]], name: str) -> None:
    found, case = results[name], CASES[name]
    assert "error" not in found, found["error"]
    assert found["equal"] and found["type"] == found["expected type"]
    if not name.startswith("gemm, partial"):  # DTensor chooses how to add the sums
        assert found["placements"] == [case.out, *[None] * (len(case.mesh) - 1)]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.exchanges])
def test_what_has_to_be_exchanged_is_never_wrong(results: dict[str, dict[str, Any]], name: str) -> None:
    """gloo has no collectives of FP8, so DTensor's redistribution says so; with NCCL, tests/gpu compares the result."""
    assert "nvalid scalar type" in results[name].get("error", "") or results[name]["equal"]


def test_only_whole_images_and_whole_vectors_are_divided() -> None:
    """What a shard of rows or features must be for its positions and its N to be right."""
    shapes = {"x": (24, 32), "weight": (48, 32), "pos_embed": (6, 48)}
    divided = {parts: [along for along, _ in PATCH_EMBED.shardings(shapes, parts)] for parts in range(1, 9)}
    assert divided == {1: [0, 2], 2: [0, 2], 3: [2], 4: [0], 5: [], 6: [2], 7: [], 8: []}
    indexed = shapes | {"pos_index": (24,)}
    assert [along for along, _ in PATCH_EMBED.shardings(indexed, 5)] == [0]
    assert [along for along, _ in PATCH_EMBED.shardings(indexed, 6)] == [0, 1]
    by_row = {"x": (4, 6, 32), "weight": (48, 32), "scale_a": (24, 1), "scale_b": (1, 48)}
    assert list(PATCH_EMBED.shardings(by_row, 4)) == [(0, {"x": 0, "scale_a": 0})]  # 48 features are 6 times 8
    assert [along for along, _ in PATCH_EMBED.shardings(by_row, 3)] == [2]
    assert [along for along, _ in PATCH_EMBED.shardings(by_row | {"scale_a": (4, 6, 1)}, 3)] == [0, 1, 2]
    assert [along for along, _ in GEMM.shardings({"a": (7, 16), "b": (5, 16)}, 4)] == [0, 1]


def test_images_are_divided_between_patches() -> None:
    """96 rows of pixels are 6 rows of patches."""
    shapes = {"images": (5, 3, 96, 32), "weight": (48, 768), "pos_embed": (12, 48)}
    divided = {parts: [along for along, _ in PATCH_EMBED_IMAGES.shardings(shapes, parts)] for parts in range(1, 9)}
    all_three = [0, 1, 2]
    assert divided == {1: all_three, 2: all_three, 3: all_three, 4: [0], 5: [0], 6: all_three, 7: [0], 8: [0]}


def test_no_sharding_divides_the_inner_extent() -> None:
    inner = {"x": -1, "weight": 1, "a": -1, "b": -1}
    for shardings, shapes in (
        (PATCH_EMBED.shardings, {"x": (4, 6, 32), "weight": (32, 32)}),
        (PATCH_EMBED.shardings, {"x": (24, 32), "weight": (32, 32)}),
        (PATCH_EMBED_IMAGES.shardings, {"images": (2, 3, 16, 16), "weight": (32, 192)}),
        (GEMM.shardings, {"a": (8, 16), "b": (8, 16)}),
        (GEMM.shardings, {"a": (2, 8, 16), "b": (2, 8, 16)}),
        (GEMM.shardings, {"a": (2, 8, 16), "b": (8, 16)}),
    ):
        for _, arguments in shardings(shapes, 1):
            assert all(name not in inner or dim < len(shapes[name]) - 1 for name, dim in arguments.items())


def run(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_dtensor_is_imported_by_nobody_but_the_user() -> None:
    """It takes seconds. Where the user has it, shardings are registered when they are first needed."""
    program = """
import sys, torch, cute_kernels
from cute_kernels.operations import sharding
a = torch.ones(2, 8, dtype=torch.bfloat16)
cute_kernels.gemm(a, a)
cute_kernels.patch_embed(*[torch.ones(8, 16).to(torch.float8_e4m3fn)] * 2)
print("torch.distributed.tensor" in sys.modules, sharding.register.cache_info().currsize)
"""
    assert run(program) == ["False", "0"]


def test_without_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no torch.distributed"):
        register.__wrapped__("gemm", GEMM.shardings)
