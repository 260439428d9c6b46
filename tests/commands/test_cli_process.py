"""The command line as a process: exit status and output when a command is stopped, and how it is started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cute_kernels.commands.cli import main
from cute_kernels.emulator.errors import Hang
from cute_kernels.operations import compile
from cute_kernels.operations.runtime import emulated
from cute_kernels.operations.runtime import environment as doctor


def test_a_full_device_is_named(tmp_path, capsys):
    path = tmp_path / "k.json"
    path.symlink_to("/dev/full")
    assert main(["plan", "--json", str(path)]) == 2
    assert capsys.readouterr().err == f"cute-kernels: error: {path} cannot be written: No space left on device\n"
    assert [p.name for p in tmp_path.iterdir()] == ["k.json"]


@pytest.mark.parametrize("words", ["plan", "--help", "plan --help", "check --help", "--version"])
def test_standard_output_on_a_full_device(words):
    command = [sys.executable, "-m", "cute_kernels", *words.split()]
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.stderr == "cute-kernels: error: stdout cannot be written: No space left on device\n"
    assert run.returncode == 2


@pytest.mark.parametrize("words", ["plan", "check --help"])
def test_standard_output_into_a_closed_pipe(words):
    process = subprocess.Popen(
        [sys.executable, "-m", "cute_kernels", *words.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


@pytest.mark.parametrize(("error", "status", "text"), [
    (KeyboardInterrupt(), 130, "cute-kernels: interrupted\n"),
    (OSError(5, "Input/output error", "disk"), 2, "cute-kernels: error: [Errno 5] Input/output error: 'disk'\n"),
    (ValueError("two\nlines"), 2, "cute-kernels: error: two lines\n"),
])  # fmt: skip
def test_one_line_and_a_status_for_what_stops_a_command(error, status, text, monkeypatch, capsys):
    def stop():
        raise error

    monkeypatch.setattr(doctor, "inspect_environment", stop)
    assert main(["doctor"]) == status
    assert capsys.readouterr().err == text


@pytest.mark.parametrize("name", ["new", "old"])
def test_what_cannot_be_written_is_refused_before_any_work(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "old").touch()
    (tmp_path / "old").chmod(0o400)
    tmp_path.chmod(0o500)
    if os.geteuid() == 0:  # to whom permissions do not apply
        monkeypatch.setattr(os, "access", lambda path, mode: os.stat(path).st_mode >> 6 & mode == mode)
    monkeypatch.setattr(compile, "compile_plan", unreachable)
    path = tmp_path / name
    assert main(["compare", "default", "stages=4", "--json", str(path)]) == 2
    assert capsys.readouterr().err == f"cute-kernels: error: {path} cannot be written: permission denied\n"


def unreachable(*_, **__):
    raise AssertionError("work was done for a file that cannot be written")


@pytest.mark.parametrize(
    ("arguments", "shown"), [(["--help"], "usage: python -m cute_kernels.emulator"), ([], "# Instructions")]
)
def test_emulator_module(arguments, shown):
    command = [sys.executable, "-m", "cute_kernels.emulator", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.startswith(shown)


def test_emulator_module_into_a_closed_pipe():
    process = subprocess.Popen(
        [sys.executable, "-m", "cute_kernels.emulator"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


def test_module_and_script_are_one_command():
    run = subprocess.run([sys.executable, "-m", "cute_kernels", "--help"], capture_output=True, text=True, check=True)
    assert "usage: cute-kernels" in run.stdout
    assert "plan" in run.stdout
    assert "compare" in run.stdout


def test_fault_that_the_emulator_reports(capsys, monkeypatch):
    """In words, not as a traceback; other errors of ours keep theirs."""
    def hang(*arguments, **more):
        raise Hang("cluster 0 hangs:\n  warp 1 waits")

    monkeypatch.setattr(emulated, "launch", hang)
    assert main(["compare", "default", "stages=4"]) == 3
    assert capsys.readouterr().err.startswith("error[hang]: cluster 0 hangs:\n  note:   warp 1 waits\n  help: ")
    monkeypatch.setattr(emulated, "launch", lambda *arguments, **more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["compare", "default", "stages=4"])
