"""Tests of bias_add.py without a GPU: `pytest docs/examples`."""

import pytest
import torch
from bias_add import bias_add
from hypothesis import given, settings

from cute_kernels.testing import assert_matches, emulation, strategies, varied


@pytest.mark.emulated(arch="sm_90a")
@pytest.mark.schedules(warps=5, random=2)
def test_one_matrix(emulated):
    x, bias = varied((112, 32), torch.float32), varied((32,), torch.float32, seed=1)
    assert_matches(bias_add(x, bias), x + bias)


@settings(max_examples=40, deadline=None)
@given(schedule=strategies.schedules(overlap=True), shape=strategies.shapes(160, 32, multiples=(16, 32)))
def test_one_launch_behind_another(schedule, shape):
    with emulation("sm_90a", schedule):
        x, bias = varied(shape, torch.float32), varied((32,), torch.float32, seed=1)
        assert_matches(bias_add(bias_add(x, bias), bias), x + bias + bias)
