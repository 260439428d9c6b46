"""What commands write: on a full device one sentence and the right status; never over what they read."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from cute_kernels.commands import cli
from cute_kernels.common import files
from cute_kernels.testing.ptx import module

FULL = "/dev/full"
STORE = "ld.param.u64 %d0, [p0]; st.global.u32 [%d0+OFFSET], 1; ret;"

def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel that is right, one that stores outside of its array, one with a barrier, and how they are launched."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "right.ptx").write_text(module(STORE.replace("OFFSET", "0"), parameters=1))
    (tmp_path / "wrong.ptx").write_text(module(STORE.replace("OFFSET", "4096"), parameters=1))
    (tmp_path / "barrier.ptx").write_text(module("bar.sync 0; " + STORE.replace("OFFSET", "0"), parameters=1))
    arrays = {"x": {"dtype": "int32", "shape": [4]}}
    (tmp_path / "a.json").write_text(json.dumps(
        {"arrays": arrays, "launches": [{"grid": 1, "block": 1, "arguments": ["x"]}]}
    ))  # fmt: skip
    return tmp_path


def lines(error: str) -> list[str]:
    """What is said beside the report."""
    assert "Traceback" not in error
    return [line for line in error.splitlines() if line.startswith("cute-kernels: ")]


EMULATED = [
    ("emulate", "--trace"), ("emulate", "--report"), ("emulate", "--sarif"), ("emulate", "--profile-json"),
    ("check --seeds 1", "--report"), ("check --seeds 1", "--sarif"), ("mutate", "--report"),
]  # fmt: skip


@pytest.mark.parametrize(
    "command, option, script, status",
    [(*each, *case) for each in EMULATED for case in (("barrier.ptx", 2), ("wrong.ptx", 3))]
    + [("mutate", "--output", "barrier.ptx", 2)],
)
def test_a_full_device(
    command: str, option: str, script: str, status: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault that was found keeps its status and its report."""
    assert cli.main([*command.split(), option, FULL, script, "a.json"]) == status
    error = capsys.readouterr().err
    assert error.count("/dev/full cannot be written: No space left on device") == 1
    assert ("error[out-of-bounds]" in error) == (status == 3)
    assert len(lines(error)) == (0 if option == "--trace" and status == 3 else 1)  # there it is a note of the report


