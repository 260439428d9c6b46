"""`cute-kernels compare`: two configurations of a kernel."""

from __future__ import annotations

import json
import re

import pytest
import torch

from cute_kernels.commands.cli import main
from cute_kernels.config import GemmProblem, PatchEmbedImagesProblem, PatchEmbedProblem
from cute_kernels.explore import plan_facts
from cute_kernels.operations import registry
from cute_kernels.plan import make_plan

SMALL = ("--features", "256", "--in-features", "128", "--positions", "49", "--sm-count", "2")


def rows_of(text: str) -> dict[str, list[str]]:
    """Cells of each row of a table, by its name."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.startswith("  ")]
    return {name: cells for name, *cells in lines}


# --- configurations --------------------------------------------------------------------------------------------------


def test_two_configurations(capsys):
    """Counts follow from the tiles: one of 256 columns or two of 128, one K block of four MMAs, loads of 32 columns."""
    assert main(["compare", "tile_n=256", "tile_n=128,stages=6", "--all", *SMALL]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["tile_n"] == ["256", "128", "-50.0%"] and rows["stages"] == ["4", "6", "+50.0%"]
    assert rows["epilogue_warps"] == ["5", "5"]
    assert rows["MMA instructions"] == ["4", "8", "+100.0%"]
    # Two CTAs: x of 128 rows, and half of the tile's weight rows, of 128 bytes each; one wavefront is 128 bytes.
    assert rows["shared: TMA fill, wavefronts"] == ["512", "768", "+50.0%"]
    # In the text, not in executions: 4 warps of 32 columns a load, one of which shares its quarter with a fifth.
    assert rows["LDTM"] == ["12", "6", "-50.0%"]
    assert rows["stack bytes (spills)"] == ["0", "0"]
    registers = [int(cell) for cell in rows["registers per thread"][:2]]
    assert all(64 < count < 256 for count in registers)


def test_what_is_equal_is_not_shown_and_large_problems_are_not_counted(capsys, monkeypatch):
    monkeypatch.setattr(plan_facts, "assembled", lambda plan: {"registers per thread": 7})
    monkeypatch.setattr(plan_facts, "instruction_mix", lambda plan: {"all": plan.config.stages})
    monkeypatch.setattr(plan_facts, "counted", lambda plan: pytest.fail("counted"))
    assert main(["compare", "stages=4", "stages=3", "--batch", "4736"]) == 0
    text = capsys.readouterr().out
    assert "counters are left out: 3,626 tiles" in text and "registers" not in text
    assert rows_of(text)["all"] == ["4", "3", "-25.0%"]
    assert main(["compare", "snake=true", "tile_n=256", *SMALL, "--no-counters"]) == 0
    assert "configuration\n  no difference" in capsys.readouterr().out
    with pytest.raises(pytest.fail.Exception, match="counted"):
        main(["compare", "default", "stages=3", *SMALL])


def test_the_kernel_stands_in_front_and_two_designs_are_named(capsys, monkeypatch):
    monkeypatch.setattr(plan_facts, "assembled", lambda plan: {})
    monkeypatch.setattr(plan_facts, "instruction_mix", lambda plan: {})
    command = ["compare", "patch-embed", "default", "tile_n=256", "--batch", "4736"]
    assert main([*command, "--json", "-"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["microseconds"]["section"] == "model, never measured"
    low, high = (float(rows[f"microseconds, {end}"]["tile_n=256"].replace(",", "")) for end in ("least", "most"))
    assert low < float(rows["microseconds"]["tile_n=256"].replace(",", "")) < high
    assert main(command) == 0
    said = "two kernels: default is patch_embed: weight in tensor memory; tile_n=256 is patch_embed: weight streamed"
    assert said in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["compare", "convolution", "default", "default"])
    assert "invalid choice: 'convolution'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("default", "stages=99"), "stages = 99: must be"),
        (("default", "stage=3"), "stage"),
        (("default", "default", "--set", "stages=3"), "--set belongs to commands with one configuration"),
    ],
)
def test_what_cannot_be_compared(arguments, message, capsys):
    assert main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "problem",
    [
        PatchEmbedProblem(98, 256, 128, 49),
        GemmProblem(64, 64, 64, 2, bias=True),
        GemmProblem(64, 64, 64, in_dtype="float32", out_dtype="float32"),
        PatchEmbedImagesProblem(2, 3, 32, 64, 16, 64, table_rows=8),
        PatchEmbedImagesProblem(2, 3, 64, 64, 32, 64, channels_last=True, table_rows=1),
        PatchEmbedImagesProblem(2, 3, 32, 64, 16, 64, in_dtype="bfloat16", precision="bf16", table_rows=0),
    ],
    ids=str,
)
def test_random_operands_are_those_of_the_plan(problem):
    """Every operand that a kernel of the plan is given has the plan's type, and equal problems have equal operands."""
    plan = make_plan(problem, arch="sm_90a")
    first, second = registry.random_operands(plan), registry.random_operands(plan)
    for part in plan.launches:
        for operand in part.operands:
            if operand.given and operand.kind == "pointer":
                tensor = getattr(first, operand.name)
                assert str(tensor.dtype).removeprefix("torch.") == operand.dtype.replace("tfloat32", "float32")
                if not operand.written and operand.name not in plan.scratch:
                    assert torch.equal(tensor.view(torch.uint8), getattr(second, operand.name).view(torch.uint8))
