from __future__ import annotations

from collections import Counter

import pytest

from tests.emulator.hardware import MODE, TALLY


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Worker processes of pytest-xdist hand their counts to the one that prints."""
    output = getattr(session.config, "workeroutput", None)
    if MODE and output is not None:
        output["hardware"] = (TALLY.device, TALLY.compared, dict(TALLY.left_out))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    device, compared, left_out = getattr(node, "workeroutput", {}).get("hardware", ("", 0, {}))
    TALLY.device = TALLY.device or device
    TALLY.compared += compared
    TALLY.left_out += Counter(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With EMULATOR_HW: how many launches were compared with the GPU, and why the others were not."""
    if not MODE:
        return
    what = (
        "assembled for sm_90a"
        if MODE == "assemble"
        else f"equal or reported as different on {TALLY.device or 'no GPU'}"
    )
    terminalreporter.section("launches on hardware")
    terminalreporter.line(f"{TALLY.compared:6d}  {what}")
    for reason, count in TALLY.left_out.most_common():
        terminalreporter.line(f"{count:6d}  {reason}")
