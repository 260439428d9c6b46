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
    flags = shlex.split(sanitizers.FLAGS)
    command = [*build.compiler(), *flags, "-shared", "-fPIC", "items.c", "-o", "items.so"]
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
    output = capfd.readouterr()
    assert found in output.err
    assert f"sanitizers: {int(bool(found))} reports" in output.out


def test_a_command_that_fails_without_a_report(capfd: pytest.CaptureFixture[str]):
    assert sanitizers.watched([sys.executable, "-c", "raise SystemExit(7)"]) == 1
    assert "0 reports, exit status 7" in capfd.readouterr().out


TESTS = """
import ctypes, time
import pytest

def call(name, count):
    items = (ctypes.c_int32 * 10)(*[2**31 - 1] * 10)
    getattr(ctypes.CDLL({library!r}), name)(items, ctypes.c_int64(count))

@pytest.mark.parametrize("count", [9, 10, {bad}])
def test_last(count):
    call("last", count)

def test_after_it():
    pass

def test_is_slow():
    open({began!r}, "w").close()
    time.sleep({seconds})
"""


@pytest.fixture(autouse=True)
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing those of all packages that are installed takes longer than these tests."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def _run(folder: Path, library: Path, bad: int, seconds: float = 0.0) -> int:
    (folder / "test_good.py").write_text("def test_passes():\n    pass\n")
    facts = {"library": str(library), "began": str(folder / "began"), "bad": bad, "seconds": seconds}
    (folder / "test_items.py").write_text(TESTS.format(**facts))
    plugins = ["-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    options = [f"--rootdir={folder}", "-c", "/dev/null", *plugins]
    return sanitizers.watched_tests([*options, str(folder)], processes=1, seconds=1e6)


def _words(output: str, file: str) -> str:
    return next(line for line in output.splitlines() if f" {file}" in line).partition(file)[2].strip()


@pytest.mark.parametrize(("bad", "outcome"), [(8, "passed"), (11, "1 failed")])
def test_each_file_has_a_line(tmp_path: Path, misbehaving: Path, bad: int, outcome: str, capfd) -> None:
    """A report is of the test that was running, and the tests behind it run all the same."""
    assert _run(tmp_path, misbehaving, bad) == int(bad == 11)
    output = capfd.readouterr()
    assert _words(output.out, "test_good.py") == "passed"
    assert _words(output.out, "test_items.py") == outcome
    assert "2 files, 6 tests, " in output.out and f"{int(bad == 11)} failed, 0 not run" in output.out
    assert ("heap-buffer-overflow" in output.err) == (bad == 11)


def test_what_has_not_run_in_time_is_named(tmp_path: Path, misbehaving: Path, capfd, monkeypatch) -> None:
    """The time is over as soon as the slow test has begun."""
    monkeypatch.setattr(sanitizers, "_now", lambda: 1e9 if (tmp_path / "began").exists() else 0.0)
    assert _run(tmp_path, misbehaving, 8, seconds=600.0) == 1
    output = capfd.readouterr().out
    assert _words(output, "test_items.py") == "1 not run"
    assert "ended after 1000000 s with tests left in 1 files" in output


def test_without_sanitizers_nothing_runs(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr(sys, "argv", ["sanitizers", "--processes", "1"])
    monkeypatch.setattr(sanitizers, "_PRELOADED", (("libnowhere.so",),))
    assert sanitizers.main() == 2
    assert "no test ran: " in (error := capfd.readouterr().err) and "has none of libnowhere.so" in error
