"""min and max of zeros of both signs: -0 < +0 (PTX ISA)."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator.machine.units.copies.reductions import combine
from cute_kernels.testing.ptx import module
from tests.emulator.ptx_launch import launch


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("swap", [False, True])
def test_f64(name: str, swap: bool):
    data = np.array([-0.0, 0.0, 7.0] if swap else [0.0, -0.0, 7.0])
    body = f"""ld.param.u64 %d0, [p0]; ld.global.f64 %d1, [%d0]; ld.global.f64 %d2, [%d0+8];
        {name}.f64 %d3, %d1, %d2; st.global.f64 [%d0+16], %d3; ret;"""
    launch(module(body), data, 0)
    assert data[2] == 0 and np.signbit(data[2]) == (name == "min")


@pytest.mark.parametrize("name", ["min", "max"])
def test_reductions_of_f16(name: str):
    old, new = np.array([0.0, -0.0, 1.0], np.float16), np.array([-0.0, 0.0, np.nan], np.float16)
    result = combine(name, "f16", old.view(np.uint8), new.view(np.uint8)).view(np.float16)
    assert np.signbit(result[:2]).tolist() == [name == "min"] * 2 and result[2] == 1
