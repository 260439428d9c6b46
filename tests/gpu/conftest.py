"""Tests that need a GPU with a kernel. Without one nothing is collected: a skip is no evidence."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.plan import ARCHS

CAPABILITIES = {arch.compute_capability for arch in ARCHS.values()}
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None

if CAPABILITY not in CAPABILITIES:
    collect_ignore_glob = ["test_*.py"]
elif CAPABILITY != (9, 0):
    collect_ignore = ["test_kernel.py", "test_gemm_split.py"]  # the variants of SM90's kernels


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "two_gpus: not collected with one GPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.device_count() < 2:
        left_out = [item for item in items if item.get_closest_marker("two_gpus")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


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
