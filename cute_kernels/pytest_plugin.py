"""A pytest plugin for tests of CuTe DSL kernels: the fixture ``emulated``, and the marker ``schedules``.

Installed with the package. It imports nothing but pytest until a test uses it.
"""

import importlib
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from cute_kernels.common import extras
from cute_kernels.common.chips import DEFAULT_ARCH


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--emulated-arch``, or ``emulated_arch`` in the configuration."""
    group = parser.getgroup("cute-kernels", "CuTe DSL kernels in the emulator")
    group.addoption("--emulated-arch", metavar="ARCH", help="what the fixture emulated compiles for, e.g. sm_90a")
    parser.addini("emulated_arch", "what the fixture emulated compiles for", default=DEFAULT_ARCH)


def pytest_configure(config: pytest.Config) -> None:
    """Declares the markers."""
    config.addinivalue_line(
        "markers",
        "schedules(*schedules, warps=0, ctas=1, overlap=False, random=0): runs a test that has the fixture emulated "
        "under the default schedule and under these; cute_kernels.testing.schedules_for says what the arguments mean",
    )
    config.addinivalue_line(
        "markers", "emulated(arch=..., strict=False): architecture and strictness of the fixture emulated"
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Behind the traceback of a fault, what `cute-kernels emulate` prints of it: both source lines, help, replay.

    The traceback has the test's and the program's own frames; ``--full-trace`` shows all.
    """
    errors = sys.modules.get("cute_kernels.emulator.errors")
    error = None if errors is None or call.excinfo is None else errors.error_behind(call.excinfo.value)
    hidden = [] if error is None or "internal error" in str(error) else _modules_below(call.excinfo.value)
    for names in hidden:
        names["__tracebackhide__"] = True  # pytest looks for it among a frame's globals, too
    outcome = yield
    for names in hidden:
        names.pop("__tracebackhide__", None)
    report = outcome.get_result()
    if error is None or not report.failed:
        return
    diagnostics = "cute_kernels.emulator.reports"
    diagnose = importlib.import_module(f"{diagnostics}.diagnosis").diagnose
    render = importlib.import_module(f"{diagnostics}.text").render
    arch = item.config.getoption("--emulated-arch")
    replay = ["pytest", *(["--emulated-arch", arch] if arch else []), item.nodeid]
    report.sections.append(("Fault found by the emulator", render(diagnose(error, replay=replay))))


def _modules_below(error: BaseException | None) -> list[dict[str, Any]]:
    """Globals of modules of the emulator and CuTe DSL that have frames in the tracebacks of an error and its causes."""
    found: list[dict[str, Any]] = []
    while error is not None:
        found += (frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__))
        error = error.__cause__ or error.__context__
    return [names for names in found if str(names.get("__name__", "")).partition(".")[0] in _BELOW]


_BELOW = ("contextlib", "cute_kernels", "cutlass", "nvidia_cutlass_dsl")  # contextlib: of the emulator's decorators


def _testing(user: str) -> Any:
    extras.require("testing", user)
    return importlib.import_module("cute_kernels.testing.emulation")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each schedule of the marker, with its name."""
    marker = metafunc.definition.get_closest_marker("schedules")
    if marker is None:
        return
    if "emulated" not in metafunc.fixturenames:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: the marker schedules needs the fixture emulated")
    schedules = _testing("the marker schedules").schedules_for(*marker.args, **marker.kwargs)
    metafunc.parametrize("emulated", schedules, indirect=True, ids=str)


@pytest.fixture
def emulated(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The test's launches run in the emulator, tensors on "cuda" are host memory: a `Session` of `capture`."""
    testing = _testing("the fixture emulated")
    config = request.config
    keywords = {"arch": config.getoption("--emulated-arch") or config.getini("emulated_arch")}
    if (marker := request.node.get_closest_marker("emulated")) is not None:
        keywords |= marker.kwargs
    with testing.emulation(schedule=getattr(request, "param", None), **keywords) as session:
        yield session
