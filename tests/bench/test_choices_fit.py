"""The fit of the SM90 GEMM's chooser: it finds a machine's candidates, and the files that it reads and writes."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from bench import choices, choices_fit
from cute_kernels.plan import ARCHS, gemm_sm90, gemm_sm90_fit


def machine(count: int, seed: int) -> list[choices_fit.Timed]:
    """Shapes on a machine whose launches take what the model says, each tile with factors of its own."""
    chance = random.Random(seed)
    factors = {tile: tuple(chance.uniform(0.8, 1.25) for _ in range(3)) for tile in gemm_sm90_fit.CANDIDATES}
    shapes = []
    for shape in choices.draw(seed, count):
        timed = choices_fit.Timed(shape.kind, shape.problem)
        for plan in gemm_sm90.candidates(shape.problem, ARCHS["sm_90a"], 132):
            ratio = plan.tiles / plan.most_clusters
            own = factors[gemm_sm90.tile(plan.config)]
            of_plan = gemm_sm90.terms(gemm_sm90.parts(plan), choices_fit.START, own)
            blocks = -(-plan.k_blocks // plan.config.split_k)
            stretch = gemm_sm90.stretch(plan.problem.k * plan.in_bytes)
            clocks = gemm_sm90.clocks(of_plan, blocks, gemm_sm90.waves(ratio), min(1, ratio), stretch)
            for times in timed.times.values():
                times[plan.config] = clocks / 1700
        shapes.append(timed)
    return shapes


def test_a_fit_chooses_for_shapes_that_it_has_not_seen() -> None:
    """From the timings of some shapes, of a machine whose tiles are 20% faster or slower than the constants say."""
    shapes = machine(60, 5)
    with choices_fit.doubles():
        data = choices_fit.GemmData(shapes)
        seen = data.owners < 40
        fitted = choices_fit.chosen_regrets(data, choices_fit.fit(data, seen, 60))["sustained"][40:]
        plain = choices_fit.START, [(1.0, 1.0, 1.0)] * len(gemm_sm90_fit.CANDIDATES)
        before = choices_fit.chosen_regrets(data, plain)["sustained"][40:]
    assert sum(before) / 20 > 1.05
    assert sum(fitted) / 20 < 1 + (sum(before) / 20 - 1) / 3


def test_the_module_of_the_fitted_numbers_is_the_generated_one() -> None:
    factors = [own for _, own in gemm_sm90_fit.CANDIDATES.values()]
    text = choices_fit.gemm_text(None, (gemm_sm90_fit.CONSTANTS, factors))
    assert text == Path(gemm_sm90_fit.__file__).read_text(), "python -m bench.choices fit writes it"


def test_files_are_read_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = next(shape for shape in choices.draw(1, 40) if not choices_fit.held_out(shape.problem))
    plans = choices.candidates(shape)[:3]

    def row(plan, mode: str, microseconds: float, failure: str = "") -> str:
        config = [int(getattr(plan.config, name)) for name in choices.FIELDS] if plan else [""] * len(choices.FIELDS)
        name, chosen = "ours" if plan else "torch", int(plan == plans[0])
        return ",".join(map(str, [*shape.row, name, *config, chosen, mode, 9, microseconds, failure]))

    lines = [
        ",".join(choices.COLUMNS),
        *(row(plan, "sustained", time) for plan, time in zip(plans, (6.0, 5.0, 8.0), strict=True)),
        row(plans[0], "burst", 9.0), row(plans[2], "burst", 8.0), row(plans[1], "", 0, "it crashed"),
        row(None, "sustained", 7.5),
    ]  # fmt: skip
    path = tmp_path / "some.csv"
    path.write_text("\n".join(lines))
    (timed,) = choices.read([path])
    assert timed.problem == shape.problem and timed.peers == {"sustained": 7.5}
    assert timed.times["burst"] == {plans[0].config: 9.0, plans[2].config: 8.0}
    assert choices_fit.regrets([timed]) == {"sustained": [1.2], "burst": [1.125]}
    assert choices.main(["regret", "--all", str(path)]) == 0
    said = capsys.readouterr().out
    assert "sustained all                 1 shapes: mean 1.200, 95% 1.200, most 1.200" in said
    assert "mean 1.250, least 1.250" in said and "sustained 0, burst 0 of 1" in said
    assert choices.main(["regret", str(path)]) == 0
    assert "shapes: mean" not in capsys.readouterr().out


def test_a_percentile_lies_between_its_neighbours() -> None:
    values = [1.0, 1.1, 1.3, 2.0]
    assert choices_fit.percentile(values, 0.5) == pytest.approx(1.2)
    assert math.isclose(choices_fit.percentile(values, 1.0), 2.0) and choices_fit.percentile([1.5]) == 1.5


def test_torch_s_default_type_is_what_it_was() -> None:
    with choices_fit.doubles():
        assert torch.get_default_dtype() is torch.float64
    assert torch.get_default_dtype() is torch.float32
