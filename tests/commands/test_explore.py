"""`cute-kernels explore`: the notebooks run headless, and their numbers are those of tiles, launches and bytes."""

from __future__ import annotations

import html.parser
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from cute_kernels import config as configs
from cute_kernels.commands.cli import main
from cute_kernels.common import extras
from cute_kernels.config import (
    GemmProblem,
    PatchEmbedImagesProblem,
    PatchEmbedProblem,
    Sm100GemmConfig,
    Sm100ImagesConfig,
    Sm100PatchEmbedConfig,
)
from cute_kernels.explore import explorer, page, subjects, sweep_outcomes, sweep_table
from cute_kernels.explore.sweep_table import Row
from cute_kernels.operations import registry
from cute_kernels.operations.runtime import emulated
from cute_kernels.plan import choose, make_plan

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "docs" / "examples" / "sweep_bias_add.py"


def test_the_page_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    problem = PatchEmbedProblem(m=4736 * 196, n=256, k=256, table_rows=196)
    base = (Sm100PatchEmbedConfig(tile_n=128, epilogue_warps=4),)
    subject, seen = subjects.Kernel(problem, base, "sm_100a", {"stages": (3, 9)}), []
    page = explorer.page_of(subject, 1, seen.append)
    default, legal, refused = seen
    assert default.config == make_plan(problem, arch="sm_100a").config
    plan, whole = legal.small, make_plan(problem, legal.config)
    assert plan.kernel_key == whole.kernel_key and plan.config == legal.config
    # Row 0 has all 256 rows of a tile at a few positions: 512 images fill it at two of them, and the other one's tiles.
    assert (plan.problem.m, plan.problem.n, plan.problem.k, plan.problem.table_rows) == (512, 256, 256, 2)
    assert default.small.config == default.config and default.small.runs == default.design
    report = emulated.launch(plan, registry.random_operands(plan))
    assert legal.smem_bytes == report.shared_bytes and legal.tmem_columns == report.tensor_columns == 256
    # Four tiles of 256 x 128 on a pair of CTAs: each element of x and of the weight arrives once in every tile.
    assert legal.counts["shared: TMA fill, wavefronts"] == 4 * (256 + 128) * 256 / 128
    assert legal.counts["L2 bytes written"] == 512 * 256 * 2
    assert "of [512, 256] x [256, 256]^T" in page and "with tiles as full as there, on 4 multiprocessors" in page
    assert refused.reason.startswith("stages = 9: must be") and "stages = 9: must be legal" in page
    assert "(measured)" not in page and legal.prediction.caveat in page
    seen_page = Seen(page)
    table = cells_of(seen_page)
    for record in sweep_outcomes.records(seen):
        assert table[record["row"]] == {name: "" if one is None else str(one) for name, one in record.items()}
    maps = [place["data-rows"] for place in seen_page.found("figure") if "class" not in place]
    assert seen_page.options == {"stages": ["3", "9"]} and maps == ["0", "1"]
    assert [line["title"].partition(":")[0] for line in seen_page.found("tr") if "data-row" in line] == [
        "legal", "legal", "not legal",
    ]  # fmt: skip
    copied = re.search(r"plan = (make_plan\(.*, Sm100PatchEmbedConfig\(.*\))", seen_page.text)[1]
    copied_plan = eval(copied, {**vars(configs), "make_plan": make_plan})
    assert copied_plan == whole and legal.config.stages == 3
    # 3,626 rows of tiles of 256 x 128 over 74 pairs; a multiplication and an addition of all elements, all moved once.
    assert "7,252 tiles over 74 clusters of 2 CTAs: 98 waves. A wave has" in seen_page.text
    moved = problem.m * 256 + 256 * 256 + problem.m * 256 * 2
    assert f"{2 * problem.m * 256 * 256 / 1e9:,.1f} G operations, {moved / 1e6:,.1f} MB" in seen_page.text
    assert f"device memory: {moved / 7.7e12 * 1e6:,.1f} us" in seen_page.text
    assert f"x: 3 stages: {3 * 128 * 128:,} B at 1,024" in seen_page.text
    assert seen_page.found("svg") and len(seen_page.found("rect")) > 100
    assert not re.search(r"""(src|href)=["'](https?:)?//""", page)  # nothing from a network


