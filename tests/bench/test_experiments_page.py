"""docs/experiments.md is what `bench.experiments_page` writes, and its data are whole."""

from __future__ import annotations

import copy
import re

import pytest

from bench import experiments_page as page

DATA = page.load()
TABLES = DATA["notes"]


def test_the_page_is_generated() -> None:
    assert page.render(DATA) == page.PAGE.read_text()


def test_data_are_written_as_they_are_kept(tmp_path, monkeypatch) -> None:
    """A row is a line, so that a change of one is a change of one."""
    monkeypatch.setattr(page, "DATA", tmp_path / "data.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    kept = page.DATA.parent.joinpath("data.json")
    page.write(DATA)
    assert kept.read_text() == page.Path(page.__file__).with_suffix(".json").read_text()
    rows = sum(len(table["rows"]) for table in TABLES.values())
    assert sum(line.startswith("    [") for line in kept.read_text().splitlines()) == rows


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_whole(name: str) -> None:
    table = TABLES[name]
    assert {len(row) for row in table["rows"]} == {len(table["columns"])}


def test_every_experiment_of_the_notes_is_there() -> None:
    """F1 to F35, but for the numbers that the notes do not have."""
    found = {number for row in DATA["notes"]["numbered"]["rows"] for number in re.findall(r"F(\d+)", row[0])}
    assert {int(number) for number in found} == set(range(1, 36)) - {15, 16, 18, 27}
    table = page.pairs_table(DATA["pairs"])
    assert "| F13 | table lines 4,096 -> 2,048 | yes: half of the lines that table loads touch, " in table


def test_counts_stand_in_the_phases() -> None:
    cells = [cell for row in page.with_counts(DATA["notes"]["phases"], DATA["last"])["rows"] for cell in row]
    assert any("TMA fill 1,536 " in cell for cell in cells) and not any("{" in cell for cell in cells)
    with pytest.raises(KeyError, match="wavefronts"):
        page.with_counts({"columns": ["a"], "rows": [["{wavefronts}"]]}, DATA["last"])
    # The notes' phases make the clocks of a tile.
    clocks = [int(row[1].replace(",", "")) for row in DATA["notes"]["phases"]["rows"]]
    text = page.PAGE.read_text()
    assert f"make {sum(clocks[3:]):,} clocks of a tile and the MMA warp's 6,066" in text and sum(clocks[:3]) == 6065


def test_a_table_without_a_place_is_an_error() -> None:
    data = copy.deepcopy(DATA)
    data["notes"]["other"] = data["notes"]["steps"]
    with pytest.raises(ValueError, match="has no place for other"):
        page.render(data)
