"""The notebook for exploring tile parameters runs, and what it prints follows from the tile sizes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from cute_kernels.commands.trace_figure import draw_trace

NOTEBOOK = Path(__file__).parents[2] / "docs" / "explore.py"


def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(NOTEBOOK))
    counts = names["counts"]
    assert counts["default"]["TMA fill"] == counts["default"]["MMA operand reads"] == 6 * 32768 / 128
    # With 128 columns a CTA loads its rows of x for half of the outputs: twice as often, and half of the weight each.
    assert counts["128 columns"]["TMA fill"] == 6 * (2 * 16384 + 2 * 8192) / 128
    assert counts["BF16 epilogue"]["table sectors of 32 B"] == counts["default"]["table sectors of 32 B"] / 2
    assert all(values["bank conflicts"] == 0 for values in counts.values())
    assert "stages=9: stages = 9 is not possible" in capsys.readouterr().out

    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = draw_trace(tmp_path / "trace.json").axes
    (legend,) = axes.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "work", "wait", "instruction that synchronises or starts something", "TMA copy, MMA, commit under way",
        "several of them at once", "release -> wait that it ends",
    ]  # fmt: skip
    labels = [label.get_text() for label in axes.get_yticklabels()]
    roles = names["plans"]["default"].roles
    for cta in range(2):
        assert [f"CTA {cta}  warp {i} {role}" for i, role in enumerate(roles)] == [
            label for label in labels if label.startswith(f"CTA {cta}  warp")
        ]
    assert "CTA 0  tensor core" in labels and labels.count("CTA 1  TMA") == 1
    part = draw_trace(tmp_path / "trace.json", steps=(100, 200))
    assert part.axes[0].get_xlim() == (100, 200)
    with pytest.raises(ValueError, match="cluster = 5 is not in"):
        draw_trace(tmp_path / "trace.json", cluster=5)