class Seen(html.parser.HTMLParser):
    """What a reader of a page finds: elements with their attributes, cells of the table, options, text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.heads, self.lines, self.options, self.text = [], [], {}, ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        given = dict(attrs)
        self.elements.append((tag, given))
        if tag == "tr" and "data-row" in given:
            self.lines.append([])
        if tag == "td" and self.lines and not self.found("article"):
            self.lines[-1].append(given.get("data-v", ""))
        if tag == "select":
            self.options[given["data-field"]] = []
        if tag == "option":
            list(self.options.values())[-1].append(given["value"])

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self.elements[-2:]]
        if tags == ["th", "button"] and data.strip():
            self.heads.append(data)
        self.text += data

    def found(self, tag: str) -> list[dict[str, str]]:
        return [given for name, given in self.elements if name == tag]


def cells_of(seen: Seen) -> dict[int, dict[str, str]]:
    """Cells of the table, by row and title."""
    return {int(line[0]): dict(zip(seen.heads, line, strict=True)) for line in seen.lines}


def test_menus_and_rows_name_a_field_alike() -> None:
    """The script asks a row for the value of a menu's field; text of a user is text on the page."""
    page = explorer.page([Row({"tile_n": 128, "kind": "<b>"}, reason="a < b"), Row({"tile_n": 64, "kind": "c"})])
    seen = Seen(page)
    assert seen.options == {"tile_n": ["128", "64"], "kind": ["<b>", "c"]}
    rows = [line for line in seen.found("tr") if "data-row" in line]
    assert [(line["data-set-tile_n"], line["data-set-kind"]) for line in rows] == [("128", "<b>"), ("64", "c")]
    assert [line["title"] for line in rows] == ["not legal: a < b", "legal"] and not seen.found("b")


def test_a_page_without_times_names_none() -> None:
    """Of a kernel that no model knows: neither a least time nor a front, and the table says that time is unknown."""
    subject = subjects.kernel(
        GemmProblem(m=4096, n=4096, k=4096), Sm100GemmConfig, "sm_100a", varied={"tile_n": ("64", "128")}, fixed=(),
        usual=True,
    )  # fmt: skip
    page = explorer.page(subject.rows(compiled=False))
    assert "it is unknown: no model knows this kernel" in page
    seen = Seen(page)
    assert not [head for head in seen.heads if " us" in head] and "(modelled" not in seen.text


def test_what_is_counted_is_the_kernel_of_the_problem() -> None:
    """For each kind of tile: images at positions, rows, grid rows of images, a skinny product; its tiles are full."""
    problems = {
        "sm_100a": (
            PatchEmbedProblem(m=928256, n=768, k=768, table_rows=196),
            PatchEmbedProblem(m=50000, n=768, k=768),
        ),
        "sm_90a": (
            PatchEmbedImagesProblem(512, 3, 224, 224, 14, 768, table_rows=256),
            GemmProblem(m=16, n=4096, k=4096),
            GemmProblem(m=4096, n=1000, k=4096),
        ),
    }
    for arch, each in problems.items():
        for problem in each:
            plan = make_plan(problem, arch=arch)
            ((row, planned),) = [sweep_table._planned(problem, (None,), arch, None, ())]
            small = sweep_table._shown_small(problem, [(row, planned)])[0]
            assert planned == plan and small.config == plan.config and small.kernel_key == plan.kernel_key
            ratio = outputs(small.problem) / small.tiles / (outputs(problem) / plan.tiles)
            assert 0.95 <= ratio and small.tiles < 200


@pytest.mark.parametrize(
    ("batch", "words"),
    [(8, "120 tiles over 120 clusters of 1 CTA: 1 wave"), (4736, "10,878 tiles over 72 clusters of 2 CTAs: 152 waves")],
)
def test_waves_of_a_kernel_that_takes_each_tile_for_every_group_of_features(batch: int, words: str) -> None:
    """20 tiles of 80 rows for six groups of 128 features; 3,626 of 256 rows for three groups of 256."""
    plan = make_plan(PatchEmbedProblem(m=196 * batch, n=768, k=768, table_rows=196), arch="sm_100a")
    assert words in " ".join(page._waves(plan))


def outputs(problem) -> int:
    return problem.n * (problem.m if hasattr(problem, "m") else problem.batch * problem.positions)


