"""--trace of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_kernels.commands import cli
from tests.emulator.observe.test_trace import check_well_formed, read


def test_each_launch_of_a_program_has_its_own_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text("from tests.emulator.scale_program import main\nmain()\nmain()\n")
    path = tmp_path / "trace.json"
    assert cli.main(["emulate", "--counters", "--trace", str(path), str(program), "--count", "64"]) == 0
    out = capsys.readouterr().out
    # 64 floats are read and written by two warps.
    assert out.count("warps 0-1 (global store): ld.global.4B: 2 requests, 256 bytes, 8 sectors") == 2
    for file in (path, tmp_path / "trace-2.json"):
        check_well_formed(read(file))
        assert f"timeline: {file}; open it with https://ui.perfetto.dev" in out


@pytest.mark.parametrize("arguments", [[], ["argument"]])
def test_a_trace_that_cannot_be_written_is_said_before_the_program_runs(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    program = tmp_path / "program.py"
    program.write_text(f"open({str(ran)!r}, 'w')\n")
    trace = tmp_path / "absent" / "trace.json"
    assert cli.main(["emulate", "--trace", str(trace), str(program), *arguments]) == 2
    out, err = capsys.readouterr()
    assert f"no folder {trace.parent} to write {trace} into" in err and "Traceback" not in err
    assert not out and not ran.exists()
