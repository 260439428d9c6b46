"""``recorded_pytest.py FILE ARGUMENTS..``: pytest, and in FILE a line of JSON for what each test came to.

`cute-kernels emulate` runs it, in an environment and a folder that are not this project's.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.emulator.errors import error_behind
from cute_kernels.emulator.reports.diagnosis import diagnose


class Recorder:
    """Writes down what tests come to as soon as it is known: the process may not live to its end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A test alone draws the same numbers as it does behind others."""
        random.seed(0)
        torch.manual_seed(0)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        """A line for what decides: the call, or an end before or behind it."""
        report = (yield).get_result()
        if report.when == "call" or not report.passed:
            said = "" if call.excinfo is None else _said(call.excinfo)
            self._write(test=item.nodeid, outcome=report.outcome, said=said, seconds=round(call.duration, 1))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported: a line for all of its tests."""
        if not report.passed:
            self._write(test="", outcome=report.outcome, said=str(report.longrepr).strip().splitlines()[-1], seconds=0)

    def _write(self, **facts: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(facts) + "\n")


def _said(failure: pytest.ExceptionInfo) -> str:
    """The kind and place of what the emulator reports; else the exception, and the line that raised it."""
    error = error_behind(failure.value)
    if error is None:
        entry = failure.traceback[-1]
        message = " ".join(str(failure.value).split())[:300]
        return f"{failure.typename}: {message} at {Path(str(entry.path)).name}:{entry.lineno + 1}"
    found = diagnose(error)
    source = found.place.source if found.place is not None else None
    where = f" at {Path(source.path).name}:{source.line}" if source is not None else ""
    return f"{found.kind}{where}: {found.sentence}"


if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[2:], plugins=[Recorder(Path(sys.argv[1]))]))
