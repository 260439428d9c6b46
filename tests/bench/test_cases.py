"""Sizes, memory limits, and the check that every peer must pass."""

from __future__ import annotations

import math

import pytest
import torch

from bench.cases import MODELS, Case, CaseData, fit, headline, make_cases

CPU = torch.device("cpu")
SMALL = Case("base-p16", 3, 5, 32, 16, 3)


def test_headline_is_the_documented_problem() -> None:
    case = headline()
    assert (case.rows, case.k, case.n) == (928256, 768, 768)
    assert case.flops == 2 * 928256 * 768 * 768
    assert case.bytes == 928256 * 768 + 928256 * 768 * 2 + 768 * 768 + 196 * 768 * 4
    assert case.slots == 1


def test_cases_are_the_product_of_positions_and_batches() -> None:
    cases = make_cases(["base-p16", "large-p16"], [256, 196], [1, 8])
    assert [(c.model, c.positions, c.images) for c in cases] == [
        ("base-p16", 196, 1), ("base-p16", 196, 8), ("base-p16", 256, 1), ("base-p16", 256, 8),
        ("large-p16", 256, 1), ("large-p16", 256, 8),
    ]  # fmt: skip


def test_every_model_can_be_read_by_tma() -> None:
    assert all(k % 16 == 0 and n % 8 == 0 for k, n, _ in MODELS.values())


@pytest.mark.parametrize(
    "arguments, match",
    [((["vit"], None, [1]), "vit"), ((["base-p16"], None, [0]), "at least 1"), ((["base-p16"], [7], [1]), "positions")],
)
def test_impossible_cases_are_refused(arguments: tuple, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_cases(*arguments)


def test_small_cases_rotate_among_more_than_two_caches_of_inputs() -> None:
    case = Case("base-p16", 1, 196, 768, 768, 1)
    assert case.slots * case.bytes > 2 * (60 << 20)
    assert case.slots <= 512


def test_a_case_that_does_not_fit_is_reduced_and_remembers_the_request() -> None:
    case = Case("so400m-p16", 4736, 1024, 768, 1152, 4736)
    assert fit(case, case.memory) is case
    reduced = fit(case, case.memory // 2)
    assert reduced.requested_images == 4736
    assert 0 < reduced.images < 4736
    assert reduced.images % 64 == 0
    assert reduced.memory <= case.memory // 2
    one_more = Case(case.model, reduced.images + 64, case.positions, case.k, case.n, 4736)
    assert one_more.memory > case.memory // 2
    with pytest.raises(ValueError, match="does not fit"):
        fit(case, 1 << 20)


def _exact(data: CaseData, with_table: bool) -> torch.Tensor:
    """Loop over rows: each against its own position, in float64."""
    rows = []
    for row in range(data.case.rows):
        value = data.x[0][row].double() @ data.weight.double().T * 0.0625
        image_position = row - (row // data.case.positions) * data.case.positions
        if with_table:
            value = value + data.bias.double() + data.pos[image_position].double()
        rows.append(value)
    return torch.stack(rows).to(torch.bfloat16)


@pytest.mark.parametrize("with_table", [True, False])
def test_check_passes_the_right_result_only(with_table: bool) -> None:
    data = CaseData(SMALL, CPU)
    right = _exact(data, with_table)
    check = data.check(right.view(3, 5, 16), with_table=with_table)
    assert check.passed
    assert check.row_error < 2.0**-8
    assert not data.check(_exact(data, not with_table), with_table=with_table).passed

    swapped = right.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert not data.check(swapped, with_table=with_table).passed


def test_check_counts_unwritten_elements_and_lets_no_nan_pass() -> None:
    data = CaseData(SMALL, CPU)
    out = data.out[0]
    data.poison()
    out[:14] = _exact(data, True)[:14]
    check = data.check(out, with_table=True)
    assert (check.unwritten, check.passed) == (16, False)
    assert math.isnan(check.row_error)


def test_check_refuses_another_shape() -> None:
    data = CaseData(SMALL, CPU)
    with pytest.raises(ValueError, match="expected BF16"):
        data.check(data.out[0][:-1], with_table=True)
    with pytest.raises(ValueError, match="expected BF16"):
        data.check(data.out[0].float(), with_table=True)
