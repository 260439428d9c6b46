"""The printed page of instructions and kinds of reports has all of them."""

from __future__ import annotations

import re
import sys

import pytest

from cute_kernels.emulator.__main__ import main, page
from cute_kernels.emulator.isa.ptx.families import FAMILIES
from cute_kernels.emulator.reports.kinds import KINDS


def test_the_page_has_all() -> None:
    families, kinds = page().split("## Kinds of reports")
    for prefix in FAMILIES:
        assert re.search(rf"\b{prefix[0]}\b", families)
    for name in KINDS:
        assert kinds.count(f"`{name}`") == 1


@pytest.mark.parametrize("name", KINDS)
def test_kinds_are_explained(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fields are filled, whatever a kind has; an unknown one is named with those that there are."""
    monkeypatch.setattr(sys, "argv", ["emulator", name])
    assert main() == 0
    shown = capsys.readouterr().out
    assert shown.strip() and not re.search(r"[{}]", shown)
    monkeypatch.setattr(sys, "argv", ["emulator", f"{name}-"])
    with pytest.raises(SystemExit):
        main()
    assert f"'{name}-'" in capsys.readouterr().err
