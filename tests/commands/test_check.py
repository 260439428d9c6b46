"""``cute-kernels check`` on a kernel that is not this package's: sound, and with a fault of each kind planted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.commands import check as check_command
from cute_kernels.commands import cli, workers
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.programs.recorded import RecordedLaunch
from cute_kernels.emulator.races.certificate import ASSUMPTIONS
from tests.emulator import exit_program
from tests.emulator.checking import ticket_program
from tests.emulator.checking.planted import planted, report_file
from tests.emulator.reports import report_files
from tests.processes import run_python

TICKETS = str(Path(ticket_program.__file__))
EXITS = str(Path(exit_program.__file__))


def check(*arguments: str) -> int:
    try:
        return cli.main(["check", "--arch", "sm_90a", *arguments])
    except SystemExit as end:
        return end.code


def replay_of(report: str) -> list[str]:
    """Arguments of the command that the report prints."""
    (line,) = re.findall(r"^  replay: (.*)$", report, re.MULTILINE)
    program, *arguments = shlex.split(line)
    assert program == "cute-kernels" and arguments[0] == "emulate"
    return arguments


def test_a_sound_kernel_is_certified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run stands for all schedules; that of the second launch beside the one that it may overlap is another."""
    report, sarif = tmp_path / "report.json", tmp_path / "report.sarif"
    assert check("--report", str(report), "--sarif", str(sarif), str(planted(None, tmp_path))) == 0
    lines = capsys.readouterr().out.splitlines()
    certified = "checked: 2 launches, 2 certified by one run each, 1 run beside the default schedule: "
    assert lines[-1] == f"{certified}1 systematic, 0 random; clean"
    assert [line for line in lines if line.endswith("add_bias: certificate")] == [
        f"launch {number} add_bias: certificate" for number in (1, 2)
    ]
    assert lines.count("  " + ASSUMPTIONS[0]) == lines.count("  " + ASSUMPTIONS[1]) == 2
    for each in report_files.validated(report)["launches"]:
        assert each["certificate"] == {
            "given": True, "for_draws": False, "assumptions": list(ASSUMPTIONS), "places": [],
        }  # fmt: skip
    (run,) = json.loads(sarif.read_text())["runs"]
    certificates = run["properties"]["certificates"]
    assert {number: each["given"] for number, each in certificates.items()} == {"1": True, "2": True}