def test_a_program_is_explored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "bias.html"
    words = ["--vary", "rows=16,24", "--arguments=--m 64", "--arch", "sm_90a", "--jobs", "1", "--output", str(output)]
    assert main(["explore", str(PROGRAM), *words]) == 0
    assert capsys.readouterr().out == f"{output}\n{output.with_suffix('.trace.json')}\n"
    page = output.read_text()
    seen = Seen(page)
    assert cells_of(seen)[1]["l2_bytes_written"] == str(64 * 32 * 4) and len(seen.found("svg")) == 1
    assert "cute-kernels emulate --arch sm_90a" in seen.text and "--m 64 --rows=16" in seen.text
    trace = json.loads((tmp_path / "bias.trace.json").read_text())
    assert 'href="bias.trace.json"' in page and trace["traceEvents"]
    assert "--rows 24 does not divide" in page and "bias_add" not in sys.modules


def test_the_timeline_is_of_the_configuration_that_is_asked_for() -> None:
    """Not of the kernel that an earlier run of the program has compiled."""
    steps = []
    for rows in (16, 64):
        found = explorer.timeline_of_program(str(PROGRAM), {"rows": rows}, arch="sm_90a", arguments=["--m", "64"])
        steps.append(max(start + length for _, start, length, _, _ in found["slices"]))
        assert "CTA 0  warp 4 TMA load" in found["tracks"]
    assert steps[1] != steps[0]
    with pytest.raises(ValueError, match="'rows': 24.*does not divide"):
        explorer.timeline_of_program(str(PROGRAM), {"rows": 24}, arch="sm_90a", arguments=["--m", "64"])


