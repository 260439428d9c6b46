"""`cute-kernels sweep`: its numbers are those of plan, model, assembler and emulator called one by one."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import random
import re
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cute_kernels.commands.cli import main
from cute_kernels.common import executors
from cute_kernels.config import (
    GemmProblem,
    PatchEmbedImagesProblem,
    PatchEmbedProblem,
    Sm80GemmConfig,
    Sm90GemmConfig,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    Sm100PatchEmbedConfig,
    Sm100ResidentConfig,
)
from cute_kernels.dsl import kernel_cache
from cute_kernels.emulator.observe.counters import UnitCounts
from cute_kernels.explore import explorer, plan_facts, sweep_table
from cute_kernels.explore import sweep_program as sweep_program_module
from cute_kernels.explore.page import page
from cute_kernels.explore.sweep_outcomes import (
    alike,
    by,
    effects,
    ranked,
    records,
    settings_text,
    spans,
)
from cute_kernels.explore.sweep_program import reason_of, sweep_program
from cute_kernels.explore.sweep_table import Row, around, grid, sweep
from cute_kernels.explore.sweep_text import lines_of, ranking, text_of
from cute_kernels.explore.tuning import search
from cute_kernels.operations import compile
from cute_kernels.plan import PLANNERS, b200, make_plan, predict
from cute_kernels.plan.base import Prediction, SmemRegion, TmemRegion
from tests.processes import pool

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PROGRAM = EXAMPLES / "sweep_bias_add.py"

LARGE = PatchEmbedProblem(m=4736 * 196, n=768, k=768, table_rows=196)
BASE = Sm100PatchEmbedConfig()


def test_rows_are_what_the_parts_say() -> None:
    settings = grid(tile_n=(256, 128), stages=(6,)) + grid(tile_n=(128,), stages=(3,))
    with pool(1) as executor:  # they come from another process
        rows = sweep(LARGE, BASE, settings, counted=True, executor=executor)
    assert [dict(row.settings) for row in rows] == settings
    # 6 stages of 256 columns are 6 * 32 KiB beside 64 KiB of staging: more than the 227 KiB of a CTA.
    assert [row.reason is None for row in rows] == [False, True, True]
    with pytest.raises(ValueError) as refused:
        make_plan(LARGE, dataclasses.replace(BASE, tile_n=256, stages=6))
    assert rows[0].reason == str(refused.value) and rows[0].microseconds is None and not rows[0].counts
    for row in rows[1:]:
        plan = make_plan(LARGE, dataclasses.replace(BASE, **row.settings))
        assert row.config == plan.config
        assert row.smem == plan.smem and row.smem_bytes == plan.smem_bytes
        assert row.tmem == plan.tmem and row.tmem_columns == 2 * row.config.tile_n  # two accumulators
        assert row.prediction == predict(plan) and row.design == plan.runs == "patch_embed: weight streamed"
        resources = compile.compile_plan(plan, emulated=True).resources
        assert (row.registers, row.stack_bytes) == (resources.registers, resources.stack_bytes)
        assert row.counts == plan_facts.counted(row.small) and row.small.kernel_key == plan.kernel_key
        # 512 images at 2 positions, of 32 bytes of weight for each feature, in tiles of 256 rows.
        assert (row.small.problem.m, row.small.problem.table_rows, row.small.tiles) == (512, 2, 2 * 6)
    # Six K blocks of 128 bytes: x of 256 rows and the tile's weight rows, in wavefronts of 128 bytes, for each tile.
    fills = [row.counts["shared: TMA fill, wavefronts"] for row in rows[1:]]
    assert fills == [6 * 2 * 6 * (256 + 128), 6 * 2 * 6 * (256 + 128)]


@pytest.mark.parametrize(
    ("problem", "base", "settings", "counts"),
    [
        # An output in BF16; the default's two store stages are more than a tile of 64 columns has.
        (GemmProblem(m=256, n=128, k=64), Sm90GemmConfig(tile_m=128), grid(tile_n=(64, 128)),
         [None, {"L2 bytes written": 256 * 128 * 2}]),
        # Four patches of 16 x 16 pixels of three channels in each image, 64 features in BF16.
        (PatchEmbedImagesProblem(2, 3, 32, 32, 16, 64, table_rows=4), Sm90ImagesConfig(), grid(stages=(3, 99)),
         [{"L2 bytes written": 2 * 4 * 64 * 2}, None]),
    ],
    ids=["gemm", "images"],
)  # fmt: skip
def test_other_operations(problem, base, settings, counts) -> None:
    rows = sweep(problem, base, settings, counted=True)
    assert [row.reason is None for row in rows] == [wanted is not None for wanted in counts]
    for row, wanted in zip(rows, counts, strict=True):
        if wanted is not None:
            assert {what: row.counts[what] for what in wanted} == wanted
            assert row.registers and row.smem_bytes == make_plan(problem, row.config).smem_bytes and not row.tmem


def test_a_program_is_run_once_for_each_configuration() -> None:
    """Of docs/examples: a ring of tiles of 32 columns and one tile of sums in FP32, beside eight bytes of barriers."""
    settings = grid(rows=(16, 24), stages=(1, 4))
    rows = sweep_program(PROGRAM, settings, arch="sm_90a", arguments=["--m", "128"])
    assert [dict(row.settings) for row in rows] == settings
    for row, stages in zip(rows[:2], (1, 4), strict=True):
        memory = 16 * 32 * 4 * (stages + 1) + 2 * 8 * stages
        assert row.reason is None and memory <= row.smem_bytes < memory + 128 and not row.tmem
        sizes = {region.name: region.nbytes for region in row.smem}
        assert sizes == sizes | {"sx": 2048 * stages, "sy": 2048, "full": 8 * stages, "empty": 8 * stages}
        assert {"sx", "sy", "full", "empty"} <= {*sizes} <= {"sx", "sy", "full", "empty", "static"}  # and padding
        assert row.smem_limit == 48 * 1024
        roles = {name.partition(": ")[2] for name in row.counts if name.startswith("warp instructions: ")}
        assert roles == {"TMA load", "TMA store", "compute"}
        assert row.registers and row.stack_bytes == 0 and row.microseconds is None
        assert row.counts["TMA loads"] == 128 // 16 and row.counts["L2 bytes written"] == 128 * 32 * 4
    assert rows[0].registers != rows[1].registers  # another kernel: nothing of the first run is left
    assert all("exit status 2: " in row.reason and "--rows 24 does not divide" in row.reason for row in rows[2:])
    assert "bias_add" not in sys.modules


REFUSALS = {
    "import sys; sys.exit('too small')": "too small",
    "raise ValueError('rows = 3\\nmore')": "ValueError: rows = 3",
    "pass": "the program launched no kernel",
}


@pytest.mark.parametrize("text", REFUSALS)
def test_why_a_program_refuses(text: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(text)
    (row,) = sweep_program(tmp_path / "program.py", [{"rows": 3}], arch="sm_90a")
    assert row.reason == REFUSALS[text] and row.registers is None


def test_a_program_gets_options_as_they_are_spelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With hyphens, and with commas in their values where semicolons separate these."""
    program = tmp_path / "program.py"
    program.write_text("import sys; sys.exit(' '.join(sys.argv[1:]))")
    varied = ["--vary", "tile-shape=64,64;128,128", "--vary", "mnk=8,8,8;", "--vary", "stages=1-2"]
    assert main(["sweep", str(program), "--arch", "sm_90a", *varied]) == 1  # none is legal
    lines = capsys.readouterr().out.splitlines()
    for shape, stages in (("64,64", 1), ("64,64", 2), ("128,128", 1), ("128,128", 2)):
        assert any(line.endswith(f": --tile-shape={shape} --mnk=8,8,8 --stages={stages}") for line in lines)


