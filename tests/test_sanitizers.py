"""What the sanitizers' run notices: a watched library that misbehaves, and one that does not."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels.emulator.core import build
from tests import sanitizers

SOURCE = """
#include <stdint.h>
int32_t last(const int32_t *items, int64_t count) { return items[count - 1]; }
int32_t next(const int32_t *items, int64_t count) { return items[count - 1] + 1; }
"""


@pytest.fixture(scope="module")
def misbehaving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of two functions, compiled as the core is."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "items.c").write_text(SOURCE)
    command = [*build.compiler(), *shlex.split(sanitizers.FLAGS), "-shared", "-fPIC", "items.c", "-o", "items.so"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "items.so"


@pytest.mark.parametrize(
    ("call", "count", "found"),
    [
        ("last", 10, ""),
        ("last", 11, "heap-buffer-overflow"),  # one behind the end of a ctypes array of 10
        ("next", 10, "signed integer overflow: 2147483647 + 1"),
    ],
)
def test_reports_decide(misbehaving: Path, call: str, count: int, found: str, capfd: pytest.CaptureFixture[str]):
    code = (
        "import ctypes; items = (ctypes.c_int32 * 10)(*[2**31 - 1] * 10);"
        f"ctypes.CDLL('{misbehaving}').{call}(items, ctypes.c_int64({count}))"
    )
    assert sanitizers.watched([sys.executable, "-c", code]) == (1 if found else 0)
    assert found in capfd.readouterr().err


def test_a_command_that_fails_without_a_report(capfd: pytest.CaptureFixture[str]):
    assert sanitizers.watched([sys.executable, "-c", "raise SystemExit(7)"]) == 1
    assert "0 reports of memory errors, exit status 7" in capfd.readouterr().out
