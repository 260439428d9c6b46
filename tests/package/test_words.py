"""Refusals have one dialect: ``NAME = VALUE: must be ..``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "cute_kernels"

OLD = re.compile(
    r"\b(?:allowed|possible)(?: are| is|:| for| here| beside)|(?:, |: |; |[?] )expected |is expected"
    r"|\b(?:is|are) needed|is not possible|; legal (?:are|is) |ha(?:s|ve) to be "
)
"""How refusals were worded before."""

EXCEPTIONS = {"ValueError", "TypeError", "NotImplementedError", "reject", "require", "ArgumentTypeError"}


def refusals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every string that an exception of a wrong argument is made of."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in EXCEPTIONS:
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def old_words(text: str) -> list[int]:
    """Lines of a module whose refusals use an old dialect."""
    return [line for line, words in refusals(ast.parse(text)) if OLD.search(words)]


def test_no_refusal_uses_an_old_dialect() -> None:
    found = {str(path.relative_to(PACKAGE)): old_words(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    "words", ["x = 3, allowed: 1 to 2", "x is int, expected str", "x: an int is needed", "x = 3 is not possible: why",
     "x 3; allowed are 1 and 2", "--x 3: expected two", "x has to be 1", "x = 3 where 2 is expected"]
)
def test_the_old_dialects_are_seen(words: str) -> None:
    assert old_words(f"raise ValueError({words!r})") == [1]
    assert not old_words(f"print({words!r})")
