"""Names of arrays in shared memory: variables of the program that allocates them, else symbols of the PTX."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from cute_kernels.dsl.allocations import Allocation, Allocations
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.isa.ptx.program import Variable
from cute_kernels.emulator.machine.state.smem import OFFSET_MASK, shared_layout
from cute_kernels.emulator.reports.sources import last_name, syntax_tree

_STATIC = re.compile(r"__static_shmem__(\d+)")
_DYNAMIC = re.compile(r"__dynamic_shmem__\d+")


@dataclass(frozen=True)
class Array:
    """``nbytes`` of them from an offset in the shared memory of a CTA on."""

    name: str
    first: int
    nbytes: int


def array_at(ptx: str, kernel: str, launch: CapturedLaunch | None, first: int, count: int) -> Array | None:
    """The array that all of some bytes of shared memory are in, None if there is none or it has no name.

    Args:
        ptx, kernel: text, and the name of its entry; "" where there is only one.
        launch: of the kernel, None if that is not known.
        first, count: the bytes, from an offset in the shared memory of a CTA on.
    """
    for array in arrays(ptx, kernel, launch):
        if array.first <= first and first + count <= array.first + array.nbytes:
            return array if array.name else None
    return None


def array_before(ptx: str, kernel: str, launch: CapturedLaunch | None, first: int) -> Array | None:
    """The array that ends last at or before an offset, None if there is none or it has no name; as `array_at`."""
    before = [array for array in arrays(ptx, kernel, launch) if array.first + array.nbytes <= first]
    array = max(before, key=lambda each: each.first + each.nbytes, default=None)
    return array if array is not None and array.name else None


def arrays(ptx: str, kernel: str, launch: CapturedLaunch | None) -> Iterator[Array]:
    """All that are known, fields before the structure that they are in."""
    kernels = parse(ptx).kernels
    name = kernel or next(iter(kernels))
    variables = [each for each in kernels[name].variables if each.space == "shared"]
    offsets, _ = shared_layout(variables)
    known = next((each for each in launch.allocations if each.kernel == name), None) if launch is not None else None
    dynamic_bytes = launch.dynamic_smem if launch is not None else OFFSET_MASK  # which ends wherever it does
    if known is not None:
        for variable, allocation in _numbered(variables, known):
            yield from _named(allocation, offsets[variable.name])
    for variable in variables:
        first = offsets[variable.name]
        if _DYNAMIC.fullmatch(variable.name):
            for allocation in _in_dynamic_memory(known, dynamic_bytes):
                yield from _named(allocation, first + allocation.first)
        elif not _STATIC.fullmatch(variable.name):
            yield Array(plain_name(variable.name), first, variable.nbytes or dynamic_bytes)


def _numbered(variables: list[Variable], known: Allocations) -> list[tuple[Variable, Allocation]]:
    """Arrays of PTX and the allocations that they were made of; none unless all are there, with the same sizes.

    The compiler numbers those that are used: with one that is not, it is not known which are.
    """
    numbers = {int(found[1]): each for each in variables if (found := _STATIC.fullmatch(each.name))}
    arrays = [numbers[number] for number in sorted(numbers)]
    if [each.nbytes for each in arrays] != [each.nbytes for each in known.static]:
        return []
    return list(zip(arrays, known.static))


def _in_dynamic_memory(known: Allocations | None, nbytes: int) -> tuple[Allocation, ...]:
    """Those allocations, if they fill the dynamic shared memory of the launch as far as it is known to be filled."""
    if known is None or not known.dynamic:
        return ()
    end = known.dynamic[-1].first + known.dynamic[-1].nbytes
    return known.dynamic if end == nbytes or known.sized and end < nbytes else ()


def _named(allocation: Allocation, first: int) -> Iterator[Array]:
    variable = assigned_variable(allocation.path, allocation.line, allocation.column)
    for field, offset, nbytes in allocation.fields:
        yield Array(f"{variable}.{field}" if variable else field, first + offset, nbytes)
    yield Array(variable, first, allocation.nbytes)


def plain_name(symbol: str) -> str:
    """The variable of a C++ program that a symbol is mangled from, any other symbol as it is.

    Of a function (``_ZZ``, the function, ``E``, the name) or of a namespace (``_ZN``, names, ``E``), each name behind
    its length.
    """
    if symbol.startswith("_ZZ"):
        ends = (found.end() for found in re.finditer("E", symbol))
        names = [name for end in ends if (name := _counted_name(re.sub(r"_\d+$", "", symbol[end:])))]
        return names[0] if len(names) == 1 else symbol
    if symbol.startswith("_ZN") and symbol.endswith("E"):
        rest, name = symbol[3:-1], ""
        while rest and (found := re.match(r"\d+", rest)):
            end = found.end() + int(found[0])
            name, rest = _counted_name(rest[:end]), rest[end:]
        return name if name and not rest else symbol
    return symbol


def _counted_name(text: str) -> str:
    """``tile`` of ``4tile``, "" of anything else."""
    found = re.fullmatch(r"([1-9]\d*)([A-Za-z_]\w*)", text)
    return found[2] if found is not None and len(found[2]) == int(found[1]) else ""


def assigned_variable(path: str, line: int, column: int) -> str:
    """The variable that an expression in a line becomes part of, "" if that is not one or the file cannot be read.

    Args:
        path: of a Python file.
        line: of the expression, from 1 on; column: from 0 on.
    """
    tree = syntax_tree(path)
    if tree is None:
        return ""
    kinds = (ast.Assign, ast.AnnAssign, ast.NamedExpr)
    around = [node for node in ast.walk(tree) if isinstance(node, kinds) and _contains(node.value, line, column)]
    if not around:
        return ""
    inner = max(around, key=lambda node: (node.lineno, node.col_offset))
    targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
    return _target(targets[0], inner.value, line, column) if len(targets) == 1 else ""


def _contains(node: ast.expr | None, line: int, column: int) -> bool:
    if node is None:
        return False
    begin, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    return begin <= (line, column) < end


def _target(target: ast.expr, value: ast.expr, line: int, column: int) -> str:
    """Variable that stands where the expression stands, of several on both sides."""
    if isinstance(target, (ast.Tuple, ast.List)):
        if not isinstance(value, (ast.Tuple, ast.List)) or len(value.elts) != len(target.elts):
            return ""
        pairs = zip(target.elts, value.elts)
        return next((_target(*pair, line, column) for pair in pairs if _contains(pair[1], line, column)), "")
    return last_name(target)