def test_the_timeline_is_of_the_row_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a number of the first legal one; rows have theirs where others are refused, too."""
    monkeypatch.setattr(explorer, "timeline_of_program", lambda _, settings, **__: {"of": f"n={settings['n']}"})
    subject = subjects.Program("program.py", [], "sm_90a", {"n": ("1", "2", "3")})
    rows = [Row({"n": "1"}, reason="too small"), Row({"n": "2"}), Row({"n": "3"})]
    assert [subject.timeline(rows, number=number)["of"] for number in (None, 3)] == ["row 2: n=2", "row 3: n=3"]
    with pytest.raises(ValueError, match="--row 1: must be one of 2-3"):
        subject.timeline(rows, number=1)
    assert subject.timeline(rows[:1]) is None
    with pytest.raises(ValueError, match="--row 1: must be one of none, since no row can be run"):
        subject.timeline(rows[:1], number=1)


def test_the_command_shows_the_row_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "sweep_program", lambda *_, **__: [Row({"n": "1"}), Row({"n": "2"})])
    asked = []
    given = {"of": "it", "tracks": ["a"], "slices": [(0, 0, 1, "work", "w")], "arrows": []}
    monkeypatch.setattr(explorer, "timeline_of_program", lambda _, settings, **__: asked.append(settings["n"]) or given)
    words = ["explore", str(PROGRAM), "--vary", "n=1,2", "--output"]
    for more, name in (([], "first"), (["--row", "2"], "second")):
        assert main([*words, str(tmp_path / f"{name}.html"), *more]) == 0
        assert f"A timeline of row {len(asked)}: it" in (tmp_path / f"{name}.html").read_text()
    assert asked == ["1", "2"]


def test_the_notebook_is_written_and_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(extras, "require", lambda *_: None)
    monkeypatch.setattr(os, "execv", lambda program, words: commands.append((program, words)) or 5)
    path = tmp_path / "gemm.ipynb"
    words = ["gemm", "--arch", "sm_90a", "--m", "300", "--vary", "tile_n=64,128", "--output", str(path)]
    main(["explore", *words])
    assert commands == [(sys.executable, [sys.executable, "-m", "jupyterlab", str(path)])]  # in place of this process
    document = json.loads(path.read_text())
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    code = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    chosen: dict = {}
    monkeypatch.setattr(subjects, "sweep", lambda *given, **how: [Row({}, reason=repr((given[:2], how["arch"])))])
    exec(code[0], chosen)
    subject = chosen["subject"]
    assert subject.problem == GemmProblem(m=300, n=4096, k=4096) and subject.values == {"tile_n": [64, 128]}
    assert subject.base == (choose(subject.problem, "sm_90a"),) and subject.arch == "sm_90a"
    assert chosen["rows"][0].reason == repr(((subject.problem, subject.base), "sm_90a"))
    shown = eval(code[1], chosen)._repr_html_()
    framed = Seen(shown).found("iframe")[0]["srcdoc"]
    assert framed == eval(code[1], chosen) and "GemmProblem(m=300" in framed
    identifiers = [cell["id"] for cell in document["cells"]]
    assert len(set(identifiers)) == len(identifiers) and all(re.fullmatch(r"[\w-]{1,64}", each) for each in identifiers)
    before = path.read_bytes()
    assert main(["explore", *words]) == 2 and path.read_bytes() == before
    path.unlink()
    main(["explore", *words, "--no-browser"])
    main(["explore", *words[:-2], "--no-browser", "--allow-root", "--output", str(path.with_stem("other"))])
    lab = [sys.executable, "-m", "jupyterlab", "--no-browser"]
    assert [words for _, words in commands[1:]] == [
        [*lab, str(path)],
        [*lab, "--allow-root", str(tmp_path / "other.ipynb")],
    ]
    monkeypatch.chdir(tmp_path)
    for _ in range(3):  # a name for each try
        main(["explore", *words[:-2]])
    assert [Path(words[-1]).name for _, words in commands[3:]] == [
        "explore.ipynb",
        "explore-2.ipynb",
        "explore-3.ipynb",
    ]


def test_times_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The GPU is a stand-in: without one no time is made up, with one they are those of the sweep's own timing."""
    rows, timed = [Row({"stages": 3})], [Row({"stages": 3}, measured=2.0)]
    problem = PatchEmbedProblem(m=64, n=64, k=128, table_rows=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert explorer.measured(problem, rows) == rows
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sweep_table, "measure", lambda given, _: timed if given is problem else None)
    assert explorer.measured(problem, rows) == timed

    def refuse(*_: object) -> None:
        raise NotImplementedError("nothing times it")

    monkeypatch.setattr(sweep_table, "measure", refuse)
    assert explorer.measured(problem, rows) == rows and capsys.readouterr().out == "not measured: nothing times it\n"


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    export, folder = ["--output", str(tmp_path / "no.html")], tmp_path / "folder.py"
    folder.mkdir()
    for arguments, message in (
        (["gemm", *export], "--vary is missing: name the tunables of gemm"),
        (["--vary", "tiles=3", *export], "setting tiles=3: did you mean tile_n? must be FIELD=VALUE"),
        (["--arguments=-m", *export], "--arguments are for a program, SCRIPT.py"),
        (["no.py", "--vary", "a=1", *export], "no file no.py"),
        ([str(folder), "--vary", "a=1", *export], f"{folder}: must be the file of a program, and is a directory"),
        ([str(PROGRAM), *export], "a program takes --vary FIELD=VALUE,.."),
        (["--output", str(tmp_path / "no.pdf")], "no.pdf ends with .pdf: must be one of .ipynb, .html"),
    ):
        assert main(["explore", *arguments]) == 2
        assert message in capsys.readouterr().err
    folder.rmdir()
    monkeypatch.setattr(extras, "missing", lambda extra, _=None: ["jupyterlab"] if extra == "explore" else [])
    assert main(["explore", "--output", str(tmp_path / "no.ipynb")]) == 2
    needs = "the command explore without --output FILE.html needs jupyterlab: pip install 'cute-kernels[explore]'"
    assert needs in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("problem", "base", "settings", "written"),
    [
        (GemmProblem(m=256, n=128, k=64), Sm100GemmConfig(), {"tile_n": (128, 100)}, 256 * 128 * 2),
        # Four patches of 16 x 16 pixels in each of two images.
        (PatchEmbedImagesProblem(2, 3, 32, 32, 16, 128, table_rows=4), Sm100ImagesConfig(),
         {"accumulators": (1, 3)}, 2 * 4 * 128 * 2),
    ],
    ids=["gemm", "images"],
)  # fmt: skip
def test_other_operations_on_sm100(problem, base, settings, written) -> None:
    """Memory is what the launch asks for, and what it allocates: every allocated column is that of a region or free."""
    legal, refused = sweep_table.sweep(problem, base, sweep_table.grid(**settings), counted=True)
    plan = make_plan(problem, legal.config, sm_count=2)
    report = emulated.launch(plan, registry.random_operands(plan))
    assert legal.smem_bytes == report.shared_bytes and legal.tmem and legal.tmem_columns <= report.tensor_columns
    assert report.tensor_columns < 2 * max(32, sum(region.columns for region in legal.tmem))
    assert legal.registers and legal.stack_bytes == 0 and legal.counts["L2 bytes written"] == written
    assert "must be" in refused.reason and refused.registers is None and not refused.tmem
