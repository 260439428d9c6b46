"""The kernel of docs/examples/bias_add.py with one fault planted, as a program of its own.

`tests/emulator/checking/reports` has what is reported of each, as people are to read it; `test_check.py` compares.
After a change of the form of reports, ``python -m tests.emulator.checking.planted`` writes the files anew, to be read
before they are committed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "bias_add.py"

FAULTS = {
    "no proxy fence": ('cute.arch.fence_proxy("async.shared", space="cta")', "pass"),
    "no wait for an empty stage": ("cute.arch.mbarrier_wait(empty + stage, (i // STAGES & 1) ^ 1)", "pass"),
    "half of the bytes": ("ROWS * COLUMNS * 4)", "ROWS * COLUMNS * 2)"),
    "no arrival": ("cute.arch.mbarrier_arrive(empty + stage)", "pass"),
    "out of bounds": ("bias[column]", "bias[column + 1000]"),
    "first parity": (") ^ 1)", "))"),
    "too few arrivals": ("empty + stage, ADDERS)", "empty + stage, ADDERS // 2)"),
    "store not waited for": ("cute.arch.cp_async_bulk_wait_group(0, read=True)", "pass"),
    "one try to wait": ("mbarrier_wait(full", "mbarrier_try_wait(full"),
    "no wait for the launch before": ("cute.arch.griddepcontrol_wait()", "pass"),
    "subtracted": ("+ bias[column]", "- bias[column]"),
}
"""Name -> what stands in the program, and what takes its place."""

SCHEDULES = {"one try to wait": ["--spurious-timeouts"], "no wait for the launch before": ["--overlap"]}
"""Of the faults that the default schedule does not show."""


def planted(fault: str | None, folder: Path) -> Path:
    """The program with a fault, a key of `FAULTS`, or with none."""
    source = EXAMPLE.read_text()
    if fault is not None:
        old, new = FAULTS[fault]
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path = folder / "program.py"
    path.write_text(source)
    return path


def report_file(fault: str) -> Path:
    """What is reported of a fault."""
    return Path(__file__).parent / "reports" / f"{fault.replace(' ', '_')}.txt"


def main() -> None:
    """Writes all files of reports."""
    for fault in FAULTS:
        if fault == "subtracted":  # a wrong result, which only the program can notice
            continue
        with tempfile.TemporaryDirectory() as folder:
            program = planted(fault, Path(folder)).name
            command = [sys.executable, "-m", "cute_kernels", "emulate", "--quiet", "--arch", "sm_90a"]
            command += [*SCHEDULES.get(fault, ()), program]
            environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 3, done.stderr
        report_file(fault).write_text(done.stderr)


if __name__ == "__main__":
    main()
