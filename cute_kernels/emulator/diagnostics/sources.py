"""Lines of the program that PTX was made of, by its ``.loc`` directives."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from dataclasses import dataclass

from cute_kernels.emulator.diagnostics.model import SourceLine

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
_LOCATION = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*\binlined_at\s+(\d+)\s+(\d+))?")
_ASSEMBLY_BEGINS, _ASSEMBLY_ENDS = "// begin inline asm", "// end inline asm"


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
    files = dict(_FILE.findall(ptx))
    current: Location | None = None
    assembly = False
    result = []
    for text in ptx.splitlines():
        if ".entry" in text:
            current = None
        assembly = _ASSEMBLY_BEGINS in text or (assembly and _ASSEMBLY_ENDS not in text)
        # Inside inline assembly the line numbers count on from the call, beyond the end of its function.
        match = None if assembly else _LOCATION.match(text)
        if match is not None and match[2] != "0" and (match[3] != "0" or current is None):
            inlined = (files.get(match[4], ""), int(match[5])) if match[4] else None
            current = Location((files.get(match[1], f"file {match[1]}"), int(match[2])), inlined, match[3] == "0")
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
    """Of a Python file; None if it cannot be read, or is none."""
    return _tree("".join(linecache.getlines(path))) if path else None


@functools.lru_cache(maxsize=32)
def _tree(text: str) -> ast.Module | None:
    try:
        return ast.parse(text) if text else None
    except (SyntaxError, ValueError):
        return None


def short_name(ptx: str, kernel: str) -> str:
    """Name of a kernel as its program has it: CuTe DSL appends the types of all parameters.

    The function that the kernel's first location is in, if the entry's name has its name; else what is before the
    types.
    """
    begin = ptx.find(f".entry {kernel}")
    if begin >= 0 and (match := re.compile(_LOCATION.pattern, re.MULTILINE).search(ptx, begin)) is not None:
        path = dict(_FILE.findall(ptx)).get(match[1], "")
        function = function_around(path, int(match[2]))
        if function is not None and f"_{function.name}_" in f"_{kernel}_":
            return function.name
    name = kernel.removeprefix("kernel_cutlass_")
    plain = re.split(r"_(?=[A-Z]|tensor)|_\d+$", name, maxsplit=1)[0]
    return plain or kernel
