from __future__ import annotations

from collections.abc import Iterator

import pytest

from cute_kernels.emulator import Options, default_options
from cute_kernels.operations import compile


@pytest.fixture(autouse=True)
def emulated_operations_add_exactly() -> Iterator[None]:
    """As `backend="reference"` does, so that the two are compared bit by bit."""
    with default_options(Options(arithmetic="exact")):
        yield


@pytest.fixture
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that gets as far as a kernel fails the test, also where another test has compiled that kernel already."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", "off")
    monkeypatch.setattr(compile, "_CACHE", {})
    monkeypatch.setattr(compile, "build", lambda _: pytest.fail("compiled"))
