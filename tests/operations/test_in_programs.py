"""The package's own operations and layers in a program that runs in the emulator, on its "cuda" tensors."""

from __future__ import annotations

import warnings

import pytest
import torch

import cute_kernels
from cute_kernels.emulator.programs import capture
from cute_kernels.models.nn import PatchOptions, convert_layer

NORMALISED = PatchOptions(precision="fp8", mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_100a"])
def test_an_operation_is_a_launch_of_the_session(arch: str) -> None:
    """Each program in a process has the kernels of its own chip."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, (rows, 64), generator=generator).bfloat16() for rows in (32, 48))
    with capture(arch) as session:
        out = cute_kernels.gemm(a.cuda(), b.cuda())
        again = cute_kernels.gemm(a.cuda(), b.cuda())
        assert out.is_cuda and torch.equal(out, again)
        assert torch.equal(out.cpu().double(), a.double() @ b.double().T)
    assert len(session.launches) == 2
    assert all(arch.removesuffix("a").replace("_", "") in each.launch.kernel_name for each in session.launches)


def test_a_launch_is_ordered_by_its_stream() -> None:
    a = torch.ones(32, 64, dtype=torch.bfloat16)
    with capture("sm_90a"):
        device, stream = a.cuda(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = cute_kernels.gemm(device, device)
        torch.cuda.current_stream().wait_stream(stream)
        assert (out == 64).all()


def test_a_graph_replays_an_operation() -> None:
    with capture("sm_90a"):
        a, graph = torch.ones(32, 64, dtype=torch.bfloat16, device="cuda"), torch.cuda.CUDAGraph()
        cute_kernels.gemm(a, a)
        with torch.cuda.graph(graph):
            out = cute_kernels.gemm(a, a) + 1
        a.fill_(2)
        graph.replay()
        assert (out == 4 * 64 + 1).all()


@pytest.mark.parametrize(("arch", "launches"), [("sm_80", 0), ("sm_89", 1), ("sm_90a", 1)])
def test_a_layer_where_e4m3_is_multiplied_and_where_not(arch: str, launches: int) -> None:
    torch.manual_seed(0)
    plain, images = torch.nn.Conv2d(3, 64, 16, stride=16), torch.rand(2, 3, 32, 32) * 2 - 1
    expected = plain(images).detach()
    with capture(arch) as session, torch.no_grad(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = convert_layer(plain.cuda(), NORMALISED)(images.cuda()).cpu()
    assert len(session.launches) == launches
    assert any("no kernel multiplies E4M3 on cuda:0, an sm_80" in str(each.message) for each in warned) != bool(
        launches
    )
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < 1e-6 if not launches else 0 < error < 0.08
