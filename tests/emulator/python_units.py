"""Launches in which Python performs every instruction with effects that the core would.

What the core leaves (rare cases, errors) a Python function performs on the same state. Tests run with both: whatever
the core does, the Python functions have to do as well.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from cute_kernels.emulator.bytecode import execution

Result = TypeVar("Result")


@contextlib.contextmanager
def units(native: bool) -> Iterator[None]:
    """Inside, launches have the units of the core, or (``native`` False) those of Python."""
    if native:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        translate = execution.translate.__wrapped__
        patch.setattr(execution, "translate", functools.lru_cache(maxsize=4)(translate))
        for of_the_core in ("Units",):
            patch.setattr(execution, of_the_core, lambda *_: None)
        patch.setattr(execution, "INLINE", {})
        yield


def with_both_units(run: Callable[[], Result]) -> tuple[Result, Result]:
    """What a function returns with the units of the core, and with those of Python."""
    with units(True):
        first = run()
    with units(False):
        return first, run()
