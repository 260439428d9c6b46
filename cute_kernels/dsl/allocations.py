"""Arrays and tensors of kernels in shared and tensor memory, as CuTe DSL's representation of a module has them.

PTX has one array for each `alloc_smem`, under a name that says nothing, and one for all that the allocator gives out.
Which variable of the program a byte belongs to, and the layouts of tensors, stand in the representation before it is
compiled, and only there. It says where an operation was called, but not who called that function: `call_sites` adds
that.
"""

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import json
import math
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_STATIC, _DYNAMIC = "cute_nvgpu.arch.alloc_smem", "cute.memref.alloca"
_WHOLE = "cute_nvgpu.arch.get_dyn_smem"  # a program that divides the memory by itself
_OVERLAYS = "smem.merge_branch_allocs"  # arrays of two branches lie in one place
_POINTS_ON, _MOVES_ON, _VIEW = ("cute.recast_iter", "cute.get_iter"), "cute.add_offset", "cute.make_view"
_TENSOR_ROOT = "cute_nvgpu.arch.sm100.retrieve_tmem_ptr"
_LOCATION = re.compile(r'(?<!\\)"((?:[^"\\]|\\.)+)":(\d+):(\d+)')
_CALLERS = re.compile(r'^loc\("called at ([^"]*)"')
_OPERATION = re.compile(r"\s*(%\w+) = ([\w.]+)\(?(%\w+)?")
_EXTENT = re.compile(r"\d+")
_TENSOR = re.compile(r'!cute\.memref<(\w+), [st]mem, (?:align<\d+>,? ?)?(?:(S<[\d,]+>), )?"(.*)">')
_OFFSET = re.compile(r'!cute\.int_tuple<"(?:(-?\d+)|\?(?:\{(?:\w+ )?(?:div=(\d+))?\})?)">')
_ELEMENT = re.compile(r"!cute\.ptr<[a-z]+(\d+)\w*, [st]mem")
_BYTES = re.compile(r'!cute\.memref<i8, smem,(?: align<(\d+)>,)? "(\d+):1">')
_FIELD = re.compile(r'"(\w+):(\d+):(\d+)"')


Places = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Allocation:
    """One array, or one structure of several."""

    first: int  # byte of the dynamic shared memory; of a static array its number among the kernel's
    nbytes: int  # size
    # (path, line, column from 0 on) of the call that allocates, and of the calls of the functions around it, the
    # innermost first
    places: Places
    fields: tuple[tuple[str, int, int], ...] = ()  # (name, byte of the structure, bytes) of each field of a structure


@dataclass(frozen=True)
class View:
    """A tensor that a kernel makes of a pointer."""

    array: int | None  # number of the static array that it lies in; None: in dynamic shared memory, or in tensor memory
    space: str  # "shared" or "tensor"
    first: int  # bytes from there to its beginning; in tensor memory columns from what was allocated
    step: int  # 0, or it begins at a multiple of so many bytes (columns) behind ``first`` that only the kernel knows
    element: str  # type, as CuTe DSL's representation names it
    swizzle: str  # ``S<bits, base, shift>`` of addresses in bytes, or ""
    layout: str  # as `layouts.offsets` takes it
    places: Places  # as of `Allocation`


