"""``cute-kernels debug``: its prompt, and the command."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from cute_kernels.commands import cli
from cute_kernels.emulator.checking.debug_shell import Shell
from cute_kernels.emulator.checking.debugger import Debugger
from cute_kernels.emulator.programs.recorded import RecordedLaunch
from tests.emulator.checking.planted import EXAMPLE
from tests.emulator.checking.test_debugger import COUNT, recorded
from tests.emulator.checking.test_reduction import write


@pytest.fixture
def count(tmp_path: Path) -> RecordedLaunch:
    return recorded(*write(tmp_path, COUNT, 1, 32))[0]


def session(debugger: Debugger, *lines: str) -> str:
    """What a terminal shows of commands."""
    shown = io.StringIO()
    shell = Shell(debugger, io.StringIO("\n".join(lines) + "\n"), shown)
    shell.prompt = ""
    shell.cmdloop()
    return shown.getvalue()


def test_the_prompt(count: RecordedLaunch) -> None:
    with Debugger(count) as debugger:
        intro, *lines = session(
            debugger, "b 17 0", "b", "c", "p %r1 %r2 %r3", "shared cell 2", "step 2", "", "warp", "bt", "nothing",
            "p %r99", "delete 1", "delete 1", "step x", "memory 16 4", "c", "q",
        ).splitlines()  # fmt: skip
    assert intro.startswith("launch 1, kernel k: grid (1, 1, 1), block (32, 1, 1), cluster (1, 1, 1).")
    assert lines[:3] == ["breakpoint 1 at PTX line 17", "1: 17 0", "breakpoint 1: warp 0.0.0 at PTX line 17 "
                         "`setp.lt.u32 %p1, %r2, 3`"]  # fmt: skip
    assert lines[3:7] == ["%r1 = 0 + 1 * lane", "%r2 = 1 in lanes 0 to 31", "%r3 = 0x400 + 4 * lane", "    0: 0x1 0x1"]
    assert lines[7] == "step: warp 0.0.0 at PTX line 15 `add.u32 %r2, %r2, 1`"
    assert lines[8] == "0.0.0 at PTX line 15 `add.u32 %r2, %r2, 1`"
    assert lines[9] == "0: no source line, PTX line 15 `add.u32 %r2, %r2, 1`"
    assert lines[10] == "error: command 'nothing': `help` lists what there is"
    assert lines[11] == "error: register '%r99': the kernel has none of this name"
    assert lines[12] == "error: breakpoint 1: there are none"
    assert lines[13] == "error: 'x': must be a number"
    assert lines[14].startswith("error: ")
    assert lines[15] == "the launch has ended after 24 warp instructions"


def test_what_is_asked_before_the_first_instruction_and_of_memory_that_is_not_there(count: RecordedLaunch) -> None:
    with Debugger(count) as debugger:
        _, *lines = session(debugger, "warp", "list", "barriers", "b 17", "c", "tensor 0", "barriers").splitlines()
    none = "no warp runs: the launch has not begun, or is over"
    assert lines[:3] == [none, f"error: {none}", "no mbarrier is initialised"]
    assert lines[5:] == ["error: tensor memory: a kernel for sm_90a has none", "no mbarrier is initialised"]


def test_a_wait_that_is_over_is_none() -> None:
    """Warp 3's: its barrier is complete, and it has not run since."""
    with Debugger(recorded(EXAMPLE)[0]) as debugger:
        _, *lines = session(debugger, "b bias_add.py:48 0.0.2", "c", "warp", "waiting").splitlines()
    standing, report = lines[2:7], "\n".join(lines[7:])
    assert standing[3].startswith("0.0.3 at PTX line ") and standing[3].endswith("`bar.sync 0`")
    assert "waits for parity 0" in standing[4] and re.search(r"warp 3, PTX line \d+\n +can run\n", report)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It debugs the launch that fails, and says so of commands that cannot be done."""
    words = write(tmp_path, COUNT.replace("st.global.u32 [%rd1]", "st.global.u32 [%rd1+4096]"), 1, 32)
    options = ["debug", "--arch", "sm_90a"]
    assert cli.main([*options, "--command", "continue", "--command", "r %r2", *words]) == 0
    shown = capsys.readouterr().out
    assert "(debug) continue\nerror[" in shown
    assert re.search(r"^%r2 = ", shown, re.MULTILINE)
    assert cli.main([*options, "--command", "c", "--command", "print %r99", *words]) == 2
    assert "register '%r99'" in capsys.readouterr().err
    assert cli.main([*options, "--launch", "2", "--command", "c", *words]) == 2
    assert "--launch 2: the launches that differ are 1" in capsys.readouterr().err
