"""`cute-kernels explore`: the notebooks run headless, and their numbers are those of tiles, launches and bytes."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import types
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
    Sm90GemmConfig,
    Sm100GemmConfig,
    Sm100ImagesConfig,
    Sm100PatchEmbedConfig,
)
from cute_kernels.explore import explorer, notebook, subjects, sweep_table
from cute_kernels.explore.sweep_table import Row
from cute_kernels.operations import examples
from cute_kernels.operations.runtime import emulated
from cute_kernels.plan import choose, make_plan

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "docs" / "examples" / "sweep_bias_add.py"
PNG = re.compile(r'src="data:image/png;base64,([^"]+)"')


def test_the_page_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    problem = PatchEmbedProblem(m=4736 * 196, n=256, k=256, table_rows=196)
    base = (Sm100PatchEmbedConfig(tile_n=128, epilogue_warps=4),)
    subject, seen = subjects.Kernel(problem, base, "sm_100a", {"stages": (3, 9)}), []
    page = notebook.page(subject, 1, seen.append)
    default, legal, refused = seen
    assert default.config == make_plan(problem, arch="sm_100a").config
    plan, whole = legal.small, make_plan(problem, legal.config)
    assert plan.kernel_key == whole.kernel_key and plan.config == legal.config
    # Row 0 has all 256 rows of a tile at a few positions: 512 images fill it at two of them, and the other one's tiles.
    assert (plan.problem.m, plan.problem.n, plan.problem.k, plan.problem.table_rows) == (512, 256, 256, 2)
    assert default.small.config == default.config and default.small.runs == default.design
    report = emulated.launch(plan, examples.random_operands(plan))
    assert legal.smem_bytes == report.shared_bytes and legal.tmem_columns == report.tensor_columns == 256
    # Four tiles of 256 x 128 on a pair of CTAs: each element of x and of the weight arrives once in every tile.
    assert legal.counts["shared: TMA fill, wavefronts"] == 4 * (256 + 128) * 256 / 128
    assert legal.counts["L2 bytes written"] == 512 * 256 * 2
    assert "of [512, 256] x [256, 256]^T" in page and "with tiles as full as there, on 4 multiprocessors" in page
    assert refused.reason.startswith("stages = 9: must be legal") and "stages = 9: must be legal" in page
    assert "(measured)" not in page and legal.prediction.caveat in page
    assert 'alt="Memory of 2 legal configurations, modelled against shared; ' in page
    copied = re.search(r"^1  (Sm100PatchEmbedConfig\(.*\))$", page.replace("&#x27;", "'"), re.MULTILINE)[1]
    assert eval(copied, vars(configs)) == legal.config == whole.config and legal.config.stages == 3
    pictures = [base64.b64decode(text) for text in PNG.findall(page)]
    assert len(pictures) == 2 and all(picture.startswith(b"\x89PNG") for picture in pictures)  # maps, timeline


def test_a_page_without_times_names_none() -> None:
    """Of a kernel that no model knows: neither a least time nor a front, and the table says that time is unknown."""
    subject = subjects.kernel(
        GemmProblem(m=4096, n=4096, k=4096), Sm90GemmConfig, "sm_90a", varied={"tile_m": ("64", "128")}, fixed=(),
        usual=True,
    )  # fmt: skip
    page = explorer.page(subject.rows(compiled=False))
    assert page.count("time unknown: no model knows this kernel") >= 2
    assert "least" not in page and "Pareto" not in page and "(modelled" not in page


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
            ((row, planned),) = [sweep_table._planned(problem, (None,), arch, None)]
            small = sweep_table._shown_small(problem, [(row, planned)])[0]
            assert planned == plan and small.config == plan.config and small.kernel_key == plan.kernel_key
            ratio = outputs(small.problem) / small.tiles / (outputs(problem) / plan.tiles)
            assert 0.95 <= ratio and small.tiles < 200


def outputs(problem) -> int:
    return problem.n * (problem.m if hasattr(problem, "m") else problem.batch * problem.positions)


def test_a_program_is_explored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "bias.html"
    words = ["--vary", "rows=16,24", "--arguments=--m 64", "--arch", "sm_90a", "--jobs", "1", "--output", str(output)]
    assert main(["explore", str(PROGRAM), *words]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    page = output.read_text()
    assert len(PNG.findall(page)) == 2
    assert re.search(rf"^L2 bytes written +{64 * 32 * 4:,}$", page, re.MULTILINE)
    assert "--rows 24 does not divide" in page and "bias_add" not in sys.modules


def test_the_timeline_is_of_the_configuration_that_is_asked_for() -> None:
    """Not of the kernel that an earlier run of the program has compiled."""
    steps = []
    for rows in (16, 64):
        figure = explorer.timeline_of_program(str(PROGRAM), {"rows": rows}, arch="sm_90a", arguments=["--m", "64"])
        steps.append(figure.axes[0].get_xlim()[1])
        assert "CTA 0  warp 4 TMA load" in [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert steps[1] != steps[0]
    with pytest.raises(ValueError, match="'rows': 24.*does not divide"):
        explorer.timeline_of_program(str(PROGRAM), {"rows": 24}, arch="sm_90a", arguments=["--m", "64"])


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
    monkeypatch.setattr(sweep_table, "sweep", lambda *given, **how: [Row({}, reason=repr((given[:2], how["arch"])))])
    exec(code[0], chosen)
    assert chosen["problem"] == GemmProblem(m=300, n=4096, k=4096) and chosen["varied"] == {"tile_n": [64, 128]}
    assert chosen["base"] == (choose(chosen["problem"], "sm_90a"),) and chosen["arch"] == "sm_90a"
    assert chosen["rows"][0].reason == repr(((chosen["problem"], chosen["base"]), "sm_90a"))
    monkeypatch.setitem(
        sys.modules, "IPython.display", types.SimpleNamespace(HTML=chosen.setdefault("shown", []).append)
    )
    exec(code[1], chosen)
    assert "GemmProblem(m=300" in chosen["shown"][0]
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
    report = emulated.launch(plan, examples.random_operands(plan))
    assert legal.smem_bytes == report.shared_bytes and legal.tmem and legal.tmem_columns <= report.tensor_columns
    assert report.tensor_columns < 2 * max(32, sum(region.columns for region in legal.tmem))
    assert legal.registers and legal.stack_bytes == 0 and legal.counts["L2 bytes written"] == written
    assert "must be legal" in refused.reason and refused.registers is None and not refused.tmem
