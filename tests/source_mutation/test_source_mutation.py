"""The parts that are mutated, and the tests that judge their mutants, are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source_mutation.parts import PARTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_files_of_a_part_exist(part) -> None:
    assert [name for name in (*part.sources, *part.tests) if not (ROOT / name).exists()] == []
