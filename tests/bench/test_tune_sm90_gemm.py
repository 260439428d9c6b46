"""The dense GEMM's timings: which candidates, and what a recorded file says of the chooser."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import tune_sm90, tune_sm90_gemm
from bench.gemm_cases import GemmCase
from cute_kernels.plan import make_plan

CASE = GemmCase("small", 512, 256, 128)


def timings(*microseconds: float) -> tune_sm90_gemm.Timings:
    """The chooser's own configuration has the first time."""
    plans = tune_sm90_gemm.plans(CASE)
    ours = sorted(zip(microseconds, (plan.config for plan in plans), strict=False), key=lambda pair: pair[0])
    return tune_sm90_gemm.Timings(CASE, 7.0, tuple(ours))


def test_the_choosers_own_configuration_is_timed_first_and_once() -> None:
    for case in tune_sm90_gemm.CASES:
        found = tune_sm90_gemm.plans(case)
        assert found[0] == make_plan(tune_sm90_gemm.problem(case), arch="sm_90a")
        assert len(found) == len(set(found)) <= tune_sm90_gemm.CANDIDATES + 1


def test_files_survive_and_others_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "timings.json"
    tune_sm90_gemm.write(path, [timings(3.0, 2.0, 4.0), timings(5.5)], {"gpu": "none"})
    assert tune_sm90_gemm.read(path) == [timings(3.0, 2.0, 4.0), timings(5.5)]
    assert tune_sm90.main(["fit", "--operation", "gemm", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "torch / fastest 3.500, chosen / fastest 1.500: 2.00 " in lines[0]
    assert "torch / fastest 1.273, chosen / fastest 1.000: 5.50 " in lines[1]
    with pytest.raises(ValueError, match="no timings of the dense GEMM"):
        tune_sm90_gemm.read(Path("bench/results/h200-tune-2026-11-21.json"))


def test_regret_needs_the_chosen_configuration() -> None:
    assert tune_sm90_gemm.regret(timings(3.0, 2.0)) == 1.5
    others = tune_sm90_gemm.Timings(CASE, 7.0, timings(3.0, 2.0).ours[:1])
    assert tune_sm90_gemm.regret(others) is None
