"""Lines of the program that PTX was made of, by its ``.loc`` directives."""

import ast
import functools
import linecache
import os
import re
import stat
import sys
from pathlib import PurePath

from cute_kernels.common.files import printable
from cute_kernels.emulator.isa.ptx.source_lines import Directive, SourcePlace, directives
from cute_kernels.emulator.reports.model import SourceLine

_SOURCES = frozenset(
    ".py .pyi .pyx .ipynb .cu .cuh .c .cc .cpp .cxx .h .hh .hpp .hxx .inl .inc .ipp .tcc .ptx .ll .mlir .ttir .ttgir "
    ".rs .jl .mojo .f90 .cuf".split()
)
"""Suffixes of files that PTX is made of: its text, which may be anybody's, can name any file of this machine."""

_LARGEST = 4 << 20
"""Bytes of a source file; of what is larger nothing is shown."""


def location(ptx: str, line: int) -> Directive | None:
    """Where a line of a PTX text comes from, None if the text does not say.

    A location of column 0 is that of the kernel as a whole, and line 0 is no line: what is before them counts.
    """
    found = _locations(ptx)
    return found[min(line, len(found)) - 1] if found and line > 0 else None


@functools.lru_cache(maxsize=8)
def _locations(ptx: str) -> list[Directive | None]:
    """By line of a text."""
    current: Directive | None = None
    result = []
    for each in directives(ptx):
        if each is None or each.place.line and (each.column or current is None):
            current = each
        result.append(current)
    return result


def source_line(place: SourcePlace) -> SourceLine:
    """A line of a file, with its text and function if the file can be read."""
    function, text = function_around(place.path, place.line), text_of_line(place.path, place.line)
    return SourceLine(place.path, place.line, text.strip(), function.name if function else "")


def text_of_line(path: str, line: int) -> str:
    """A line of a source file, without characters that command a terminal; "" where there is none."""
    lines = lines_of(path)
    return printable(lines[line - 1].rstrip("\r\n")) if 0 < line <= len(lines) else ""


def lines_of(path: str) -> list[str]:
    """Lines of a source file as it is now, or of a notebook's cell; none of what is no source, or is too large."""
    known = linecache.cache.get(path)
    if known is not None and len(known) > 1 and known[1] is None:  # text that is in no file
        return known[2]
    for folder in ("", *sys.path):
        try:
            name = os.path.realpath(os.path.join(folder, path))  # a link's own name says nothing
            status = os.stat(name)
            source = stat.S_ISREG(status.st_mode) and PurePath(name).suffix.lower() in _SOURCES
            return _read(name, status.st_mtime_ns) if source and status.st_size <= _LARGEST else []
        except (OSError, ValueError):
            continue
    return []


@functools.lru_cache(maxsize=32)
def _read(name: str, _changed: int) -> list[str]:
    opened = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(opened, encoding="utf-8", errors="replace") as file:
        return file.readlines(_LARGEST)


def function_around(path: str, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The innermost function around a line; None outside of functions, and where the file cannot be read."""
    tree = syntax_tree(path)
    if tree is None:
        return None
    functions = nodes(tree, ast.FunctionDef, ast.AsyncFunctionDef)
    around = [node for node in functions if _first_line(node) <= line <= (node.end_lineno or 0)]
    return max(around, key=lambda node: node.lineno, default=None)


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def syntax_tree(path: str) -> ast.Module | None:
    """Syntax tree of a Python file; None if it cannot be read, or is none."""
    return _tree("".join(lines_of(path))) if path else None


@functools.lru_cache(maxsize=32)
def _tree(text: str) -> ast.Module | None:
    try:
        return ast.parse(text) if text else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@functools.lru_cache(maxsize=64)
def nodes(tree: ast.Module, *kinds: type[ast.AST]) -> list[ast.AST]:
    """All nodes of some kinds in a tree."""
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


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
