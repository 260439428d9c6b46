"""CUDA tensors on any architecture: every backend gives the contract's result, devices and streams are respected."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import patch_embed
from cute_kernels.operations.runtime.constants import DerivedTensors


def make_call(images=5, positions=49, n=72, k=100):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(images, positions, k, generator=generator).to(torch.float8_e4m3fn)
    weight = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
    return x, weight, torch.randn(n, generator=generator), torch.randn(positions, n, generator=generator)


def test_the_reference_is_the_same_on_every_device():
    call = make_call()
    out = patch_embed(*(t.cuda() for t in call), scale_a=0.01, backend="reference")
    assert out.is_cuda
    assert torch.equal(out.cpu(), patch_embed(*call, scale_a=0.01, backend="reference"))


def test_auto_runs_the_kernel_and_agrees_with_the_contract_where_sums_are_exact():
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randint(-2, 3, (*shape, 100), generator=generator) for shape in ((5, 49), (72,)))
    call = (x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn), *make_call()[2:])
    out = patch_embed(*(t.cuda() for t in call), scale_a=0.01)
    assert torch.equal(out.cpu(), patch_embed(*call, scale_a=0.01, backend="reference"))


def test_tensors_on_two_devices_are_refused():
    x, weight, bias, pos = make_call()
    with pytest.raises(ValueError, match="bias is on cpu and x is on cuda:0"):
        patch_embed(x.cuda(), weight.cuda(), bias, pos.cuda(), backend="reference")


def test_a_scale_on_the_device_is_not_synchronised():
    x, weight, bias, pos = (t.cuda() for t in make_call())
    scale = torch.tensor([0.01], device="cuda")
    patch_embed(x, weight, bias, pos, scale_a=scale, scale_b=2.0, backend="reference")
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = patch_embed(x, weight, bias, pos, scale_a=scale, scale_b=2.0, backend="reference")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, patch_embed(x, weight, bias, pos, scale_a=0.01, scale_b=2.0, backend="reference"))


@pytest.mark.gpu_only("two streams at once")
def test_a_derived_tensor_is_ordered_between_streams():
    """The build is slow and runs on one stream; another stream asks for the result at once."""
    cache = DerivedTensors()
    source = torch.ones(1 << 20, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()

    def slow_double():
        work = busy
        for _ in range(50):
            work = work @ busy
        return source * 2 + work.sum() * 0

    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    busy.mul_(1e-2)  # keep the powers finite
    slow_double().clone()  # a kernel's first launch loads it, which may synchronise
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        cache.get("double", (source,), slow_double)
    with torch.cuda.stream(second):
        copied = cache.get("double", (source,), slow_double).clone()
    torch.cuda.synchronize()
    assert cache.misses == 1
    assert torch.equal(copied, source * 2)


def test_a_captured_graph_sees_later_updates_of_its_constants():
    cache, source = DerivedTensors(), torch.ones(16, device="cuda")
    out = torch.zeros(16, device="cuda")

    def step():
        out.copy_(cache.get("double", (source,), lambda: source * 2))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()  # fills the cache before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    source.fill_(7.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, torch.full_like(out, 14.0))
    step()
    assert torch.equal(out, torch.full_like(out, 14.0))
