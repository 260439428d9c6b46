"""Video instructions of 2 and 4 lanes, and cvt.pack, of operations that others have.

All of them compute with 64 bits, where nothing overflows, and take the bits that they keep. The scalar ones (``vadd``,
``vmad``) are not implemented: GPUs have none, and of many forms an H100 gives other results than the PTX ISA, by what
ptxas makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cute_kernels.emulator.isa.instructions.compare import integer_compare
from cute_kernels.emulator.isa.instructions.integers import binary, shift_by
from cute_kernels.emulator.isa.ptx.program import Instruction, Operand, Part
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import Constant, PureOp, Value

_RELATIONS = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True)
class Numbers:
    """Arithmetic of a basic block with signed numbers of 64 bits."""

    block: BlockBuilder

    def do(self, name: str, a: Value, b: Value | int) -> Value:
        return self.block.pure(binary(name, "s64"), a, Constant(b, 64) if isinstance(b, int) else b)

    def field(self, value: Value, first: int, bits: int, *, signed: bool) -> Value:
        """Bits of a register, extended by their sign or by zeros."""
        type_ = "s64" if signed else "u64"
        extract = PureOp(f"bfe_{type_}", (type_, "u32", "u32"), type_)
        wide = self.block.resize(self.block.whole(value), 64)
        return self.block.pure(extract, wide, Constant(first, 32), Constant(bits, 32))

    def clamp(self, value: Value, bits: int, *, signed: bool) -> Value:
        """The nearest number of so many bits."""
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        return self.do("max", self.do("min", value, high), low)

    def compared(self, relation: str, a: Value, b: Value) -> Value:
        """1 where the relation holds, else 0."""
        type_ = "b64" if relation in ("eq", "ne") else "s64"
        holds = self.block.pure(integer_compare(relation, type_), a, b)
        return self.block.select(holds, Constant(1, 64), Constant(0, 64))

    def pack(self, fields: Sequence[Value], bits: int) -> Value:
        """Fields side by side, the first one lowest: a register of 32 bits."""
        result: Value = Constant(0, 64)
        for number, value in enumerate(fields):
            low = self.block.pure(binary("and", "b64"), value, Constant((1 << bits) - 1, 64))
            moved = self.block.pure(shift_by("shl", "b64", number * bits), low) if number else low
            result = self.block.pure(binary("or", "b64"), result, moved)
        return self.block.resize(result, 32)


_Operation = Callable[[Numbers, Value, Value], Value]


def _average(numbers: Numbers, a: Value, b: Value) -> Value:
    total = numbers.do("add", a, b)
    rounded = numbers.do("add", total, numbers.compared("ge", total, Constant(0, 64)))
    return numbers.block.pure(shift_by("shr", "s64", 1), rounded)


def _difference(numbers: Numbers, a: Value, b: Value) -> Value:
    return numbers.do("sub", numbers.do("max", a, b), numbers.do("min", a, b))


def _plain(name: str) -> _Operation:
    return lambda numbers, a, b: numbers.do(name, a, b)


def _compare(relation: str) -> _Operation:
    return lambda numbers, a, b: numbers.compared(relation, a, b)


_OPERATIONS: dict[str, _Operation] = {
    **{f"v{name}": _plain(name) for name in ("add", "sub", "min", "max")},
    "vabsdiff": _difference,
    "vavrg": _average,
    **{f"vset.{relation}": _compare(relation) for relation in _RELATIONS},
}
_SOURCES = "{u,s}32 {u,s}32"
_OPERANDS = "d.:u32, a.:u32, b.:u32, c:u32"
_ARITHMETIC = ("vadd", "vsub", "vmin", "vmax", "vabsdiff")
#: By the digit at the end of the opcode: lanes of a register, the bits of each, and the letter of their selectors.
_LANES = {"2": (2, 16, "h"), "4": (4, 8, "b")}


@dataclass(frozen=True)
class _Opcode:
    """A video instruction: the types of its result and of a and b, and what is done with them."""

    kept: str
    a: str
    b: str
    operation: _Operation
    saturates: bool
    accumulates: bool

    @staticmethod
    def of(instruction: Instruction) -> _Opcode:
        name, *parts = instruction.parts
        name = name.rstrip("24")
        types = [part for part in parts if part in ("s32", "u32")]
        relations = [part for part in parts if part in _RELATIONS]
        operation = _OPERATIONS[".".join([name, *relations])]
        kept = types[0] if len(types) == 3 else "u32"
        return _Opcode(kept, *types[-2:], operation, "sat" in parts, "add" in parts)

    def result(self, numbers: Numbers, x: Value, y: Value, bits: int) -> Value:
        value = self.operation(numbers, x, y)
        return numbers.clamp(value, bits, signed=self.kept == "s32") if self.saturates else value


def _selector(operand: Operand, default: str) -> str:
    return operand.selector if isinstance(operand, Part) else default


def _refuse_wrong(instruction: Instruction, selector: str, letter: str, count: int, below: int) -> list[int]:
    """The numbers of a selector, the lowest lane's first."""
    numbers = [int(digit) for digit in reversed(selector[1:])]
    if selector[0] != letter or len(numbers) > count or any(number >= below for number in numbers):
        raise instruction.refuse(f"selector .{selector} of {instruction.opcode} is not one of the PTX ISA")
    return numbers


