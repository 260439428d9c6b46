"""docs/emulator/contract.md lists what the emulator executes: the table must be the generated one."""

from __future__ import annotations

from pathlib import Path

from cute_kernels.emulator.__main__ import coverage
from cute_kernels.emulator.ptx.families import FAMILIES

DOCS = Path(__file__).parents[3] / "docs" / "emulator" / "contract.md"


def test_table_is_current() -> None:
    table = coverage()
    assert DOCS.read_text().endswith(table + "\n"), "paste what `python -m cute_kernels.emulator` prints into the page"
    for prefix in FAMILIES:
        assert prefix[0] in table
