"""Changes of Python source that Cosmic Ray has no operator for: conditions, statements and checks that are left out."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_OTHERS = {"any": "all", "all": "any", "min": "max", "max": "min"}


@dataclass(frozen=True)
class Change:
    """Text in place of a part of a file.

    Attributes:
        node: the part.
        text: what stands there instead.
    """

    node: ast.AST
    text: str

    @property
    def start(self) -> tuple[int, int]:
        """Line from 1 and column of the part."""
        return self.node.lineno, self.node.col_offset

    def applied(self, source: str) -> str:
        """The text of the file with the change; columns of `ast` count bytes."""
        lines = source.encode().splitlines(keepends=True)
        first, last = self.node.lineno - 1, self.node.end_lineno - 1
        before, after = lines[first][: self.node.col_offset], lines[last][self.node.end_col_offset :]
        return b"".join([*lines[:first], before, self.text.encode(), after, *lines[last + 1 :]]).decode()


Changes = Iterator[Change]


def _halves(node: ast.AST, source: str) -> Changes:
    """``8`` -> ``4``, ``1`` -> ``0``."""
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value > 0:
        yield Change(node, str(node.value // 2))


def _quantifiers(node: ast.AST, source: str) -> Changes:
    """``any`` -> ``all``, ``min`` -> ``max``, and the other way."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _OTHERS:
        yield Change(node.func, _OTHERS[node.func.id])


def _operands(node: ast.AST, source: str) -> Changes:
    """``a or b or c`` -> ``b or c``, ``a or c``, ``a or b``."""
    if isinstance(node, ast.BoolOp):
        word = " and " if isinstance(node.op, ast.And) else " or "
        for left_out in node.values:
            kept = [_text(source, each) for each in node.values if each is not left_out]
            yield Change(node, word.join(kept))


def _text(source: str, node: ast.expr) -> str:
    text = ast.get_source_segment(source, node) or ""
    return f"({text})" if isinstance(node, (ast.BoolOp, ast.IfExp, ast.Lambda)) or "\n" in text else text


def _branches(node: ast.AST, source: str) -> Changes:
    """``if a:`` -> ``if False:``, ``a if b else c`` too."""
    if isinstance(node, (ast.If, ast.IfExp)):
        yield Change(node.test, "False")


def _classes(node: ast.AST, source: str) -> Changes:
    """``type(a) is b`` -> ``isinstance(a, b)``."""
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.Call) and isinstance(node.ops[0], ast.Is):
        if isinstance(node.left.func, ast.Name) and node.left.func.id == "type":
            yield Change(node, f"isinstance({_text(source, node.left.args[0])}, {_text(source, node.comparators[0])})")


def _statements(node: ast.AST, source: str) -> Changes:
    """A call whose result nobody takes, ``a += b``, and an assignment to a name that has a value -> ``pass``."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    arguments = node.args
    known = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    for each in ast.walk(node):
        if isinstance(each, ast.AugAssign) or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)):
            yield Change(each, "pass")
        elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            if each.targets[0].id in known:
                yield Change(each, "pass")
            known.add(each.targets[0].id)


OPERATORS: dict[str, Callable[[ast.AST, str], Changes]] = {
    "ours/Halve": _halves,
    "ours/SwapQuantifier": _quantifiers,
    "ours/DropOperand": _operands,
    "ours/NeverBranch": _branches,
    "ours/SubclassesToo": _classes,
    "ours/DropStatement": _statements,
}


def changes(source: str, operator: str) -> list[Change]:
    """All changes of an operator, in a fixed order."""
    found = (each for node in ast.walk(ast.parse(source)) for each in OPERATORS[operator](node, source))
    known = {(each.start, each.node.end_lineno, each.node.end_col_offset, each.text): each for each in found}
    return list(known.values())
