"""Drawn models of patch embeddings: their candidates, what computes the same, and the report of their times."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections import Counter
from unittest import mock

import pytest
import torch

from bench import choices, choices_images
from cute_kernels.plan import PLANNERS, make_plan


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


def test_the_report_has_regrets_and_ratios_of_peers(capsys: pytest.CaptureFixture[str]) -> None:
    shape = choices_images.draw(11, 1)[0]
    plans = choices_images.candidates(shape)[:2]
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(shape.columns)
    for name, config, chosen, time in (
        ("ours", plans[0].config, 1, 12.0), ("ours", plans[1].config, 0, 10.0), ("peer", None, 0, 15.0),
    ):  # fmt: skip
        writer.writerow([*shape.row, name, *shape.cells(config), chosen, "sustained", 9, time, ""])
    choices_images.report(choices_images.judged(csv.DictReader(io.StringIO(file.getvalue()))))
    printed = capsys.readouterr().out
    assert "chosen / fastest mean 1.200, 95% 1.20, most 1.20" in printed and "mean 1.25, least 1.250" in printed
