"""The dense GEMM's timings: which candidates, and what a recorded file says of the chooser."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import tune_gemm
from bench.archive import recorded
from bench.gemm_cases import GemmCase
from cute_kernels.plan import ARCHS, gemm_sm90, gemm_sm90_fit, make_plan
from tests.nightly import daily_or_all

CASE = GemmCase("small", 512, 256, 128)


def timings(*microseconds: float) -> tune_gemm.Timings:
    """The chooser's own configuration has the first time."""
    plans = tune_gemm.plans(CASE)
    ours = sorted(zip(microseconds, (plan.config for plan in plans), strict=False), key=lambda pair: pair[0])
    return tune_gemm.Timings(CASE, 7.0, tuple(ours))


def test_the_choosers_own_configuration_is_timed_first_and_once() -> None:
    for case in daily_or_all(tune_gemm.CASES[::4], tune_gemm.CASES):
        found = tune_gemm.plans(case)
        assert found[0] == make_plan(tune_gemm.problem(case), arch="sm_90a")
        assert len(found) == len(set(found)) <= tune_gemm.CANDIDATES + 1


def test_files_survive_and_others_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "timings.json"
    tune_gemm.write(path, "sm_90a", [timings(3.0, 2.0, 4.0), timings(5.5)], {"gpu": "none"})
    assert tune_gemm.read(path) == [timings(3.0, 2.0, 4.0), timings(5.5)]
    tune_gemm.report(tune_gemm.read(path))
    lines = capsys.readouterr().out.splitlines()
    assert "torch / fastest 3.500, chosen / fastest 1.500: 2.00 " in lines[0]
    assert "torch / fastest 1.273, chosen / fastest 1.000: 5.50 " in lines[1]
    with pytest.raises(ValueError, match="no timings of the dense GEMM"):
        tune_gemm.read(recorded("2026-11-21-h200/tune.json"))


def test_regret_needs_the_chosen_configuration() -> None:
    assert tune_gemm.regret(timings(3.0, 2.0)) == 1.5
    plans = gemm_sm90.search_space(tune_gemm.problem(CASE), ARCHS["sm_90a"], 132)
    other = next(plan.config for plan in plans if gemm_sm90.tile(plan.config) not in gemm_sm90_fit.CANDIDATES)
    assert tune_gemm.regret(tune_gemm.Timings(CASE, 7.0, ((2.0, other),))) is None
