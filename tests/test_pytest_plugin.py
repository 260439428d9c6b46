"""The plugin of pytest in a process of its own: fixture, marker, reports, misuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from cute_kernels import pytest_plugin
from tests.processes import run_python

ROOT = Path(__file__).parents[1]


def run_tests(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, far from this repository's configuration."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = ["-m", "pytest", "-p", "cute_kernels.pytest_plugin", "-v"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "400",  # no summary is cut short
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # importing those of all packages takes longer than the tests
        "HYPOTHESIS_STORAGE_DIRECTORY": str(ROOT / ".hypothesis"),  # has the constants of this package's modules
    }
    return run_python(*command, *arguments, str(folder), cwd=folder, env=environment)


def test_the_plugin_is_registered_under_its_own_name_and_needs_nothing_before_it_is_used() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'"{pytest_plugin.__name__}" = "{pytest_plugin.__name__}"' in project
    heavy = "{'torch', 'cutlass', 'numpy', 'hypothesis'}"
    program = f"import sys, {pytest_plugin.__name__}\nprint({heavy} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout == "set()\n", run.stderr


def test_architecture_strictness_and_misuse(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest, torch\n"
        "def test_arch(emulated): assert emulated.arch == 'sm_80' and torch.zeros(1, device='cuda').is_cuda\n"
        "@pytest.mark.emulated(arch='sm_90a', strict=True)\n"
        "def test_marked(emulated): assert emulated.arch == 'sm_90a' and emulated.options.strict\n"
        "def test_plain(): assert not torch.zeros(1).is_cuda\n"
    )
    run = run_tests(tmp_path, "--emulated-arch", "sm_80")
    assert run.returncode == 0 and "3 passed" in run.stdout, run.stdout
    misuses = (
        ("@pytest.mark.schedules(random=1)\ndef test_it(): pass\n", "the marker schedules needs the fixture emulated"),
        ("@pytest.mark.schedules(random=-1)\ndef test_it(emulated): pass\n", "random = -1: must be at least 0"),
        ("@pytest.mark.schedules('lazy')\ndef test_it(emulated): pass\n", "must be Schedule(..)"),
        ("@pytest.mark.emulated(arch='sm_75')\ndef test_it(emulated): pass\n", "arch = 'sm_75': must be one of sm_80"),
    )
    for number, (body, _) in enumerate(misuses):
        (tmp_path / f"test_misuse_{number}.py").write_text(f"import pytest\n{body}")
    (tmp_path / "test_it.py").unlink()
    run = run_tests(tmp_path, "--continue-on-collection-errors")
    summary = run.stdout.rpartition("short test summary info")[2]
    for number, (_, words) in enumerate(misuses):
        assert re.search(rf"^(ERROR|FAILED) test_misuse_{number}\.py.* {re.escape(words)}", summary, re.M), run.stdout
    assert run.returncode == 1 and "passed" not in summary


RACE = """
import cutlass, pytest, torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def turn(y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    buffer = cute.make_tensor(cute.arch.alloc_smem(cutlass.Int32, 64), cute.make_layout(64))
    buffer[thread] = thread
    y[thread] = buffer[thread ^ 1]

@cute.jit
def launch(y: cute.Tensor):
    turn(y).launch(grid=(1, 1, 1), block=(64, 1, 1))

def test_race(emulated):
    launch(from_dlpack(torch.zeros(64, dtype=torch.int32, device="cuda")))

@pytest.mark.parametrize("wrapped", ["as it is"])
@pytest.mark.xfail
def test_expected(emulated, wrapped):
    test_race(emulated)

@pytest.mark.parametrize("wrapped", ["by the program"])
def test_behind_another(emulated, wrapped):
    try:
        test_race(emulated)
    except Exception as error:
        raise ValueError("the program's own") from error

def test_of_another_kind(emulated):
    raise RuntimeError("not the emulator's")
"""


def test_the_report_of_a_fault_follows_the_traceback(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(RACE)
    output = run_tests(tmp_path, "--emulated-arch", "sm_90a").stdout
    assert "3 failed, 1 xfailed" in output and output.count("Fault found by the emulator") == 2, output
    _, report, behind = output.split("Fault found by the emulator")
    assert "replay: pytest --emulated-arch sm_90a test_it.py::test_race\n" in report, output
    assert "replay: pytest --emulated-arch sm_90a 'test_it.py::test_behind_another[by the program]'\n" in behind, output
    assert "error[lanes-race]: a load reads shared memory that a store by another lane" in report, output
    assert re.search(r"--> .*test_it.py:11 .*\n +written at .*test_it.py:10 ", report), output
    assert "help: a barrier is missing between test_it.py:10 and test_it.py:11: " in report
    assert "cute.arch.sync_warp()" in report
    # The frames of the test, none of the emulator and of CuTe DSL in between.
    shown = set(re.findall(r"^(\S+\.py):\d+: ", output, re.MULTILINE))
    assert shown == {"test_it.py"}, output


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from cute_kernels.common import extras\nthere = extras._is_there\n"
        "extras._is_there = lambda module: module != 'hypothesis' and there(module)\n"
    )
    (tmp_path / "test_it.py").write_text("def test_it(emulated): pass\n")
    run = run_tests(tmp_path)
    assert run.returncode == 1
    assert "the fixture emulated needs hypothesis: pip install 'cute-kernels[testing]'" in run.stdout
