"""`cute-kernels explore`: the notebooks run headless, and their numbers are those of tiles, launches and bytes."""

from __future__ import annotations

import base64
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
from cute_kernels.explore import explorer, notebook, sweep_table
from cute_kernels.explore.sweep_table import Row
from cute_kernels.operations import examples
from cute_kernels.operations.runtime import emulated
from cute_kernels.plan import make_plan

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "cute_kernels" / "explore" / "notebooks"
PROGRAM = ROOT / "docs" / "examples" / "sweep_bias_add.py"
PNG = re.compile(r'src="data:image/png;base64,([^"]+)"')


def test_the_notebook_runs_headless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    choice = """
from cute_kernels.config import PatchEmbedProblem, Sm100PatchEmbedConfig
problem = PatchEmbedProblem(m=4736 * 196, n=768, k=768, table_rows=196)
base = Sm100PatchEmbedConfig(tile_n=128, epilogue_warps=4)
arch = "sm_100a"
varied = {"stages": (3, 9)}
jobs = 1
"""
    cells = notebook.with_choice(notebook.cells_of((NOTEBOOKS / "kernel.py").read_text()), choice)
    page, names = notebook.execute(cells)
    default, legal, refused = names["rows"]
    assert default.config == make_plan(names["problem"], arch="sm_100a").config and names["table"] is not None
    small = names["small"]
    assert (small.m, small.n, small.k) == (392, 256, 256)
    plan = make_plan(small, legal.config, sm_count=2)
    report = emulated.launch(plan, examples.random_operands(plan))
    assert legal.smem_bytes == report.shared_bytes and legal.tmem_columns == report.tensor_columns == 256
    # Four tiles of 256 x 128 on a pair of CTAs: each element of x and of the weight arrives once in every tile.
    assert legal.counts["shared: TMA fill, wavefronts"] == 4 * (256 + 128) * 256 / 128
    assert legal.counts["L2 bytes written"] == 392 * 256 * 2
    assert refused.reason.startswith("stages = 9: must be legal") and "stages = 9: must be legal" in page
    assert "not measured: no GPU" in page and legal.prediction.caveat in page
    assert f"{legal.prediction.time}: --set stages=3" in page
    assert 'alt="Memory of 2 legal configurations, modelled against shared; ' in page
    copied = re.search(r"^  (Sm100PatchEmbedConfig\(.*\))$", page.replace("&#x27;", "'"), re.MULTILINE)[1]
    assert eval(copied, vars(configs)) == Sm100PatchEmbedConfig(tile_n=128, epilogue_warps=4, stages=3)
    pictures = [base64.b64decode(text) for text in PNG.findall(page)]
    assert len(pictures) == 2 and all(picture.startswith(b"\x89PNG") for picture in pictures)  # maps, timeline


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


def test_smaller_problems() -> None:
    gemm = explorer.smaller(GemmProblem(m=4096, n=64, k=4096, batches=3, bias=True))
    assert gemm == GemmProblem(m=512, n=64, k=256, bias=True)
    with pytest.raises(TypeError, match="problem is int: must be one of PatchEmbedProblem"):
        explorer.smaller(3)


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
    exec(code[0], chosen)
    assert chosen["problem"] == GemmProblem(m=300, n=4096, k=4096) and chosen["varied"] == {"tile_n": [64, 128]}
    assert type(chosen["base"]).__name__ == "Sm90GemmConfig"
    assert code[1:] == [cell.source for cell in notebook.cells_of((NOTEBOOKS / "kernel.py").read_text())
                        if not cell.markdown][1:]  # fmt: skip
    identifiers = [cell["id"] for cell in document["cells"]]
    assert len(set(identifiers)) == len(identifiers) and all(re.fullmatch(r"[\w-]{1,64}", each) for each in identifiers)
    before = path.read_bytes()
    assert main(["explore", *words]) == 2 and path.read_bytes() == before
    path.unlink()
    main(["explore", *words, "--no-browser"])
    assert commands[1:] == [(sys.executable, [sys.executable, "-m", "jupyterlab", "--no-browser", str(path)])]


def test_times_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is a stand-in: without one no time is made up, with one they are those of the sweep's own timing."""
    rows, timed = [Row({"stages": 3})], [Row({"stages": 3}, measured=2.0)]
    problem = PatchEmbedProblem(m=64, n=64, k=128, table_rows=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert explorer.measured(problem, rows) == (rows, "no GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sweep_table, "measure", lambda given, _: timed if given is problem else None)
    assert explorer.measured(problem, rows) == (timed, None)
    monkeypatch.setattr(sweep_table, "measure", lambda *_: rows)
    assert explorer.measured(problem, rows) == (rows, "no configuration is for this GPU")

    def refuse(*_: object) -> None:
        raise NotImplementedError("nothing times it")

    monkeypatch.setattr(sweep_table, "measure", refuse)
    assert explorer.measured(problem, rows) == (rows, "nothing times it")


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    export, folder = ["--output", str(tmp_path / "no.html")], tmp_path / "folder.py"
    folder.mkdir()
    for arguments, message in (
        (["gemm", *export], "--vary is missing: name the tunables of gemm"),
        (["--vary", "tiles=3", *export], "setting tiles=3: did you mean tile_n? expected FIELD=VALUE"),
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
    legal, refused = sweep_table.sweep(problem, base, sweep_table.grid(**settings), counted=problem)
    plan = make_plan(problem, legal.config, sm_count=2)
    report = emulated.launch(plan, examples.random_operands(plan))
    assert legal.smem_bytes == report.shared_bytes and legal.tmem and legal.tmem_columns <= report.tensor_columns
    assert report.tensor_columns < 2 * max(32, sum(region.columns for region in legal.tmem))
    assert legal.registers and legal.stack_bytes == 0 and legal.counts["L2 bytes written"] == written
    assert "must be legal" in refused.reason and refused.registers is None and not refused.tmem
