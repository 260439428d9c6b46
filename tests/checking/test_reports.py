"""Reports of planted faults, word for word: what a user gets to read."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import pytest

from cute_kernels.commands import cli
from tests.checking.planted import FAULTS, planted

REPORTS = Path(__file__).parent / "reports"
SCHEDULES = {"one try to wait": ["--spurious-timeouts"], "no wait for the launch before": ["--overlap"]}
REPORTED = [fault for fault in FAULTS if fault != "subtracted"]  # a wrong result, which only the program can notice


def report_of(fault: str, folder: Path, *options: str) -> str:
    """What `cute-kernels emulate` prints on stderr, with the program's path shortened."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        words = ["emulate", "--quiet", "--arch", "sm_90a", *SCHEDULES.get(fault, ()), *options]
        assert cli.main([*words, str(planted(fault, folder))]) == 3
    return "\n".join(" ".join(line.split()) for line in printed.getvalue().replace(f"{folder}/", "").splitlines())


def file_of(fault: str) -> Path:
    return REPORTS / f"{fault.replace(' ', '_')}.txt"


@pytest.mark.parametrize("fault", REPORTED)
def test_report(fault: str, tmp_path: Path) -> None:
    assert report_of(fault, tmp_path) + "\n" == file_of(fault).read_text()


def main() -> None:
    """Writes all files."""
    for fault in REPORTED:
        with tempfile.TemporaryDirectory() as folder:
            file_of(fault).write_text(report_of(fault, Path(folder)) + "\n")


if __name__ == "__main__":
    main()
