"""Errors carry where they happened."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cute_kernels.emulator import errors


def place(line: int | None, text: str, source: str) -> SimpleNamespace:
    return SimpleNamespace(line=line, text=text, source=source)


def test_location_is_appended_as_far_as_it_is_known():
    error = errors.IllegalAccess("misaligned load")
    assert str(error) == "misaligned load"
    error.at(place(512, "\ttcgen05.ld.x32 {..};", "epilogue.py:88"), "CTA 1 warp 3 (epilogue)")
    assert str(error) == (
        "misaligned load at PTX line 512 `tcgen05.ld.x32 {..};` (epilogue.py:88), CTA 1 warp 3 (epilogue)"
    )
    assert str(errors.BarrierMisuse("x").at(place(None, "", "a.py:1"), "warp 2")) == "x at a.py:1, warp 2"
    assert str(errors.BarrierMisuse("x").at(None, "warp 2")) == "x in warp 2"


def test_the_innermost_location_wins():
    error = errors.UnsupportedPTX("what", ptx_line=3)
    assert error.at(place(9, "", ""), "warp 1") is error
    assert (error.ptx_line, error.warp, error.message) == (3, "warp 1", "what")


def test_hang_carries_its_report():
    error = errors.Hang("no warp can run", "warp 0 waits\nwarp 1 waits")
    assert error.report == "warp 0 waits\nwarp 1 waits" and str(error).endswith("warp 1 waits")


@pytest.mark.parametrize(
    "kind", ["UnsupportedPTX", "IllegalAccess", "ProxyFenceMissing", "SharedMemoryRace", "BarrierMisuse", "Hang"]
)
def test_one_except_clause_catches_all(kind: str):
    with pytest.raises(errors.EmulatorError):
        raise getattr(errors, kind)("x")
