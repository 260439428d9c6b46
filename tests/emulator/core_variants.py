"""Tests that run once for every instruction set for which the core is compiled, if this processor has it.

By day for the plainest and for the one in use.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cute_kernels.emulator.core import build, library
from cute_kernels.emulator.machine.units.matrix import products
from tests.nightly import NIGHTLY, by_day

_DAILY = {"baseline", library.usable()[-1]}
VARIANTS = by_day(library.usable(), _DAILY)
ALL_VARIANTS = by_day(build.variants(), {library.usable()[-1]})
"""Those that the processor cannot execute, too; by day the one in use alone, for each takes half a minute."""


@functools.cache
def _load(variant: str) -> ctypes.CDLL:
    """The core of a variant; by day the plainest is not optimised, a quarter of the time: its code is tested."""
    with pytest.MonkeyPatch.context() as patch:
        if variant != library.usable()[-1] and not NIGHTLY:
            patch.setenv(build.FLAGS_VARIABLE, f"{os.environ.get(build.FLAGS_VARIABLE, '')} -O0")
        return library.load(variant)


def of_every_variant(compute: Callable[[], np.ndarray]) -> np.ndarray:
    """What is computed with matrix products, by the core of each variant: bit for bit the same."""
    found = {}
    for variant in sorted(library.usable() if NIGHTLY else _DAILY):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(products, "core", functools.partial(_load, variant))
            found[variant] = compute()
    first, *others = found
    for other in others:
        np.testing.assert_array_equal(found[first], found[other], f"{first} and {other}")
    return found[first]


def each_variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """A fixture: matrix products are computed by the core of the variant that is its parameter."""
    with pytest.MonkeyPatch.context() as patch:
        core = _load(request.param)
        patch.setattr(products, "core", lambda: core)
        yield request.param
