"""Settings of the whole suite: random order, reproducible data, nothing left behind, and what each part took.

pytest-randomly shuffles the modules and the tests of each, by one seed for all worker processes. The seed is printed
first, and ``make test ARGS=--randomly-seed=SEED`` repeats the order. Hypothesis draws the same examples in
every order.
"""

# ruff: noqa: E402
from __future__ import annotations

import gc

gc.disable()  # until the first test: what is imported and collected lives until the end

import collections
import functools
import importlib
import os
import pkgutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from unittest import mock

import hypothesis
import numpy as np
import pytest
import torch
from torch.nn.modules import module as modules

import cute_kernels
from cute_kernels.commands import workers
from cute_kernels.dsl import kernel_cache
from cute_kernels.emulator.programs.device import building
from cute_kernels.operations.runtime import tuned
from tests.nightly import NIGHTLY, examples
from tests.random_orders import KERNELS

# Tests that emulate a kernel take seconds, so the time of an example says nothing. A night draws more examples, anew.
hypothesis.settings.register_profile(
    "suite", deadline=None, max_examples=examples(25, 200), derandomize=not NIGHTLY, print_blob=True
)
hypothesis.settings.load_profile("suite")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    # Of the processes that tests start: threads that wait for each other on two cores waste half their time.
    os.environ["OMP_NUM_THREADS"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background job inherits that Ctrl-C is ignored: tests of interrupts would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "nightly: run by `make nightly` alone, which sets NIGHTLY=1")
    if KERNELS not in os.environ:  # which the worker processes of pytest-xdist inherit
        folder = tempfile.TemporaryDirectory(prefix="cute-kernels-test-")
        os.environ[KERNELS] = folder.name
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(functools.partial(os.environ.pop, KERNELS))
    os.environ["CUTE_KERNELS_CACHE_DIR"] = os.environ[KERNELS]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if item.get_closest_marker("nightly") and not NIGHTLY]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Prints the seed of the order at once, also with ``-q``: a run that hangs or is killed can be repeated, too."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    seed = session.config.getoption("randomly_seed", None)
    if reporter is not None and seed is not None and not hasattr(session.config, "workerinput"):
        reporter.write_line(f"random order: --randomly-seed={seed}")


def pytest_terminal_summary(terminalreporter) -> None:
    """Prints how long each part of the suite took, in seconds of all worker processes together."""
    seconds: collections.Counter[str] = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds["/".join(PurePosixPath(report.nodeid.split("::")[0]).parts[:2])] += report.duration
    parts = ", ".join(f"{part} {taken:.0f}" for part, taken in seconds.most_common())
    terminalreporter.write_line(f"seconds of all processes by part: {parts or 'no test ran'}")


# pytest names the test that runs; torch.compile and Triton name the folders of their caches at their first use; OpenMP
# libraries and OpenCV, which transformers may bring, set theirs when they are first imported.
SET_BY_LIBRARIES = (
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "TRITON_",
    "KMP_",
    "OMP_",
    "LD_LIBRARY_PATH",
    "QT_QPA_",
)


HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")


def process_state() -> dict[str, object]:
    """What one test could leave behind for another."""
    return {
        "environment": {name: value for name, value in os.environ.items() if not name.startswith(SET_BY_LIBRARIES)},
        "current directory": os.getcwd(),
        "import path": list(sys.path),
        "torch's default type": torch.get_default_dtype(),
        "torch's gradients": torch.is_grad_enabled(),
        "torch's threads": torch.get_num_threads(),
        "hooks of all modules": [list(hooks) for name, hooks in vars(modules).items() if name in HOOKS],
        "NumPy's error handling": np.geterr(),
        "configurations found fastest": _tuned_files(),
    }


def _tuned_files() -> list[Path]:
    folder = kernel_cache.directory()
    return [] if folder is None or not folder.is_dir() else _tuned_files_of(folder, folder.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _tuned_files_of(folder: Path, modified: int) -> list[Path]:
    """Looked for when the folder has changed only: in the end it has the kernels of the whole suite."""
    return tuned.files()


@pytest.fixture(autouse=True, scope="session")
def all_modules_are_imported() -> None:
    """Before the first test: a module that is imported while a test has replaced a name keeps the replacement."""
    for module in pkgutil.walk_packages(cute_kernels.__path__, "cute_kernels."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
    building.library()  # says that it is compiled, which a test that compares what is printed would find
    # No collection of garbage has to look through modules and tests again, nor often through compiled kernels.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def commands_start_no_workers() -> Iterator[None]:
    """Unless a test says how many: each process would import torch and CuTe DSL, four seconds, to do very little."""
    with mock.patch.object(workers, "JOBS", 1):
        yield


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """The same random tensors in every order, and a process that the next test finds as this one found it."""
    torch.random.default_generator.manual_seed(0)  # torch.manual_seed also notes, for each device, where it was called
    before = process_state()
    yield
    forget_compiled_functions()
    after = process_state()
    changed = [_difference(what, before[what], after[what]) for what in before if before[what] != after[what]]
    assert not changed, f"left behind: {'; '.join(changed)}"


def forget_compiled_functions() -> None:
    """Those of torch.compile, which counts recompilations per code object and beyond a limit compiles no more."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters.pop("frames", None):
        torch._dynamo.reset()


def _difference(what: str, before: object, after: object) -> str:
    if isinstance(before, dict):
        names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        return f"{what}: " + ", ".join(f"{name} {before.get(name)!r} -> {after.get(name)!r}" for name in names)
    return f"{what}: {before!r} -> {after!r}"
