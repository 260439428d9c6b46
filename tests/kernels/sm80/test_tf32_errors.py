"""How far TF32 products are from exact ones: the bounds that docs/operations.md states."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.config import GemmProblem, Sm80GemmConfig
from cute_kernels.operations.reference.rounding import round_tf32
from cute_kernels.operations.runtime import emulated
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.plan import make_plan
from tests.kernels.sm80.tf32_errors import BLOCK, ROUNDINGS, SIZES, bound, measure, operands, product
from tests.nightly import crossed

SHIFTS = {"truncate": -7.1e-4, "one-sided": -3.6e-4, "nearest": 0.0}
"""Results are closer to 0 by the mean of what is cut off a factor, 2^-11 ln 2, for each that is cut."""
RMS = {"truncate": 7.8e-4, "one-sided": 4.7e-4, "nearest": 2.95e-4}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_numbers_of_both_signs(target: str, rounding: str, size: int) -> None:
    """Absolute errors within the bound, relative ones as small for any size, and a shift only where bits are cut."""
    errors = measure(size, rounding, target)
    assert errors.of_bound < 0.25
    assert errors.largest < 8 * RMS[rounding] * size**0.5
    assert errors.rms == pytest.approx(RMS[rounding], rel=0.05)
    assert errors.shift == pytest.approx(SHIFTS[rounding], abs=3e-5)
    median, most, _ = errors.relative
    assert median < 1.1 * RMS[rounding]
    assert most < 0.025


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("k", [8, 64])
@pytest.mark.parametrize(
    ("rounding", "a", "b"),
    [
        ("truncate", 1 + 2**-10 - 2**-23, 1 + 2**-10 - 2**-23),
        ("one-sided", 1 + 2**-11, 1 + 2**-10 - 2**-23),
        ("nearest", 1 + 2**-11, 1 + 2**-11),
    ],
)
def test_bounds_are_no_larger_than_they_have_to_be(rounding: str, a: float, b: float, k: int, target: str) -> None:
    """Factors whose roundings err most, all in one direction."""
    of_a, of_b, most = ROUNDINGS[rounding]
    rows = torch.full((16, k), a), torch.full((16, k), b)
    exact = k * a * b
    error = (product(of_a(rows[0]), of_b(rows[1]), target).double() - exact).abs().max().item() / exact
    assert 0.99 * most < error < bound(rounding, k)


@pytest.mark.parametrize(
    ("roundings", "arch"),
    crossed(
        [("truncate", "truncate"), ("nearest", "nearest"), ("nearest_a", "one-sided"), ("nearest_a", "b is TF32")],
        ["sm_80", "sm_90"],
    ),
)
def test_whole_kernels_have_these_bits(roundings: tuple[str, str], arch: str) -> None:
    """With the sums of the chip; of a ``b`` that is TF32 already those of rounding both to nearest."""
    rounding, stands_for = roundings
    rounded = stands_for == "b is TF32"
    a, b = operands(BLOCK)
    config = Sm80GemmConfig(64, 64, rounding=rounding)
    plan = make_plan(GemmProblem(BLOCK, BLOCK, BLOCK, 1, "float32", "float32"), config, arch)
    out = torch.empty(1, BLOCK, BLOCK)
    given = round_tf32(b) if rounded else b
    report = emulated.launch(plan, Operands(a=a[None], b=given[None], bias=None, out=out))
    of_a, of_b, _ = ROUNDINGS["nearest" if rounded else stands_for]
    assert torch.equal(out[0], product(of_a(a), of_b(b), arch))
    assert report.mma_instructions == BLOCK**3 // (16 * 8 * 8)
