"""Comparison (setp, set) and selection (selp)."""

from cute_kernels.emulator.isa.instructions.integers import binary, storage
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS, Instruction, Pair
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import Constant, Pack, PureOp, Value

_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def integer_compare(relation: str, type_: str) -> PureOp:
    """setp on integers, by a relation of `_COMPARE`; of eq and ne the bits alone matter."""
    if relation in ("eq", "ne"):
        type_ = f"b{TYPE_BITS[type_]}"
    return PureOp(f"setp_{relation}_{type_}", (storage(type_),) * 2, "pred")


def _integers(block: BlockBuilder, instruction: Instruction, relation: str, type_: str) -> Value:
    a, b = (block.value(operand, TYPE_BITS[type_]) for operand in instruction.operands[1:3])
    return block.pure(integer_compare(_UNSIGNED.get(relation, relation), type_), a, b)


_FLOATS = ("f16", "bf16", "f32", "f64")
_HALVES = ("f16", "bf16")
_PAIRS = ("f16x2", "bf16x2")


def _floats(block: BlockBuilder, instruction: Instruction, relation: str, type_: str) -> list[Value]:
    """Whether a relation of floats holds, of pairs for both: plain ones are false when unordered, those with u true."""
    a, b = (block.whole(block.value(operand, TYPE_BITS[type_])) for operand in instruction.operands[1:3])
    element = type_.removesuffix("x2")
    stored = element if element in ("f32", "f64") else "u16"
    op = PureOp(f"setp_{relation}_{element}", (stored, stored), "pred")
    if type_ == element:
        return [block.pure(op, a, b)]
    return [block.pure(op, x, y) for x, y in zip(block.split(a, 2), block.split(b, 2))]


def _compared(block: BlockBuilder, instruction: Instruction, type_: str) -> list[Value]:
    """Result of a comparison for each element of ``type_``."""
    if "ftz" in instruction.parts:
        raise instruction.refuse(f"qualifier .ftz of {instruction.parts[0]} is not implemented")
    relation = instruction.parts[1]
    if type_ in (*_FLOATS, *_PAIRS):
        return _floats(block, instruction, relation, type_)
    return [_integers(block, instruction, relation, type_)]


def _combined(block: BlockBuilder, instruction: Instruction, holds: list[Value]) -> list[Value]:
    """With the last operand, where the opcode has .and, .or or .xor."""
    combine = [part for part in instruction.parts[2:-1] if part in ("and", "or", "xor")]
    if not combine:
        return holds
    condition = block.value(instruction.operands[3], 1)
    return [block.pure(binary(combine[0], "pred"), each, condition) for each in holds]


def _combined_with(parts: tuple[str, ...]) -> str:
    return ", c:pred" if {"and", "or", "xor"} & set(parts) else ""


_SIGNED = "$relations and|or|xor?"
_GRAMMAR = (
    ("eq|ne and|or|xor?", "$bits"), (_SIGNED, "s{16,32,64}"), ("$relations|lo|ls|hi|hs and|or|xor?", "u{16,32,64}"),
    ("$relations|equ|neu|ltu|leu|gtu|geu|num|nan and|or|xor? ftz?", "f32|f64|f16|bf16"),
)  # fmt: skip


@family(
    "setp", operands=lambda parts: f"p{'' if parts[-1] in _HALVES else '|q?'}:pred, a, b{_combined_with(parts)}",
    qualifiers="; ".join(f"{first} {type_}" for first, type_ in (*_GRAMMAR, (_GRAMMAR[-1][0], "f16x2|bf16x2")))
    + "; ftz / f64|bf16|bf16x2",
)  # fmt: skip
def _setp(block: BlockBuilder, instruction: Instruction) -> None:
    """setp on integers and bits; and on floats, f16x2 and bf16x2 with a predicate for each."""
    holds = _compared(block, instruction, instruction.parts[-1])
    if len(holds) == 1 and instruction.parts[-1] not in _FLOATS and block.context.is_uniform_of_tid(instruction):
        holds = [block.first_lane(holds[0])]
    if len(holds) == 1:
        holds.append(block.logic_not(holds[0]))
    first, second = _combined(block, instruction, holds)
    destination = instruction.operands[0]
    if isinstance(destination, Pair):
        block.define(destination.value, first)
        block.define(destination.predicate, second)
    else:
        block.define(destination, first)


#: Type of a result of set -> (true, bits of each).
_TRUE = {
    **{f"{kind}{bits}": ((1 << bits) - 1, bits) for kind in "us" for bits in (16, 32)},
    "f32": (0x3F800000, 32), "f16": (0x3C00, 16), "bf16": (0x3F80, 16), "f16x2": (0x3C00, 16), "bf16x2": (0x3F80, 16),
}  # fmt: skip


@family(
    "set", operands=lambda parts: f"d:{parts[-2]}, a, b{_combined_with(parts)}",
    qualifiers="; ".join((
        *(f"{first} u32|s32|f32|f16|bf16 {type_}" for first, type_ in _GRAMMAR[:3]),
        *(f"{_GRAMMAR[3][0]} {form}" for form in (
            "u32|s32|f32|f16|bf16 f32|f64", "{u,s}{16,32}|f16|bf16 f16", "{u,s}{16,32}|bf16 bf16",
            "u32|s32|f16x2 f16x2", "u32|s32|bf16x2 bf16x2",
        )),
    )) + "; ftz / f64|bf16|bf16x2",
)  # fmt: skip
def _set(block: BlockBuilder, instruction: Instruction) -> None:
    """set: all ones, or 1.0, where a comparison holds, else 0; of f16x2 and bf16x2 in both halves."""
    result, type_ = instruction.parts[-2:]
    holds = _combined(block, instruction, _compared(block, instruction, type_))
    true, bits = _TRUE[result]
    if type_ in _PAIRS and result in ("u32", "s32"):
        true, bits = 0xFFFF, 16
    chosen = [block.select(each, Constant(true, bits), Constant(0, bits)) for each in holds]
    block.define(instruction.operands[0], chosen[0] if len(chosen) == 1 else Pack(chosen))


@family(*(f"selp.{k}{b}" for k in "bsu" for b in (16, 32, 64)), "selp.f32", "selp.f64", operands="d, a, b, p:pred")
def _selp(block: BlockBuilder, instruction: Instruction) -> None:
    """selp: choose by predicate."""
    bits = TYPE_BITS[instruction.parts[1]]
    yes, no = (block.value(operand, bits) for operand in instruction.operands[1:3])
    block.define(instruction.operands[0], block.select(block.value(instruction.operands[3], 1), yes, no))
