"""Arrays that kernels allocate in shared memory, as CuTe DSL's representation of a module has them.

PTX has one array for each `alloc_smem`, under a name that says nothing, and one for all that the allocator gives out.
Which variable of the program a byte belongs to stands in the representation before it is compiled, and only there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_STATIC, _DYNAMIC = "cute_nvgpu.arch.alloc_smem", "cute.memref.alloca"
_WHOLE = "cute_nvgpu.arch.get_dyn_smem"  # a program that divides the memory by itself
_OVERLAYS = "smem.merge_branch_allocs"  # arrays of two branches lie in one place
_LOCATION = re.compile(r'(?<!\\)"((?:[^"\\]|\\.)+)":(\d+):(\d+)')
_POINTER = re.compile(r"!cute\.ptr<[a-z]+(\d+)\w*, smem")
_BYTES = re.compile(r'!cute\.memref<i8, smem,(?: align<(\d+)>,)? "(\d+):1">')
_FIELD = re.compile(r'"(\w+):(\d+):(\d+)"')


@dataclass(frozen=True)
class Allocation:
    """One array, or one structure of several.

    Attributes:
        first: byte of the dynamic shared memory; of a static array its number among the kernel's.
        nbytes: size.
        path, line, column: of the call that allocates; ``column`` from 0 on.
        fields: (name, byte of the structure, bytes) of each field of a structure.
    """

    first: int
    nbytes: int
    path: str
    line: int
    column: int
    fields: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Allocations:
    """Those of a kernel.

    Attributes:
        kernel: name of its entry.
        static: in the order in which PTX numbers them.
        dynamic: in the order of addresses; none if it is not known where they are.
        sized: the program says how large the dynamic shared memory is; else it ends with the last of them.
    """

    kernel: str
    static: tuple[Allocation, ...] = ()
    dynamic: tuple[Allocation, ...] = ()
    sized: bool = False


def of_module(module: Any) -> tuple[Allocations, ...]:
    """The allocations of every kernel in a module that is not compiled yet."""
    kernels = (op for op in _operations(module) if op.regions and "sym_name" in op.attributes)
    return tuple(_of_kernel(kernel) for kernel in kernels)


def _operations(module: Any) -> Iterator[Any]:
    """Operations in the module's GPU modules."""
    for inner in module.body.operations:
        if inner.operation.name == "gpu.module":
            for block in inner.operation.regions[0].blocks:
                yield from (each.operation for each in block.operations)


def _of_kernel(kernel: Any) -> Allocations:
    found = [op for op in _inside(kernel) if op.name in (_STATIC, _DYNAMIC, _WHOLE)]
    static = [op for op in found if op.name == _STATIC]
    dynamic = sorted((op for op in found if op.name == _DYNAMIC), key=_partition)
    known = _OVERLAYS not in kernel.attributes and not any(op.name == _WHOLE for op in found)
    name = str(kernel.attributes["sym_name"]).strip('"')
    return Allocations(
        name, _numbered(static), _laid_out(dynamic) if known else (), "smem.config_smem_size" in kernel.attributes
    )


def _inside(operation: Any) -> Iterator[Any]:
    """All operations of a kernel in program order."""
    for region in operation.regions:
        for block in region.blocks:
            for each in block.operations:
                yield each.operation
                yield from _inside(each.operation)


def _partition(alloca: Any) -> int:
    """The system's memory, number 0, comes before the user's."""
    return _number(alloca, "smem.partition_id")


def _number(operation: Any, attribute: str) -> int:
    found = operation.attributes[attribute] if attribute in operation.attributes else 0
    return int(str(found).split(" ")[0])


def _numbered(operations: Iterable[Any]) -> tuple[Allocation, ...]:
    """Static arrays; none if the size of one is not known."""
    result = []
    for number, operation in enumerate(operations):
        element = _POINTER.match(str(operation.results[0].type))
        if element is None:
            return ()
        nbytes = int(element[1]) * _number(operation, "input") // 8
        result.append(Allocation(number, nbytes, *_place(operation)))
    return tuple(result)


def _laid_out(operations: Iterable[Any]) -> tuple[Allocation, ...]:
    """Dynamic shared memory, one after the other, each aligned; none if the size of one is not known."""
    result, end = [], 0
    for operation in operations:
        array = _BYTES.fullmatch(str(operation.results[0].type))
        if array is None:
            return ()
        align, nbytes = int(array[1] or 1), int(array[2])
        first = -(-end // align) * align
        attributes = operation.attributes
        text = str(attributes["smem.struct_fields"]) if "smem.struct_fields" in attributes else ""
        fields = tuple((name, int(offset), int(size)) for name, size, offset in _FIELD.findall(text))
        result.append(Allocation(first, nbytes, *_place(operation), fields))
        end = first + nbytes
    return tuple(result)


def _place(operation: Any) -> tuple[str, int, int]:
    """File, line and column of the innermost call of the program."""
    found = _LOCATION.search(str(operation.location))
    return (found[1], int(found[2]), int(found[3])) if found is not None else ("", 0, 0)
