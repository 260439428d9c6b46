"""Names of arrays in shared memory, and tensors in them: variables of the program, else symbols of the PTX."""

import ast
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cute_kernels.dsl.allocations import Allocation, Allocations, Places, View
from cute_kernels.dsl.layouts import offsets, swizzled
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.isa.ptx.program import Variable
from cute_kernels.emulator.machine.state.smem import OFFSET_MASK, shared_layout
from cute_kernels.emulator.reports.sources import last_name, nodes, syntax_tree

_STATIC = re.compile(r"__static_shmem__(\d+)")
_DYNAMIC = re.compile(r"__dynamic_shmem__\d+")
_FILLS = re.compile(r"mbarrier\.init|cp\.async|wgmma|tcgen05")
_TYPES = {
    "bf16": ml_dtypes.bfloat16, "f16": "<f2", "f32": "<f4", "tf32": "<f4", "f64": "<f8",
    "f8E4M3FN": ml_dtypes.float8_e4m3fn, "f8E5M2": ml_dtypes.float8_e5m2, "f8E8M0FNU": ml_dtypes.float8_e8m0fnu,
    **{f"{kind}{8 * n}": f"<{kind[0]}{n}" for n in (1, 2, 4, 8) for kind in ("i", "ui")}, "si8": "i1",
}  # fmt: skip


@dataclass(frozen=True)
class Array:
    """``nbytes`` of them from an offset in the shared memory of a CTA on."""

    name: str
    first: int
    nbytes: int


@dataclass(frozen=True)
class Tile:
    """A tensor of the program in the shared or tensor memory of a CTA."""

    name: str  # that of the array that it fills, else its variable
    view: View  # layout and swizzle
    first: int  # byte of shared memory, or column of what was allocated, at which it begins, or part 0 of it does
    variable: str = dataclasses.field(default="", compare=False)  # its own
    staged: bool = dataclasses.field(default=True, compare=False)  # whether something fills stages in its kernel

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements. Raises ValueError: elements of less than eight bits."""
        if self.view.element not in _TYPES:
            raise ValueError(f"tile {self.name} = elements {self.view.element}: must be of {', '.join(_TYPES)}")
        return np.dtype(_TYPES[self.view.element])

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory from the first one on, 0 where it is not known which."""
        try:
            return 0 if self.view.space == "tensor" or self.view.step else self.places().size * self.dtype.itemsize
        except ValueError:
            return 0

    @property
    def swizzle(self) -> str:
        """Swizzle of the tensor, by the name that tensor maps have for it."""
        found = re.fullmatch(r"S<([123]),4,3>", self.view.swizzle)
        return f"swizzle {16 << int(found[1])}B" if found else f"swizzle {self.view.swizzle or 'none'}"

    def places(self, part: int = 0) -> np.ndarray:
        """Bytes at which elements begin, by coordinates: of shared memory, or 4 * (column + 65536 * lane). Raises
        ValueError: a layout or a type that is not known."""
        view, elements, first = self.view, offsets(self.view.layout), self.first + part * self.view.step
        if view.space == "tensor":
            return 4 * first + elements * self.dtype.itemsize
        return swizzled(first + elements * self.dtype.itemsize, view.swizzle)

    def at(self, byte: int) -> str:
        """Name and coordinates of the element that has a byte as of `places`, "" if none has, or several have."""
        try:
            size = self.places().size * self.dtype.itemsize
            part = (byte - self.first) // self.view.step if self.view.step else 0
            if part < 0 or self.view.step and (size > self.view.step or self.view.space == "tensor"):
                return ""
            begins = byte - self.places(part)
        except ValueError:
            return ""
        found = np.argwhere((begins >= 0) & (begins < self.dtype.itemsize))
        return f"{self.name}{f'@{part}' * bool(self.view.step)}[{self._words(found[0])}]" if len(found) == 1 else ""

    def _words(self, index: Iterable[int]) -> str:
        """Coordinates of an element: the third one is its stage, where one stage lies behind the other."""
        places = offsets(self.view.layout)
        # Lanes of tensor memory lie farther apart than its stages do.
        staged = self.staged and places.ndim > 2 and (
            self.view.space == "tensor" or places.shape[2] == 1
            or places[0, 0].ravel(order="F")[-1] >= places[:, :, :1].max()
        )  # fmt: skip
        return ", ".join(f"stage {each}" if axis == 2 and staged else str(each) for axis, each in enumerate(index))


def tile_at(
    ptx: str, kernel: str, launch: CapturedLaunch | None, byte: int, space: str = "shared"
) -> tuple[Tile | None, str]:
    """The tensor that has a byte, and the name and coordinates of its element; None and "" if that is not known.
    ``ptx``, ``kernel``, ``launch``: as of `array_at`. ``byte``: as of `Tile.places`. ``space``: "shared" or "tensor".
    """
    if space == "tensor" and ptx.count("tcgen05.alloc") != 1:  # a CTA's first allocation begins with column 0
        return None, ""
    found = ((tile, tile.at(byte)) for tile in tiles(ptx, kernel, launch) if tile.view.space == space)
    return next((each for each in found if each[1]), (None, ""))


