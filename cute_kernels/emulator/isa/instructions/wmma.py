"""wmma.load, wmma.store and wmma.mma: loads and stores by lanes, and mma.sync of parts of the matrices.

Which lane has which element is left open by the PTX ISA. Here fragments are those of mma.sync, one part of eight or
sixteen rows after the other; D of m8n32 is the transpose of that of m32n8, with A and B exchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cute_kernels.emulator.isa.instructions.floats import float_to_float
from cute_kernels.emulator.isa.instructions.integers import binary, shift_by
from cute_kernels.emulator.isa.instructions.memory import SPACES, Access, address_of, memory_space
from cute_kernels.emulator.isa.instructions.mma import multiply_registers
from cute_kernels.emulator.isa.ptx.families import always_varies
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS, Instruction, Operand, Special, items_of
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import CANONICAL, Constant, Pack, PureOp, Value
from cute_kernels.emulator.machine.units.matrix.mma_sync import TYPES, Form

_BITS = {name: TYPE_BITS[name] for name in ("f16", "bf16", "s8", "u8", "f32", "s32", "f64")}
_BITS |= {"tf32": 32, "s4": 4, "u4": 4, "b1": 1}
_ACCUMULATORS = {"f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "f64": ("f64",)}
_WIDE = ((16, 16, 16), (32, 8, 16), (8, 32, 16))
#: Shapes by type of A and B (PTX ISA, wmma: matrix shapes).
_SHAPES = {
    **dict.fromkeys(("f16", "bf16", "s8", "u8"), _WIDE), "tf32": ((16, 16, 8),), "f64": ((8, 8, 4),),
    **dict.fromkeys(("s4", "u4"), ((8, 8, 32),)), "b1": ((8, 8, 128),),
}  # fmt: skip


def _accumulators(type_: str) -> tuple[str, ...]:
    return _ACCUMULATORS.get(type_, ("s32",))


@dataclass(frozen=True)
class _Matrix:
    """One of the matrices of a shape and the fragment that holds it."""

    # m, n, k: shape
    m: int
    n: int
    k: int
    name: str  # "a", "b", "c" or "d"
    type: str  # of its elements

    @property
    def swapped(self) -> bool:
        """Whether rows of the parts are columns of D."""
        return self.n > 2 * self.m

    @property
    def form(self) -> tuple[int, int, int]:
        """Shape of mma.sync."""
        return min(max(self.m, self.n), 16), 8, self.k

    @property
    def rows(self) -> tuple[int, int]:
        """Rows, and rows of a part, as mma.sync has them: of B its columns are meant, of a swapped D too."""
        first = self.name == ("b" if self.swapped else "a") or self.name in "cd"
        side = self.n if self.name == "b" or self.name in "cd" and self.swapped else self.m
        return side, self.form[0] if first else 8

    @property
    def registers(self) -> tuple[_Register, ...]:
        """Without those that ptxas wants twice."""
        return tuple(self._accumulators() if self.name in "cd" else self._operands())

    @property
    def count(self) -> int:
        """Registers of a fragment: A and B of .f16 have eight, whatever the shape."""
        return 8 if self.type == "f16" and self.name in "ab" else len(self.registers)

    def _operands(self) -> Iterator[_Register]:
        side, part = self.rows
        per = max(32, _BITS[self.type]) // _BITS[self.type]
        for first in range(0, side, part):
            for chunk in range(0, self.k, 4 * per):
                for row in range(first, first + part, 8):
                    yield _Register(row, chunk, per, per)

    def _accumulators(self) -> Iterator[_Register]:
        side, part = self.rows
        per = 2 if self.type == "f16" else 1
        for first in range(0, side, part):
            for column in range(0, self.m * self.n // side, 8):
                for row in range(first, first + part, 8):
                    for i in range(0, 2, per):
                        yield _Register(row, column + i, 2, per)


@dataclass(frozen=True)
class _Register:
    """Elements of a register: lane l has those of row ``row + l / 4`` and ``per`` columns from
    ``column + step * (l % 4)`` on.
    """

    row: int
    column: int
    step: int
    per: int


def _sides(shape: str) -> tuple[int, int, int]:
    m, n, k = map(int, re.findall(r"\d+", shape))
    return m, n, k


def _matrix(parts: tuple[str, ...]) -> tuple[_Matrix, str, str]:
    """(matrix, layout, state space) of the opcode of wmma.load and wmma.store."""
    _, _, name, _, _, layout, shape, *space, type_ = parts
    return _Matrix(*_sides(shape), name, type_), layout, SPACES[space[0]] if space else "generic"


class _Places:
    """Addresses of a matrix in memory, which a whole warp accesses."""

    def __init__(self, block: BlockBuilder, instruction: Instruction, operands: Sequence[Operand]) -> None:
        self.block = block
        self.matrix, layout, self.space = _matrix(instruction.parts)
        matrix = self.matrix
        block.operation("whole_warp")
        address, *stride = operands
        base, offset = address_of(block, address)
        base = block.agreed(block.resize(base, 32 if self.space == "shared" else 64))
        self.width = base.bits
        sides = {"a": (matrix.m, matrix.k), "b": (matrix.k, matrix.n)}.get(matrix.name, (matrix.m, matrix.n))
        between = Constant(sides[layout == "row"], 32)
        if stride:
            between = block.agreed(block.value(stride[0], 32))
        bits = _BITS[matrix.type]
        between = self._times(block.resize(between, self.width), bits)
        self.line = block.pure(shift_by("shr", f"u{self.width}", 3), between)
        #: Whether the columns of `_Register` lie side by side in memory.
        self.beside = (layout == "row") == (not matrix.swapped if matrix.name in "cd" else matrix.name == "a")
        quad, pair = self._lanes()
        step = matrix.registers[0].step
        along, across = (pair, quad) if self.beside else (quad, pair)
        inner, outer = (step, 1) if self.beside else (1, step)
        along = self._times(along, inner * bits // 8)
        across = self._times(block.pure(binary("mul.lo", f"u{self.width}"), across, self.line), outer)
        self.first = self._sum(self._sum(base, Constant(offset, self.width)), self._sum(along, across))

    def _times(self, value: Value, factor: int) -> Value:
        if factor == 1:
            return value
        return self.block.pure(binary("mul.lo", f"u{self.width}"), value, Constant(factor, self.width))

    def _sum(self, a: Value, b: Value) -> Value:
        return self.block.pure(binary("add", f"u{self.width}"), a, b)

    def _lanes(self) -> tuple[Value, Value]:
        """(l / 4, l % 4)."""
        lane = self.block.resize(self.block.value(Special("%laneid"), 32), self.width)
        quad = self.block.pure(shift_by("shr", f"u{self.width}", 2), lane)
        return quad, self.block.pure(binary("and", f"b{self.width}"), lane, Constant(3, self.width))

    def pieces(self, register: _Register) -> Iterator[tuple[Value, int]]:
        """(addresses of all lanes, constant offset) of each piece of a register, lowest first."""
        bits = _BITS[self.matrix.type]
        if self.beside:
            yield self._at(register.row), register.column * bits // 8
            return
        for i in range(register.per):
            yield self._at(register.column + i), register.row * bits // 8

    def _at(self, lines: int) -> Value:
        if not lines:
            return self.first
        return self._sum(self.first, self._times(self.line, lines))

    def facts(self, register: _Register) -> tuple[int, ...]:
        """Facts of an `Access` to a piece."""
        return memory_space(self.space, self.space == "shared"), self.piece_bits(register) // 8, 0

    def piece_bits(self, register: _Register) -> int:
        return _BITS[self.matrix.type] * (register.per if self.beside else 1)


_SYNC = "sync.aligned"


def _registers(matrix: _Matrix) -> str:
    return f"{{{matrix.name}}}{matrix.count}:{'b64' if matrix.type == 'f64' else 'b32'}"


def _memory_operands(parts: tuple[str, ...]) -> str:
    matrix = _matrix(parts)[0]
    operands = _registers(matrix), "[p]"
    return ", ".join((*(operands[::-1] if matrix.name == "d" else operands), "stride:u32?"))


def _mma_operands(parts: tuple[str, ...]) -> str:
    return ", ".join(map(_registers, _product(parts)))


def _named(type_: str) -> str:
    return "|".join(f"m{m}n{n}k{k}" for m, n, k in _SHAPES[type_])


def _in_memory(types: Iterable[tuple[str, str]], name: str) -> str:
    """Grammar of loads and stores of types, each of a matrix that goes with the second one."""
    narrow = {"a": "row", "b": "col"}.get(name, "row|col")  # of elements below a byte
    return "; ".join(
        f"{narrow if _BITS[type_] < 8 else 'row|col'} {_named(of)} global|shared|shared::cta? {type_}"
        for type_, of in types
    )


_SUMS = [(type_, of) for of in _SHAPES for type_ in _accumulators(of)]

_FACTORS = [(type_, type_) for type_ in _SHAPES]


@family(f"wmma.load.c.{_SYNC}", varies=always_varies, operands=_memory_operands, qualifiers=_in_memory(_SUMS, "c"))
@family(f"wmma.load.b.{_SYNC}", varies=always_varies, operands=_memory_operands, qualifiers=_in_memory(_FACTORS, "b"))
@family(f"wmma.load.a.{_SYNC}", varies=always_varies, operands=_memory_operands, qualifiers=_in_memory(_FACTORS, "a"))
def _load(block: BlockBuilder, instruction: Instruction) -> None:
    """wmma.load: A, B and C of all shapes and types."""
    places = _Places(block, instruction, instruction.operands[1:])
    items = items_of(instruction.operands[0])
    registers = places.matrix.registers
    values = []
    for register in registers:
        storage, parts = CANONICAL[places.piece_bits(register)], []
        for address, offset in places.pieces(register):
            access = Access("load", address, places.facts(register), offset=offset)
            parts += block.anchor(access, [(storage, False)], [address])
        values.append(Pack(parts))
    for i, item in enumerate(items):
        block.define(item, values[i % len(values)])


@family(f"wmma.store.d.{_SYNC}", destinations=0, operands=_memory_operands, qualifiers=_in_memory(_SUMS, "d"))
def _store(block: BlockBuilder, instruction: Instruction) -> None:
    """wmma.store: D of all shapes and types."""
    address, source, *stride = instruction.operands
    places = _Places(block, instruction, (address, *stride))
    for item, register in zip(items_of(source), places.matrix.registers):
        pieces = list(places.pieces(register))
        value = block.whole(block.value(item, max(_BITS[places.matrix.type], 32)))
        parts = block.split(value, len(pieces)) if len(pieces) > 1 else [value]
        for (address, offset), part in zip(pieces, parts):
            part = block.whole(part)
            block.anchor(Access("store", address, places.facts(register), [part], offset), [], [address, part])


def _product(parts: tuple[str, ...]) -> tuple[_Matrix, _Matrix, _Matrix, _Matrix]:
    """D, A, B and C of the opcode of wmma.mma: of .f16 it has the types of D and C alone."""
    sides = _sides(next(part for part in parts[2:] if part[0] == "m"))
    d, *factors, c = (part for part in parts if part in _BITS)
    a, b = factors or ("f16", "f16")
    return _Matrix(*sides, "d", d), _Matrix(*sides, "a", a), _Matrix(*sides, "b", b), _Matrix(*sides, "c", c)


_ROUNDINGS = ("rn", "rz", "rm", "rp")


def _products() -> Iterator[str]:
    """Forms of wmma.mma but those of bits: of .f16 they have the types of D and C alone."""
    layouts = "row|col row|col"
    yield f"{layouts} {_named('f16')} f16|f32 f16|f32"
    for type_ in ("bf16", "tf32"):
        yield f"{layouts} {_named(type_)} f32 {type_} {type_} f32"
    yield f"{layouts} {_named('f64')} $round? f64 f64 f64 f64"
    for type_ in ("s8", "u8", "s4", "u4"):
        yield f"{layouts if type_[1] == '8' else 'row col'} {_named(type_)} s32 {type_} {type_} s32 satfinite?"


@family(
    *(f"wmma.mma.{op}.popc.{_SYNC}" for op in ("xor", "and")), varies=always_varies, operands=_mma_operands,
    qualifiers=f"row col {_named('b1')} s32 b1 b1 s32",
)  # fmt: skip
@family(f"wmma.mma.{_SYNC}", varies=always_varies, operands=_mma_operands, qualifiers="; ".join(_products()))
def _mma(block: BlockBuilder, instruction: Instruction) -> None:
    """wmma.mma: f16, bf16, tf32, f64, s8, u8, s4, u4, b1."""
    parts = instruction.parts
    d, *sources = _product(parts)
    a_type, b_type, c_type, d_type = (matrix.type for matrix in (*sources, d))
    items = [items_of(operand) for operand in instruction.operands]
    word = max(_BITS[a_type], 32)
    a, b, c = ([block.value(item, word) for item in each[: len(x.registers)]] for each, x in zip(items[1:], sources))
    if d.swapped:
        a, b = b, a
    both = "f32" if {c_type, d_type} == {"f16", "f32"} else c_type
    default = "rn" if a_type == "f64" else ""
    variant = next((part for part in parts if part in ("xor", "and", *_ROUNDINGS)), default)
    rows, columns, k = d.form
    if a_type == "tf32":  # ptxas makes two of it, in order of K
        k = 4
    form = Form(rows, columns, k, TYPES[a_type], TYPES[b_type], both, "satfinite" in parts, variant)
    if both != c_type:
        c = [block.pure(float_to_float("f32", "f16"), half) for pair in c for half in block.split(pair, 2)]
    results = _parts(block, form, a, b, c, d.k // k)
    if both != d_type:
        narrow = PureOp("cvt_f16_f32_rn", ("f32",), "u16")
        halves = [block.pure(narrow, value) for value in results]
        results = [Pack(pair) for pair in zip(halves[::2], halves[1::2])]
    for item, value in zip(items[0], results):
        block.define(item, value)


def _parts(block: BlockBuilder, form: Form, a: list[Value], b: list[Value], c: list[Value], steps: int) -> list[Value]:
    """D of the products of each part of A with each of B, in so many steps of K."""
    results: list[Value] = []
    of_a, of_b = form.a_registers, form.b_registers
    for i in range(0, len(a), of_a * steps):
        for j in range(0, len(b), of_b * steps):
            sums = c[len(results) : len(results) + form.c_registers]
            for step in range(steps):
                at, of = i + of_a * step, j + of_b * step
                sums = multiply_registers(block, form, a[at : at + of_a], b[of : of + of_b], sums)
            results += sums
    return results
