"""`bench.profile`: every case is one that the command plans, and its files are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import profile
from cute_kernels.commands import cli
from cute_kernels.commands.kernel_options import plan_of
from cute_kernels.explore.profiling.report import device_for
from cute_kernels.plan.base import with_profile


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", profile.CASES)
def test_every_case_has_a_plan_with_stamps(name: str, arch: str, tmp_path: Path) -> None:
    (arguments,) = profile.commands(tmp_path / "x", [name], ("--device", "emulator", "--arch", arch)).values()
    options = cli._parser().parse_args(arguments)
    plan = plan_of(options)
    assert (device_for(plan, options.device, None, options.stamps), plan.arch.name) == ("emulator", arch)
    # What a warp writes of a tile is at most 40 stamps, with which no tile of a large problem is lost.
    tiles = -(-plan.tiles * getattr(plan, "feature_groups", 1) // plan.clusters)
    assert with_profile(plan, options.stamps).profile >= 40 * tiles


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    small = ("patch-embed", "--arch", "sm_90a", "--batch", "8", "--positions", "49", "--features", "128",
             "--in-features", "128", "--sm-count", "2", "--set", "tile_rows=32", "--set", "warpgroups=1")  # fmt: skip
    monkeypatch.setattr(profile, "CASES", {"small": small})
    output = tmp_path / "phases"
    assert profile.main(["--output", str(output), "--device", "emulator"]) == 0
    text = Path(f"{output}.md").read_text()
    assert "wait operands_empty" in text and "wait operands_empty" in capsys.readouterr().out
    assert json.loads(Path(f"{output}-small.json").read_text())["problem"]["m"] == 8 * 49
    assert json.loads(Path(f"{output}-small.trace.json").read_text())["traceEvents"]


def test_a_case_that_fails_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "CASES", {"wrong": ("patch-embed", "--features", "7")})
    assert profile.main(["--output", str(tmp_path / "phases"), "--device", "emulator"]) == 2
    assert not list(tmp_path.iterdir())
