"""`emulate --watch`: a program runs again after each save of one of its files, in a fork that has its libraries."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cute_kernels.emulator.programs import on_save

PROGRAM = """\
import sys, time, helper
assert sys.argv[1:] == ["--watch"]
print("value", helper.VALUE, flush=True)
if helper.VALUE == 3:
    time.sleep(600)
sys.exit(7 if helper.VALUE == 4 else 0)
"""


def test_a_program_runs_again_when_one_of_its_files_is_saved(tmp_path: Path) -> None:
    program, helper = tmp_path / "program.py", tmp_path / "helper.py"
    program.write_text(PROGRAM)
    helper.write_text("VALUE = 1\n")
    command = [sys.executable, "-m", "cute_kernels", "emulate", "--watch", str(program), "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert _until(process, "runs again")[:1] == ["value 1\n"]
            for value, status in ((2, 0), (4, 7)):
                helper.write_text(f"VALUE = {value}\n# {value}\n")
                lines = _until(process, "runs again")
                assert f"value {value}\n" in lines and f"status {status} " in lines[-1]
                assert "(2 files)" in lines[-1]
            helper.write_text("VALUE = 3  # waits for ever\n")
            _until(process, "value 3")
            program.write_text("print('another program', flush=True)\n")
            assert "another program\n" in _until(process, "status 0")
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()


def _until(process: subprocess.Popen[str], words: str) -> list[str]:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return lines
    pytest.fail(f"the command ended without {words!r}: {lines}")


def test_the_first_process_has_libraries_and_no_module_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second run finds the library that the first one imported, and imports the program's own module anew."""
    own, library = tmp_path / "module_of_the_program.py", "this"  # a module of Python's that nothing else imports
    own.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop(library, None)
    seen = []

    def run() -> int:
        print("loaded before:", library in sys.modules, own.stem in sys.modules)
        importlib.import_module(library)
        importlib.import_module(own.stem)
        return 5

    def look(seconds: float) -> None:
        """Saves the module after the first run, and interrupts after the second."""
        text = capfd.readouterr()
        seen.extend(line for line in text.out.splitlines() if line.startswith("loaded before"))
        if "status 5" in text.err:
            if len(seen) == 2:
                raise KeyboardInterrupt
            own.write_text("1")
        pause(seconds)

    pause = time.sleep
    monkeypatch.setattr(on_save.time, "sleep", look)
    with pytest.raises(KeyboardInterrupt):
        on_save.run_on_save(run, str(own))
    assert seen == ["loaded before: False False", "loaded before: True False"]


def test_a_module_that_is_saved_before_anybody_knows_of_it_counts_as_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run that imports it first reads it before the save, so that nothing but its time tells of the save."""
    own = tmp_path / "module_saved_early.py"
    own.write_text("VALUE = 1")
    monkeypatch.syspath_prepend(tmp_path)
    program = tmp_path / "program.py"
    program.write_text("")

    def run() -> int:
        value = importlib.import_module(own.stem).VALUE
        print("value", value, flush=True)
        if value == 1:
            own.write_text("VALUE = 22")
        return 0

    def look(seconds: float) -> None:
        seen.append(capfd.readouterr().out)
        if "value 22" in seen[-1] or len(seen) > 400:
            raise KeyboardInterrupt
        pause(seconds)

    seen, pause = [], time.sleep
    monkeypatch.setattr(on_save.time, "sleep", look)
    with pytest.raises(KeyboardInterrupt):
        on_save.run_on_save(run, str(program))
    assert "value 22" in "".join(seen)
