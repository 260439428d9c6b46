"""``--keep-going`` and suppressions, on a kernel with two faults: no proxy fence, a store that nobody waits for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cute_kernels.commands import cli
from cute_kernels.emulator.reports import going_on
from cute_kernels.emulator.reports.kinds import KINDS
from tests.emulator.checking.planted import EXAMPLE, FAULTS
from tests.emulator.reports import planted_causes, report_files

_ALL = ["proxy-fence", "source-in-use", "exit-in-use"]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """In the current folder."""
    monkeypatch.chdir(tmp_path)
    source = EXAMPLE.read_text()
    for fault in ("no proxy fence", "store not waited for"):
        source = source.replace(*FAULTS[fault])
    Path("program.py").write_text(source)
    return "program.py"


def run(name: str, *arguments: str) -> int:
    try:
        return cli.main([name, "--arch", "sm_90a", *arguments])
    except SystemExit as end:
        return end.code


def line_of(words: str) -> int:
    """Number of the only line of the program that contains them."""
    (number,) = (n for n, line in enumerate(Path("program.py").read_text().splitlines(), 1) if words in line)
    return number


def test_each_report_is_printed_once_and_execution_goes_on(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("emulate", "--keep-going", "--report", "report.json", program) == 3
    captured = capsys.readouterr()
    kinds = re.findall(r"^error\[(.*?)\]", captured.err, re.MULTILINE)
    assert kinds == _ALL and "the result is right" in captured.out and "2 launches in" in captured.out
    written = report_files.validated(Path("report.json"))
    assert [each["kind"] for each in written["diagnostics"]] == _ALL and written["status"] == 3
    assert [each["complete"] for each in written["launches"]] == [True, True]
    # What a CTA leaves behind at its exit is found when nothing executes any more; it has a place all the same.
    place = written["diagnostics"][-1]["place"]
    assert place["source"]["line"] == line_of("cute.copy(store,") and place["instruction"].startswith("cp.async.bulk")


def test_what_is_suppressed_is_no_fault(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    written, read = line_of("sy[row, column] ="), line_of("cute.copy(store,")
    Path("known.txt").write_text(f"# known\n\nexit-in-use   # at the end\nsource-in-use:program.py:{read}\n")
    options = ["--suppressions", "known.txt", "--report", "report.json"]
    assert run("emulate", *options, "--suppress", f"proxy-fence:program.py:{written}", program) == 0
    report = report_files.validated(Path("report.json"))
    names = ["exit-in-use", f"source-in-use:program.py:{read}", f"proxy-fence:program.py:{written}"]
    assert sorted(report["suppressed"]) == sorted(names) and not report["diagnostics"]
    assert "suppressed reports: " in capsys.readouterr().err
    # Of another line: what is not left out stops the launch, as ever.
    assert run("emulate", *options, "--suppress", f"proxy-fence:program.py:{written + 1}", program) == 3
    assert capsys.readouterr().err.startswith("error[proxy-fence]")


def test_the_kind_that_a_report_has_without_its_cause_suppresses_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    fault = planted_causes.FAULTS["gemm_sm90: wgmma reads another stage of a"]
    assert fault.kind == "unfinished-copy"
    Path("program.py").write_text(fault.source)
    run("emulate", "--suppress", "shared-race", "--report", "report.json", "program.py")
    report = report_files.validated(Path("report.json"))
    assert list(report["suppressed"]) == ["shared-race"]
    assert not {"shared-race", "unfinished-copy"} & {each["kind"] for each in report["diagnostics"]}


def test_check_goes_on_too(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "--keep-going", "--seeds", "0", "--seconds", "1", program) == 3
    captured = capsys.readouterr()
    assert [captured.err.count(f"error[{kind}]") for kind in _ALL] == [1, 1, 1]
    assert "checked: 2 launches" in captured.out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hang", "'hang': execution cannot go on after it"),
        ("typo:a.py:3", "'typo': there is no such kind: must be one of proxy-fence, "),
    ],
)
def test_what_cannot_be_suppressed(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("emulate", "--suppress", text, "program.py") == 2
    assert words in capsys.readouterr().err
    file = tmp_path / "known.txt"
    file.write_text(f"proxy-fence\n{text}\n")
    with pytest.raises(ValueError, match="known.txt, line 2: suppression"):
        going_on.read(file)


def test_suppressions_are_read_as_they_are_written() -> None:
    for text in ("proxy-fence", "proxy-fence:a/b.py", "proxy-fence:a/b.py:12"):
        assert str(going_on.Suppression.of(text)) == text


def test_every_kind_has_a_sentence_or_the_emulator_s_words_and_help() -> None:
    """Kinds that classes of errors have where nothing more is known are the only ones without help."""
    assert {name for name, kind in KINDS.items() if not kind.help} == {"barrier-misuse", "illegal-access", "fault"}
    for kind in KINDS.values():
        assert not kind.sentence.endswith(".") and not kind.help.endswith(".")
