"""Writes to constants past autograd's version counter, which are found by comparing; derivatives that are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad

from cute_kernels import gemm, patch_embed
from cute_kernels.operations.runtime.constants import DERIVED, frozen_constants
from tests.gpu.harness import Call, check_against_fp64, random_call
from tests.models.nn.embedding import embedding as positioned

SHAPE = 50, 21, 264, 256


def embed(call: Call) -> torch.Tensor:
    return patch_embed(call.x, call.weight, call.bias, call.pos_embed, scale_a=call.scale)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A step of an optimiser, from which on constants are compared; undone after the test."""
    monkeypatch.setattr(DERIVED, "compares_on_gpu", False)

    def run() -> None:
        torch.optim.SGD(torch.nn.Linear(2, 2).parameters()).step()

    return run


@pytest.mark.parametrize("name", ["weight", "bias", "pos_embed"])
def test_constants_of_remembered_calls(name: str, step, record_property) -> None:
    call = random_call(*SHAPE)
    embed(call)
    embed(call)
    step()
    for seed in range(1, 4):
        embed(call)
        getattr(call, name).data.copy_(getattr(random_call(*SHAPE, seed=seed), name))
        check_against_fp64(call, embed(call), "f32", record_property)


def test_the_bias_of_a_product(step) -> None:
    a, b = (torch.randn(rows, 64, device="cuda").bfloat16() for rows in (64, 128))
    bias = torch.randn(128, device="cuda")
    step()
    for _ in range(3):
        expected = torch.nn.functional.linear(a.float(), b.float(), bias)
        torch.testing.assert_close(gemm(a, b, bias=bias, out_dtype=torch.float32), expected, rtol=1e-3, atol=1e-2)
        bias.data.neg_()


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@torch.no_grad()
def test_a_teacher_whose_weights_are_averages(precision: str, step) -> None:
    layer = torch.nn.Conv2d(3, 64, 16, stride=16).cuda().bfloat16()
    pos = torch.nn.Parameter(torch.randn(1, 4, 64, device="cuda").bfloat16())
    teacher = positioned(layer, pos_embed=pos, precision=precision).eval()
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, device="cuda")
    given = images if precision == "int8" else (images.float() / 127.5 - 1).bfloat16()
    teacher(given)
    step()
    parameters = list(teacher.parameters())
    for _ in range(3):
        for parameter in parameters:
            parameter.data.mul_(0.5).sub_(parameter.data, alpha=3.0)
        fresh = positioned(layer, pos_embed=pos.detach().clone(), precision=precision).eval()
        got = teacher(given)
        assert torch.equal(got, fresh(given)) and torch.equal(teacher(given), got)


def test_frozen_constants_are_not_compared(step) -> None:
    call = random_call(*SHAPE)
    step()
    before = embed(call)
    call.bias.data.add_(1)
    with frozen_constants():
        assert torch.equal(embed(call), before)
    assert not torch.equal(embed(call), before)


def test_tangents_of_remembered_calls_are_refused() -> None:
    call = random_call(*SHAPE)
    rows = call.x.to(torch.bfloat16)
    call = dataclasses.replace(call, x=rows, weight=call.weight.to(torch.bfloat16))
    embed(call)
    embed(call)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        embed(dataclasses.replace(call, x=forward_ad.make_dual(rows, torch.ones_like(rows))))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: embed(dataclasses.replace(call, x=x)), (rows,), (rows,))


@torch.no_grad()
def test_pixels_beyond_fp8_give_nan() -> None:
    layer = torch.nn.Conv2d(3, 64, 16, stride=16).cuda()
    embedding = positioned(layer, precision="fp8").eval()
    pixels = torch.rand(2, 3, 32, 32, device="cuda") * 2 - 1
    pixels[1, 2, 20, 5] = 1.2
    got = embedding(pixels)
    assert got[1, 2].isnan().all()
    assert int(got.isnan().any(-1).sum()) == 1
