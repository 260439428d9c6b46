"""Drawn shapes of the GEMM, their candidates, and what becomes of a candidate that fails."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import types
from collections import Counter
from unittest import mock

import pytest
import torch

from bench import choices, choices_fit
from cute_kernels.explore.tuning import search
from cute_kernels.operations.gemm import GEMM
from cute_kernels.plan import gemm_sm90, gemm_sm90_fit, make_plan


def test_shapes_are_those_of_the_seed() -> None:
    shapes = choices.draw(1, 400)
    assert shapes == choices.draw(1, 400) and shapes != choices.draw(2, 400)
    kinds = Counter(shape.kind for shape in shapes)
    assert all(abs(kinds[kind] / 400 - share) < 0.06 for kind, (share, _) in choices.KINDS.items())
    assert abs(sum(choices_fit.held_out(shape.problem) for shape in shapes) / 400 - 1 / 3) < 0.06
    assert min(shape.problem.m for shape in shapes) < 4 and max(shape.problem.m for shape in shapes) > 30_000


def test_candidates_are_legal_and_the_choice_is_the_first() -> None:
    for shape in choices.draw(3, 400)[::25]:
        plans = choices.candidates(shape)
        assert plans[0] == make_plan(shape.problem, arch="sm_90a")
        assert len({plan.config for plan in plans}) == len(plans) >= 5
        assert len(plans) <= 36 + 1
        for plan in plans:
            assert make_plan(shape.problem, plan.config, "sm_90a") == plan


@pytest.mark.parametrize("narrow", [True, False])
def test_shapes_are_timed_in_tiles_that_the_chooser_does_not_have(narrow: bool) -> None:
    work = choices.work(7, 10 if narrow else 35, narrow=narrow, other_tiles=not narrow)
    if narrow:
        assert [shape.problem.n < 600 for shape, _ in work] == [True, True, True, False, False] * 2
    else:
        assert 5 < len(work) < 35 and all(shape.kind == "bf16" and shape.problem.m >= 64 for shape, _ in work)
    others = Counter()
    for shape, plans in work:
        assert plans[0] == make_plan(shape.problem, arch="sm_90a") and len(plans) == len(set(plans)) <= 41
        for plan in plans:
            assert make_plan(shape.problem, plan.config, "sm_90a") == plan
        others.update(tile for plan in plans if (tile := gemm_sm90.tile(plan.config)) not in gemm_sm90_fit.CANDIDATES)
    assert 10 < len(others) <= 80 and max(others.values()) > 1


def test_a_candidate_that_fails_is_recorded_and_others_are_timed() -> None:
    shape = next(shape for shape in choices.draw(1, 20) if shape.kind == "bf16")
    shape = dataclasses.replace(shape, problem=dataclasses.replace(shape.problem, m=33, n=64, k=256))
    plans = choices.candidates(shape)[:5]
    example, chance = GEMM.example, random.Random(0)
    inputs = [example(shape.problem, "cpu") for _ in range(2)]

    def calls_of(plan, slot):
        if plan == plans[2]:
            raise RuntimeError("no such kernel")
        return [lambda _: slot.out.fill_(3.0 if plan == plans[3] else 1.0)]

    with contextlib.ExitStack() as held:
        for owner, name, value in (
            (search, "calls_of", calls_of),
            (search, "replay_timer", lambda launch, count: lambda: chance.uniform(0.010, 0.011)),
            (choices, "input_sets", lambda operation, problem: inputs),
            (choices, "absent", lambda plan: {plan} & {plans[4]}),
            (torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0)),
            (torch.cuda, "synchronize", lambda: None),
        ):
            held.enter_context(mock.patch.object(owner, name, value))
        rows = choices.time_shape(shape, plans, False, {1}, lambda place: None)
    found = [dict(zip(choices.COLUMNS, row, strict=True)) for row in rows]
    assert [row["failure"] for row in found[:3]] == [
        "crashed or hung", "RuntimeError: no such kernel", "RuntimeError: it differs by 2 of the norm",
    ]  # fmt: skip
    assert [(row["mode"], row["chosen"]) for row in found[3:]] == [("sustained", 1), ("burst", 1)]
    assert all(10 <= row["microseconds"] <= 11 for row in found[3:])