@pytest.mark.parametrize(
    "command", ["plan gemm --json", "plan gemm --csv", "doctor --json", "same right.ptx right.ptx --json"]
)
def test_a_full_device_of_other_commands(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = command.replace("right.ptx", "'right.ptx a.json'")
    assert cli.main([*shlex.split(words), FULL]) == 2
    assert lines(capsys.readouterr().err) == [
        "cute-kernels: error: /dev/full cannot be written: No space left on device"
    ]


@pytest.mark.parametrize("command", ["emulate --counters --profile", "check --seeds 1", "mutate"])
@pytest.mark.parametrize("script, status", [("barrier.ptx", 2), ("wrong.ptx", 3)])
def test_a_full_stdout(command: str, script: str, status: int, folder: Path, monkeypatch, capsys) -> None:
    with open(os.open(FULL, os.O_WRONLY), "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main([*command.split(), script, "a.json"]) == status
        monkeypatch.undo()
    said = lines(capsys.readouterr().err)
    assert set(said) <= {"cute-kernels: error: stdout cannot be written: No space left on device"}
    assert len(said) == 1 or (not said and status == 3)  # a command that has printed nothing before its report


@pytest.mark.parametrize("script, status", [("right.ptx", 0), ("wrong.ptx", 3)])
def test_a_full_stderr(script: str, status: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can be told; the status says it."""
    full = io.StringIO()
    full.write = refuse
    monkeypatch.setattr(sys, "stderr", full)
    assert cli.main(["emulate", script, "a.json"]) == status
    assert cli.main(["emulate", "missing.ptx", "a.json"]) == 2


@pytest.mark.parametrize("script, status", [("right.ptx", 2), ("wrong.ptx", 2)])
def test_kept_launches_on_a_full_device(script: str, status: int, folder: Path, monkeypatch, capsys) -> None:
    """They are written before a launch runs: no fault has been found."""
    monkeypatch.setattr(files, "_replace", refuse)
    assert cli.main(["emulate", "--keep-ptx", "kept", script, "a.json"]) == status
    [line] = lines(capsys.readouterr().err)
    assert "kept/launch-1-" in line and line.endswith("cannot be written: No space left on device")


def test_kept_launches_of_which_the_last_ones_have_no_room(folder: Path, monkeypatch, capsys) -> None:
    """The fault that was found by then is reported."""
    left, write = iter(range(2)), files._replace
    monkeypatch.setattr(files, "_replace", lambda *a: write(*a) if next(left, None) is not None else refuse())
    assert cli.main(["emulate", "--keep-ptx", "kept", "wrong.ptx", "a.json"]) == 3
    error = capsys.readouterr().err
    assert "error[out-of-bounds]" in error and len(lines(error)) == 1


PROGRAM = """
import torch
import cute_kernels.emulator.programs.capturing as capturing
import gc
sessions = [each for each in gc.get_objects() if type(each) is capturing.Session]  # dead proxies have no class
[session] = [each for each in sessions if each.options.trace and not each.failures and each.unwritten is None]
x = torch.zeros(4, dtype=torch.int32, device="cuda")
for name in {names!r}:
    try:
        session.launch_ptx(open(name).read(), x, grid=1, block=1)
    except Exception as error:
        print("caught", type(error).__name__)
"""


@pytest.mark.parametrize("names, status", [(["right.ptx"], 2), (["wrong.ptx", "right.ptx"], 3)])
def test_a_program_that_catches_everything(names: list[str], status: int, folder: Path, capsys) -> None:
    (folder / "program.py").write_text(PROGRAM.format(names=names))
    assert cli.main(["emulate", "--trace", FULL, "program.py"]) == status
    out, error = capsys.readouterr()
    assert "caught" in out and "No space left on device" in error


# --- never over what a command reads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--report", "--sarif", "--trace", "--profile-json"])
@pytest.mark.parametrize("target", ["right.ptx", "./right.ptx", "link.json", "hard.json", "a.json"])
def test_no_output_replaces_the_program(option: str, target: str, folder: Path, capsys) -> None:
    """Nor its description, under no name."""
    (folder / "link.json").symlink_to("right.ptx")
    os.link(folder / "right.ptx", folder / "hard.json")
    before = [(folder / name).read_bytes() for name in ("right.ptx", "a.json")]
    assert cli.main(["emulate", option, target, "right.ptx", "a.json"]) == 2
    [line] = lines(capsys.readouterr().err)
    assert f"{option} = {folder / target}" in line and "the command reads this file: must be another one" in line
    assert [(folder / name).read_bytes() for name in ("right.ptx", "a.json")] == before


@pytest.mark.parametrize(
    "words, message",
    [
        ("check --report right.ptx right.ptx a.json", "--report = "),
        ("mutate --output right.ptx right.ptx a.json", "--output = "),
        ("emulate --report rules.txt --suppressions rules.txt right.ptx a.json", "--report = "),
        ("emulate --report a.py right.ptx a.py:launches", "--report = "),
        ("same --json right.ptx 'right.ptx a.json' 'right.ptx a.json'", "--json = "),
        ("emulate --trace t.json right.ptx t-2.json", "--trace = "),
        ("emulate --keep-ptx . launch-1-k.ptx a.json", "--keep-ptx = "),
        ("emulate --report new.json --trace ./new.json right.ptx a.json", "are both"),
        ("emulate --profile-json new.json --sarif link.json right.ptx a.json", "are both"),
    ],
)
def test_other_files_that_a_command_reads(words: str, message: str, folder: Path, capsys) -> None:
    for name in ("launch-1-k.ptx", "t-2.json", "rules.txt", "a.py"):
        (folder / name).write_text("")
    (folder / "link.json").symlink_to("new.json")
    assert cli.main(shlex.split(words)) == 2
    [line] = lines(capsys.readouterr().err)
    assert message in line
    assert (folder / "launch-1-k.ptx").exists() and not (folder / "new.json").exists()
    assert (folder / "right.ptx").read_text().startswith(".version")