@dataclass(frozen=True)
class Allocations:
    """Allocations of the kernel with this entry: static arrays in the order in which PTX numbers them, dynamic ones in
    the order of addresses, none if it is not known where they are, and tensors in program order. ``sized``: the
    program says how large the dynamic shared memory is; else it ends with the last of them."""

    kernel: str
    static: tuple[Allocation, ...] = ()
    dynamic: tuple[Allocation, ...] = ()
    sized: bool = False
    views: tuple[View, ...] = ()

    def text(self) -> str:
        """JSON that `of_text` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_text(cls, text: str) -> "Allocations":
        given = _tuples(json.loads(text))
        kinds = {"static": Allocation, "dynamic": Allocation, "views": View}
        return cls(**given | {name: tuple(kind(**each) for each in given[name]) for name, kind in kinds.items()})


def _tuples(value: Any) -> Any:
    """Turns the lists of JSON into tuples."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


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
    inside = [op for op in _inside(kernel) if op.name in (_STATIC, _DYNAMIC, _WHOLE, _VIEW)]
    found = [op for op in inside if op.name != _VIEW and " smem" in _type(op)]
    static, whole = ([op for op in found if op.name == name] for name in (_STATIC, _WHOLE))
    dynamic = sorted((op for op in found if op.name == _DYNAMIC), key=_partition)
    known = _OVERLAYS not in kernel.attributes and not whole
    name = str(kernel.attributes["sym_name"]).strip('"')
    arrays = _laid_out(dynamic) if known else ()
    firsts = {op: array.first for op, array in zip(dynamic, arrays)} if not whole else dict.fromkeys(whole, 0)
    numbers = {op: number for number, op in enumerate(static)}
    starts = [(numbers.get(op), 0 if op in numbers else firsts.get(op)) for op in found]
    pointers = _Pointers(starts, [op.location for op in inside if op.name == _VIEW])
    text = kernel.get_asm(enable_debug_info=False)  # places of all operations are seven times as long
    views = tuple(view for line in text.splitlines() if (view := pointers.view(line)) is not None)
    return Allocations(name, _numbered(static), arrays, "smem.config_smem_size" in kernel.attributes, views)


class _Pointers:
    """Pointers of a kernel by their names in its text: bindings would make new operations of each tensor."""

    def __init__(self, starts: Iterable[tuple[int | None, int | None]], locations: Iterable[Any]) -> None:
        self._starts, self._locations = iter(starts), iter(locations)
        self._known = dict[str, tuple[int | None, str, int, int]]()

    def view(self, line: str) -> View | None:
        """Takes the next line of the text: the tensor that it makes, if it is known where it lies."""
        found = _OPERATION.match(line)
        if found is None:
            return None
        name, operation, operand = found.groups()
        location = next(self._locations) if operation == _VIEW else None
        if "mem" not in line:
            return None
        if operation in (_STATIC, _DYNAMIC, _WHOLE) and " smem" in line:
            array, first = next(self._starts)
            if first is not None:
                self._known[name] = array, "shared", first, 0
        elif operation == _TENSOR_ROOT:
            self._known[name] = None, "tensor", 0, 0
        elif operand not in self._known:
            self._known.pop(name, None)
        elif operation in _POINTS_ON:
            self._known[name] = self._known[operand]
        elif operation == _MOVES_ON:
            self._move(name, line, *self._known[operand])
        elif operation == _VIEW:
            return _tensor(line, location, *self._known[operand])
        return None

    def _move(self, name: str, line: str, array: int | None, space: str, first: int, step: int) -> None:
        bits, moved = _ELEMENT.search(line), _OFFSET.search(line)
        if bits is None or moved is None:
            self._known.pop(name, None)
            return
        number, multiple = moved.groups()
        unit = int(bits[1]) / (8 if space == "shared" else 32)  # columns have 32 bits
        step = math.gcd(step, 0 if number else int(int(multiple or 1) * unit))
        self._known[name] = array, space, first + int(int(number or 0) * unit), step


def _tensor(line: str, location: Any, array: int | None, space: str, first: int, step: int) -> View | None:
    """The tensor that a line makes; None of what one thread loads or stores."""
    kind = _TENSOR.search(line)
    if kind is None or step and sum(int(extent) > 1 for extent in _EXTENT.findall(kind[3].partition(":")[0])) < 2:
        return None
    element, swizzle, layout = kind.groups()
    return View(array, space, first, step, element, swizzle or "", layout, _places(location))


def _inside(operation: Any) -> Iterator[Any]:
    """All operations of a kernel in program order."""
    for region in operation.regions:
        for block in region.blocks:
            for each in block.operations:
                yield each.operation
                yield from _inside(each.operation)


def _type(operation: Any) -> str:
    """Type of its result, without the object that the bindings make of the result, and without new operations."""
    return next(map(str, operation.results.types), "")


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
        element = _ELEMENT.match(_type(operation))
        if element is None:
            return ()
        nbytes = int(element[1]) * _number(operation, "input") // 8
        result.append(Allocation(number, nbytes, _places(operation.location)))
    return tuple(result)


