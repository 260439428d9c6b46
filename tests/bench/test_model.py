"""The models of time: their constants are the fit, and how far they are from what was measured."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from bench import archive, model
from cute_kernels.config import GemmProblem, Sm90GemmConfig
from cute_kernels.plan import b200, gemm_sm90, make_plan, patches_sm90, predict


@pytest.fixture(scope="module")
def checked() -> list[model.Checked]:
    return model.check()


def test_the_costs_in_use_are_the_fit():
    assert model.fit(model.VARIANTS) == b200.FITTED


def test_variants_left_out_of_the_fit(checked):
    pearson, rank = model.correlations(checked)
    assert pearson >= 0.95 and rank >= 0.9
    assert max(abs(entry.error) for entry in checked) <= 0.12


def test_the_caveat_has_the_figures_of_the_page(checked):
    """One of them, over configurations that others timed, no command makes: the page says so."""
    _, rank = model.correlations(checked)
    distinct = len({entry.fitted for entry in checked})
    assert f"rank correlation {rank:.2f} over {len(checked)} variants" in b200.CAVEAT
    assert f"{distinct} distinct times" in b200.CAVEAT
    page = Path("docs/model.md").read_text()
    assert all("145 configurations" in text and "-0.09" in text for text in (b200.CAVEAT, page))
    assert "no command here repeats these figures" in page


def test_the_page_has_the_tables(checked):
    page = Path("docs/model.md").read_text()
    assert model.b200_table(checked) in page and model.designs_table() in page
    assert "0.46 ms modelled, cuBLAS 0.365" in model.plain_product() and "at 0.365 ms; a kernel" in page
    for cost, digits in dataclasses.asdict(b200.FITTED).items():
        assert f" {digits} clocks" in page, cost


def test_what_the_notes_compare_is_told_apart(checked):
    """Steps of more than 5% in the notes have the same sign in the model."""
    times = {entry.variant.name: entry for entry in checked}
    steps = [
        ("single CTAs, 128 columns", "pairs, 128 columns"),
        ("pairs, 128 columns", "pairs, 256 columns"),
        ("4 stages (F6)", "padded staging, coalesced stores"),
        ("128 columns, 4 stages (F12)", "padded staging, coalesced stores"),
        ("padded staging, coalesced stores", "blocked table (F13)"),
        ("blocked table (F13)", "swizzled staging, TMA stores (F24)"),
        ("loads of 16 columns (F32)", "warps 80 clocks apart (F31)"),
    ]
    for slower, faster in steps:
        before, after = times[slower], times[faster]
        assert after.variant.milliseconds < 0.95 * before.variant.milliseconds
        assert after.fitted < before.fitted


def test_work_is_what_the_emulator_counts_for_the_notes_variants():
    """Per CTA tile: the notes' profile has 44.56 million excess sectors, 2,048 per tile, of 4,096 lines of table; the
    seed's staging stores and loads 1,024 wavefronts, and 512 lines of output."""
    staged = model.VARIANTS[[v.name for v in model.VARIANTS].index("padded staging, coalesced stores")]
    work = staged.work
    assert work.tiles == 147 and work.tiles * 74 == 10_878
    assert work.lines == 4096 + 1024 + 512 and work.partial_lines == 0
    assert work.operand_bytes == (128 + 128) * 768 and work.mma_clocks == 3072
    assert (work.waits, work.columns) == (8, 256)
    direct = model.VARIANTS[[v.name for v in model.VARIANTS].index("4 stages (F6)")].work
    assert direct.lines == 4096 + 64 * 32 and direct.partial_lines == 64 * 32  # 64 requests, a line for every lane


def test_times_of_patches_are_those_of_models_that_no_fit_has_seen():
    unseen = model.check_patches()
    errors = [abs(each.predicted / each.time - 1) for shape in unseen for each in shape]
    assert len(errors) > 1000 and 0.88 <= np.mean(np.array(errors) <= patches_sm90.ERROR) <= 0.92
    text, page = model.unseen_text(unseen), Path("docs/model.md").read_text()
    assert text in page.replace("\n", " ")
    assert f"{np.median(errors):.0%} in the median and {max(errors):.0%} at the most" in patches_sm90.CAVEAT


def test_times_of_gemm_are_those_of_shapes_that_no_fit_has_seen():
    """Against what was timed: the clock rate is that of the fit's shapes; range, caveat and page are of the others."""
    seen, unseen = model.check_gemm()
    rate = statistics.median(each.scale for shape in seen for each in shape)
    assert round(rate) == gemm_sm90.CLOCKS_PER_MICROSECOND
    for long, error in enumerate(gemm_sm90.ERRORS):
        launches = [each for shape in unseen for each in shape if (each.predicted >= gemm_sm90.LONG) == long]
        within = sum(abs(each.predicted / each.time - 1) <= error for each in launches)
        assert len(launches) > 2000 and 0.88 <= within / len(launches) <= 0.92
    text, page = model.unseen_text(unseen, gemm_sm90.LONG), Path("docs/model.md").read_text()
    assert text in page.replace("\n", " ")
    assert all(part in text for part in ("10% in the median, 94% at the most", "0.91 in the median"))
    assert "error 10% in the median and 94% at the most" in gemm_sm90.CAVEAT and "0.91" in gemm_sm90.CAVEAT


@pytest.mark.parametrize("unseen", [model.check_patches, lambda: model.check_gemm()[1]], ids=["patches", "gemm"])
def test_ratios_of_configurations_of_one_problem(unseen):
    """A range holds nine pairs of ten, of those that differ in one field and of all; the page and the caveat say so."""
    launches = unseen()
    module = patches_sm90 if unseen is model.check_patches else gemm_sm90
    for errors, expected in zip(model.ratio_errors(launches), module.RATIO_ERRORS, strict=True):
        assert len(errors) > 1000 and 0.88 <= np.mean(errors <= expected) <= 0.92
        assert f"{expected:.0%}" in module.CAVEAT.partition("Ratios")[2]
    assert model.ratio_text(launches) in Path("docs/model.md").read_text().replace("\n", " ")
    plan = make_plan(GemmProblem(512, 512, 512), arch="sm_90a")
    assert predict(plan).ratio_errors == gemm_sm90.RATIO_ERRORS


def test_times_of_gemm_hold_for_an_h100():
    """Another card than the fit's, on which layers were tuned earlier."""
    recorded = json.loads(archive.read_text(archive.recorded("2026-11-26-h100/gemm-layers-tune.json")))
    errors = []
    for entry in recorded["cases"]:
        for time, *values in entry["timings"]:
            config = Sm90GemmConfig(**dict(zip(recorded["fields"], values, strict=True)))
            plan = make_plan(GemmProblem(*entry["case"][1:]), config, "sm_90a")
            errors.append(abs(predict(plan).microseconds / time - 1))
    assert len(errors) > 1000 and np.quantile(errors, 0.9) < gemm_sm90.ERRORS[0]


def test_several_products_have_no_modelled_time():
    """No recorded run has any."""
    assert predict(make_plan(GemmProblem(512, 512, 512), arch="sm_90a")) is not None
    assert predict(make_plan(GemmProblem(512, 512, 512, batches=2), arch="sm_90a")) is None
