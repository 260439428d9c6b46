"""Instructions whose last bits PTX leaves open, and modes that are refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator.errors import UnsupportedPTX
from tests.emulator.instruction_cases import GROUPS, UNIFORM, Case, text_of
from tests.emulator.ptx_launch import launch

APPROXIMATE = {
    "ex2.approx.f32": np.exp2,
    "ex2.approx.ftz.f32": np.exp2,
    "lg2.approx.f32": np.log2,
    "rsqrt.approx.f32": lambda x: 1 / np.sqrt(x),
    "tanh.approx.f32": np.tanh,
    "sin.approx.f32": np.sin,
    "cos.approx.f32": np.cos,
    "rcp.approx.ftz.f32": lambda x: 1 / x,
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximations_are_within_one_unit_in_the_last_place(name: str):
    case = Case(f"{name} {{d}}, {{0}};", 32, (32,), lambda a: 0, "f")
    values = np.linspace(0.05, 9, 32 * GROUPS + UNIFORM).astype(np.float32)
    data = np.zeros((len(values), 2), np.uint64)
    data[:, 0] = values.view(np.uint32)
    launch(text_of(case), data)
    got = data[:, 1].astype(np.uint32).view(np.float32)
    exact = APPROXIMATE[name](values.astype(np.longdouble))
    np.testing.assert_array_less(np.abs(got - exact), np.spacing(np.abs(got)))


@pytest.mark.parametrize(
    "text",
    [
        "add.sat.u32 {d}, {0}, {1};",
        "mul.rn.bf16.f32 {d}, {0}, {1};",
        "prmt.b32.f4e.rc8 {d}, {0}, {1}, {0};",
        "setp.lt.ftz.f32 {d}, {0}, {1};",
        "min.xorsign.f32 {d}, {0}, {1};",
    ],
)
def test_modes_that_are_not_implemented_are_refused_by_name(text: str):
    with pytest.raises(UnsupportedPTX, match=r"not implemented|it takes|needs one of \.abs") as caught:
        case = Case(text, 1 if "setp" in text else 32, (32, 32), lambda a, b: 0)
        launch(text_of(case), np.zeros((102, 3), np.uint64))
    assert caught.value.ptx_line is not None
