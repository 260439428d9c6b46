"""Lines of the program that PTX was made of, by its ``.loc`` directives."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from dataclasses import dataclass

from cute_kernels.diagnostics.model import SourceLine
from cute_kernels.emulator.ptx.source_lines import directives


@dataclass(frozen=True)
class Location:
    """Where a PTX line comes from: file and line, and those of the call that it was inlined at, or None."""

    place: tuple[str, int]
    inlined_at: tuple[str, int] | None = None
    whole: bool = False


def location(ptx: str, line: int) -> Location | None:
    """Where a line of a PTX text comes from, None if the text does not say.

    A location of column 0 is that of the kernel as a whole, and line 0 is no line: what is before them counts.
    """
    found = _locations(ptx)
    return found[min(line, len(found)) - 1] if found and line > 0 else None


@functools.lru_cache(maxsize=8)
def _locations(ptx: str) -> list[Location | None]:
    """By line of a text."""
    current: Location | None = None
    result = []
    for each in directives(ptx):
        if each is None:
            current = None
        elif each.place.line and (each.column or current is None):
            inlined = (each.inlined_at.path, each.inlined_at.line) if each.inlined_at is not None else None
            current = Location((each.place.path, each.place.line), inlined, not each.column)
        result.append(current)
    return result


def source_line(path: str, line: int) -> SourceLine:
    """A line of a file, with its text and function if the file can be read."""
    linecache.checkcache(path)  # it may have been edited, or be another one in another folder
    function = function_around(path, line)
    return SourceLine(path, line, linecache.getline(path, line).strip(), function.name if function else "")


def function_around(path: str, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The innermost function around a line; None outside of functions, and where the file cannot be read."""
    tree = syntax_tree(path)
    if tree is None:
        return None
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    around = [node for node in functions if _first_line(node) <= line <= (node.end_lineno or 0)]
    return max(around, key=lambda node: node.lineno, default=None)


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def syntax_tree(path: str) -> ast.Module | None:
    """Syntax tree of a Python file; None if it cannot be read, or is none."""
    return _tree("".join(linecache.getlines(path))) if path else None


@functools.lru_cache(maxsize=32)
def _tree(text: str) -> ast.Module | None:
    try:
        return ast.parse(text) if text else None
    except (SyntaxError, ValueError):
        return None


def last_name(node: ast.expr) -> str:
    """``c`` of ``a.b.c``, "" of what is no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def short_name(ptx: str, kernel: str) -> str:
    """Name of a kernel as its program has it: CuTe DSL appends the types of all parameters.

    The function that the kernel's first location is in, if the entry's name has its name; else what is before the
    types.
    """
    begin = ptx.find(f".entry {kernel}")
    first = next(filter(None, directives(ptx)[ptx.count("\n", 0, begin) :]), None) if begin >= 0 else None
    if first is not None:
        function = function_around(first.place.path, first.place.line)
        if function is not None and f"_{function.name}_" in f"_{kernel}_":
            return function.name
    name = kernel.removeprefix("kernel_cutlass_")
    plain = re.split(r"_(?=[A-Z]|tensor)|_\d+$", name, maxsplit=1)[0]
    return plain or kernel
