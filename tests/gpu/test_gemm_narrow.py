"""The dense GEMM of 8 bits on a GPU: bit for bit what its tensor cores add, its repeated calls, its graphs."""

from __future__ import annotations

import pytest
import torch

import cute_kernels
from cute_kernels.config import GemmConfig
from cute_kernels.operations import reference
from cute_kernels.operations.gemm import GEMM
from tests.gpu import architecture, gemm_configs

FP8, INT8, UINT8 = torch.float8_e4m3fn, torch.int8, torch.uint8
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
M, N, K = 300, 200, 784


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normally distributed, of integers all that there are, on the CPU."""
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1, shape, dtype=dtype)


def addends(name: str) -> dict:
    """Arguments besides the operands, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    rows, columns = torch.rand(M, 1, generator=generator), torch.rand(1, N, generator=generator)
    bias, residual = torch.randn(N, generator=generator), torch.randn(M, N, generator=generator)
    return {
        "numbers": {"scale_a": 0.3, "scale_b": 0.1},
        "rows and columns": {"scale_a": rows, "scale_b": columns, "residual": residual.bfloat16()},
        "to FP8": {
            "scale_b": columns, "bias": bias.bfloat16(), "activation": "gelu_tanh", "out_dtype": FP8, "out_scale": 0.05,
        },
        "to FP8, in memory": {"bias": bias.half(), "out_dtype": FP8, "out_scale": torch.tensor([[0.05]])},
        "in memory": {"scale_a": torch.tensor([0.2]), "out_dtype": torch.float32, "residual": residual},
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", ["numbers", "rows and columns", "to FP8", "to FP8, in memory", "in memory"])
@pytest.mark.parametrize("dtype", [FP8, INT8, UINT8, torch.bfloat16])
def test_every_bit(dtype: torch.dtype, name: str) -> None:
    torch.manual_seed(0)
    a, b = draw(M, K, dtype=dtype), draw(N, K, dtype=INT8 if dtype is UINT8 else dtype)
    more = addends(name)
    on_device = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in more.items()}
    split = getattr(GEMM.prepared(a=a.cuda(), b=b.cuda(), **on_device).plan.config, "split_k", 1)
    expected = reference.gemm(a, b, split_k=split, arithmetic=architecture.at_hand(), **more)
    a, b = a.cuda(), b.cuda()
    for _ in range(2):  # the second call is a repeated one
        out = cute_kernels.gemm(a, b, **on_device).cpu()
        bits = BITS[out.itemsize]
        assert torch.equal(out.view(bits), expected.view(bits))


@pytest.mark.parametrize("config", gemm_configs.NARROW, ids=gemm_configs.name)
def test_configurations_of_narrow_results(config: GemmConfig) -> None:
    a, b, more = draw(M, K, dtype=FP8), draw(N, K, dtype=FP8), addends("to FP8, in memory")
    expected = reference.gemm(a, b, arithmetic=architecture.at_hand(), **more)
    on_device = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in more.items()}
    out = cute_kernels.gemm(a.cuda(), b.cuda(), **on_device, config=config).cpu()
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


def test_a_graph_reads_addends_of_the_moment() -> None:
    a, b = (torch.randn(256, 768, device="cuda").to(FP8) for _ in range(2))

    def drawn() -> dict[str, torch.Tensor]:
        numbers = {"scale_a": torch.rand(256, 1, device="cuda"), "out_scale": torch.rand(1, device="cuda") + 0.5}
        bias, residual = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((256,), (256, 256)))
        return numbers | {"bias": bias, "residual": residual}

    first, second = drawn(), drawn()
    expected = cute_kernels.gemm(a, b, **second, out_dtype=FP8)
    cute_kernels.gemm(a, b, **first, out_dtype=FP8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cute_kernels.gemm(a, b, **first, out_dtype=FP8)
    for name, values in second.items():
        first[name].copy_(values)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out.view(UINT8), expected.view(UINT8))
