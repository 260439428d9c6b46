"""Operators on "cuda" tensors in the emulator: what of torch they take the place of."""

from __future__ import annotations

import contextlib

import pytest
import torch

from cute_kernels.emulator.programs.cuda_operators import on_device_backward


def test_the_apply_of_autograd_may_be_of_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of users get their class and arguments also with torch 2.14, where it is no ``classmethod``."""

    class Function(dict):
        apply = dict.__dict__["fromkeys"]

    class Device(contextlib.nullcontext):
        def is_on_device(self, value: object) -> bool:
            return False

    monkeypatch.setattr(torch.autograd, "Function", Function)
    made = type("Own", (Function,), {})
    with on_device_backward(Device()):
        result = made.apply(["a", "b"], 3)
    assert type(result) is made and result == {"a": 3, "b": 3}
    assert Function.__dict__["apply"] is dict.__dict__["fromkeys"]