def test_draws_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert check("--results-may-differ", "--seeds", "0", "--report", str(report), TICKETS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "certificate for these draws; 1 place stands against it" in lines[0]
    assert re.match(r"  1 another order of atomic operations \[draw\]: .*`atom\.", lines[1])
    (launch,) = report_files.validated(report)["launches"]
    assert [place["kind"] for place in launch["certificate"]["places"]] == ["draw"]


def test_a_sound_kernel_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert check("--always-search", "--seeds", "1", "--report", str(report), str(planted(None, tmp_path))) == 0
    captured = capsys.readouterr()
    # Lazy, timeouts, five warps starved twice, lazy and random: 13; of the second launch two with overlap besides.
    expected = "checked: 2 launches, 30 runs beside the default schedule: 28 systematic, 2 random; clean"
    assert captured.out.splitlines()[-1] == expected and captured.err == ""
    written = report_files.validated(report)
    assert (written["status"], written["diagnostics"]) == (0, [])
    assert (written["summary"]["runs"], [each["kernel"] for each in written["launches"]]) == (30, ["add_bias"] * 2)


def test_a_check_goes_on_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that were lost are repeated and no others; another input has other runs."""
    store, program, seed = tmp_path / "runs.jsonl", tmp_path / "program.py", tmp_path / "seed"
    head, main, rest = planted(None, tmp_path).read_text().partition('if __name__ == "__main__":\n')
    program.write_text(f"{head}{main}    torch.manual_seed(int(open({str(seed)!r}).read()))\n{rest}")
    words = ["--always-search", "--seeds", "2", "--jobs", "1", "--store", str(store)]

    def checked(number: int, *more: str) -> str:
        """The summary; each in a process of its own, whose memory has nothing of another run."""
        seed.write_text(str(number))
        done = run_python("-m", "cute_kernels", "check", "--arch", "sm_90a", *words, *more, str(program))
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1].partition("schedule: ")[2]

    assert checked(1) == "28 systematic, 4 random; clean"
    lines = store.read_text().splitlines()
    assert len(lines) == 32
    store.write_text("\n".join([*lines[:2], *lines[4:], lines[3][:40]]))
    report = tmp_path / "report.json"
    again = checked(1, "--resume", "--report", str(report))
    assert again == "2 systematic, 0 random; 30 runs taken from --store; clean"
    assert json.loads(report.read_text())["summary"]["kept"] == 30
    assert checked(2, "--resume") == "28 systematic, 4 random; clean"
    assert check(*words, str(program)) == check("--resume", str(program)) == 2
    assert check(*words, "--resume", "--keep-going", str(program)) == 2
    errors = capsys.readouterr().err
    said = ("go on with it by --resume", "--resume is for --store FILE", "--keep-going: a run that")
    assert all(each in errors for each in said)


@pytest.mark.parametrize("change", [
    {"kernel_name": "other"}, {"programmatic": True}, {"cooperative": True}, {"grid": (2, 1, 1)}, {"ptx": "other"},
], ids=str)  # fmt: skip
def test_a_kept_run_is_of_what_executes(change: dict) -> None:
    """The launch before it counts as well, where this one may overlap it, and so do variables of the module."""

    def digest(launch: CapturedLaunch, previous: CapturedLaunch | None = None, variable: int = 1) -> str:
        before = previous and RecordedLaunch(1, previous, ())
        variables = (("v", np.full(4, variable, np.uint8)),)
        return check_command._digest(RecordedLaunch(2, launch, (), before, variables=variables))

    launch = CapturedLaunch("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, (), "ptx")
    other = dataclasses.replace(launch, **change)
    different = digest(other), digest(launch, launch), digest(launch, other), digest(launch, variable=2)
    assert len({digest(launch), *different}) == 5
    assert digest(launch, other) == digest(launch, dataclasses.replace(other, stream=3))


def test_a_kept_run_is_of_what_a_file_of_suppressions_says_now(tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    options = argparse.Namespace(script=TICKETS, arguments=[], arch="sm_90a", suppressions=[rules])
    origins = []
    for text in ("shared-race\n", "lanes-race\n", "shared-race\n"):
        rules.write_text(text)
        origins.append(workers.origin_of(options, []))
    assert origins[0] == origins[2] != origins[1]


def test_any_name_of_a_program_is_found_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM writes some characters of names as escapes, and so does a URI."""
    folder = tmp_path / "Zürich 50% #1"
    folder.mkdir()
    program = planted("no proxy fence", folder).rename(folder / "a \\ Straße.py")
    monkeypatch.chdir(tmp_path)
    arguments = ["--report", "report.json", "--sarif", "report.sarif", str(program.relative_to(tmp_path))]
    assert check(*arguments) == 3
    (diagnostic,) = report_files.validated(Path("report.json"))["diagnostics"]
    assert diagnostic["place"]["source"]["file"] == str(program.relative_to(tmp_path))
    report_files.agree(diagnostic, capsys.readouterr().err)
    report_files.agree_with_sarif(diagnostic, json.loads(Path("report.sarif").read_text()))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("no proxy fence", "proxy-fence"),
        ("no wait for an empty stage", "stage-in-use"),
        ("half of the bytes", "extra-bytes"),
        ("no arrival", "hang"),
        ("out of bounds", "out-of-bounds"),
        ("first parity", "first-parity"),
        ("too few arrivals", "phase-missed"),
        ("store not waited for", "source-in-use"),
    ],
)
def test_faults_that_every_schedule_shows(
    fault: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check("--report", "report.json", "--sarif", "report.sarif", planted(fault, tmp_path).name) == 3
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error[{kind}]: ")
    assert replay_of(captured.err) == ["emulate", "--arch", "sm_90a", "program.py"]
    assert captured.err == report_file(fault).read_text()
    written = report_files.validated(Path("report.json"))
    assert (written["command"], written["status"]) == ("check", 3)
    (diagnostic,) = written["diagnostics"]
    report_files.agree(diagnostic, captured.err)
    report_files.agree_with_sarif(diagnostic, json.loads(Path("report.sarif").read_text()))


@pytest.mark.parametrize(
    ("fault", "kind", "schedule"),
    [
        ("one try to wait", "unfinished-copy", ["--spurious-timeouts"]),
        ("no wait for the launch before", "launch-overlap", ["--overlap"]),
    ],
)
def test_faults_that_some_schedules_show_are_replayed_by_the_printed_command(
    fault: str, kind: str, schedule: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    program = planted(fault, tmp_path).name
    assert cli.main(["emulate", "--quiet", "--arch", "sm_90a", program]) == 0
    capsys.readouterr()
    assert check(program) == 3
    report = capsys.readouterr().err
    assert report.startswith(f"error[{kind}]: ")
    arguments = replay_of(report)
    assert arguments == ["emulate", "--arch", "sm_90a", *schedule, program]
    assert cli.main([arguments[0], "--quiet", *arguments[1:]]) == 3
    without_steps = re.sub(r"  steps: .*\n(    +\d+: .*\n)+", "", report)
    assert (without_steps == report) == (schedule == ["--overlap"])
    assert capsys.readouterr().err == without_steps == report_file(fault).read_text()


def test_results_that_depend_on_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    """Warps take tickets, and write which they got: no race, and another result when another warp is first."""
    assert check(TICKETS) == 3
    report = capsys.readouterr().err
    assert report.startswith("error[different-result]: the result depends on the schedule: 2 bytes of device")
    assert "the first is byte 0 of the 8 bytes of allocation 1: 0x01 instead of 0x00" in report
    assert "--results-may-differ" in report
    # The program's own check, that warp 0 was first, fails under the schedule that is printed.
    assert cli.main([*replay_of(report), "--exact"]) == 1
    assert check("--results-may-differ", "--seeds", "2", TICKETS) == 0


def test_the_time_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--always-search", "--seconds", "1e-9", EXITS, "normal") == 0
    assert "0 systematic, 0 random; clean, but not all systematic schedules fitted into --seconds" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("exit-7", 7, ""),
        ("raise", 1, "ValueError: the program's own"),
        ("fault", 3, f"replay: cute-kernels emulate --arch sm_90a {EXITS} fault"),
        ("fault-caught", 3, "note: the program caught the error, and went on"),
        ("refused", 4, "opcode 'alloca.u32' is not implemented"),
    ],
)
def test_exit_status_says_who_failed(how: str, status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--seeds", "0", EXITS, how) == status
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name, line", [
    ("emulate", "  0  the program ended, and every kernel was in order"),
    ("check", "  0  every schedule that was tried is in order"),
    ("mutate", "  5  the score is below --fail-under"),
])  # fmt: skip
def test_help_has_a_line_for_each_exit_status(name: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert line in lines and "  1  the program raised an exception of its own" in lines
    assert any(each.startswith("  4  PTX, or something else of the program") for each in lines)


def test_what_cannot_be_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.py"
    empty.write_text("import torch\n")
    for arguments, words in (
        ([str(empty)], f"{empty} launched no kernel"),
        (["no such.py"], "no file no such.py"),
        ([str(tmp_path)], f"script = {tmp_path}: must be the file of a program, and is a directory"),
        (["--seconds", "0", EXITS], "'0' is not a positive number of seconds"),
        (["--seconds", "nan", EXITS], "'nan' is not a positive number of seconds"),
        (["--seeds", "-1", EXITS], "'-1' is not a number of schedules"),
    ):
        assert check(*arguments) == 2
        assert words in capsys.readouterr().err


def test_the_replay_command_has_what_the_check_had(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--strict", "--without", "registers", "--max-idle-blocks", "1000", EXITS, "fault") == 3
    assert replay_of(capsys.readouterr().err) == [
        "emulate", "--arch", "sm_90a", "--without", "registers", "--strict", "--max-idle-blocks", "1000", EXITS,
        "fault",
    ]  # fmt: skip
    assert sys.argv[0] != EXITS
