"""The JSON schema, the tables and the plot, on made-up measurements."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench import results as r
from bench.cases import Case, Check
from bench.peers import OURS
from bench.timing import LaunchCost, Protocol, Run

CASE = Case("base-p16", 100, 200, 500, 1000, 400)


def runs(*milliseconds: float, burst: float) -> list[Run]:
    sustained = [Run("sustained", i, 10, ms, 1500.0, 690.0, 690.0 * ms) for i, ms in enumerate(milliseconds)]
    return [Run("burst", 0, 5, burst, 1980.0, 400.0), *sustained]


@pytest.fixture
def results() -> r.Results:
    check = Check(0.002, 0.0015, 0)
    peers = [
        r.PeerResult("slow", "complete", "tile | 128", check, runs(4.0, 5.0, 6.0, burst=3.0)),
        r.PeerResult("absent", "GEMM only", reason="not installed: absent"),
        r.PeerResult(OURS, "complete", "default", check, runs(2.0, 2.0, 2.5, burst=1.5), LaunchCost(7.0, None, "no")),
        r.PeerResult("copy", "copy", runs=runs(1.0, burst=1.0)),
    ]
    protocol = Protocol(rounds=3, sustained_s=0.01)
    return r.Results("2026-01-01", "command", {"gpu": "made up"}, protocol, [r.CaseResult(CASE, peers)])


def test_rows_are_sorted_and_divided_by_ours(results: r.Results) -> None:
    rows = [dict(zip(r.HEADER, row, strict=True)) for row in r.case_rows(results.cases[0], OURS)]
    assert [row["peer"] for row in rows] == ["copy", OURS, "slow", "absent"]
    assert [row["vs ours"] for row in rows] == ["0.500", "1.000", "2.500", ""]
    ours = rows[1]
    assert ours["sustained ms"] == "2.000 [2.000, 2.250]"
    assert ours["burst ms"] == "1.500 [1.500, 1.500]"
    # 2 * 20000 * 500 * 1000 operations in 2 ms; 20000 * (500 + 2000) + 500000 + 800000 bytes.
    assert ours["TFLOP/s"] == "10"
    assert ours["TB/s"] == "0.03"
    assert (ours["MHz"], ours["W"], ours["mJ"], ours["row error"]) == ("1500", "690", "1380", "0.0020")
    assert rows[0]["TFLOP/s"] == ""
    assert rows[3]["with"] == "not run: not installed: absent"


def test_json_round_trip(results: r.Results) -> None:
    text = r.to_json(results)
    assert r.from_json(text) == results
    assert json.loads(text)["schema"] == "cute-kernels/bench/1"


def _edit(document: dict, path: list, value: object) -> dict:
    place = document
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return document


@pytest.mark.parametrize(
    "path, value, match",
    [
        (["schema"], "other/1", "not a document"),
        (["date"], KeyError, "missing .'date'"),
        (["cases", 0, "case", "k"], KeyError, "missing .'k'"),
        (["cases", 0, "peers", 0, "runs", 0, "seconds"], 1.0, "unknown .'seconds'"),
        (["cases", 0, "peers", 0, "runs"], [], "either runs or a reason"),
        (["cases", 0, "peers", 0, "reason"], "broken", "either runs or a reason"),
        (["cases", 0, "peers", 0, "check"], [1], "expected an object"),
    ],
)
def test_json_is_checked_when_read(results: r.Results, path: list, value: object, match: str) -> None:
    document = _edit(json.loads(r.to_json(results)), path, value)
    with pytest.raises(ValueError, match=match):
        r.from_json(json.dumps(document))


def test_json_refuses_nan(results: r.Results) -> None:
    results.cases[0].peers[0].check = Check(float("nan"), 0.0, 0)
    with pytest.raises(ValueError, match="JSON"):
        r.to_json(results)


def test_reduced_cases_say_so(results: r.Results) -> None:
    assert "reduced from 400 images" in CASE.title
    _, rows = r.overview_rows(results, OURS, "sustained")
    assert rows == [("base-p16/200 x 100*", "2.0000", "2.50", "-", "0.50")]


def test_table_and_report_show_every_peer(results: r.Results) -> None:
    buffer = io.StringIO()
    Console(width=240, file=buffer).print(r.case_table(results.cases[0], OURS))
    # A title wider than its table is wrapped.
    shown, report = " ".join(buffer.getvalue().split()), r.report(results, OURS)
    for text in (shown, report):
        assert all(name in text for name in ("slow", "absent", OURS, "copy", "reduced from 400 images"))
    assert "median [quartiles]" in shown
    assert "tile \\| 128" in report
    assert "no graph: no" in report
    for line in report.splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") in (len(r.HEADER) + 1, len(r.COST_HEADER) + 1)


def test_plot_is_a_picture(results: r.Results, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    r.plot(results, OURS, path)
    from matplotlib import image

    pixels = image.imread(path)[..., :3]
    assert pixels.shape[1] > 800
    red = (abs(pixels - [0xC4 / 255, 0x4E / 255, 0x52 / 255]) < 0.01).all(-1)
    blue = (abs(pixels - [0x4C / 255, 0x72 / 255, 0xB0 / 255]) < 0.01).all(-1)
    # Our bar (2.0 ms) is 2 / 5 of the slow peer's (5.0 ms), both as high.
    assert red[:, :].any() and blue.any()
    longest = [max(row.sum() for row in mask) for mask in (red, blue)]
    assert longest[0] / longest[1] == pytest.approx(0.4, abs=0.03)


def test_plot_names_what_it_shows_and_no_number_lies_under_a_tick(
    results: r.Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot

    variant = r.PeerResult(f"{OURS} tile_n=64", "complete", runs=runs(3.0, 3.0, 3.0, burst=4.0))
    results.cases[0].peers.append(variant)
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    r.plot(results, OURS, tmp_path / "plot.png")
    (axis,) = pyplot.gcf().axes
    (legend,) = pyplot.gcf().legends
    monkeypatch.undo()
    pyplot.close("all")
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == [OURS, f"{OURS}, another configuration", "complete", "copy"]  # "GEMM only" did not run
    handles = {text: patch.get_facecolor() for text, patch in zip(texts, legend.get_patches(), strict=True)}
    names = [label.get_text() for label in axis.get_yticklabels()]
    bars = dict(zip(names, (patch.get_facecolor() for patch in axis.patches), strict=True))
    assert names == ["slow", variant.name, OURS, "copy"]
    assert [bars[name] for name in names] == [handles[text] for text in ("complete", texts[1], OURS, "copy")]
    assert len(set(bars.values())) == 4
    # The quartiles' upper end, or the burst median where that is further right.
    assert [text.get_position()[0] for text in axis.texts] == [5.5, 4.0, 2.25, 1.0]


def test_labels_of_many_variants_say_what_differs_and_do_not_touch(
    results: r.Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot

    settings = ("tile_images=64,row_patches=2,tile_n=192", "cluster=2,stages=4,store_stages=2,pingpong=True")
    variants = [f"{OURS} tile_rows=1,{settings[0]},{settings[1]},order={order}" for order in ("row", "image")]
    variants += [f"{OURS} tile_rows=1,tile_n={n}" for n in range(64, 320, 16)]
    results.cases[0].peers += [r.PeerResult(name, "complete", runs=runs(3.0, 3.0, 3.0, burst=4.0)) for name in variants]
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    r.plot(results, OURS, tmp_path / "plot.png")
    figure = pyplot.gcf()
    figure.canvas.draw()  # extents are known of what was drawn at the figure's own resolution
    labels = figure.axes[0].get_yticklabels()
    monkeypatch.undo()
    pyplot.close("all")
    names = [label.get_text() for label in labels]
    assert "tile_n=80" in names and "slow" in names and OURS in names
    long = next(name for name in names if "order=row" in name)
    assert long.replace("\n", " ") == f"{settings[0]},{settings[1]},order=row".replace(",", ", ")
    assert long.count("\n") >= 1 and not any("tile_rows" in name for name in names)
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
    assert all(lower.y1 <= upper.y0 for lower, upper in itertools.pairwise(boxes))
    (legend,) = figure.legends
    assert min(box.x0 for box in boxes) >= 0 and not legend.get_window_extent().overlaps(figure.axes[0].bbox)
