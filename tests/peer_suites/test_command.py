"""`make peers` with a project that nobody has. The suites of others need checkouts of theirs."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.peer_suites import __main__ as command
from tests.peer_suites import suites
from tests.peer_suites.outcome import PAGE, WHOSE, Cause, Found, Outcome, causes, judge, page, record, table
from tests.peer_suites.suites import SUITES, Sampled, Suite, sample, sessions
from tests.processes import run_python


def test_each_sampled_test_is_recorded_with_a_cause_that_there_is():
    tests, known, reasons = sample(), record(), causes()
    assert [each.name for each in tests] == list(known)
    assert {each.suite for each in tests} == {suite.name for suite in SUITES}
    assert sum(each.quick for each in tests) == 5
    for outcome in known.values():
        assert outcome.verdict in ("passed", "failed", "skipped")
        assert (outcome.cause in reasons) == (outcome.verdict == "failed")
    assert set(reasons) == {outcome.cause for outcome in known.values() if outcome.cause}


def test_the_page_has_the_tables_of_the_record():
    assert PAGE.read_text() == page(), "python -m tests.peer_suites . --page writes it"


def test_the_first_cause_that_fits_is_named():
    known = {"race": Cause("theirs", "^shared-race at kernel", "a race"), "race too": Cause("emulator", "race", "?")}
    assert judge(Found("failed", "shared-race at kernel.py:7: both write"), known) == Outcome("failed", "race")
    assert judge(Found("failed", "global-race: both write"), known) == Outcome("failed", "race too")
    assert judge(Found("failed", "KeyError: 1"), known) == Outcome("failed", "")
    assert judge(Found("passed", "race"), known) == Outcome("passed")


def test_the_table_counts_whose_fault_failures_are():
    known = {"a": Cause("theirs", "", "a race of theirs"), "b": Cause("stand-in", "", "no generators")}
    failures = [Outcome("failed", "a"), Outcome("failed", "b"), Outcome("failed")]
    outcomes = [Outcome("passed"), *failures, Outcome("skipped")]
    tests = [Sampled("acme", "sm_90a", f"t::{number}") for number in range(len(outcomes))]
    lines = table(tests, {each.name: outcome for each, outcome in zip(tests, outcomes, strict=True)}, known)
    columns = [cell.strip() for cell in lines[0].strip("|").split("|")]
    cells = dict(zip(columns, (cell.strip() for cell in lines[2].strip("|").split("|")), strict=True))
    expected = {"suite": "acme", "for": "sm_90a", "passed": "1", "theirs": "1", "ours: torch stand-in": "1"}
    assert cells == dict.fromkeys([*WHOSE.values()], "0") | expected | {"not explained": "1", "skipped by itself": "1"}
    assert "1 of 4 that are not skipped pass." in lines
    assert "| acme | 1 | theirs | a race of theirs |" in lines


@pytest.mark.parametrize("line", ["acme sm_90a", "acme sm_90a a.py::t\nacme sm_90a a.py::t"])
def test_a_sample_that_cannot_be_read(tmp_path: Path, line: str):
    (tmp_path / "sample.txt").write_text(line)
    with pytest.raises(ValueError, match=r"sample\.txt:\d = .*: must be"):
        sample(tmp_path / "sample.txt")


def test_a_process_has_tests_of_one_file_and_architecture():
    tests = [Sampled("a", "x", "f::1"), Sampled("a", "y", "f::1"), Sampled("a", "x", "g::1"), Sampled("a", "x", "f::2")]
    assert [[each.test for each in group] for group in sessions(tests)] == [["f::1", "f::2"], ["g::1"], ["f::1"]]


PACKAGE = '''
import torch
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.programs import host

PTX = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry multiply(.param .u64 p0, .param .u32 p1) {
    .reg .b64 %d; .reg .b32 %r, %s;
    ld.param.u64 %d, [p0]; ld.param.u32 %s, [p1];
    mul.lo.u32 %r, %s, 21; st.global.u32 [%d], %r; ret;
}"""


def multiply(number, threads=1):
    x = torch.tensor([0], dtype=torch.int32, device="cuda")
    parameters = (x.data_ptr().to_bytes(8, "little"), number.to_bytes(4, "little"))
    host.submit(CapturedLaunch("multiply", (1, 1, 1), (threads, 1, 1), (1, 1, 1), 0, parameters, PTX))
    return x.item()
