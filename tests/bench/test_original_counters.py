"""What a B200 counted for the CUDA original, and what the emulator counts for the same design."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from bench import experiments
from bench import original_counters as original
from cute_kernels.plan import make_plan

FOUND = functools.cache(lambda variant: original.per_tile_and_cta(original.CONFIGS[variant]))


def test_the_profile_is_whole_numbers_per_tile() -> None:
    """21,756 = 10,878 x 2 tiles of a CTA: beyond them, only what each of 148 CTAs does once is left."""
    assert original.CTA_TILES == 2 * 3626 * 3
    exact = {(p.variant, p.count): (p.per_tile, p.per_launch) for p in original.PROFILE if not p.digits}
    assert exact == {
        ("staging", "shared store instructions"): (128, 148),
        ("staging", "shared load instructions"): (160, 666),
        ("staging", "shared wavefronts"): (1024, 1554),
        ("staging", "global store instructions"): (160, 0),
        ("st.global.v8", "shared store instructions"): (0, 148),
        ("st.global.v8", "shared load instructions"): (0, 666),
        ("st.global.v8", "shared wavefronts"): (0, 1554),
        ("st.global.v8", "global store instructions"): (64, 0),
    }
    for row in original.PROFILE:
        if row.digits:  # 44.56 million
            assert round(row.per_tile * original.CTA_TILES, -4) == row.total and row.per_tile == 2048


@pytest.mark.parametrize("row", original.PROFILE, ids=lambda row: f"{row.variant}, {row.count}")
def test_a_tile_costs_what_it_cost_on_the_b200(row: original.Profiled) -> None:
    per_tile, per_cta = FOUND(row.variant)[row.count]
    assert per_tile == row.per_tile
    # Once per launch every warp here loads the address of tensor memory, which tcgen05.alloc wrote; it is no store.
    once = {"shared load instructions": 7, "shared wavefronts": 7}
    assert per_cta == once.get(row.count, 0)


def test_counts_are_linear_in_the_tiles() -> None:
    config = original.CONFIGS["staging"]
    found, three = FOUND("staging"), original.counted(config, 3)
    assert three == {name: 2 * (3 * tile + cta) for name, (tile, cta) in found.items()}


def test_table() -> None:
    text = original.table()
    assert "| staging | shared load instructions | 3,481,626 | 160 | 160 | 4.5 | 7 |" in text
    assert "| st.global.v8 | excess sectors of global loads | 44.56 million | 2,048 | 2,048 | rounded | 0 |" in text


PAGE = (Path(original.__file__).parents[1] / "docs" / "experiments.md").read_text()


def test_pairs_differ_in_something_and_have_plans() -> None:
    for experiment in experiments.EXPERIMENTS:
        assert experiment.before != experiment.after, experiment.name
        for config in (experiment.before, experiment.after):
            make_plan(experiments.PROBLEM, config, "sm_100a")
        assert f"| {experiment.name} | " in PAGE
        assert f" | {experiment.explained}: {experiment.why} |" in PAGE


def test_a_pair_is_counted() -> None:
    """The two profiled states, whose kernels are compiled already: what the profile has, and the rest of the row."""
    staging = next(experiment for experiment in experiments.EXPERIMENTS if experiment.name == "staging")
    assert (staging.before, staging.after) == (original.CONFIGS["st.global.v8"], original.CONFIGS["staging"])
    row = experiments.row(staging, experiments.changes(staging))
    assert "staging 0 -> 1,024; global store requests 64 -> 160; store lines 2,048 -> 512 |" in row
    assert row in PAGE
