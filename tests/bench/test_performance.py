"""docs/performance.md is what the recorded results say, and the index names every one of them."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from pathlib import Path

import pytest

from bench import archive, performance
from bench.image_cases import make_cases
from bench.image_cases import problem as problem_of
from cute_kernels.plan import make_plan


def test_the_page_is_the_generated_one() -> None:
    assert performance.render() == performance.PAGE.read_text(), "python -m bench.performance writes it"


def test_the_index_names_every_recorded_file() -> None:
    found = {
        path.name.removesuffix(archive.SUFFIX): set(archive.contents(path)) for path in archive.RESULTS.glob("*.xz")
    }
    assert {name: set(files) for name, files in archive.index().items()} == found
    assert {path.name for path in archive.RESULTS.iterdir()} == {f"{name}{archive.SUFFIX}" for name in found} | {
        "index.json"
    }
    assert all(
        entry["command"].startswith("python -m bench.") for day in archive.index().values() for entry in day.values()
    )


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """An archive of two files."""
    path = tmp_path / f"2026-01-02-card{archive.SUFFIX}"
    with tarfile.open(path, "w:xz") as opened:
        for name, text in (("./a-1.json", '{"a": 1}'), ("b.txt", "text\n")):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            opened.addfile(info, io.BytesIO(text.encode()))
    return path


def test_files_are_read_beside_and_inside_of_an_archive(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = packed.parent / "c.txt"
    beside.write_text("beside")
    assert archive.read_text(beside) == "beside" and json.loads(archive.read_text(packed / "a-1.json")) == {"a": 1}
    assert archive.expand(packed / "a*.json") == [packed / "a-1.json"] and archive.expand(beside) == [beside]
    with pytest.raises(FileNotFoundError, match=r"has no c\.json, only a-1\.json, b\.txt"):
        archive.read_text(packed / "c.json")
    with pytest.raises(FileNotFoundError):
        archive.read_text(packed.with_name(f"none{archive.SUFFIX}") / "b.txt")
    assert archive.main([str(packed / "?.txt")]) == 0 and capsys.readouterr().out == "text\n"


def test_a_time_counts_for_the_configuration_that_it_was_taken_with() -> None:
    """As benches write a configuration; a run from before a field existed counts only where that changes nothing."""
    (case,) = make_cases(["base-p14"], [4736])
    now = dataclasses.asdict(make_plan(problem_of(case), None, "sm_90a", sm_count=132).config)
    fields = {"repack_pairs": 4, "skip_zeros": True}  # which they were until

    def detail(**changes: object) -> str:
        return ", ".join(f"{name} {value}" for name, value in {**now, **changes}.items())

    earlier, later = "2026-11-26", performance.FIELDS_WENT
    assert performance.is_today(detail(**fields), case, earlier) and performance.is_today(detail(), case, later)
    assert not performance.is_today(detail(), case, earlier)
    for date in (earlier, later):
        assert not performance.is_today(detail(**fields, stages=now["stages"] - 1), case, date)
        assert not performance.is_today(f"patchify in front, {detail(**fields)}", case, date)
    assert not performance.is_today(detail(skip_zeros=True), case, earlier)


def test_times_on_the_page_are_of_today_s_configurations() -> None:
    """An asterisk marks another one, and the page would have to say what it means."""
    shown = [row for row in performance.image_rows() if row.result.case.images in performance.IMAGES]
    assert len(shown) > 40 and [row.result.case.name for row in shown if not row.current] == []
    assert "\\*" not in performance.images()
