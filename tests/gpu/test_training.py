"""Derivatives on a GPU: beside float64, compiled, captured in CUDA graphs, without waiting for the device."""

from __future__ import annotations

import copy

import pytest
import torch

from cute_kernels import gemm, patch_embed, patch_embed_images, prepare_patch_weight
from cute_kernels.operations.runtime.constants import DERIVED
from tests.models.nn.embedding import Embedding
from tests.models.nn.embedding import embedding as positioned

pytestmark = pytest.mark.gpu_only("the autograd of torch on a GPU")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def embedding(dtype: torch.dtype = torch.bfloat16, patch: int = 16, features: int = 256) -> Embedding:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, features, patch, stride=patch)
    pos = torch.nn.Parameter(torch.randn(16, features) * 0.1)
    return positioned(layer, pos_embed=pos, precision="auto").to("cuda", dtype)


def check_gradients(embed: Embedding, call: torch.nn.Module, images: torch.Tensor, tolerance: float = 1e-2) -> None:
    """Those of all parameters, beside the convolution in float64."""
    embed.zero_grad(set_to_none=True)
    out = call(images)
    direction = torch.randn_like(out)
    out.backward(direction)
    exact = {name: parameter.detach().double().requires_grad_() for name, parameter in embed.named_parameters()}
    patch = exact["weight"].shape[-1]
    values = torch.nn.functional.conv2d(images.double(), exact["weight"], exact["bias"], stride=patch)
    expected = values.flatten(2).transpose(1, 2) + exact["pos_embed"]
    expected.backward(direction.double())
    assert (out.double() - expected).norm() < tolerance * expected.norm()
    for name, parameter in embed.named_parameters():
        error = (parameter.grad.double() - exact[name].grad).norm() / exact[name].grad.norm()
        assert error < tolerance, (name, float(error))


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the step of an optimiser, from which on kept constants are compared."""
    monkeypatch.setattr(DERIVED, "compares_on_gpu", True)


@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_modules(dtype: torch.dtype, patch: int) -> None:
    embed = embedding(dtype, patch)
    check_gradients(embed, embed, random(5, 3, 4 * patch, 4 * patch, dtype=dtype))


def test_compiled_as_one_graph(stepped: None) -> None:
    embed, images = embedding(), random(5, 3, 64, 64)
    compiled = torch.compile(embed, fullgraph=True)
    check_gradients(embed, compiled, images)
    with torch.no_grad():
        embed.weight.neg_()
    check_gradients(embed, compiled, images)


def test_operations() -> None:
    a, b, bias = random(200, 128), random(96, 128) / 11, random(96)
    index = torch.randint(7, (200,), device="cuda")
    calls = {
        "gemm": (
            lambda a, b, bias: gemm(a, b, bias=bias, activation="gelu_tanh"),
            lambda a, b, bias: torch.nn.functional.gelu(a @ b.T + bias, approximate="tanh"),
        ),
        "patch_embed": (
            lambda a, b, bias: patch_embed(a, b, None, bias.expand(7, 96) * 2, pos_index=index),
            lambda a, b, bias: a @ b.T + (bias.expand(7, 96) * 2)[index],
        ),
    }
    for name, (ours, plain) in calls.items():
        mine = [value.clone().requires_grad_() for value in (a, b, bias)]
        exact = [value.double().requires_grad_() for value in (a, b, bias)]
        out = ours(*mine)
        direction = torch.randn_like(out)
        out.backward(direction)
        plain(*exact).backward(direction.double())
        for got, expected in zip(mine, exact, strict=True):
            assert (got.grad - expected.grad).norm() < 1e-2 * expected.grad.norm(), name


@pytest.mark.parametrize("trained", [("weight", "bias", "pos_embed"), ("weight",), ("pos_embed",)])
def test_the_host_never_waits(trained: tuple[str, ...], stepped: None) -> None:
    """Steps of an optimiser, with preparation by hand as well; two calls in a step, as gradients are accumulated."""
    embed, images = embedding(), random(5, 3, 64, 64)
    raw = torch.randint(0, 256, images.shape, dtype=torch.uint8, device="cuda")
    for name, parameter in embed.named_parameters():
        parameter.requires_grad_(name in trained)
    parameters = [parameter for parameter in embed.parameters() if parameter.requires_grad]
    optimiser = torch.optim.SGD(parameters, lr=0.01)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        for _ in range(2):
            embed(images).float().square().mean().backward()
        embed(raw).float().square().mean().backward()
        if "weight" in trained:
            prepared = prepare_patch_weight(embed.weight, precision="bf16")
            patch_embed_images(images, prepared, embed.bias).float().mean().backward()
        optimiser.step()

    step()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_in_a_cuda_graph(stepped: None) -> None:
    """Replays read the weights as they are, and leave what steps outside of a graph leave."""
    embed, images = embedding(), random(5, 3, 64, 64)
    twin = copy.deepcopy(embed)

    def step(module: Embedding) -> None:
        for parameter in module.parameters():
            parameter.grad = None
        module(images).float().square().mean().backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.sub_(parameter.grad, alpha=0.5)

    for _ in range(3):
        step(twin)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(embed)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(embed)
    graph.replay()
    graph.replay()
    for mine, other in zip(embed.parameters(), twin.parameters(), strict=True):
        assert (mine - other).norm() < 1e-2 * other.norm()