def test_only_modules_of_the_program_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries stay, also those of an environment in the program's folder: many cannot be imported twice."""
    environment = tmp_path / ".venv" / "lib"
    environment.mkdir(parents=True)
    (environment / "swept_library.py").write_text("")
    (tmp_path / "swept_helper.py").write_text("import swept_library")
    (tmp_path / "swept_package").mkdir()
    (tmp_path / "swept_package" / "part.py").write_text("")
    (tmp_path / "program.py").write_text("import swept_helper, swept_package.part")
    monkeypatch.syspath_prepend(environment)
    (row,) = sweep_program(tmp_path / "program.py", [{"rows": 3}], arch="sm_90a")
    assert row.reason == "the program launched no kernel"
    names = ("swept_library", "swept_helper", "swept_package", "swept_package.part")
    assert [name in sys.modules for name in names] == [True, False, False, False]
    monkeypatch.delitem(sys.modules, "swept_library")


def test_a_kernel_at_fault_is_no_legal_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the program catches the error too: without its second wait, the consumer reads what TMA may be writing."""
    text = (EXAMPLES / "bias_add.py").read_text()
    wait = "cute.arch.mbarrier_wait(full + stage, i // STAGES & 1)"
    assert wait in text
    (tmp_path / "bias_add.py").write_text(text.replace(wait, "pass"))
    call = (EXAMPLES / "sweep_bias_add.py").read_text().replace("assert torch", "import contextlib\nassert torch")
    head, _, last = call.rpartition("assert torch.equal(")
    (tmp_path / "program.py").write_text(f"{head}\nwith contextlib.suppress(Exception):\n    torch.equal({last}")
    (row,) = sweep_program(tmp_path / "program.py", [{"stages": 2}], arch="sm_90a", arguments=["--m", "64"])
    # Kind, place and sentence are those that emulate prints.
    printed = main(["emulate", str(tmp_path / "bias_add.py"), "--arch", "sm_90a"]), capsys.readouterr().err
    assert printed[0] == row.status == 3
    kind, sentence, line = re.search(r"error\[(.*?)\]: (.*)\n *--> \S*bias_add.py:(\d+) ", printed[1]).groups()
    assert row.reason == f"{kind} at bias_add.py:{line}: {sentence}" and kind == "unfinished-copy"


def made(microseconds: float | None, nbytes: int, **settings: int) -> Row:
    prediction = None
    if microseconds is not None:
        parts = {"copies": 0.75 * microseconds, "launch": 0.25 * microseconds}
        prediction = Prediction(microseconds, parts, "as far as it goes", 0.25)
    return Row(
        settings or {"stages": nbytes}, smem=(SmemRegion("x", 0, nbytes, 1),), smem_limit=4096, prediction=prediction
    )


def test_times_whose_ranges_overlap_are_one_level() -> None:
    """Each is known to a quarter: 3 to 5 for 4.0, and so on."""
    rows = [made(5.0, 100), made(4.0, 200), made(4.2, 300), made(None, 10), made(8.0, 50), made(9.0, 40)]
    assert ranked(rows) == [[rows[0], rows[1], rows[2]], [rows[4], rows[5]]]
    measured = [dataclasses.replace(row, measured=time) for row, time in zip(rows, (2.0, 2.1, 2.0))]
    assert ranked(measured) == [[measured[0], measured[2]], [measured[1]]]


def test_a_level_has_the_rows_that_may_be_quickest() -> None:
    """As docs/explore.md says: no range of the others that are left ends before theirs begins. In a chain the first
    overlaps with the second alone."""
    chain = [made(4.0, 1), made(6.0, 2), made(9.0, 3), made(13.0, 4)]  # 3 to 5, 4.5 to 7.5, 6.75 to 11.25, 9.75 to ..
    assert ranked(chain) == [chain[:2], chain[2:]]
    generator = random.Random(1)
    for _ in range(50):
        rows = [made(generator.uniform(1, 20), n + 1) for n in range(generator.randrange(1, 9))]
        wanted, left = [], rows
        while left:
            ends = [row.prediction.most for row in left]
            wanted.append([row for row in left if not any(end < row.prediction.least for end in ends)])
            left = [row for row in left if row not in wanted[-1]]
        assert ranked(rows) == wanted


def test_ratios_tell_rows_apart_that_ranges_do_not() -> None:
    """Off by at most a tenth where one field differs, a fifth where several do; not between two models."""
    rows = [made(4.0, 8, n=1, m=1), made(4.35, 8, n=1, m=2), made(4.7, 8, n=2, m=1), made(4.9, 8, n=2, m=2)]
    assert len(ranked(rows)) == 1
    times = [dataclasses.replace(row.prediction, ratio_errors=(0.1, 0.2)) for row in rows]
    known = [dataclasses.replace(row, prediction=time) for row, time in zip(rows, times, strict=True)]
    assert ranked(known) == [known[:3], known[3:]]
    n, m = effects(known)
    assert n == "n 1 to 2 (2 pairs): modelled us +12.6% to +17.5%"
    assert m == "m 1 to 2 (2 pairs): modelled us within the error of a ratio"
    followed = dataclasses.replace(known[2], others={"loads": 2})
    assert effects([known[0], followed]) == ["n 1 to 2 with loads (1 pair): modelled us within the error of a ratio"]
    known[3] = dataclasses.replace(known[3], prediction=dataclasses.replace(times[3], caveat="of another model"))
    assert ranked(known) == [known]


def test_a_level_is_said_with_its_range_and_what_its_rows_share() -> None:
    times = {3: 4.0, 4: 4.1, 5: 9.0}
    configs = {stages: dataclasses.replace(BASE, tile_n=128, stages=stages) for stages in times}
    rows = [dataclasses.replace(made(time, 8, stages=n), config=configs[n]) for n, time in times.items()]
    tie, shared, alone, words, why = ranking(rows, 3)
    assert tie == "4.0 to 4.1 us (modelled, 3 to 5), of which the model does not say which is quickest: 1-2"
    assert shared == "    --set tile_n=128"
    assert alone == "9.0 us (modelled, 7 to 11): 3" and words == "    --set tile_n=128 --set stages=5"
    assert why == "    copies 6.8, launch 2.2"
    assert ranking(rows, 1) == [tie, shared] and text_of(rows)[-1] == "as far as it goes"


def test_rows_with_one_outcome_stand_together() -> None:
    """Products of values are spelled as such, and what the plan chooses is row 0, apart from a row that is the same."""
    default = dataclasses.replace(made(4.0, 8), settings={}, config=BASE, design="streamed")
    rows = [default, *(made(4.0 + tile, 8, tile=tile, stages=stages) for tile in (0, 1) for stages in (2, 3, 4))]
    rows += [Row({"tile": 2, "stages": stages}, reason="too large") for stages in (2, 4)]
    followed = dataclasses.replace(rows[1], others={"loads": 2})
    assert settings_text([followed]) == "tile=0, stages=2 (with loads=2)"
    assert settings_text([rows[2], followed]) == "tile=0, stages=3; tile=0, stages=2 (with loads=2)"
    assert [len(group) for group in alike(rows)] == [1, 3, 3, 2]
    assert len(alike([rows[1], dataclasses.replace(rows[2], design="weight on chip")])) == 2
    lines = lines_of(rows)
    assert lines[1] == f"0  default: {BASE}" and lines[2].endswith("4.0 (3 to 5)  copies; streamed")
    assert lines[3] == "1-3  tile=0, stages=2|3|4" and lines[5] == "4-6  tile=1, stages=2|3|4"
    assert lines[-1] == "7-8  tile=2, stages=2|4: too large"
    assert settings_text([rows[1], rows[5]]) == "tile=0, stages=2; tile=1, stages=3"
    assert [spans(numbers) for numbers in ([3], [1, 2, 3, 5, 7, 8], [])] == ["3", "1-3, 5, 7-8", ""]
    with pytest.raises(ValueError, match="--sort registers: no row has it: must be one of 'shared', 'modelled'"):
        by(rows, "registers")


def test_rows_are_sorted_by_a_field_as_numbers() -> None:
    """A program's options are texts; the names of tunables may have hyphens; a row without the field comes last."""
    rows = [Row({"tile_n": size}, reason="too large") for size in ("128", "64", "256")]
    assert [row.settings["tile_n"] for row in by(rows, "tile-n")] == ["64", "128", "256"]
    assert [row.settings["kind"] for row in by([Row({"kind": name}) for name in "ca"], "kind")] == ["a", "c"]
    rows = [Row({}), Row({"n": 2}), Row({"m": 1}), Row({"n": 1})]
    assert by(rows, "n") == [rows[0], rows[3], rows[1], rows[2]]
    with pytest.raises(ValueError, match="--sort k: no row has it: must be one of .*, or a field: n, m$"):
        by(rows, "k")