def tiles(ptx: str, kernel: str, launch: CapturedLaunch | None) -> Iterator[Tile]:
    """Tensors with a name, in program order, those first of which it is known where they begin."""
    variables, offsets_of, known = _kernel(ptx, kernel, launch)
    if known is None:
        return
    certain = not known.dynamic or bool(_in_dynamic_memory(known, launch.dynamic_smem))
    numbered = dict(enumerate(_numbered(variables, known)))
    dynamic = next((offsets_of[each.name] for each in variables if certain and _DYNAMIC.fullmatch(each.name)), None)
    names = _names([view.places for view in known.views])
    allocated = reversed([each for each in _allocated(ptx, kernel, launch) if each.nbytes])
    arrays = {(each.first, each.nbytes): each.name for each in allocated}
    for name, view in sorted(zip(names, known.views), key=lambda each: each[1].step > 0):
        if view.space == "tensor":
            first = 0
        elif view.array is None:
            first = dynamic
        else:
            first = offsets_of[numbered[view.array][0].name] if view.array in numbered else None
        if first is not None:
            staged = view.space == "tensor" or _FILLS.search(ptx) is not None
            tile = Tile(name, view, first + view.first, name, staged)
            name = arrays.get((tile.first, tile.nbytes)) or name
            if name:
                yield dataclasses.replace(tile, name=name)


def array_at(ptx: str, kernel: str, launch: CapturedLaunch | None, first: int, count: int) -> Array | None:
    """The array that all of some bytes of shared memory are in, None if there is none or it has no name. ``ptx``,
    ``kernel``: text, and the name of its entry; "" where there is only one. ``launch``: of the kernel, None if that is
    not known. ``first``, ``count``: the bytes, from an offset in the shared memory of a CTA on."""
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
    """All that are known, fields before the structure that they are in, tensors last."""
    yield from _allocated(ptx, kernel, launch)
    for tile in tiles(ptx, kernel, launch):
        if tile.nbytes:
            yield Array(tile.name, tile.first, tile.nbytes)


def _allocated(ptx: str, kernel: str, launch: CapturedLaunch | None) -> Iterator[Array]:
    variables, offsets_of, known = _kernel(ptx, kernel, launch)
    dynamic_bytes = launch.dynamic_smem if launch is not None else OFFSET_MASK  # which ends wherever it does
    if known is not None:
        pairs = _numbered(variables, known)
        for (variable, allocation), name in zip(pairs, _names([each.places for _, each in pairs])):
            yield from _named(allocation, offsets_of[variable.name], name)
    for variable in variables:
        first = offsets_of[variable.name]
        if _DYNAMIC.fullmatch(variable.name):
            inside = _in_dynamic_memory(known, dynamic_bytes)
            for allocation, name in zip(inside, _names([each.places for each in inside])):
                yield from _named(allocation, first + allocation.first, name)
        elif not _STATIC.fullmatch(variable.name):
            yield Array(plain_name(variable.name), first, variable.nbytes or dynamic_bytes)


def _kernel(
    ptx: str, kernel: str, launch: CapturedLaunch | None
) -> tuple[list[Variable], dict[str, int], Allocations | None]:
    """Shared variables of a kernel, their offsets, and what is known of its allocations."""
    kernels = parse(ptx).kernels
    name = kernel or next(iter(kernels))
    variables = [each for each in kernels[name].variables if each.space == "shared"]
    known = next((each for each in launch.allocations if each.kernel == name), None) if launch is not None else None
    return variables, shared_layout(variables)[0], known


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
    """Allocations of dynamic shared memory, if they fill as much of it as the launch is known to use."""
    if known is None or not known.dynamic:
        return ()
    end = known.dynamic[-1].first + known.dynamic[-1].nbytes
    return known.dynamic if end == nbytes or known.sized and end < nbytes else ()


def _named(allocation: Allocation, first: int, variable: str) -> Iterator[Array]:
    for field, offset, nbytes in allocation.fields:
        yield Array(f"{variable}.{field}" if variable else field, first + offset, nbytes)
    yield Array(variable, first, allocation.nbytes)


def _names(places: Sequence[Places]) -> Iterator[str]:
    """Variables of what was made at some places; what one expression makes several of is told apart by its order."""
    for index, around in enumerate(places):
        which = sum(each == around for each in places[:index]), sum(each == around for each in places)
        yield next(filter(None, (assigned_variable(*place, *which) for place in around)), "")


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


def assigned_variable(path: str, line: int, column: int, number: int = 0, count: int = 1) -> str:
    """The variable that an expression in a line becomes part of, "" if that is not one or the file cannot be read.
    ``path``: of a Python file. ``line``: of the expression, from 1 on; column: from 0 on. ``number``, ``count``: which
    of the values that the expression has had, and of how many."""
    tree = syntax_tree(path)
    if tree is None:
        return ""
    assigned = nodes(tree, ast.Assign, ast.AnnAssign, ast.NamedExpr)
    around = [node for node in assigned if _contains(node.value, line, column)]
    if not around:
        return ""
    inner = max(around, key=lambda node: (node.lineno, node.col_offset))
    targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
    if len(targets) != 1:
        return ""
    target = targets[0]
    if isinstance(target, (ast.Tuple, ast.List)) and isinstance(inner.value, (ast.GeneratorExp, ast.ListComp)):
        return last_name(target.elts[number]) if len(target.elts) == count else ""
    return _target(target, inner.value, line, column)


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
