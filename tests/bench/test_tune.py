"""The default configurations of SM90 choose well among timings of sizes that were chosen by hand."""

from __future__ import annotations

import statistics
from pathlib import Path

from bench import tune
from bench.archive import recorded
from cute_kernels.plan import make_plan

ARCH, RECORDED = tune.read(recorded("2026-11-21-h200/tune.json"))
RECORDED |= tune.read(recorded("2026-11-22-h200/tune-few.json"))[1]


def test_the_chosen_configuration_is_near_the_fastest_measured() -> None:
    regrets = []
    for case, timings in RECORDED.items():
        plan = make_plan(tune.problem(case), arch="sm_90a")
        measured = {config: time for time, config in timings}
        if plan.config in measured:
            regrets.append(measured[plan.config] / timings[0][0])
            print(case, regrets[-1])
    assert len(regrets) >= 45 and max(regrets) <= 1.17 and statistics.mean(regrets) <= 1.03


def test_recorded_file_survives_writing(tmp_path: Path) -> None:
    tune.write(tmp_path / "again.json", ARCH, RECORDED, {})
    assert tune.read(tmp_path / "again.json") == ("sm_90a", RECORDED)
