"""The SM90 GEMM's chooser against the candidates that recorded runs timed beside each other, that no fit saw."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from bench import choices, choices_fit
from bench.archive import RESULTS
from cute_kernels.config import GemmProblem
from cute_kernels.plan import ARCHS, gemm_sm90, make_plan


def test_the_choice_is_near_the_fastest_of_shapes_that_no_fit_has_seen() -> None:
    """Figures of docs/performance.md; the fastest of thirty timings owes some to chance, most in bursts."""
    shapes = choices.read([RESULTS / "2026-11-29-h200.tar.xz"])
    shapes = [shape for shape in shapes if choices.held_out(shape.problem)]
    found = choices_fit.regrets(shapes)
    sustained, bursts = ([value for value in found[mode] if not math.isnan(value)] for mode in choices_fit.MODES)
    assert len(sustained) == len(bursts) == len(shapes) == 206
    assert statistics.mean(sustained) <= 1.024 and choices_fit.percentile(sorted(sustained)) <= 1.105
    assert max(sustained) <= 1.21
    assert statistics.mean(bursts) <= 1.038 and choices_fit.percentile(sorted(bursts)) <= 1.135


def test_the_choice_is_near_the_fastest_of_shapes_that_were_drawn_after_the_fit() -> None:
    shapes = choices.read([RESULTS / "2026-11-29-h200.tar.xz" / "after-choices.csv"])
    found = choices_fit.regrets([shape for shape in shapes if shape.problem not in choices.OUT_OF_REACH])
    sustained, bursts = ([value for value in found[mode] if not math.isnan(value)] for mode in choices_fit.MODES)
    assert len(sustained) == 220 and statistics.mean(sustained) <= 1.03
    assert choices_fit.percentile(sorted(sustained)) <= 1.13 and statistics.mean(bursts) <= 1.027


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
