"""The default configurations of SM90 follow from the recorded timings, and choose well among them."""

from __future__ import annotations

from pathlib import Path

from bench import tune
from bench.archive import recorded
from cute_kernels.plan import make_plan, patch_embed_sm90

ARCH, RECORDED = tune.read(recorded("2026-11-21-h200/tune.json"))
RECORDED |= tune.read(recorded("2026-11-22-h200/tune-few.json"))[1]


def test_coefficients_are_those_that_the_fit_gives() -> None:
    assert tune.fit(RECORDED) == patch_embed_sm90.MICROSECONDS


def test_the_chosen_configuration_is_near_the_fastest_measured() -> None:
    for case, timings in RECORDED.items():
        plan = make_plan(tune.problem(case), arch="sm_90a")
        measured = {config: time for time, config in timings}
        assert measured[plan.config] <= 1.09 * timings[0][0], (case, plan.config)


def test_a_case_is_predicted_without_its_own_timings() -> None:
    """Not a memory of the cases: left out of the fit, none is chosen much worse."""
    for case in ((196, 768, 768, 8), (1024, 1152, 768, 8), (576, 1536, 768, 64)):
        others = tune.fit({other: timings for other, timings in RECORDED.items() if other != case})
        assert tune.regret(case, RECORDED[case], others) <= 1.05


def test_long_rows_of_few_positions_are_known() -> None:
    """K = 3072 and 49 positions: tiles of several positions, chosen before these were timed, took 1.38 of the time."""
    assert {case for case in RECORDED if case[2] == 3072} == {(49, 768, 3072, 100), (49, 768, 3072, 777)}


def test_recorded_file_survives_writing(tmp_path: Path) -> None:
    tune.write(tmp_path / "again.json", ARCH, RECORDED, {})
    assert tune.read(tmp_path / "again.json") == ("sm_90a", RECORDED)
