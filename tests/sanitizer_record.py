"""A plugin of pytest that writes which tests there are and what became of each, for `tests.sanitizers`.

Lines of JSON: first the names of all tests. A module of its own, since every process of a watched run imports it, which
takes seconds there if it imports the emulator.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

RECORD = "CUTE_KERNELS_SANITIZER_RECORD"
"""The environment variable that names the file."""


class _Recorder:
    """In the process that hands tests to others, which sees every report and does not end with a process of tests."""

    def __init__(self, path: Path) -> None:
        self._path, self._collected = path, False

    def _write(self, entry: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if not self._collected:
            self._collected = True
            self._write({"tests": list(ids)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = {"test": report.nodeid, "when": report.when, "outcome": report.outcome, "seconds": report.duration}
        self._write(entry)


def pytest_configure(config: pytest.Config) -> None:
    if RECORD in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(Path(os.environ[RECORD])))
