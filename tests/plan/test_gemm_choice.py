"""The SM90 GEMM's chooser against the candidates that recorded runs timed beside each other, that no fit saw."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from bench import choices, choices_fit, performance
from cute_kernels.config import GemmProblem
from cute_kernels.plan import ARCHS, candidate_plans, gemm_sm90, make_plan

BOUNDS = {
    "one in three": (340, (1.023, 1.105), (1.03, 1.125)),
    "few columns or rows": (40, (1.038, 1.125), (1.029, 1.125)),
    "drawn after the last fit": (104, (1.024, 1.105), (1.026, 1.115)),
    "drawn after it, also in 80 other tiles": (39, (1.032, 1.105), (1.031, 1.135)),
}
"""Shapes; mean and 95th percentile of regrets, sustained and in bursts: figures of docs/performance.md, rounded up."""


@pytest.mark.parametrize("name", BOUNDS)
def test_the_choice_is_near_the_fastest_of_shapes_that_no_fit_has_seen(name: str) -> None:
    """The fastest of thirty timings owes some to chance, most in bursts."""
    shapes = performance.unseen(name)
    count, *bounds = BOUNDS[name]
    assert len(shapes) == count
    for mode, (mean, percentile) in zip(choices_fit.MODES, bounds, strict=True):
        found = sorted(value for value in choices_fit.regrets(shapes)[mode] if not math.isnan(value))
        assert len(found) == count
        assert statistics.mean(found) <= mean and choices_fit.percentile(found) <= percentile


@pytest.mark.parametrize("sm_count", [1, 4, 132])
@pytest.mark.parametrize("in_dtype", ["bfloat16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_the_choice_is_the_legal_candidate_of_least_modelled_time(in_dtype, out_dtype, sm_count: int) -> None:
    """The chooser keeps what it needs of a kind of problem; here each candidate has a plan for the very problem."""
    factors = {"row_scale": True, "column_scale": True} if in_dtype == "float8_e4m3fn" else {}
    for (m, n, k), residual in itertools.product(
        [(1, 64, 16), (3, 24, 2048), (33, 1000, 512), (200, 768, 3072), (2050, 3200, 12800), (60_015, 320, 992)],
        (None, "bfloat16", "float32"),
    ):
        problem = GemmProblem(
            m, n, k, 1, in_dtype, out_dtype, bias=True, activation="gelu_tanh", residual=residual, **factors
        )  # fmt: skip
        chosen = make_plan(problem, arch="sm_90a", sm_count=sm_count)
        plans = gemm_sm90.candidates(problem, ARCHS["sm_90a"], sm_count)
        assert chosen == min(plans, key=gemm_sm90.modelled_clocks)


def test_a_tuner_times_first_what_the_chooser_finds_best() -> None:
    for shape in choices.draw(5, 60)[::10]:
        plans = candidate_plans(shape.problem, "sm_90a")
        assert plans[0] == make_plan(shape.problem, arch="sm_90a") and len(plans) == len(set(plans)) > 30
        known = [gemm_sm90.modelled_clocks(plan) for plan in gemm_sm90.candidates(shape.problem, ARCHS["sm_90a"], 132)]
        assert [gemm_sm90.modelled_clocks(plan) for plan in plans[: len(known)]] == sorted(known)
