"""What is more of the same, and left to `make nightly`, which sets NIGHTLY=1.

`make test` runs every kind of case. A night runs all cases of a kind, and examples that hypothesis draws anew.
"""

from __future__ import annotations

import os

import pytest

NIGHTLY = os.environ.get("NIGHTLY") == "1"

nightly = pytest.mark.nightly
"""Marks a test, or a case of one, that only a night runs."""


def examples(usual: int, night: int) -> int:
    """How many examples hypothesis draws for a test."""
    return night if NIGHTLY else usual
