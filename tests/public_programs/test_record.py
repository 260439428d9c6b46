"""The record of `make programs` and its tables in the docs. The programs themselves need what others made."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_python
from tests.public_programs import __main__ as command
from tests.public_programs import clones, page
from tests.public_programs.cases import HERE, cases
from tests.public_programs.clones import CLONES, Clone
from tests.public_programs.outcome import Outcome, judge, record, write_record

VERDICTS = {"exact", "reported", "refused"}


def test_each_case_is_recorded_and_has_a_program():
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    assert all((HERE / case.program).exists() for case in cases())
    known = record()
    assert {known[name].verdict for name in names} <= VERDICTS
    for clone in CLONES:
        examples = [case.name for case in clone.cases()]
        assert len(set(examples)) == len(examples)
        assert {known[name].verdict for name in examples} <= VERDICTS | {"stopped", "unchecked"}
        names += examples
    assert list(known) == names


def test_the_page_is_that_of_the_record():
    """Every run is counted by its verdict."""
    text = page.PAGE.read_text()
    assert page.render() == text, "python -m tests.public_programs --page writes it"
    table = text.partition(page.BEGIN)[2].partition(page.END)[0]
    rows = {
        row[0]: row[1:] for row in ([cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines())
    }
    suites = {"packages": list(cases())} | {clone.origin: list(clone.cases()) for clone in CLONES}
    known = record()
    for title, suite in suites.items():
        counts = dict(zip(rows["suite"], map(int, rows[title]), strict=True))
        assert counts.pop("runs") == len(suite) == sum(counts.values())
        for verdict, count in counts.items():
            assert [known[case.name].verdict for case in suite].count(verdict) == count


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
        (1, "AssertionError: Tensor-likes are not close!", [], Outcome("wrong")),
        (4, "", [REFUSED], Outcome("refused", ("no such opcode",))),
        (4, "first\nlast\n", [], Outcome("refused", ("last",))),
        (3, "emulated: 2 launches complete in 1.0 s", [RACE], Outcome("stopped", ("global-race at kernel:7",))),
        (3, "emulated: 2 launches in 1.0 s", [RACE], Outcome("unchecked", ("global-race at kernel:7",))),
        (3, "PASS on H200\nTraceback", [RACE], Outcome("stopped", ("global-race at kernel:7",))),
        (1, "Traceback\nKeyError: 1\nemulated: 1 launch in 0.1 s\n", [], Outcome("crashed", ("KeyError: 1",))),
        (0, "", [], Outcome("unchecked")),
        (3, "help: it is wrong: look\nemulated: 1 launch in 1.0 s", [NOWHERE], Outcome("unchecked", ("exit-in-use",))),
    ],
)
def test_the_verdict(status: int, output: str, diagnostics: list[dict], outcome: Outcome):
    assert judge(status, output, diagnostics) == outcome


def test_programs_that_assert_and_say_nothing():
    assert judge(0, "", [], silent=True) == Outcome("exact")
    assert judge(3, "emulated: 2 launches in 1.0 s", [NOWHERE], silent=True) == Outcome("reported", ("exit-in-use",))
    assert judge(3, "emulated: 2 launches complete in 1.0 s", [NOWHERE], silent=True).verdict == "stopped"


PROGRAM = """
import sys
import torch
from cute_kernels.emulator.programs import host
from cute_kernels.emulator.captured_launch import CapturedLaunch

PTX = '''.version 8.8
.target sm_80
.address_size 64
.visible .entry multiply(.param .u64 p0, .param .u32 p1) {
    .reg .b64 %d; .reg .b32 %r, %s;
    ld.param.u64 %d, [p0]; ld.param.u32 %s, [p1];
    mul.lo.u32 %r, %s, 21; st.global.u32 [%d], %r; ret;
}'''
x = torch.tensor([0], dtype=torch.int32, device="cuda")
block = (int(sys.argv[2]), 1, 1)
parameters = (x.data_ptr().to_bytes(8, "little"), int(sys.argv[1]).to_bytes(4, "little"))
host.submit(CapturedLaunch("multiply", (1, 1, 1), block, (1, 1, 1), 0, parameters, PTX))
assert x.item() == 42, "Tensor-likes are not close!"
print("the product is correct")
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of a repository with one program, in place of the others, and a record of its own."""
    folder = tmp_path / "clone" / "examples" / "products"
    folder.mkdir(parents=True)
    (folder / "multiply.py").write_text(PROGRAM)
    runs = ("# of the test", "sm_100a {} 2 1", "sm_90a {} 2 64", "", "sm_90a {} 3 1", "")
    (tmp_path / "list.txt").write_text("\n".join(runs).format(*["products/multiply.py"] * 3))
    clone = Clone("fake-examples", "somebody/products, v1", "examples", str(tmp_path / "list.txt"), "", ("is correct",))
    monkeypatch.setattr(command, "CLONES", (clone,))
    monkeypatch.setattr(command, "cases", lambda: iter(()))
    monkeypatch.setattr("tests.public_programs.outcome.RECORD", tmp_path / "expected.json")
    monkeypatch.setattr("tests.public_programs.outcome.subprocess.run", _run)
    return tmp_path


def _run(command: list[str], *, env: dict[str, str], cwd: str, timeout: float, **_: Any) -> subprocess.CompletedProcess:
    """Programs run in a process of the server, which has torch already."""
    return run_python(*command[1:], cwd=Path(cwd), env=env, timeout=timeout)


def test_programs_of_a_clone(fake: Path, capsys: pytest.CaptureFixture[str]):
    """One that is right, one with a race that gives the right result, and one with a wrong result."""
    arguments = ["--fake-examples", str(fake / "clone"), "--jobs", "2"]
    assert command.main([*arguments, "2", "--record"]) == 0
    said = capsys.readouterr().out
    assert "| `products/multiply` | `2 1` | sm_100a | exact |" in said
    assert "| `products/multiply` | `2 64` | sm_90a | reported: `global-race" in said
    assert command.main([*arguments, "2 1"]) == 0
    assert "not as recorded" not in capsys.readouterr().out
    assert command.main([*arguments, "3 1"]) == 1
    said = capsys.readouterr().out
    assert "| `products/multiply` | `3 1` | sm_90a | wrong |" in said and "not as recorded" in said


def test_a_folder_that_is_no_clone(fake: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command.main(["--fake-examples", str(fake)])
    assert "no folder examples there: must be a clone of somebody/products, v1" in capsys.readouterr().err


def test_a_driver_runs_in_place_of_the_program(tmp_path: Path):
    """And gets it as its first argument."""
    name = "sm_100a 10-block-scaled-matmul.py mixed"
    (example,) = [case for case in clones.TRITON_TUTORIALS.cases() if case.name == name]
    words = example.command(tmp_path)
    assert words == [str(HERE / "triton_tutorial.py"), str(tmp_path / "10-block-scaled-matmul.py"), "mixed"]


def test_the_record_is_read_as_it_was_written(fake: Path):
    outcomes = {"a": Outcome("exact"), 'b "c"': Outcome("reported", ("race at x:1", "race"))}
    write_record(outcomes)
    assert record() == outcomes and len((fake / "expected.json").read_text().splitlines()) == 4