def test_columns_that_no_row_has_are_not_shown() -> None:
    """No model, tensor memory or design of a program's kernels."""
    row = Row({"n": "1"}, registers=32, stack_bytes=0, smem=(SmemRegion("x", 0, 4096, 1),))
    assert lines_of([row]) == ["    registers  stack B  shared B", "1  n=1", "           32        0     4,096"]


@pytest.mark.parametrize("default", (True, False))
def test_a_row_keeps_its_number_when_sorted(default: bool) -> None:
    """In the table, in the lines on levels and in records; row 0 stays first."""
    rows = [made(time, nbytes, n=nbytes) for time, nbytes in ((100.0, 3), (1.0, 2), (10.0, 1))]
    rows = [dataclasses.replace(row, config=BASE) for row in rows]
    rows[:0] = [dataclasses.replace(made(1000.0, 9), settings={}, config=BASE)] * default
    lines = text_of(rows, sort="modelled")
    heads = [re.match(r"(\d+)  (?:n=(\d)|default)", line) for line in lines_of(rows, "modelled")]
    first = [("0", None)] * default
    assert [head.groups() for head in heads if head] == [*first, ("2", "2"), ("3", "1"), ("1", "3")]
    levels = [line for line in lines if "us (modelled, " in line]
    assert [level.partition(" us")[0] + level[-3:] for level in levels] == ["1.0: 2", "10.0: 3", "100.0: 1"]
    found = [(record["row"], record.get("n")) for record in records(rows, "modelled")]
    assert found == [*[(0, None)] * default, (2, 2), (3, 1), (1, 3)]
    assert by(rows, "modelled") == [*rows[:default], rows[-2], rows[-1], rows[-3]]


