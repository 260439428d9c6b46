"""A step of a training on a GPU, up to the launch: its plan is remembered, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cute_kernels.operations import base
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES as OPERATION


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