@family(*(f"vset{lanes}" for lanes in _LANES), operands=_OPERANDS, qualifiers=f"{_SOURCES} $relations add?")
@family(
    *(f"{name}{lanes}" for name in (*_ARITHMETIC, "vavrg") for lanes in _LANES), operands=_OPERANDS,
    qualifiers=f"{{u,s}}32 {_SOURCES} sat? add?; add / sat",
)  # fmt: skip
def _lanes(block: BlockBuilder, instruction: Instruction) -> None:
    """Video instructions of 2 and 4 lanes, with selectors."""
    count, bits, letter = _LANES[instruction.parts[0][-1]]
    opcode, numbers = _Opcode.of(instruction), Numbers(block)
    d, *sources = instruction.operands
    a, b, c = (block.value(operand, 32) for operand in sources)
    digits = "".join(map(str, reversed(range(2 * count))))
    mask = _refuse_wrong(instruction, _selector(d, letter + digits[count:]), letter, count, count)
    chosen = [
        _refuse_wrong(instruction, _selector(operand, letter + default), letter, count, 2 * count)
        for operand, default in ((sources[0], digits[count:]), (sources[1], digits[:count]))
    ]
    if any(len(each) != count for each in chosen) or sorted(set(mask)) != mask:
        raise instruction.refuse(f"selectors of {instruction.opcode} are not those of the PTX ISA")
    results = {}
    for lane in mask:
        x, y = (
            numbers.field((a, b)[each[lane] // count], each[lane] % count * bits, bits, signed=type_ == "s32")
            for each, type_ in zip(chosen, (opcode.a, opcode.b))
        )
        results[lane] = opcode.result(numbers, x, y, bits)
    if opcode.accumulates:
        total = numbers.field(c, 0, 32, signed=False)
        for result in results.values():
            total = numbers.do("add", total, result)
        block.define(d, block.resize(total, 32))
        return
    others = (lane for lane in range(count) if lane not in results)
    results |= {lane: numbers.field(c, lane * bits, bits, signed=False) for lane in others}
    block.define(d, numbers.pack([results[lane] for lane in range(count)], bits))


#: Results of cvt.pack: bits and whether they are signed.
_PACKED = {f"{kind}{bits}": (bits, kind == "s") for kind in "us" for bits in (16, 8, 4, 2)}


@family("cvt.pack.sat.u16.s32", "cvt.pack.sat.s16.s32", operands="d, a:s32, b:s32")
@family(
    *(f"cvt.pack.sat.{type_}.s32.b32" for type_, (bits, _) in _PACKED.items() if bits < 16),
    operands="d, a:s32, b:s32, c:b32",
)  # fmt: skip
def _cvt_pack(block: BlockBuilder, instruction: Instruction) -> None:
    """cvt.pack: two integers, each limited to a narrow type, side by side, the second one lowest; c lies above them."""
    bits, signed = _PACKED[instruction.parts[3]]
    numbers = Numbers(block)
    a, b, *c = (block.value(operand, 32) for operand in instruction.operands[1:])
    narrow = [numbers.clamp(numbers.field(value, 0, 32, signed=True), bits, signed=signed) for value in (b, a)]
    result = numbers.pack(narrow, bits)
    if c:
        above = block.pure(shift_by("shl", "b32", 2 * bits), block.whole(c[0]))
        result = block.pure(binary("or", "b32"), result, above)
    block.define(instruction.operands[0], result)
