"""``cute-kernels profile`` in the emulator, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest
import torch

from cute_kernels.commands.cli import main
from tests.emulator.observe.test_trace import check_well_formed, read, thread_names

SMALL = ("--batch", "8", "--positions", "49", "--features", "128", "--in-features", "128", "--sm-count", "2")


def test_command_in_the_emulator(capsys, tmp_path) -> None:
    trace, facts = tmp_path / "trace.json", tmp_path / "facts.json"
    options = ("--arch", "sm_90a", "--device", "emulator")  # also where there is such a GPU
    arguments = ["profile", *options, *SMALL, "--set", "tile_rows=32", "--set", "warpgroups=1", "--warps"]
    assert main([*arguments, "--trace", str(trace), "--json", str(facts)]) == 0
    text = capsys.readouterr().out
    assert "role" in text and "phases of a tile" in text and "%" not in text and "clocks per tile" not in text
    assert "emulator: clocks are no time" in text and "launch:" not in text and "waits least" not in text
    found = json.loads(facts.read_text())
    assert found["device"] == "emulator" and found["lost_stamps"] == 0 and found["equilibrium"]
    mean = {(warp["warp"], warp["phase"]): warp["mean"] for warp in found["warps"]}
    for warp in range(5):
        parts = [clocks for (index, phase), clocks in mean.items() if index == warp and phase != "all"]
        assert sum(parts) == pytest.approx(mean[warp, "all"])
    assert re.search(r"^load +.*wait operands_empty", text, re.MULTILINE)
    events = read(trace)
    check_well_formed(events)
    assert {"warp 0 mma", "warp 4 load"} <= set(thread_names(events).values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "64"], "there is no GPU for sm_100a here, and [0-9]+ tiles take long in the emulator"),
        (["--device", "gpu"], "--device gpu: there is no GPU for sm_100a here"),
        ([*SMALL, "--stamps", "9"], "stamps = 9: must be"),
        (["patch-embed-images", "--arch", "sm_90a", "--patch", "28"], "chains kernels, of patchify and patch_embed"),
        (["gemm"], r"kernels of gemm \(Sm100GemmPlan\) write no clock stamps"),
        ([*SMALL, "--arch", "sm_89"], r"kernels of patch_embed \(Sm80PatchEmbedPlan\) write no clock stamps"),
        ([*SMALL, "--trace", "/nowhere/trace.json"], "no folder /nowhere"),
    ],
)
def test_command_says_what_is_wrong(arguments: list[str], message: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["profile", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