'''

TESTS = """
import os
import pytest
import torch
from acme.products import multiply

drawn = []

@pytest.mark.parametrize("number", [2, 3])
def test_right(number):
    assert multiply(number) == 21 * number

def test_race():
    assert multiply(2, threads=64) == 42

def test_wrong():
    assert multiply(2) == 43

def test_skipped():
    pytest.skip("not on this chip")

@pytest.mark.parametrize("again", [0, 1])
def test_numbers_do_not_depend_on_tests_before(again):
    drawn.append(torch.randn(1).item())
    assert drawn[0] == drawn[-1]

def test_dies():
    os._exit(7)
"""

SAMPLED = """
*acme sm_90a test_products.py::test_right[2]
acme sm_90a test_products.py::test_race
acme sm_90a test_products.py::test_wrong
acme sm_90a test_products.py::test_skipped
acme sm_90a test_products.py::test_numbers_do_not_depend_on_tests_before[0]
acme sm_90a test_products.py::test_numbers_do_not_depend_on_tests_before[1]
acme sm_90a test_products.py::test_dies
acme sm_90a test_broken.py::test_right
"""

CAUSED = {
    "race": {"whose": "theirs", "said": "^global-race", "why": "threads write the same word"},
    "wrong": {"whose": "emulator", "said": r"^AssertionError: .* at test_products\.py:\d+$", "why": "a wrong product"},
    "dies": {"whose": "theirs", "said": "^no result: ", "why": "the test ends the process"},
    "import": {"whose": "environment", "said": "No module named 'nothing'", "why": "nothing is not installed"},
}


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the checkout of a project whose tests pass, fail, are skipped and die; a record of its own."""
    checkout = tmp_path / "peers" / "acme"
    (checkout / "tests").mkdir(parents=True)
    (checkout / "source").mkdir()
    (checkout / "source" / "products.py").write_text(PACKAGE)
    (checkout / "tests" / "test_products.py").write_text(TESTS)
    (checkout / "tests" / "test_broken.py").write_text("import nothing\ndef test_right(): pass\n")
    (tmp_path / "sample.txt").write_text(SAMPLED)
    (tmp_path / "causes.json").write_text(json.dumps(CAUSED))
    suite = Suite("acme", "somebody/acme", "abcdef12", "tests", {"acme": "source"}, {"ACME": "1"})
    monkeypatch.setattr(suites, "SUITES", (suite,))
    monkeypatch.setattr(suites, "SAMPLE", tmp_path / "sample.txt")
    monkeypatch.setattr("tests.peer_suites.outcome.CAUSES", tmp_path / "causes.json")
    monkeypatch.setattr("tests.peer_suites.outcome.RECORD", tmp_path / "expected.json")
    monkeypatch.setattr("tests.peer_suites.outcome.subprocess.run", _run)
    return tmp_path


def _run(command: list[Any], *, timeout: float = 60, **keywords: Any) -> subprocess.CompletedProcess:
    """Emulated programs run in a process of the server, which has torch already."""
    if command[0] == "git":
        return subprocess.CompletedProcess(command, 0, "0123456789\n", "")
    return run_python(*command[1:], cwd=keywords["cwd"], env=keywords["env"], timeout=timeout)


def test_a_suite(acme: Path, capsys: pytest.CaptureFixture[str]):
    """Every outcome has its cause; what is then recorded passes, and another outcome, or one unexplained, fails."""
    folder = str(acme / "peers")
    assert command.main([folder, "--record"]) == 0
    said = capsys.readouterr().out
    assert "acme: commit 01234567; the record is of abcdef12" in said
    assert re.search(r"test_race: failed, \d+ s, race .*\n    global-race: ", said)
    assert "3 of 7 that are not skipped pass." in said
    words = {name.rpartition("::")[2]: (each.verdict, each.cause) for name, each in record().items()}
    assert words.pop("test_right[2]") == ("passed", "") and words.pop("test_right") == ("failed", "import")
    assert words == {
        "test_race": ("failed", "race"),
        "test_wrong": ("failed", "wrong"),
        "test_skipped": ("skipped", ""),
        "test_numbers_do_not_depend_on_tests_before[0]": ("passed", ""),
        "test_numbers_do_not_depend_on_tests_before[1]": ("passed", ""),
        "test_dies": ("failed", "dies"),
    }
    assert not list((acme / "peers").rglob("__pycache__"))

    assert command.main([folder, "--quick"]) == 0
    assert "1 of 1 that are not skipped pass." in capsys.readouterr().out
    tests = acme / "peers" / "acme" / "tests" / "test_products.py"
    tests.write_text(TESTS.replace("== 21 * number", "== unknown"))
    assert command.main([folder, "--quick", "--record"]) == 1
    said = capsys.readouterr().out
    assert "<- recorded: passed" in said and "| acme | 1 | not explained |  |" in said


def test_a_folder_without_checkouts(acme: Path, capsys: pytest.CaptureFixture[str]):
    for folder, said in ((acme, "must have a checkout"), (acme / "no", "must be a folder with checkouts")):
        with pytest.raises(SystemExit):
            command.main([str(folder)])
        assert said in capsys.readouterr().err
