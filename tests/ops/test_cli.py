"""The command line: PTX export, argument errors. The demo has a file of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cute_kernels.cli import main
from cute_kernels.compile import compile_plan
from cute_kernels.config import Problem, TileConfig
from cute_kernels.plan import make_plan


def test_ptx_and_facts(tmp_path, capsys):
    path = tmp_path / "k.ptx"
    arguments = [
        "ptx",
        "patch-embed",
        "--batch",
        "3",
        "--positions",
        "100",
        "--features",
        "1152",
        "--in-features",
        "588",
    ]
    assert main([*arguments, "--tile-n", "128", "--stages", "5", "--epilogue-warps", "4", "-o", str(path)]) == 0
    facts = json.loads((tmp_path / "k.ptx.json").read_text())
    plan = make_plan(Problem(300, 1152, 592, table_rows=100), TileConfig(tile_n=128, stages=5, epilogue_warps=4))
    assert path.read_text() == compile_plan(plan).ptx
    assert f".entry {facts['kernel']}(" in path.read_text()
    assert ".target sm_100a" in path.read_text()
    assert facts["problem"]["k"] == 592
    assert facts["config"] == {
        "tile_n": 128, "stages": 5, "epilogue_warps": 4, "tmem_load_width": 32, "epilogue": "f32",
    }  # fmt: skip
    assert facts["grid"] == [2 * 2 * 9, 1, 1]  # a pair of CTAs for each of 2 x 9 tiles of 256 x 128
    assert (facts["cluster"], facts["block"]) == ([2, 1, 1], [6 * 32, 1, 1])
    assert facts["dynamic_smem_bytes"] == plan.smem_bytes
    assert 0 < facts["resources"]["registers"] <= 255
    assert capsys.readouterr().out.split() == [str(path), str(path) + ".json"]


@pytest.mark.parametrize(
    ("table", "scale", "rows"), [("positions", "value", 196), ("bias", "pointer", 1), ("none", "value", 0)]
)
def test_ptx_variants(tmp_path, table, scale, rows):
    path = tmp_path / "k.ptx"
    assert main(["ptx", "patch-embed", "--table", table, "--scale", scale, "-o", str(path)]) == 0
    problem = json.loads((tmp_path / "k.ptx.json").read_text())["problem"]
    assert (problem["table_rows"], problem["scale_source"], problem["m"]) == (rows, scale, 196)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ptx", "patch-embed", "-o", "x", "--stages", "9"], "nearest legal value: 5"),
        (["ptx", "patch-embed", "-o", "x", "--epilogue", "fp64"], "nearest legal value: 'f32'"),
        (["demo", "--images", "absent.png"], "no image file absent.png"),
        (["demo", "--output", "absent/demo.png"], "no folder for absent/demo.png"),
        (["demo", "--model", "absent"], "absent holds no config.json"),
        (["demo", "--model", "x", "--image-size", "64"], "--model brings its own"),
        (["demo", "--image-size", "8"], "image_size = 8 is smaller than a patch"),
    ],
)
def test_unusable_arguments(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_module_and_script_are_one_command():
    run = subprocess.run([sys.executable, "-m", "cute_kernels", "--help"], capture_output=True, text=True, check=True)
    assert "usage: cute-kernels" in run.stdout
    assert "demo" in run.stdout
    assert "ptx" in run.stdout
