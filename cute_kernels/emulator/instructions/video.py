"""Video instructions (vadd .. vset, also of 2 and 4 lanes of a register) and cvt.pack, of operations that others have.

All of them compute with 64 bits, where nothing overflows, and take the bits that they keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cute_kernels.emulator.graph.block import BlockBuilder
from cute_kernels.emulator.graph.families import family
from cute_kernels.emulator.graph.values import Constant, PureOp, Value
from cute_kernels.emulator.instructions.compare import integer_compare
from cute_kernels.emulator.instructions.integers import binary, shift_by
from cute_kernels.emulator.ptx.decode import Instruction

_RELATIONS = ("eq", "ne", "lt", "le", "gt", "ge")
_SECOND = ("add", "min", "max")  # what is done with operand c


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


_OPERATIONS: dict[str, _Operation] = {
    **{f"v{name}": _plain(name) for name in ("add", "sub", "min", "max")},
    "vabsdiff": _difference,
    "vavrg": _average,
}
#: By the digit at the end of the opcode: lanes of a register, and the bits of each.
_LANES = {"": (1, 32), "2": (2, 16), "4": (4, 8)}


@family(
    *(f"{name}{lanes}" for name in _OPERATIONS for lanes in _LANES if name + lanes != "vavrg"),
    *(f"vset{lanes}" for lanes in _LANES),
    qualifiers=("s32", "u32", "sat", *_SECOND, *_RELATIONS),
)
def _video(block: BlockBuilder, instruction: Instruction) -> None:
    """vadd, vsub, vabsdiff, vmin, vmax, vset, also of 2 and 4 lanes, and vavrg2, vavrg4; selectors are refused."""
    name, *parts = instruction.parts
    count, bits = _LANES[name[-1] if name[-1] in "24" else ""]
    name = name.rstrip("24")
    types = [part for part in parts if part in ("s32", "u32")]
    second = parts[-1] if parts[-1] in _SECOND else ""
    relation = next((part for part in parts if part in _RELATIONS), "")
    if len(types) != (2 if name == "vset" else 3) or (name == "vset") != bool(relation):
        raise instruction.refuse(f"types or comparison of {instruction.parts[0]} are not those of the PTX ISA")
    kept, (a_type, b_type) = types[0] if len(types) == 3 else "u32", types[-2:]
    numbers = Numbers(block)
    a, b, *c = (block.value(operand, 32) for operand in instruction.operands[1:])
    if (second and not c) or (not second and count == 1 and c):
        raise instruction.refuse(f"{instruction.opcode} with {len(c) + 2} operands is not implemented")
    results = []
    for lane in range(count):
        x = numbers.field(a, lane * bits, bits, signed=a_type == "s32")
        y = numbers.field(b, lane * bits, bits, signed=b_type == "s32")
        result = numbers.compared(relation, x, y) if relation else _OPERATIONS[name](numbers, x, y)
        results.append(numbers.clamp(result, bits, signed=kept == "s32") if "sat" in parts else result)
    if not second:
        block.define(instruction.operands[0], numbers.pack(results, bits))
        return
    total = results[0]
    for result in results[1:]:
        total = numbers.do("add", total, result)
    low = numbers.field(block.resize(total, 32), 0, 32, signed=kept == "s32")
    other = numbers.field(c[0], 0, 32, signed=kept == "s32")
    block.define(instruction.operands[0], block.resize(numbers.do(second, low, other), 32))


#: Results of cvt.pack: bits and whether they are signed.
_PACKED = {f"{kind}{bits}": (bits, kind == "s") for kind in "us" for bits in (16, 8, 4, 2)}


@family(*(f"cvt.pack.sat.{type_}.s32" for type_ in _PACKED))
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
