"""--trace of the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cute_kernels import cli
from tests.emulator.test_trace import check_well_formed, read


def test_demo_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 48, 3), np.uint8)).save(photo)
    trace = tmp_path / "trace.json"
    arguments = ["--backend", "emulator", "--images", photo, "--image-size", "48", "--output", tmp_path / "out.png"]
    assert cli.main(["demo", *map(str, arguments), "--trace", str(trace)]) == 0
    check_well_formed(read(trace))
    assert f"timeline: {trace}; open it with https://ui.perfetto.dev" in capsys.readouterr().out


def test_each_launch_of_a_program_has_its_own_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text("from tests.emulator.scale_program import main\nmain()\nmain()\n")
    path = tmp_path / "trace.json"
    assert cli.main(["emulate", "--counters", "--trace", str(path), str(program), "--count", "64"]) == 0
    out = capsys.readouterr().out
    # 64 floats are read and written by two warps.
    assert out.count("warp 0: ld.global.4B: 1 requests, 128 bytes, 4 sectors") == 2
    for file in (path, tmp_path / "trace-2.json"):
        check_well_formed(read(file))
        assert f"timeline: {file}; open it with https://ui.perfetto.dev" in out
