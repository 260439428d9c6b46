"""Tests that run once for every instruction set for which the core is compiled, if this processor has it.

By day for the plainest and for the one in use.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from cute_kernels.emulator.core import build, library
from cute_kernels.emulator.units.matrix import products
from tests.nightly import by_day

DAILY = {"baseline", library.usable()[-1]}
VARIANTS = by_day(library.usable(), DAILY)
ALL_VARIANTS = by_day(build.variants(), {library.usable()[-1]})
"""Those that the processor cannot execute, too; by day the one in use alone, for each takes half a minute."""
_load = functools.cache(library.load)


def each_variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """A fixture: matrix products are computed by the core of the variant that is its parameter."""
    with pytest.MonkeyPatch.context() as patch:
        core = _load(request.param)
        patch.setattr(products, "core", lambda: core)
        yield request.param