def test_a_column_is_named_as_in_the_records() -> None:
    names = ("shared: loads, wavefronts", "TMA loads", "a, b")
    rows = [Row({"n": n}, registers=9 - n, stack_bytes=0, counts=dict(zip(names, (n, 5 - n, 1)))) for n in range(3)]
    for name in ("registers", "TMA loads", "tma_loads"):
        assert by(rows, name) == rows[::-1]
    assert records(rows, "stack_bytes") == records(rows) and by(rows, "shared_loads_wavefronts") == rows
    quoted = "'registers', 'stack', 'shared: loads, wavefronts', 'TMA loads', 'a, b'"
    with pytest.raises(ValueError, match=f"^--sort c: no row has it: must be one of {quoted}, or a field: n$"):
        by(rows, "c")


def test_what_a_field_changes() -> None:
    """Of rows that differ in it alone: tiles double the memory, stages add a half to the smaller tile, a third to the
    larger one. Modelled times are known to a quarter: half of one is a change, 0.9 of it is none."""
    memory = {(1, 2): 200, (1, 3): 300, (2, 2): 600, (2, 3): 800}
    rows = [made(6.0 / tile, nbytes, tile=tile, stages=stages) for (tile, stages), nbytes in memory.items()]
    tile, stages = effects(rows)
    assert tile == "tile 1 to 2 (2 pairs): modelled us -50.0%, shared B +166.7% to +200.0%"
    assert stages == "stages 2 to 3 (2 pairs): modelled us within its range, shared B +33.3% to +50.0%"
    times = {(1, 2): 6.0, (2, 2): 5.4, (1, 3): 6.0, (2, 3): 2.0}
    some = [made(time, 8, tile=tile, stages=stages) for (tile, stages), time in times.items()]
    assert effects(some)[0] == "tile 1 to 2 (2 pairs): modelled us -66.7% in 1 pair of 2, in the rest within its range"
    assert effects([*rows[:1], Row({"tile": 1, "stages": 3}, reason="too large")]) == []
    known, unknown = Row({"n": 1}, counts={"a": 4}), Row({"n": 2}, counts={"b": 4})
    assert effects([known, unknown]) == ["n 1 to 2 (1 pair): nothing is known of both"]
    assert effects([made(None, 8, n=1), made(None, 8, n=2)]) == ["n 1 to 2 (1 pair): no change of shared B"]
    counted = [dataclasses.replace(row, counts={"conflicts": count}) for row, count in zip(rows[:2], (0, 32))]
    assert effects(counted)[0].endswith("conflicts +32")
    padded = [Row({"pad": pad}, counts={"conflicts": n, "stores": 8 * n}) for pad, n in ((0, 28), (1, 5), (4, 9))]
    assert effects(padded)[1:] == [
        f"{what} least at pad 1, between the ends, in 1 of 1 group of rows" for what in ("conflicts", "stores")
    ]
    assert len(effects(padded[1:])) == len(effects([padded[0], padded[2], padded[1]])) == 1
    followed = [*rows[:3], dataclasses.replace(rows[3], others={"loads": 2})]
    alone, both, *_ = effects(followed)
    assert alone == "tile 1 to 2 (1 pair): modelled us -50.0%, shared B +200.0%"
    assert both == "tile 1 to 2 with loads (1 pair): modelled us -50.0%, shared B +166.7%"


