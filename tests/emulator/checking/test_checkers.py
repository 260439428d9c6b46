"""docs/emulator/evidence.md says what Task Scheduling and the emulator say; by day of some of its rows."""

from __future__ import annotations

import re

import pytest

from tests import nightly
from tests.emulator.checking import checkers

TABLE = checkers.PAGE.read_text().partition(checkers.BEGIN)[2].partition(checkers.END)[0]
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", TABLE, re.MULTILINE)[1:]
DAILY = ("none", "no wait", "half of the bytes")


def test_the_page_has_all_faults() -> None:
    """Every fault of the program has a row, in which each of the three tools says something."""
    assert [fault for fault, *_ in ROWS] == list(checkers.FAULTS)
    assert all(said for row in ROWS for said in row)


@pytest.mark.parametrize("fault", checkers.FAULTS if nightly.NIGHTLY else DAILY)
def test_rows(fault: str) -> None:
    (row,) = [row for row in ROWS if row[0] == fault]
    refused, _, _ = checkers.run(fault)
    assert (f"refuses it: {refused[:72]}" in row[1]) if refused else row[1] == "nothing"
    _, kind, launches = checkers.run(fault, "--unchecked")
    assert len(launches) == 1 and row[2] == (f"`{kind}`" if kind else "nothing")
