"""Tests that need a GPU with a kernel. Without one nothing is collected: a skip is no evidence."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.plan import ARCHS

CAPABILITIES = {arch.compute_capability for arch in ARCHS.values()}
HAS_KERNEL = torch.cuda.is_available() and torch.cuda.get_device_capability() in CAPABILITIES

if not HAS_KERNEL:
    collect_ignore_glob = ["test_*.py"]


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
