from __future__ import annotations

import pytest

from bench import cases, gemm_cases, image_cases


@pytest.fixture
def few_input_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or three: on a GPU tiny cases get as many as it takes to leave its caches, hundreds."""
    monkeypatch.setattr(cases, "MAX_SLOTS", 2)
    monkeypatch.setattr(image_cases, "MAX_SLOTS", 2)
    monkeypatch.setattr(gemm_cases, "ROTATED_BYTES", 1 << 10)
