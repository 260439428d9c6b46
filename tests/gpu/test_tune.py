"""`tune_gemm` and `tune_patch_embed` on a GPU: the winner is used, is right, and later processes find it."""

from __future__ import annotations

import pytest
import torch

import cute_kernels
from cute_kernels.config import GemmProblem
from cute_kernels.explore.tuning.search import input_sets, interleaved, timers_of
from cute_kernels.operations.gemm import GEMM
from cute_kernels.operations.patch_embed import PATCH_EMBED
from cute_kernels.operations.runtime import tuned
from cute_kernels.plan import candidate_plans
from tests.gpu import architecture


@pytest.mark.gpu_only("times")
@pytest.mark.parametrize(("shape", "bias"), [((196, 768, 1024), True), ((2048, 1024, 512), False)])
def test_the_winner_is_used(shape, bias, tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned, "_KNOWN", {})
    m, n, k = shape
    config = cute_kernels.tune_gemm(m, n, k, bias=bias, candidates=6)
    assert len(tuned.files()) == 1
    monkeypatch.setattr(tuned, "_KNOWN", {})
    a, b = (torch.randint(-8, 9, size, device="cuda").bfloat16() for size in ((m, k), (n, k)))
    addend = torch.randn(n, device="cuda") if bias else None
    assert GEMM.prepared(a=a, b=b, bias=addend).plan.config == config
    product = (a.double() @ b.double().T).float()
    expected = (product if addend is None else product + addend).bfloat16()
    for _ in range(2):
        assert torch.equal(cute_kernels.gemm(a, b, bias=addend), expected)


@pytest.mark.gpu_only("times")
def test_a_shorter_kernel_is_timed_as_shorter(tmp_path, monkeypatch):
    times = {}
    for k in (512, 4096):
        problem = GemmProblem(4096, 4096, k)
        (plan,) = candidate_plans(problem, architecture.at_hand())[:1]
        times[k] = interleaved(timers_of(GEMM, [plan], input_sets(GEMM, problem)), 3)[plan]
    assert 4 < times[4096] / times[512] < 12


@pytest.mark.gpu_only("times")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8], ids=str)
def test_the_winner_of_rows_is_used(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned, "_KNOWN", {})
    config = cute_kernels.tune_patch_embed(3, 49, 256, 384, dtype=dtype, candidates=6)
    assert len(tuned.files()) == 1
    monkeypatch.setattr(tuned, "_KNOWN", {})
    # Products of small integers: sums are exact in any order.
    weight_type = torch.int8 if dtype is torch.uint8 else dtype
    x = torch.randint(0, 9, (3, 49, 384), device="cuda").to(dtype)
    weight = torch.randint(-4, 5, (256, 384), device="cuda").to(weight_type)
    pos = torch.randn(49, 256, device="cuda")
    assert PATCH_EMBED.prepared(x=x, weight=weight, pos_embed=pos, scale_a=0.5).plan.config == config
    product = x.to(torch.float64) @ weight.to(torch.float64).T
    expected = (0.5 * product + pos).float().bfloat16()
    for _ in range(2):
        assert torch.equal(cute_kernels.patch_embed(x, weight, None, pos, scale_a=0.5), expected)


@pytest.mark.gpu_only("times")
def test_first_calls_choose_by_time_where_that_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned, "_KNOWN", {})
    a, b = (torch.randint(-8, 9, size, device="cuda").bfloat16() for size in ((328, 2048), (1488, 2048)))
    expected = (a.double() @ b.double().T).bfloat16()
    graph, stream, default = torch.cuda.CUDAGraph(), torch.cuda.Stream(), GEMM.prepared(a=a, b=b).plan.config
    with cute_kernels.tune_first_calls():
        cute_kernels.gemm(a, b, config=default)
        assert tuned.files() == []
        states = torch.get_rng_state(), torch.cuda.get_rng_state()
        for _ in range(2):
            assert torch.equal(cute_kernels.gemm(a, b), expected)
        assert all(map(torch.equal, states, (torch.get_rng_state(), torch.cuda.get_rng_state())))
        with torch.cuda.graph(graph, stream=stream):
            result = cute_kernels.gemm(a, b)
    (config,) = [config for config in tuned._KNOWN.values() if config is not None]
    problem = GemmProblem(328, 1488, 2048)
    assert config in [plan.config for plan in candidate_plans(problem, architecture.at_hand())[:2]]
    assert len(tuned.files()) == 1
    graph.replay()
    assert torch.equal(result, expected) and torch.equal(cute_kernels.gemm(a, b), expected)
