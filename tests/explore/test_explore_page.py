"""The notebook for exploring tile parameters runs, and what it prints follows from the tile sizes."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from cute_kernels.explore.explorer import drawn
from cute_kernels.explore.page import timeline_page
from cute_kernels.plan import b200
from cute_kernels.plan.base import Prediction

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
    printed = capsys.readouterr().out
    assert "stages=9: stages = 9: must be" in printed
    check_times(names["predictions"], printed)

    trace = tmp_path / "trace.json"
    found, page = drawn(trace), (tmp_path / "trace.html").read_text()
    assert page.count("<rect ") == len(found["slices"]) and page.count("<path ") == len(found["arrows"]) > 0
    assert {kind for *_, kind, _ in found["slices"]} == {"work", "wait", "instruction", "unit"}
    roles = names["plans"]["default"].roles
    for cta in range(2):
        assert [f"CTA {cta}  warp {i} {role}" for i, role in enumerate(roles)] == [
            label for label in found["tracks"] if label.startswith(f"CTA {cta}  warp")
        ]
    assert "CTA 0  tensor core" in found["tracks"] and found["tracks"].count("CTA 1  TMA") == 1
    lines = [tuple(map(float, each)) for each in re.findall(r'<path d="M(\S+) (\S+) L(\S+) (\S+)"', page)]
    assert lines == [(a, b + 0.5, c, d + 0.5) for a, b, c, d in found["arrows"]]
    assert all(a <= c and max(b, d) < len(found["tracks"]) for a, b, c, d in lines)
    # Every wait says what it is for, and every slice of the first cluster is there.
    events = json.loads(trace.read_text())["traceEvents"]
    assert len(found["slices"]) == sum(e["ph"] == "X" and e["pid"] in (1, 2) for e in events)
    assert all("wait" in words for *_, kind, words in found["slices"] if kind == "wait")
    # A long one: numbers keep their digits, and what is left out is said.
    long = {
        "of": "x",
        "tracks": ["a"],
        "slices": [(0, n + 1_000_000.5, 1, "work", "w") for n in range(20_001)],
        "arrows": [(1_000_001.5, 0, 1_000_002.5, 0), (1_020_000.5, 0, 1_020_002.5, 0)],
    }
    shown = timeline_page(long)
    assert 'x="1000001.5"' in shown and 'viewBox="0 0 1020000.5 1"' in shown and shown.count("<path ") == 1
    assert "These are the first 20,000 of 20,001 slices." in shown and "These are the first" not in page
    with pytest.raises(ValueError, match="cluster = 5 is not in"):
        drawn(trace, cluster=5)


def check_times(predictions: dict[str, Prediction], printed: str) -> None:
    """The modelled times at 4736 images, by hand from the tiles: 74 pairs share 3,626 rows of tiles of 256."""
    per_byte = b200.FITTED.operand_byte / b200.CLOCKS_PER_MICROSECOND
    for name, tiles, columns in (("default", -(-3626 * 3 // 74), 256), ("128 columns", -(-3626 * 6 // 74), 128)):
        operands = 6 * (16384 + 64 * columns)
        assert predictions[name].parts["operands from L2"] == pytest.approx(tiles * operands * per_byte)
        assert f"\n{name:22}{predictions[name].microseconds:12,.0f}  operands from L2, " in printed
    waits = [predictions[name].parts["waits for tensor memory"] for name in ("16 columns a load", "default")]
    assert waits[0] == pytest.approx(2 * waits[1])
    # Weights on chip are not brought again for every tile; which of them is chosen, the model does not tell.
    on_chip = {predictions[name].microseconds for name in ("weight in SMEM", "weight in TMEM")}
    assert predictions["chosen"].microseconds in on_chip
    assert max(on_chip) < min(p.microseconds for name, p in predictions.items() if p.microseconds not in on_chip)