def _laid_out(operations: Iterable[Any]) -> tuple[Allocation, ...]:
    """Dynamic shared memory, one after the other, each aligned; none if the size of one is not known."""
    result, end = [], 0
    for operation in operations:
        array = _BYTES.fullmatch(_type(operation))
        if array is None:
            return ()
        align, nbytes = int(array[1] or 1), int(array[2])
        first = -(-end // align) * align
        attributes = operation.attributes
        text = str(attributes["smem.struct_fields"]) if "smem.struct_fields" in attributes else ""
        fields = tuple((name, int(offset), int(size)) for name, size, offset in _FIELD.findall(text))
        result.append(Allocation(first, nbytes, _places(operation.location), fields))
        end = first + nbytes
    return tuple(result)


def _places(location: Any) -> Places:
    """Where an operation is called, the innermost call first."""
    text = str(location)
    found, callers = _LOCATION.search(text), _CALLERS.match(text)
    if found is None:
        return ()
    around = (each.rsplit(":", 2) for each in callers[1].split("|")) if callers is not None else ()
    callers = ((path, int(line), int(column)) for path, line, column in around)
    return ((found[1], int(found[2]), int(found[3])), *callers)


@contextlib.contextmanager
def call_sites() -> Iterator[None]:
    """Operations that are made inside say who called the functions around them, where CuTe DSL (4.8 on) lets them."""
    op = importlib.import_module("cutlass._mlir_helpers.op")
    if not hasattr(op, "loc_transform") or op._LOC_TRANSFORMS.get():  # another one may be around
        yield
        return
    from cutlass._mlir import ir

    running = _Callers(op)

    def with_callers(location: Any) -> Any:
        if location is None:
            return None
        callers = running.of(sys._getframe(1))[1:]
        return ir.Location.name(f"called at {'|'.join(callers)}", childLoc=location) if callers else location

    with op.loc_transform(with_callers):
        try:
            yield
        finally:
            running.clear()  # what the frames of the last operation have


class _Callers:
    """Calls of the program's functions that are running, up to the kernel, the innermost first.

    Thousands of operations ask, deep in CuTe DSL's functions. Above a function that has been running since the last
    operation nothing has changed; a generator may have been left, and resumed by another.
    """

    def __init__(self, op: Any) -> None:
        self._op = op
        self._calls: dict[tuple[int, int], tuple[Any, str]] = {}  # codes live as long as their numbers
        self._above: dict[types.FrameType, tuple[str, ...]] = {}  # frames of the last operation, the outermost first

    def of(self, frame: types.FrameType | None) -> tuple[str, ...]:
        entered = []
        while frame is not None and frame.f_code.co_name != "kernel_wrapper":
            if frame in self._above and not frame.f_code.co_flags & inspect.CO_GENERATOR:
                break
            entered.append(frame)
            frame = frame.f_back
        while self._above and next(reversed(self._above)) is not frame:
            self._above.popitem()
        callers = self._with_call(frame, self._above[frame]) if self._above else ()
        for frame in reversed(entered):
            self._above[frame] = callers
            callers = self._with_call(frame, callers)
        return callers

    def clear(self) -> None:
        self._above.clear()

    def _with_call(self, frame: types.FrameType, callers: tuple[str, ...]) -> tuple[str, ...]:
        place = id(frame.f_code), frame.f_lasti
        if place not in self._calls:
            self._calls[place] = frame.f_code, _call(self._op, frame)
        call = self._calls[place][1]
        return (call, *callers) if call else callers


def _is_framework(op: Any, frame: types.FrameType) -> bool:
    try:
        return op._is_framework_stack_frame(frame)
    except FileNotFoundError:
        # Only a relative name asks for the directory, which the program removed; CuTe DSL's names are absolute.
        return False


def _call(op: Any, frame: types.FrameType) -> str:
    """Where a function of the program calls another; "" of a function of CuTe DSL or of this package's dsl."""
    code = frame.f_code
    if _is_framework(op, frame) or os.path.dirname(code.co_filename) == os.path.dirname(__file__):
        return ""
    positions = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    text = f"{code.co_filename}:{frame.f_lineno}:{positions[2] or 0}"
    return "" if {'"', "|"} & set(text) else text
