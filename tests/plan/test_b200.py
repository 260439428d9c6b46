"""Predicted times: what they add up to, and what their work is counted from."""

from __future__ import annotations

import dataclasses

import pytest

from bench import model
from cute_kernels.commands.cli import main
from cute_kernels.config import (
    GemmProblem,
    PatchEmbedImagesProblem,
    Sm90ImagesConfig,
    Sm100PatchEmbedConfig,
    Sm100ResidentConfig,
)
from cute_kernels.plan import b200, candidate_plans, make_plan, predict


def test_a_prediction_adds_up_and_has_its_floors():
    work = b200.TileWork(10, 100.0, 1000.0, 100.0, 2.0, 10.0, 0.0)
    costs = b200.UnitClocks(0.1, 1.0, 1.0, 10.0, 1.0)
    prediction = b200.predict(work, costs)
    clocks = 100 + 100 + 20 + 10
    launch = b200.LAUNCH_MICROSECONDS
    assert prediction.microseconds == pytest.approx(10 * clocks / b200.CLOCKS_PER_MICROSECOND + launch)
    assert sum(prediction.parts.values()) == pytest.approx(prediction.microseconds)
    multiplied = b200.predict(dataclasses.replace(work, mma_clocks=1000.0), costs)
    assert multiplied.largest_part == "tensor core"
    assert multiplied.microseconds == pytest.approx(1e4 / b200.CLOCKS_PER_MICROSECOND + launch)
    moved = b200.predict(dataclasses.replace(work, memory_bytes=7.7e9), costs)
    assert moved.largest_part == "device memory" and moved.microseconds == pytest.approx(1000 + launch)
    filled = b200.predict(dataclasses.replace(work, once_lines=1707.5), costs)
    assert filled.microseconds == pytest.approx(prediction.microseconds + 1)


def test_images_are_bound_by_the_rows_of_narrow_boxes():
    """A tile of one patch of a grid row has boxes of rows of 16 bytes, and 14 times as many of them as a whole one."""
    problem = PatchEmbedImagesProblem(4736, 3, 224, 224, 16, 768)
    prediction = predict(make_plan(problem, Sm90ImagesConfig(tile_patches=1, tile_images=128), "sm_90a"))
    assert prediction.microseconds == pytest.approx(sum(prediction.parts.values()))
    whole = predict(make_plan(problem, arch="sm_90a"))
    assert prediction.largest_part == "K blocks" and prediction.parts["K blocks"] > 1.5 * whole.parts["K blocks"]


def test_images_on_a_b200_have_the_work_of_rows_with_the_weight_on_chip():
    """4736 images in tiles of 16 images and a grid row of 14 patches: 224 columns, of a pair 256 features."""
    problem = PatchEmbedImagesProblem(4736, 3, 224, 224, 16, 768, table_rows=196)
    plan = make_plan(problem, arch="sm_100a")
    prediction = predict(plan)
    tiles = -(-plan.tiles * plan.feature_groups // plan.clusters)
    clocks = tiles * plan.columns * b200.FITTED.column
    assert prediction.parts["epilogue columns"] == pytest.approx(clocks / b200.CLOCKS_PER_MICROSECOND)
    bytes_ = 4736 * 3 * 224 * 224 + 768 * 768 + 196 * 768 * 4 + 4736 * 196 * 768 * 2
    halved = dataclasses.replace(plan, sm_count=2**20)  # as many clusters as tiles: memory alone is left
    memory = predict(halved).parts["device memory"]
    assert memory == pytest.approx(bytes_ / b200.MEMORY_BYTES_PER_MICROSECOND)


def test_commands_show_the_modelled_time(capsys):
    assert main(["plan", "--batch", "8"]) == 0
    assert "us (modelled, " in capsys.readouterr().out
    assert main(["plan", "gemm"]) == 0
    assert "modelled" not in capsys.readouterr().out
    assert predict(make_plan(GemmProblem(64, 64, 64))) is None


def test_a_resident_weight_is_brought_once():
    """128 features of 256 rows: a CTA's half of the rows comes by TMA, and the output is staged and read."""
    config = Sm100ResidentConfig(weight="tmem", cta_group=2, tile_rows=256, tile_positions=2, tmem_load_width=32)
    work = make_plan(model.HEADLINE, config, "sm_100a").work
    assert work.operand_bytes == 128 * 768 and work.mma_clocks == 3072
    # Four warps read a row of the table at each of two positions.
    assert work.lines == 2 * 128 * 256 * 2 // 128 + 4 * 2
    assert (work.waits, work.columns) == (8, 256)
    # 3 groups of features; 19 tiles of 128 images and 98 pairs of positions in each, but for half of the last images.
    assert work.tiles == -(-37 * 98 // 24) and work.once_lines == 4 * 48 * 32
    shared = make_plan(model.HEADLINE, dataclasses.replace(config, weight="smem"), "sm_100a").work
    assert shared.once_lines == 128 * 768 // 128


def test_the_tuner_times_promising_plans_first():
    problem = dataclasses.replace(model.HEADLINE, m=64 * 196)
    first, *others = candidate_plans(problem, "sm_100a")
    times = [predict(plan).microseconds for plan in others]
    assert first == make_plan(problem, arch="sm_100a") and times == sorted(times)


def test_work_follows_the_configuration():
    """Wide loads have fewer waits, a fifth warp relieves only one, and single CTAs load whole weight tiles."""

    def work(**settings: object) -> b200.TileWork:
        return make_plan(model.HEADLINE, Sm100PatchEmbedConfig(**settings), "sm_100a").work

    base = work()
    assert base.waits == 8 and work(tmem_load_width=64).waits == 4
    assert work(epilogue_warps=4).columns == base.columns == 256
    assert work(cta_group=1, tile_n=128).operand_bytes == work(tile_n=128).operand_bytes * 4 // 3
    assert work(order="flat").lines > base.lines
