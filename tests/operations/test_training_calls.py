"""A step of a training on a GPU, up to the launch: its plan is remembered, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cute_kernels.emulator.programs import capture
from cute_kernels.operations import base
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES as OPERATION
from cute_kernels.operations.reference import patch_rows


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What would be launched, and how often it was planned."""
    found, plan = SimpleNamespace(operands=[], plans=0), type(OPERATION).plan

    def counted(self, a):
        found.plans += 1
        return plan(self, a)

    monkeypatch.setattr(type(OPERATION), "plan", counted)
    monkeypatch.setattr(base, "choose_backend", lambda device, backend: "kernel")
    monkeypatch.setattr(base, "launch", lambda executor, plan, operands: found.operands.append(operands))
    monkeypatch.setattr(base, "in_autograd_function", lambda: True)
    monkeypatch.setattr(OPERATION.repeated, "put", lambda *_: pytest.fail("a weight that trains was remembered"))
    OPERATION.repeated.clear()
    yield found
    OPERATION.repeated.clear()


def call(images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    values = images, weight, None, None, bias, None, 16, torch.bfloat16, "auto", None
    return OPERATION._run(*OPERATION.table.encode(values))


def test_steps_share_a_plan_and_read_their_own_numbers(launched: SimpleNamespace) -> None:
    images, weight, bias = torch.ones(2, 3, 32, 32), torch.ones(24, 768), torch.zeros(24)
    images, weight = images.bfloat16(), weight.bfloat16()
    for step in range(3):
        call(images, weight.mul_(2), bias.fill_(step))
        table = launched.operands[-1].table
        assert float(table.max()) == step and float(launched.operands[-1].weight.max()) == 2.0 ** (step + 1)
    assert launched.plans == 1
    call(images[:1], weight, bias)
    call(images.to(memory_format=torch.channels_last), weight, bias)
    assert launched.plans == 3
    with pytest.raises(ValueError, match="weight"):
        call(images, weight[:, :-1], bias)
    OPERATION.repeated.clear()
    call(images, weight, bias)
    assert launched.plans == 4


@pytest.mark.parametrize("negative", [False, True])
def test_a_step_on_a_device_leaves_out_the_dispatcher(negative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But of a view whose sign is not in its memory, which the dispatcher makes what it stands for."""
    asked, below = [], OPERATION._below_autograd
    monkeypatch.setattr(OPERATION, "_below_autograd", lambda *given: asked.append(given[0]) or below(*given))
    generator = torch.Generator().manual_seed(0)
    images, weight, bias, direction = (
        torch.randint(-2, 3, shape, generator=generator).bfloat16()
        for shape in ((2, 3, 32, 32), (64, 3, 16, 16), (64,), (2, 4, 64))
    )
    with capture("sm_90a"):
        given = [torch.nn.Parameter(each.cuda()) for each in (weight, bias)]
        pixels = torch._neg_view(-images.cuda()) if negative else images.cuda()
        values = pixels, given[0].flatten(1), None, None, given[1], None, 16, torch.float32, "auto", None
        out = OPERATION.call(values)
        out += 1  # as into a result of torch's operators
        out.backward(direction.float().cuda())
        found = [out.detach().cpu(), *(each.grad.cpu() for each in given)]
    rows = patch_rows(images, 16).double()
    columns = direction.flatten(0, 1).double()
    sums = rows @ weight.flatten(1).double().T + bias.double() + 1
    expected = sums.view(2, 4, 64), (columns.T @ rows).view(weight.shape), columns.sum(0)
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got.double(), wanted.to(got.dtype).double())
    assert len(asked) == 1 and (asked[0] is None) != negative
