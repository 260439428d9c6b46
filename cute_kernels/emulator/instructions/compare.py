"""Comparison (setp) and selection (selp)."""

from __future__ import annotations

from cute_kernels.emulator.graph.block import BlockBuilder
from cute_kernels.emulator.graph.values import PureOp, Value
from cute_kernels.emulator.instructions.integers import INTEGERS, binary, storage
from cute_kernels.emulator.ptx.decode import TYPE_BITS, Instruction, Pair
from cute_kernels.emulator.ptx.families import family, qualifiers

_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def integer_compare(relation: str, type_: str) -> PureOp:
    """setp on integers, by a relation of `_COMPARE`; of eq and ne the bits alone matter."""
    if relation in ("eq", "ne"):
        type_ = f"b{TYPE_BITS[type_]}"
    return PureOp(f"setp_{relation}_{type_}", (storage(type_),) * 2, "pred")


def _compare_integers(block: BlockBuilder, instruction: Instruction) -> Value:
    """The predicate of setp on integers and bits."""
    qualifiers(instruction, *_COMPARE, *_UNSIGNED, "and", "or", "xor", "b16", "b32", "b64", *INTEGERS)
    relation, type_ = instruction.parts[1], instruction.parts[-1]
    if relation in _UNSIGNED and type_[0] != "u" or relation not in ("eq", "ne") and type_[0] == "b":
        legal = "eq, ne" if type_[0] == "b" else "eq, ne, lt, le, gt, ge"
        raise instruction.refuse(f"setp.{relation}.{type_}: .{type_} is compared by {legal}")
    a, b = (block.value(operand, TYPE_BITS[type_]) for operand in instruction.operands[1:3])
    holds = block.pure(integer_compare(_UNSIGNED.get(relation, relation), type_), a, b)
    return block.first_lane(holds) if block.context.is_uniform_of_tid(instruction) else holds


_RELATIONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def _compare_floats(block: BlockBuilder, instruction: Instruction) -> Value:
    """The predicate of setp on floats: plain relations are false when unordered, the ...u ones true."""
    qualifiers(instruction, *_RELATIONS, "and", "or", "xor", "f16", "bf16", "f32", "f64")
    relation, type_ = instruction.parts[1], instruction.parts[-1]
    a, b = (block.value(operand, TYPE_BITS[type_]) for operand in instruction.operands[1:3])
    stored = type_ if type_ in ("f32", "f64") else "u16"
    return block.pure(PureOp(f"setp_{relation}_{type_}", (stored, stored), "pred"), a, b)


def _compare_into(block: BlockBuilder, instruction: Instruction, holds: Value) -> None:
    """Writes the destinations of setp: ``p`` or ``p|q`` with q = !p, and the ``.and/.or/.xor`` combination."""
    combine = [part for part in instruction.parts[2:-1] if part in ("and", "or", "xor")]
    other = block.logic_not(holds)
    if combine:
        condition = block.value(instruction.operands[3], 1)
        op = binary(combine[0], "pred")
        holds, other = block.pure(op, holds, condition), block.pure(op, other, condition)
    destination = instruction.operands[0]
    if isinstance(destination, Pair):
        block.define(destination.value, holds)
        block.define(destination.predicate, other)
    else:
        block.define(destination, holds)


@family("setp")
def _setp(block: BlockBuilder, instruction: Instruction) -> None:
    """setp on integers and bits; and on floats."""
    relation, type_ = instruction.parts[1], instruction.parts[-1]
    if relation not in _RELATIONS and relation not in _UNSIGNED:
        known = ", ".join((*_RELATIONS, *_UNSIGNED))
        raise instruction.refuse(f"setp.{relation}: the comparison comes first, one of {known}")
    if type_ in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2"):
        holds = _compare_floats(block, instruction)
    else:
        holds = _compare_integers(block, instruction)
    _compare_into(block, instruction, holds)


@family(*(f"selp.{k}{b}" for k in "bsu" for b in (16, 32, 64)), "selp.f32", "selp.f64")
def _selp(block: BlockBuilder, instruction: Instruction) -> None:
    """selp: choose by predicate."""
    bits = TYPE_BITS[instruction.parts[1]]
    yes, no = (block.value(operand, bits) for operand in instruction.operands[1:3])
    block.define(instruction.operands[0], block.select(block.value(instruction.operands[3], 1), yes, no))
