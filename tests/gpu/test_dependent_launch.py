"""Programmatic dependent launch: a kernel begins before the one in front of it has ended, and must not be seen to."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import frozen_constants, patch_embed
from cute_kernels.config import PatchEmbedProblem
from cute_kernels.operations.runtime import gpu
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.plan import make_plan
from tests.gpu import harness
from tests.gpu.harness import check_against_fp64, random_call, sized_rows
from tests.gpu.patch_embed_configs import AT_HAND


@pytest.mark.parametrize("config", AT_HAND.chained.values(), ids=AT_HAND.chained)
@pytest.mark.parametrize("rows", [196, 40_000])
def test_a_launch_reads_what_the_launch_before_it_wrote(rows, config):
    """Each launch takes the bytes of the last one's output for its rows and overwrites what that one had read.

    Every output feature is one element of its row, so that values stay E4M3 numbers: in BF16 their low four bits are
    zero, and no byte of them is an E4M3 NaN.
    """
    n, k, links = 384, 768, 4  # rows of 768 bytes in and out
    rows, seeds, repeats = sized_rows(rows), range(10), 5
    if harness.DRY_RUN:
        seeds, repeats = range(2), 1
    weight = torch.zeros(n, k, device="cuda")
    weight[torch.arange(n), torch.randperm(k)[:n]] = 1.0
    weight = weight.to(torch.float8_e4m3fn)
    plan = make_plan(PatchEmbedProblem(rows, n, k), config)
    start = [random_call(1, rows, n, k, seed=seed).x.view(torch.bfloat16).view(rows, n) for seed in seeds]
    buffers = [torch.empty_like(start[0]), torch.empty_like(start[0])]

    def chains(synchronised: bool) -> torch.Tensor:
        results = []
        for first in start:
            buffers[0].copy_(first)
            for i in range(links):
                x, out = buffers[i % 2], buffers[1 - i % 2]
                gpu.launch(plan, Operands(x=x.view(torch.float8_e4m3fn), weight=weight, scale=1.0, out=out))
                if synchronised:
                    torch.cuda.synchronize()
            results.append(buffers[links % 2].clone())
        torch.cuda.synchronize()
        return torch.stack(results).view(torch.int16)

    expected = chains(synchronised=True)
    assert len(expected.unique()) > 8 and not torch.equal(expected[0], expected[1])
    for _ in range(repeats):
        assert torch.equal(chains(synchronised=False), expected)


@pytest.mark.gpu_only("a CUDA graph")
def test_frozen_constants_are_read_as_they_were(record_property):
    call = random_call(3, 21, 264, 256)
    arguments = (call.x, call.weight, call.bias, call.pos_embed)
    patch_embed(*arguments, scale_a=call.scale)
    live, frozen = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(live):
        out_live = patch_embed(*arguments, scale_a=call.scale)
    with frozen_constants(), torch.cuda.graph(frozen):
        out_frozen = patch_embed(*arguments, scale_a=call.scale)
    for graph, out in ((live, out_live), (frozen, out_frozen)):
        graph.replay()
        torch.cuda.synchronize()
        check_against_fp64(call, out, "f32", record_property)
    before = out_frozen.clone()
    call.bias.add_(100.0)
    patch_embed(*arguments, scale_a=call.scale)  # replaces the cached table
    scratch = [torch.full((64, 1024), float("nan"), device="cuda") for _ in range(50)]  # would get its memory
    live.replay()
    frozen.replay()
    torch.cuda.synchronize()
    check_against_fp64(call, out_live, "f32", record_property)
    assert torch.equal(out_frozen, before)
    del scratch


@pytest.mark.gpu_only("a CUDA graph")
def test_frozen_constants_are_refused_inside_a_capture():
    graph = torch.cuda.CUDAGraph()
    buffer = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        buffer.add_(1)
        with pytest.raises(RuntimeError, match="before the capture"), frozen_constants():
            pass
