"""Options and exit statuses of the commands that run a program: the same ones wherever they mean something."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from cute_kernels.commands import cli
from cute_kernels.testing.ptx import module
from tests.emulator.checking.planted import EXAMPLE, planted

COMMANDS = ("emulate", "check", "mutate", "sweep", "explore")


def run(*arguments: str) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_exit_statuses_mean(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    text = capsys.readouterr().out.partition("Exit status: ")[2]
    assert text and all(re.search(rf"\b{status}\b", text) for status in (0, 2))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("check", "--seeds", "0"), r"checked: 2 launches, 2 certified .*; clean\n"),
        (("mutate", "--match", "fence.proxy"), ""),
        (("emulate",), ""),
    ],
)
def test_little_is_printed_where_nothing_is_found(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check says in one line that it was one; the others say nothing."""
    own = "the result is right\n"  # of the program
    assert run(*arguments, "--arch", "sm_90a", str(EXAMPLE)) == 0
    assert len(capsys.readouterr().out) > len(own)
    assert run(*arguments, "--quiet", "--arch", "sm_90a", str(EXAMPLE)) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(re.escape(own) + said, out) and not err


def test_reports_are_printed_quietly_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = str(planted("one try to wait", tmp_path))
    assert run("check", "--quiet", "--seeds", "0", "--arch", "sm_90a", program) == 3
    captured = capsys.readouterr()
    assert captured.out == "the result is right\n" and captured.err.startswith("error[unfinished-copy]")
    arguments = ("--quiet", "--match", "mbarrier_init", "--arch", "sm_90a", str(EXAMPLE))
    assert run("mutate", *arguments) == 0
    assert re.fullmatch(r"the result is right\n  survives: .*\n    .*\n", capsys.readouterr().out)


def test_check_names_warps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the schedule that it finds, and in the command that runs it again."""
    program = str(planted("one try to wait", tmp_path))
    roles = ("--roles", "add_bias:load=4,add=0-3")
    assert run("check", "--quiet", "--seeds", "0", *roles, "--arch", "sm_90a", program) == 3
    report = capsys.readouterr().err
    assert re.search(r"warp \d 'add'", report) and "warp 4 'load'" in report, report
    (replay,) = re.findall("replay: cute-kernels (.*)", report)
    assert run(*shlex.split(replay)) == 3 and "warp 4 'load'" in capsys.readouterr().err


def test_mutants_of_a_program_with_a_report_that_is_suppressed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own fault is none of the mutants'; any other one stops the program as ever, and notices a mutant."""
    arguments = ("--arch", "sm_90a", "--quiet", "--match", "drop bar.sync", str(planted("no proxy fence", tmp_path)))
    for other in ((), ("--suppress", "shared-race")):
        assert run("mutate", *other, *arguments) == 3
        assert "error[proxy-fence]" in capsys.readouterr().err
    assert run("mutate", "--suppress", "proxy-fence", "--fail-under", "100", *arguments) == 0
    assert re.fullmatch(r"suppressed reports: \d+ by proxy-fence\n", capsys.readouterr().err)


def test_a_traceback_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = str(planted("no proxy fence", tmp_path))
    for command in ("emulate", "check", "mutate"):
        for asked in (False, True):
            assert run(command, "--arch", "sm_90a", *["--traceback"] * asked, program) == 3
            assert ("Traceback (most recent call last)" in capsys.readouterr().err) == asked


def test_a_sweep_of_a_program_that_is_at_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where another configuration is in order; one that the program refuses is no fault."""
    source = EXAMPLE.with_name("reverse.py").read_text()
    for line in ("import argparse", "parser = argparse.ArgumentParser()", "parser.add_argument('--sync', type=int)",
                 "SYNC = parser.parse_args().sync", "assert SYNC < 2"):  # fmt: skip
        source = source.replace("THREADS, BLOCKS = 64, 2", f"{line}\nTHREADS, BLOCKS = 64, 2")
    barrier = "        if cutlass.const_expr(SYNC):\n            cute.arch.sync_threads()\n        # Missing"
    program = tmp_path / "program.py"
    program.write_text(source.replace("        # Missing", barrier))
    for values, status in (("1", 0), ("0,1", 3), ("1,2", 0)):
        assert run("sweep", str(program), "--arch", "sm_90a", "--vary", f"sync={values}") == status
    assert "shared-race at program.py:" in capsys.readouterr().out


class Watched(argparse.Namespace):
    """Options that know which of them were asked for."""

    def __getattribute__(self, name: str) -> object:
        object.__getattribute__(self, "__dict__").setdefault("_asked", set()).add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("command", ["emulate", "check --seeds 1", "mutate", "debug --command quit"])
def test_a_command_takes_no_option_that_it_does_not_look_at(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, described = tmp_path / "barrier.ptx", tmp_path / "launches.json"
    program.write_text(module("bar.sync 0; ret;", parameters=0))
    described.write_text(json.dumps({"arrays": {}, "launches": [{"grid": 1, "block": 32, "arguments": []}]}))
    parsed = cli._parser().parse_args([*command.split(), str(program), str(described)])
    options = Watched(**vars(parsed))
    assert parsed.run(options) in (0, 1)
    asked = object.__getattribute__(options, "__dict__")["_asked"]
    assert vars(parsed).keys() - asked <= {"watch", "run"}  # those are of all commands, in cli.py


@pytest.mark.parametrize("command", ["emulate", "debug", "check", "mutate"])
def test_options_behind_the_program_are_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint(sys.argv[1:])\n")
    arguments = ["--strict", "--arch=sm_90a", "--other", "-x"]
    assert run(command, str(program), *arguments) == (0 if command == "emulate" else 2)
    out, err = capsys.readouterr()
    assert str(arguments) in out + err
    assert f"cute-kernels: note: {program} gets --strict --arch; ours stand before {program}\n" in err
    program.write_text("import argparse\n# --strict and --arch are its own\n")
    run(command, str(program), *arguments)
    run(command, str(tmp_path / "missing.py"), *arguments)
    assert "note" not in capsys.readouterr().err
