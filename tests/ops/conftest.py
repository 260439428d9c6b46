from __future__ import annotations

import pytest

from cute_kernels import compile


@pytest.fixture
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that gets as far as a kernel fails the test, also where another test has compiled that kernel already."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", "off")
    monkeypatch.setattr(compile, "_CACHE", {})
    monkeypatch.setattr(compile, "compile_uncached", lambda *_, **__: pytest.fail("compiled"))
