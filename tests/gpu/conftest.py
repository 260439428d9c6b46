"""Tests that need a GPU with a kernel. Without one nothing is collected: a skip is no evidence.

``--dry-run-arch sm_100a`` runs them without a GPU: `tests.gpu.emulated` stands for a device of that architecture and
sizes are reduced. That shows that the tests fit the architecture, and that its kernels give the expected numbers in the
emulator; it shows nothing about a GPU. Tests marked ``gpu_only`` are left out of it, since what they look at is not
emulated: streams that run at once, `torch.compile`, times, the driver.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from tests.gpu import architecture, emulated, harness


def pytest_addoption(parser: pytest.Parser) -> None:
    choices = architecture.WITH_SELECTIONS
    parser.addoption("--dry-run-arch", choices=choices, help="tests/gpu on an emulated device, at small sizes")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "two_gpus: not collected with one GPU")
    config.addinivalue_line("markers", "gpu_only(what): left out of a dry run, for what the emulator does not have")
    arch = config.getoption("--dry-run-arch", None)
    if arch is not None:
        device = contextlib.ExitStack()
        device.enter_context(emulated.device(arch))
        config.add_cleanup(device.close)
        harness.DRY_RUN = True


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Decides about the files that need what the device at hand has not; of all others pytest decides."""
    if not collection_path.match("test_*.py"):
        return None
    arch = architecture.at_hand()
    if arch is None or (collection_path.name in architecture.NEEDS_SM90 and arch != "sm_90a"):
        return True
    if arch not in architecture.WITH_SELECTIONS and collection_path.name != architecture.ANYWHERE:
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not _can_run(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _can_run(item: pytest.Item) -> bool:
    if item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
        return False
    return not (harness.DRY_RUN and item.get_closest_marker("gpu_only"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The largest of every figure that tests measured with `record_property`; also across worker processes."""
    largest: dict[str, tuple[float, str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in getattr(report, "user_properties", ()):
                if isinstance(value, float) and value > largest.get(name, (float("-inf"), ""))[0]:
                    largest[name] = (value, report.nodeid)
    if largest:
        terminalreporter.section("largest measured figures")
        for name, (value, test) in sorted(largest.items()):
            terminalreporter.line(f"{value:12.5g}  {name}  ({test})")
