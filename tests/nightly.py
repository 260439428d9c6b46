"""What is more of the same, and left to `make nightly`, which sets NIGHTLY=1.

`make test` runs every kind of case. A night runs all cases of a kind, and examples that hypothesis draws anew.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterable
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

NIGHTLY = os.environ.get("NIGHTLY") == "1"

nightly = pytest.mark.nightly
"""Marks a test, or a case of one, that only a night runs."""


def by_day(names: Iterable[str], daily: Collection[str]) -> list[ParameterSet]:
    """Parameters of a test, of which only ``daily`` do not wait for the night.

    Raises:
        ValueError: a name that is not there.
    """
    names = list(names)
    if unknown := set(daily) - set(names):
        raise ValueError(f"no parameters: {', '.join(sorted(unknown))}")
    return [pytest.param(name, marks=() if name in daily else nightly) for name in names]


def every_other(names: Iterable[str]) -> list[ParameterSet]:
    """Parameters of a test that compiles a kernel for each: by day every other one."""
    return by_day(names := list(names), names[::2])


def crossed(first: Iterable[object], second: Iterable[object]) -> list[ParameterSet]:
    """Pairs of two parameters: by day every other one, in which each name of both occurs."""
    return [
        pytest.param(one, other, marks=() if (i + j) % 2 == 0 else nightly)
        for i, one in enumerate(first)
        for j, other in enumerate(second)
    ]


def daily_or_all(daily: Iterable[T], every: Iterable[T]) -> list[T]:
    """What tests of this run are of: by day ``daily``."""
    return list(every if NIGHTLY else daily)


def drawn(daily: Iterable[T], every: Iterable[T]) -> SearchStrategy[T]:
    """What hypothesis draws of what a kernel is compiled for: by day ``daily``, which other tests compile anyway."""
    return st.sampled_from(daily_or_all(daily, every))


def drawn_together(**facts: Iterable[object]) -> SearchStrategy[dict[str, object]]:
    """Several facts that a kernel is compiled for, drawn by hypothesis: by day of as few kernels as have every value.

    The most values that a fact has are the number of kernels; which values come together is shuffled once and for all.
    """
    values = {name: list(each) for name, each in facts.items()}
    if NIGHTLY:
        return st.fixed_dictionaries({name: st.sampled_from(each) for name, each in values.items()})
    kernels = max(map(len, values.values()))
    spread = {name: random.Random(name).sample((each * kernels)[:kernels], kernels) for name, each in values.items()}
    return st.sampled_from([dict(zip(spread, together)) for together in zip(*spread.values())])


def examples(usual: int, night: int) -> int:
    """How many examples hypothesis draws for a test."""
    return night if NIGHTLY else usual
