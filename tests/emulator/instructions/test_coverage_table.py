"""docs/emulator/families.md lists what the emulator executes and reports: the page must be the generated one."""

from __future__ import annotations

from pathlib import Path

from cute_kernels.emulator.__main__ import page
from cute_kernels.emulator.diagnostics.kinds import KINDS
from cute_kernels.emulator.ptx.families import FAMILIES

DOCS = Path(__file__).parents[3] / "docs" / "emulator" / "families.md"


def test_page_is_current() -> None:
    text = page()
    assert DOCS.read_text() == text, "python -m cute_kernels.emulator > docs/emulator/families.md"
    families, kinds = text.split("## Kinds of reports")
    for prefix in FAMILIES:
        assert prefix[0] in families
    for name in KINDS:
        assert f"| `{name}` | " in kinds
