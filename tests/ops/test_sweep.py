"""`cute-kernels sweep`: its numbers are those of plan, model, assembler and emulator called one by one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cute_kernels import compile
from cute_kernels.commands import plan_facts
from cute_kernels.commands.cli import main
from cute_kernels.commands.sweep_figure import draw
from cute_kernels.commands.sweep_table import Row, best, grid, pareto, sweep
from cute_kernels.config import GemmProblem, PatchEmbedProblem, Sm100PatchEmbedConfig
from cute_kernels.plan import SmemRegion, make_plan, predict

LARGE = PatchEmbedProblem(m=4736 * 196, n=768, k=768, table_rows=196)
SMALL = PatchEmbedProblem(m=512, n=256, k=128, table_rows=196)
BASE = Sm100PatchEmbedConfig()


def test_rows_are_what_the_parts_say() -> None:
    settings = grid(tile_n=(256, 128), stages=(6,)) + grid(tile_n=(128,), stages=(3,))
    rows = sweep(LARGE, BASE, settings, counted=SMALL, jobs=2)
    assert [dict(row.settings) for row in rows] == settings
    # 6 stages of 256 columns are 6 * 32 KiB beside 64 KiB of staging: more than the 227 KiB of a CTA.
    assert [row.reason is None for row in rows] == [False, True, True]
    with pytest.raises(ValueError) as refused:
        make_plan(LARGE, dataclasses.replace(BASE, tile_n=256, stages=6))
    assert rows[0].reason == str(refused.value) and rows[0].microseconds is None and not rows[0].counts
    for row in rows[1:]:
        plan = make_plan(LARGE, dataclasses.replace(BASE, **row.settings))
        assert row.config == dataclasses.replace(BASE, **row.settings)
        assert row.smem == plan.smem and row.smem_bytes == plan.smem_bytes
        assert (row.microseconds, row.bound) == (predict(plan).microseconds, predict(plan).bound)
        resources = compile.compile_plan(plan, emulated=True).resources
        assert (row.registers, row.stack_bytes) == (resources.registers, resources.stack_bytes)
        assert row.counts == plan_facts.counted(make_plan(SMALL, row.config, sm_count=2))
    # One K block of 128 bytes: x of 256 rows and the tile's weight rows, in wavefronts of 128 bytes; both tiles of 128
    # columns bring x again.
    fills = [row.counts["shared: TMA fill, wavefronts"] for row in rows[1:]]
    assert fills == [2 * 2 * (256 + 128), 2 * 2 * (256 + 128)]


def made(microseconds: float | None, nbytes: int) -> Row:
    return Row({"stages": nbytes}, smem=(SmemRegion("x", 0, nbytes, 1),), microseconds=microseconds)


def test_best_and_pareto() -> None:
    rows = [made(5.0, 100), made(4.0, 200), made(4.0, 300), made(6.0, 100), made(None, 10), made(3.0, 400)]
    assert best(rows, 2) == [rows[5], rows[1]]
    assert pareto(rows) == [rows[0], rows[1], rows[5]]


def test_picture_has_every_legal_row() -> None:
    rows = [made(5.0, 1024), Row({"stages": 9}, reason="too large"), made(4.0, 2048)]
    memory, times = draw(rows).axes
    assert [text.get_text() for text in memory.get_yticklabels()] == ["stages=1024   1", "stages=2048   3"]
    assert [patch.get_width() for patch in memory.patches] == [1.0, 2.0]
    assert {text.get_text(): text.xy for text in times.texts} == {"1": (1.0, 5.0), "3": (2.0, 4.0)}
    with pytest.raises(ValueError, match="no legal configuration"):
        draw(rows[1:2])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "sweep.png"
    arguments = ["sweep", "--batch", "4736", "--vary", "tile_n=256", "--vary", "stages=3,6", "--output", str(output)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    time = predict(make_plan(LARGE, dataclasses.replace(BASE, tile_n=256, stages=3))).microseconds
    assert f"{time:,.1f} us (modelled): --set tile_n=256 --set stages=3" in text
    assert " 2  tile_n=256, stages=6: stages = 6 is not possible" in text
    assert output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"settings": [{"tiles": 1}]}, TypeError, "settings have 'tiles', allowed for Sm100PatchEmbedConfig"),
        ({"counted": GemmProblem(m=1, n=8, k=8)}, TypeError, "counted is GemmProblem, expected PatchEmbedProblem"),
        ({"jobs": 0}, ValueError, "jobs = 0, allowed: at least 1"),
    ],
)
def test_refused(keywords: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sweep(LARGE, BASE, **{"settings": [], **keywords})


def test_refused_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--vary", "stages=3", "--vary", "stages=4"]) == 2
    assert "stages is varied twice" in capsys.readouterr().err
    assert main(["sweep", "--vary", "tiles=3"]) == 2
    assert "--set tiles=3: expected FIELD=VALUE; fields for " in capsys.readouterr().err
