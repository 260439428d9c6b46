"""Drawn models of patch embeddings: their candidates, what computes the same, and the report of their times."""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch

from bench import choices, choices_fit, choices_images
from cute_kernels.plan import PLANNERS, make_plan, patches_sm90


def test_models_are_those_of_the_seed_at_several_numbers_of_images() -> None:
    shapes = choices_images.draw(11, 120)
    assert shapes == choices_images.draw(11, 120) and shapes != choices_images.draw(12, 120)
    kinds = Counter(shape.kind for shape in shapes)
    assert all(abs(kinds[kind] / 120 - share / 12) < 0.15 for kind, share in choices_images.KINDS.items())
    rows = [dict(zip(shape.columns, shape.row, strict=False)) for shape in shapes]
    assert all(384 <= row["n"] <= 4096 and 1 <= row["images"] <= 777 for row in rows)
    assert {row["patch"] for row in rows if row["patch"]} == {14, 16, 32}


def test_candidates_are_legal_and_the_default_is_the_first() -> None:
    for shape in choices_images.draw(11, 60)[::5]:
        plans = choices_images.candidates(shape)
        assert plans[0] == make_plan(shape.problem, arch="sm_90a") and len(plans) == len(set(plans)) <= 23
        codec = PLANNERS[shape.operation.name].codec
        for plan in plans:
            (text,) = shape.cells(plan.config)
            assert make_plan(shape.problem, codec.decode(text), "sm_90a") == plan
        launches = [kernel.kernel_key for plan in plans for kernel in plan.launches]
        compiled = [kernel.kernel_key for kernel in choices.kernels([(shape, plans)])]
        assert len(set(compiled)) == len(compiled) and set(compiled) == set(launches)


def test_passes_are_chains_of_two_kernels() -> None:
    found = choices_images.passes()
    assert [shape.number for shape, _ in found] == list(range(8))
    assert all(plans and all(len(plan.launches) == 2 for plan in plans) for _, plans in found)
    assert {shape.row[2] for shape, _ in found} == {1, 2, 3, 16, 64, 512}


@pytest.mark.parametrize("kind", ["uint8 images", "bf16 images"])
def test_what_computes_the_same_of_images_agrees(kind: str) -> None:
    shape = next(shape for shape in choices_images.draw(11, 60) if shape.kind == kind and shape.problem.patch == 16)
    problem = dataclasses.replace(shape.problem, batch=2, height=48, width=48, n=64, table_rows=9)
    inputs = [shape.operation.example(problem) for _ in range(2)]
    with mock.patch.object(torch, "compile", lambda function, **_: function):
        peers = dataclasses.replace(shape, problem=problem).peers(inputs)
    results = [launch(1, 0).float() for launch in peers.values()]
    assert len(results) == 2 and results[0].shape == (2, 9, 64)
    assert float((results[0] - results[1]).norm() / results[0].norm()) < 0.01


def machine(count: int) -> list[choices_fit.Timed]:
    """Models on a machine whose launches take what the model says with constants of its own."""
    own = {name: [value * (3 if place % 2 else 0.4) for place, value in enumerate(values)]
           for name, values in choices_images.PatchData.start.items()}  # fmt: skip
    shapes = []
    for shape in choices_images.draw(5, count):
        timed = choices_fit.Timed(shape.kind, shape.problem)
        for plan in choices_images.candidates(shape):
            for times in timed.times.values():
                times[plan.config] = sum(patches_sm90.parts(choices_images.work_of(plan), own)) / 1800
        shapes.append(timed)
    return shapes


def test_a_fit_chooses_for_models_that_it_has_not_seen() -> None:
    with choices_fit.doubles():
        data = choices_images.PatchData(machine(36))
        fitted = choices_fit.chosen_regrets(data, choices_fit.fit(data, data.owners < 24, 60))["sustained"][24:]
        before = choices_fit.chosen_regrets(data, (data.start, []))["sustained"][24:]
    assert sum(before) / 12 > 1.02
    assert sum(fitted) / 12 < 1 + (sum(before) / 12 - 1) / 3


def test_the_module_of_the_fitted_numbers_is_the_generated_one() -> None:
    """All but the clock rate, which needs the timings."""
    text = choices_fit.between_marks(
        Path(patches_sm90.__file__), choices_fit.constants_text((patches_sm90.CONSTANTS, []))
    )
    rate = f"CLOCKS_PER_MICROSECOND = {patches_sm90.CLOCKS_PER_MICROSECOND}\n"
    assert text == Path(patches_sm90.__file__).read_text().replace(rate, ""), "python -m bench.choices fit --images"


def test_files_are_read_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = choices_images.draw(11, 1)[0]
    plans = choices_images.candidates(shape)[:2]
    path = tmp_path / "images.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(shape.columns)
        for name, config, chosen, time in (
            ("ours", plans[0].config, 1, 12.0), ("ours", plans[1].config, 0, 10.0), ("peer", None, 0, 15.0),
        ):  # fmt: skip
            writer.writerow([*shape.row, name, *shape.cells(config), chosen, "sustained", 9, time, ""])
    (timed,) = choices_images.read([path])
    assert timed.problem == shape.problem and timed.peers == {"sustained": 15.0}
    assert choices.main(["regret", "--images", "--all", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "mean 1.200, 95% 1.200, most 1.200" in printed and "mean 1.250, least 1.250" in printed


def test_older_timings_are_read() -> None:
    """Of images whose channels are last, two sources were timed; cases of `bench.tune` are of rows."""
    *_, images, rows = (choices_images.read([path])[0] for path in choices_images.RECORDED if path.suffix == ".json"
                        if path.name in ("images-channels-last.json", "tune.json"))  # fmt: skip
    found = {shape.kind: {config.source for config in shape.times["sustained"]} for shape in (images, rows)
             if shape.kind != "fp8 rows"}  # fmt: skip
    assert found == {"uint8 images, channels last": {"split", "gather"}}
    assert {images.kind, rows.kind} == {"uint8 images, channels last", "fp8 rows"}
