"""What is more of the same, and left to `make nightly`, which sets NIGHTLY=1.

`make test` runs every kind of case. A night runs all cases of a kind, and examples that hypothesis draws anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet

NIGHTLY = os.environ.get("NIGHTLY") == "1"

nightly = pytest.mark.nightly
"""Marks a test, or a case of one, that only a night runs."""


def every_other(names: Iterable[str]) -> list[ParameterSet]:
    """Parameters of a test that compiles a kernel for each: by day every other one, by night all."""
    return [pytest.param(name, marks=nightly if index % 2 else ()) for index, name in enumerate(names)]


def examples(usual: int, night: int) -> int:
    """How many examples hypothesis draws for a test."""
    return night if NIGHTLY else usual