def test_counts_of_roles_are_shown_where_there_are_several() -> None:
    """One role's are those of all warps."""

    def counts(**instructions: int) -> dict[str, float]:
        units = UnitCounts(1, {role: {"float": count} for role, count in instructions.items()}, {})
        return {name: n for name, n in plan_facts.counts_of([types.SimpleNamespace(units=units)]).items() if n}

    assert counts(compute=3) == {"warp instructions": 3}
    roles = {"warp instructions: compute": 3, "warp instructions: load": 2}
    assert counts(compute=3, load=2) == {"warp instructions": 5} | roles


def test_records_have_one_set_of_names() -> None:
    found = records([made(4.0, 8), Row({"stages": 9}, reason="too large")])
    assert found[0] == {
        "row": 1, "stages": 8, "design": None, "shared_bytes": 8, "modelled_us": 4.0, "modelled_us_least": 3.0,
        "modelled_us_most": 5.0, "modelled_largest_part": "copies", "refused": None,
    }  # fmt: skip
    assert list(found[1]) == list(found[0]) and found[1]["refused"] == "too large" and found[1]["modelled_us"] is None


def test_integers_of_records_stay_integers() -> None:
    """Options of programs, which are text, too; counts of the emulator; a data frame's, where some are missing."""
    rows = [Row({"m": "16", "way": "1"}, counts={"TMA loads, all": 3}), Row({"m": "-8", "way": "a"}, reason="no")]
    found = records(rows)
    assert [(each["m"], each["way"], each["tma_loads_all"]) for each in found] == [(16, "1", 3), (-8, "a", None)]
    plan = make_plan(PatchEmbedProblem(m=128, n=128, k=64), Sm90PatchEmbedConfig())
    assert {type(one) for one in plan_facts.counted(plan).values()} == {int}
    pandas = pytest.importorskip("pandas")
    frame = explorer.frame(rows)
    assert str(frame.tma_loads_all.dtype) == str(frame.m.dtype) == "Int64" and frame.tma_loads_all.isna().sum() == 1
    assert pandas.read_csv(io.StringIO(frame.to_csv()), dtype_backend="numpy_nullable").m.tolist() == [16, -8]


