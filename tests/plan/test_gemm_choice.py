"""The SM90 GEMM's chooser against the candidates that recorded runs timed beside each other."""

from __future__ import annotations

import statistics

from bench import tune_gemm as tuner
from bench.archive import recorded

ALL_TUNED = tuner.read(recorded("2026-11-21-h200/gemm-tune.json"))
TUNED = [entry for entry in ALL_TUNED if entry.case.m > 64]  # of fewer rows, those that do not exist were loaded, too
FEW_ROWS = tuner.read(recorded("2026-11-22-h200/gemm-few-rows.json"))
LAYERS = tuner.read(recorded("2026-11-26-h100/gemm-layers-tune.json"))
SMALL = tuner.read(recorded("2026-11-26-h100/gemm-small-tune.json"))
LONGER = tuner.read_bench(recorded("2026-11-21-h200/gemm-configs.json"))


def regrets(timings: list[tuner.Timings]) -> list[float]:
    """Per case, the time of the chosen configuration over that of the fastest."""
    found = [tuner.regret(entry) for entry in timings]
    assert None not in found, "a choice was not timed"
    return found


def test_the_choice_is_near_the_fastest_of_long_runs() -> None:
    """Six squares and twelve layers, each in bursts and sustained: the figures in `sm90_gemm.default_config`."""
    assert len(LONGER) == 2 * 18
    bursts, sustained = regrets(LONGER[::2]), regrets(LONGER[1::2])
    assert statistics.mean(bursts) <= 1.003 and max(bursts) <= 1.015
    assert statistics.mean(sustained) <= 1.005 and max(sustained) <= 1.043


def test_the_choice_is_near_the_fastest_of_the_tuner() -> None:
    """55 cases from a row of 64 tiles to layers of 4736 images; the fastest of 40 timings owes some to chance."""
    found = regrets(TUNED)
    assert len(found) == 55
    assert statistics.mean(found) <= 1.032 and max(found) <= 1.162
    assert sum(value <= 1.01 for value in found) >= 25


def test_the_choice_is_near_the_fastest_of_layers() -> None:
    """16 layers of SigLIP on an H100, and 16 to 64 rows."""
    found = regrets(LAYERS)
    assert len(found) == 19
    assert statistics.mean(found) <= 1.03 and max(found) <= 1.12


def test_the_choice_is_near_the_fastest_of_small_products() -> None:
    """Layers of one and two images, 128 and 512 rows, and squares."""
    found = regrets(SMALL)
    assert len(found) == 12
    assert statistics.mean(found) <= 1.06 and max(found) <= 1.15


def test_few_rows_take_no_longer_than_torch_s_product() -> None:
    found = regrets(FEW_ROWS)
    assert statistics.mean(found) <= 1.02 and max(found) <= 1.075
    ratios = [regret * entry.ours[0][0] / entry.torch for regret, entry in zip(found, FEW_ROWS)]
    assert statistics.mean(ratios) <= 0.95 and max(ratios) <= 1.07
