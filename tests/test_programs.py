"""The record of `make programs` and its table in the docs. The programs themselves need packages that others made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.cases import HERE, cases
from tests.programs.outcome import Outcome, judge, record, table

PAGE = Path(__file__).parents[1] / "docs" / "emulator" / "programs.md"


def test_each_case_is_recorded_and_has_a_program():
    names = [case.name for case in cases()]
    assert list(record()) == names and len(set(names)) == len(names)
    assert all((HERE / case.program).exists() for case in cases())
    assert {outcome.verdict for outcome in record().values()} <= {"exact", "reported", "refused"}


def test_the_page_has_the_table():
    page = PAGE.read_text().splitlines()
    first = page.index("| of | what | for | result |")
    lines = table(record())
    assert page[first : first + len(lines) + 1] == [*lines, ""]


RACE = {"kind": "global-race", "sentence": "a race", "place": {"source": {"file": "a/kernel.py", "line": 7}}}
NOWHERE = {"kind": "exit-in-use", "sentence": "an exit", "place": {"source": None}}
REFUSED = {"kind": "unsupported", "sentence": "no such opcode", "place": None}


@pytest.mark.parametrize(
    ("status", "output", "diagnostics", "outcome"),
    [
        (0, "PASS on H200", [], Outcome("exact")),
        (3, "PASS on H200", [RACE, RACE, NOWHERE], Outcome("reported", ("global-race at kernel:7", "exit-in-use"))),
        (3, "wrong: gemm", [RACE], Outcome("wrong", ("global-race at kernel:7",))),
        (1, "wrong: gemm", [], Outcome("wrong")),
        (4, "", [REFUSED], Outcome("refused", ("no such opcode",))),
        (4, "first\nlast\n", [], Outcome("refused", ("last",))),
        (3, "", [RACE], Outcome("crashed", ("global-race at kernel:7",))),
        (1, "Traceback\nKeyError: 1\n", [], Outcome("crashed", ("KeyError: 1",))),
        (0, "", [], Outcome("crashed")),
    ],
)
def test_the_verdict(status: int, output: str, diagnostics: list[dict], outcome: Outcome):
    assert judge(status, output, diagnostics) == outcome