def test_maps_have_every_array_of_every_legal_row() -> None:
    """Places are parts of what a CTA may have, in per cent; rows with the same memory are one map."""
    regions = (TmemRegion("accumulator 0", 0, 128), TmemRegion("accumulator 1", 128, 128), TmemRegion("w", 320, 192))
    rows = [
        dataclasses.replace(made(None, 1024), tmem=regions),
        Row({"stages": 9}, reason="too large"),
        made(None, 2048),
        dataclasses.replace(made(None, 2048), settings={"stages": 2049}),
    ]
    text = page(rows)
    maps = re.findall(r'<figure data-rows="([^"]*)">(.*?)</figure>', text, re.DOTALL)
    assert [which for which, _ in maps] == ["1", "3 4"]
    places = [re.findall(r"left:([\d.]+)%;width:([\d.]+)%", each) for _, each in maps]
    assert places == [[("0", "25"), ("0", "25"), ("25", "25"), ("62.5", "37.5")], [("0", "50")]]
    colours = re.findall(r'class="c(\d)"[^>]*>', maps[0][1])
    assert colours[1] == colours[2] and len(set(colours)) == 3  # an array has one colour in all of its stages


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "sweep.html"
    arguments = ["sweep", "--batch", "4736", "--vary", "tile_n=256", "--vary", "stages=3,6", "--output", str(output)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    time = predict(make_plan(LARGE, dataclasses.replace(BASE, tile_n=256, stages=3))).microseconds
    assert f"{time:,.1f} ({0.88 * time:,.0f} to {1.12 * time:,.0f})  operands from L2; patch_embed: weight" in text
    assert "0  default: Sm100ResidentConfig(" in text and "; patch_embed: weight in tensor memory" in text
    assert b200.CAVEAT in text
    assert "2  tile_n=256, stages=6 (with store_buffers=1)" in text
    assert main([*arguments, "--around", "class"]) == 0
    assert "2  tile_n=256, stages=6: stages = 6: must be" in capsys.readouterr().out
    assert f">{time:,.1f} <small>{0.88 * time:,.0f} to {1.12 * time:,.0f}</small>" in output.read_text()


def test_a_table_without_compilation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The question that the explorer was asked first; its records, and the status where nothing is legal."""
    monkeypatch.setattr(compile, "compile_plan", lambda *_, **__: pytest.fail("compiled"))
    varied = ["--vary", "stages=4-7", "--vary", "epilogue_warps=4,5", "--vary", "stagger_clocks=80,40"]
    command = ["sweep", "--batch", "4736", *varied, "--vary", "tmem-load-width=16,32,64", "--no-compile"]
    assert main([*command, "--json", str(tmp_path / "rows.json"), "--csv", str(tmp_path / "rows.csv")]) == 0
    text = capsys.readouterr().out
    assert "of which the model does not say which is quickest: 0, 2-3, 5-6, 8-9" in text
    assert "stages=6, epilogue_warps=5, stagger_clocks=80|40, tmem_load_width=32 (with store_buffers=1)" in text
    assert "37-48  stages=7, epilogue_warps=4|5, stagger_clocks=80|40, tmem_load_width=16|32|64: stages = 7:" in text
    assert "varying tmem_load_width 16 to 64 (12 pairs): modelled us within its range" in text
    assert "varying stages 4 to 6 with store_buffers (" in text
    found = json.loads((tmp_path / "rows.json").read_text())
    assert len(found) == 49 and found[0]["row"] == 0 and "registers" not in found[0]
    times = {row["modelled_us"] for row in found if row["tmem_load_width"] == 64 and row["refused"] is None}
    assert len(times) == 1
    with open(tmp_path / "rows.csv", newline="") as file:
        assert [row["stages"] for row in csv.DictReader(file)] == ["", *(str(4 + n // 12) for n in range(48))]
    assert main(["sweep", "--vary", "stages=99", "--no-compile", "--json", "-"]) == 1
    assert [row["row"] for row in json.loads(capsys.readouterr().out)] == [0, 1]
    for wrong, message in (
        (["--sort", "speed"], "--sort speed: no row has it: must be one of 'shared', 'tmem', 'modelled'"),
        (["--output", str(tmp_path / "a.jpg")], "a.jpg ends with .jpg: must be one of .html"),
        (["--json", "-", "--csv", "-"], "--json - and --csv -: one of them is printed"),
        (["--json", str(tmp_path / "no" / "a.json")], "no folder"),
        (["--vary", "stagse=3"], "setting stagse=3: did you mean stages?"),
        (["--measure"], "a measured sweep times kernels on a CUDA device, and there is none"),
    ):
        assert main(["sweep", "--batch", "4736", "--vary", "stages=3", "--no-compile", *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"settings": [{"tiles": 1}]}, TypeError, "settings have 'tiles'"),
        ({"jobs": 0}, ValueError, "jobs = 0: must be at least 1"),
        ({"measured": True}, NotImplementedError, "a measured sweep times kernels on a CUDA device, and there is none"),
    ],
)
def test_refused(monkeypatch: pytest.MonkeyPatch, keywords: dict, error: type[Exception], message: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(error, match=message):
        sweep(LARGE, BASE, **{"settings": [], **keywords})


def test_what_cannot_be_measured() -> None:
    with pytest.raises(NotImplementedError, match="nothing times it: problem is SimpleNamespace: must be .*Images"):
        sweep(types.SimpleNamespace(), Sm90ImagesConfig(), [], measured=True)


def test_times_come_from_the_device_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: a stand-in for its timers, which are the search's own."""
    problem, settings = PatchEmbedProblem(m=64, n=64, k=128, table_rows=4), grid(tile_rows=(16, 32))
    device = types.SimpleNamespace(arch="sm_90a", sm_count=132)
    milliseconds = {16: 0.25, 32: 0.125}

    def timers(operation, plans, inputs):
        assert inputs == [problem] and len(plans) == 2
        return {plan: lambda plan=plan: milliseconds[plan.config.tile_rows] for plan in plans}

    monkeypatch.setattr(search, "device_at_hand", lambda name: device)
    monkeypatch.setattr(search, "input_sets", lambda operation, given: [given])
    monkeypatch.setattr(search, "timers_of", timers)
    rows = sweep(problem, Sm90PatchEmbedConfig(), settings, measured=True)
    assert [row.measured for row in rows] == [250.0, 125.0]
    assert ranked(rows)[0] == [rows[1]]
    assert "measured us" in lines_of(rows)[0] and "125.0" in lines_of(rows)[4] and len(lines_of(rows)) == 5
    device.arch = "sm_100a"
    monkeypatch.setattr(search, "timers_of", lambda *_: {})
    assert [row.measured for row in sweep(problem, Sm90PatchEmbedConfig(), settings[:1], measured=True)] == [None]


def test_workers_of_a_cluster_evaluate_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for the cluster: another executor at that address. `make dask` has a cluster."""
    addresses = []

    @contextlib.contextmanager
    def connect(address: str):
        addresses.append(address)
        with ThreadPoolExecutor(1) as executor:
            yield executor

    command = ["sweep", "gemm", "--arch", "sm_90a", "--m", "256", "--n", "256", "--k", "64", "--vary", "stages=2,99"]
    assert main(command) == 0
    here = capsys.readouterr().out
    monkeypatch.setattr(executors, "connect", connect)
    monkeypatch.setattr(executors, "check_address", lambda address: None)
    assert main([*command, "--executor", "dask://there:8786"]) == 0
    assert capsys.readouterr().out == here and addresses == ["dask://there:8786"]
    assert main([*command, "--executor", "dask://there:8786", "--jobs", "2"]) == 2
    assert "a cluster has its own workers" in capsys.readouterr().err


def test_refused_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["no.py", "--vary", "a=1"], "no file no.py"),
        (
            ["no.py", "--vary", "a=1", "--set", "b=2"],
            "a program takes --vary FIELD=VALUE,.. and --arguments, and no --set",
        ),
        (["no.py", "--vary", "a=1", "--no-compile"], "--measure and --no-compile are for this package's kernels"),
        (["--vary", "stages=3", "--arguments=-m"], "--arguments are for a program, SCRIPT.py"),
        (
            ["--vary", "stages=3", "--executor", "there"],
            "executor = 'there': must be dask://HOST:PORT or ray://HOST:PORT",
        ),
    ):
        assert main(["sweep", *arguments]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["sweep", "convolution", "--vary", "a=1"])
    assert "'convolution': must be patch-embed, patch-embed-images, gemm, or a program" in capsys.readouterr().err
    assert main(["sweep", "--vary", "stages=3", "--vary", "stages=4"]) == 2
    assert "stages is varied twice" in capsys.readouterr().err
    assert main(["sweep", "--vary", "tiles=3"]) == 2
    error = capsys.readouterr().err
    assert "setting tiles=3: did you mean tile_n? must be FIELD=VALUE; fields for sm_100a, " in error
    for kernel in PLANNERS["patch_embed"].of("sm_100a"):  # of all kernels that there are
        names = ", ".join(part.name for part in dataclasses.fields(kernel.config))
        assert f"{kernel.config.__name__}: {names}" in error


@pytest.mark.parametrize("arch", ("sm_120", "sm_89", "sm_86", "sm_80"))
def test_rows_are_planned_for_the_architecture_of_the_command(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "gemm", "--arch", arch, "--no-compile", "--json", "-", "--vary", "stages=2-9"]
    command += ["--around", "class"]  # as plan has them
    main(command)
    records = json.loads(capsys.readouterr().out)[1:]
    for record in records:
        legal = main(["plan", "gemm", "--arch", arch, "--set", f"stages={record['stages']}"]) == 0
        refusal = capsys.readouterr().err
        assert (record["refused"] is None) == legal, record
        assert legal or record["refused"] in refusal
    assert len({record["refused"] is None for record in records}) == 2  # some are legal, and some are not


def test_legality_is_that_of_the_problem() -> None:
    """Pairs of CTAs have whole pieces of the strips of 512 images, and of two images they have not."""
    problem = PatchEmbedImagesProblem(512, 3, 224, 224, 14, 768, table_rows=256)
    settings = grid(warpgroups=(1, 2), cluster=(1, 2))
    rows = sweep(problem, Sm90ImagesConfig(), settings, compiled=False)
    assert [row.reason for row in rows] == [None] * 4
    for row in rows:
        assert row.plan(problem).config == row.config == make_plan(problem, row.config).config
        assert sweep_table._shown_small(problem, [(row, row.plan(problem))])[0].config == row.config


def test_values_are_varied_around_what_the_problem_gets(capsys: pytest.CaptureFixture[str]) -> None:
    """A skinny product: the class has buffers that small tiles refuse, row 0 has none of them."""
    skinny = ["sweep", "gemm", "--arch", "sm_90a", "--m", "16", "--no-compile", "--vary", "tile_n=32,64"]
    assert main([*skinny, "--around", "class"]) == 1
    assert "store_stages = 2: must be" in capsys.readouterr().out
    assert main(skinny) == 0
    problem = GemmProblem(m=16, n=4096, k=4096)
    usual = make_plan(problem, arch="sm_90a").config
    kind, arch = type(usual), "sm_90a"
    rows = sweep(problem, around(problem, kind, arch), grid(tile_n=(32, usual.tile_n)), arch=arch, compiled=False)
    assert [row.config for row in rows] == [dataclasses.replace(usual, tile_n=32), usual]
    # Where a value needs other fields to change, they do, and the row says so.
    base = around(LARGE, Sm100ResidentConfig, "sm_100a")
    few, usual = sweep(LARGE, base, grid(stages=(2, base[0].stages)), arch="sm_100a", compiled=False)
    assert usual.config == make_plan(LARGE, arch="sm_100a").config and not usual.others
    with pytest.raises(ValueError, match="stages = 2"):
        make_plan(LARGE, dataclasses.replace(base[0], stages=2), "sm_100a")
    changed = {name: value for name, value in vars(few.config).items() if value != getattr(base[0], name)}
    assert changed == {"stages": 2, **few.others} and "tile_rows" in few.others


def test_fields_that_nobody_names_follow_a_varied_tile(capsys: pytest.CaptureFixture[str]) -> None:
    """Against all values of those fields: what is refused has none, and what follows had to."""
    problem = GemmProblem(4096, 4096, 4096)
    command = ["sweep", "gemm", "--arch", "sm_90a", "--no-compile", "--json", "-", "--set", "group_m=4"]
    main([*command, "--vary", "tile_m=64,128,256", "--vary", f"tile_n={','.join(map(str, range(16, 257, 16)))}"])
    records = json.loads(capsys.readouterr().out)[1:]
    usual = dataclasses.replace(make_plan(problem, arch="sm_90a").config, group_m=4)

    def legal(**values: object) -> bool:
        try:
            make_plan(problem, dataclasses.replace(usual, **values), "sm_90a")
        except ValueError:
            return False
        return True

    given = grid(tile_m=(64, 128, 256), tile_n=range(16, 257, 16))
    rows = sweep(problem, usual, given, following=["pingpong", "stages", "store_stages"], arch="sm_90a", compiled=False)
    assert [record["refused"] for record in records] == [row.reason for row in rows]
    others = grid(pingpong=(False, True), stages=range(2, 9), store_stages=range(1, 17))
    followed = 0
    for row in rows:
        if row.reason is not None:
            assert not any(legal(**row.settings, **each) for each in others), row.settings
            continue
        for name in row.others:
            assert not legal(**row.settings, **{n: one for n, one in row.others.items() if n != name})
        assert row.config == dataclasses.replace(usual, **row.settings, **row.others)
        followed += bool(row.others)
    assert followed > 20 and sum(row.reason is not None for row in rows) < 10
    strict = sweep(problem, usual, given, arch="sm_90a", compiled=False)
    assert [row.reason is None for row in strict] == [legal(**each) for each in given]


@pytest.mark.parametrize(
    ("varied", "named", "refusal"),
    [
        ("tile_m=256", [], None),
        ("tile_m=256", ["--set", "pingpong=true"], "tile_m = 256"),  # warpgroups in turn have no such tile
        ("tile_m=64", ["--set", "tile_n=64"], None),
        ("tile_m=64", ["--set", "tile_n=64", "--set", "store_stages=2"], "store_stages = 2"),  # of one buffer
    ],
)
def test_a_field_that_the_user_names_follows_nothing(
    varied: str, named: list[str], refusal: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["sweep", "gemm", "--arch", "sm_90a", "--no-compile", "--json", "-", "--vary", varied, *named])
    reason = json.loads(capsys.readouterr().out)[1]["refused"]
    assert reason is None if refusal is None else reason.startswith(refusal)


def test_a_shard_is_part_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse takes a value that begins with a hyphen for an option: the message says how to write one."""
    for words, message in (
        (["--shard", "-1/2"], "expected one argument; one that begins with a hyphen is written --shard=VALUE"),
        (["--shard=-1/2"], "--shard: -1/2: must be I/N with 1 <= I <= N"),
        (["--shard", "3/2"], "--shard: 3/2: must be I/N with 1 <= I <= N"),
    ):
        with pytest.raises(SystemExit):
            main(["sweep", "--vary", "stages=3", *words])
        assert message in capsys.readouterr().err


def test_registers_that_too_many_warpgroups_leave_are_their_fault() -> None:
    problem = PatchEmbedImagesProblem(512, 3, 224, 224, 14, 768, table_rows=256)
    for more in ({}, {"tile_images": 4}, {"tile_images": 16}):
        with pytest.raises(ValueError, match="^warpgroups = 3: .*; nearest legal value: 2$"):
            make_plan(problem, Sm90ImagesConfig(warpgroups=3, **more))
    with pytest.raises(ValueError, match="stages = 10: must be legal: .* 2 to 8 stages; nearest legal value: 8"):
        make_plan(GemmProblem(m=64, n=64, k=64), Sm80GemmConfig(stages=10), "sm_80")
    with pytest.raises(ValueError, match="tile_positions = 64"):
        make_plan(LARGE, Sm100ResidentConfig(tile_rows=32, tile_positions=64))


def test_one_of_something_is_singular() -> None:
    """In reasons and in names of arrays."""
    problem = PatchEmbedProblem(m=4096, n=768, k=768, table_rows=4)
    with pytest.raises(ValueError, match="the limit with 1 warpgroup is 240; "):
        make_plan(problem, Sm90PatchEmbedConfig(warpgroups=1, tile_rows=256, weight="registers"), "sm_90a")
    config = Sm90GemmConfig(tile_m=64, tile_n=64, store_stages=1, pingpong=False)
    names = [region.name for region in make_plan(GemmProblem(m=256, n=64, k=64), config, "sm_90a").smem]
    assert names[-1] == "output: 1 stage" and "a: 4 stages" in names


class Refused(Exception):
    """As CuTe DSL raises it where ptxas refuses a kernel."""

    ptxas_error = (
        "ptxas error   : Entry function\n  '" + 70 * "k" + "'\n uses too much shared data (0xe030 bytes, 0xc000 max)"
    )


def test_the_assemblers_reason_reaches_the_table() -> None:
    reason = reason_of(Refused("\x1b[91merror:\x1b[0m PTX assembly failed\n\n  --> kernel.py"))
    assert reason == f"Refused: Entry function '{39 * 'k'}..' uses too much shared data (0xe030 bytes, 0xc000 max)"
    assert reason_of(ValueError("\x1b[1;31mred\x1b[0m\a\nmore")) == "ValueError: red\\x07"


def test_a_run_of_a_program_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the program, what it imports, its arguments, or this package change; what was refused is tried again."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    script, helper, runs = tmp_path / "program.py", tmp_path / "helper.py", []
    script.write_text("import helper")
    helper.write_text("size = 1")

    def cached(*words: str, **facts: object) -> dict:
        def run() -> dict:
            runs.append(words)
            sweep_program_module.run_once(str(script), words, io.StringIO())
            return {"registers": 8, **facts}

        return sweep_program_module.cached(str(script), words, "sm_90a", run)

    assert cached("--a=1") == cached("--a=1") == {"registers": 8} and len(runs) == 1
    cached("--a=2")
    helper.write_text("size = 2")
    cached("--a=1")
    script.write_text("import helper  # again")
    cached("--a=1")
    assert len(runs) == 4
    for _ in range(2):
        cached("--a=3", reason="too small")
    assert len(runs) == 6
    assert kernel_cache.clear(tmp_path / "cache") == 0 and not list((tmp_path / "cache").glob("*.run"))
    cached("--a=1")
    assert len(runs) == 7
