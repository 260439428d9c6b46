"""docs/emulator/families.md lists what the emulator executes and reports: the page must be the generated one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from cute_kernels.emulator.__main__ import main, page
from cute_kernels.emulator.isa.ptx.families import FAMILIES
from cute_kernels.emulator.reports.kinds import KINDS

DOCS = Path(__file__).parents[2] / "docs" / "emulator" / "families.md"


def test_page_is_current() -> None:
    text = page()
    assert DOCS.read_text() == text, "python -m cute_kernels.emulator > docs/emulator/families.md"
    families, kinds = text.split("## Kinds of reports")
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
