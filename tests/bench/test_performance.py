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

    now |= {"repack_pairs": 4, "skip_zeros": True}  # which were fields then

    def detail(**changes: object) -> str:
        return ", ".join(f"{name} {value}" for name, value in {**now, **changes}.items())

    assert performance.is_today(detail(), case)
    assert not performance.is_today(detail(stages=now["stages"] - 1), case)
    assert not performance.is_today(f"patchify in front, {detail()}", case)
    before = detail().replace(", repack_pairs 4", "")
    assert before != detail() and not performance.is_today(before, case)


def test_the_products_on_a_gpu_that_are_shown_as_today_s() -> None:
    """The headline of either kind of pixels is a time of the default configuration."""
    shown = {row.result.case.name: row.current for row in performance.image_rows()}
    assert shown["base-p16 x 4736"] and shown["base-p16 x 4736, bfloat16"]
    assert not shown["vit-b32 x 4736"]
