"""Candidates of a public list: what the emulator says of each, which docs/emulator/evidence.md repeats."""

from __future__ import annotations

import re

import pytest

from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.reports.diagnosis import diagnose
from tests.emulator.candidates import CANDIDATES
from tests.emulator.test_public_bugs import PAGE, SCHEDULES, launch


@pytest.mark.parametrize("name", CANDIDATES)
def test_the_mended_kernel_is_silent_and_right(name: str) -> None:
    for options in SCHEDULES:
        assert launch(CANDIDATES[name], options, fixed=True) == CANDIDATES[name].expected, options


@pytest.mark.parametrize("name", CANDIDATES)
def test_what_comes_of_the_candidate(name: str) -> None:
    """It is reported under every schedule, or under none, with the right result."""
    bug = CANDIDATES[name]
    for options in SCHEDULES:
        if not bug.kinds:
            assert launch(bug, options, fixed=False) == bug.expected
            continue
        with pytest.raises(EmulatorError, match=re.compile(bug.message, re.S)) as error:
            launch(bug, options, fixed=False)
        assert diagnose(error.value).kind == bug.kinds[0]


def test_the_page_has_them() -> None:
    page = PAGE.read_text()
    for bug in CANDIDATES.values():
        assert not bug.kinds or f"(`{bug.kinds[0]}`)" in page, bug.flaw
