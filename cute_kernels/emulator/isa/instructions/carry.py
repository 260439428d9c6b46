"""Extended-precision integer arithmetic: add.cc, addc, sub.cc, subc, mad.cc, madc.

They read and write one carry flag per thread, CC.CF (PTX ISA, "Extended-Precision Integer Arithmetic Instructions"). It
is a predicate register here, which `decode_body` adds to the operands when the instruction is decoded, so that the flow
analysis knows of it like of any other register.
"""

from __future__ import annotations

from collections.abc import Sequence

from cute_kernels.emulator.isa.instructions.integers import binary
from cute_kernels.emulator.isa.ptx.decode import TYPE_BITS, Instruction
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import Constant, PureOp, Value

_TYPES = "{u,s}{32,64}"


def _sum(bits: int, subtract: bool) -> tuple[PureOp, PureOp]:
    """The result, and the carry (borrow) out, of two numbers and a carry (borrow) in."""
    type_, (total, out) = f"u{bits}", ("subc", "borrow") if subtract else ("addc", "carry")
    inputs = (type_, type_, "pred")
    return PureOp(f"{total}_{type_}", inputs, type_), PureOp(f"{out}_{type_}", inputs, "pred")


def _define(block: BlockBuilder, instruction: Instruction, sources: Sequence[Value], bits: int) -> None:
    """``sources`` are two numbers and the carry in, or None for 0."""
    result, carry = _sum(bits, instruction.parts[0].startswith("sub"))
    values = [block.pure(op, *sources) for op in (result, carry)]
    block.define(instruction.operands[0], values[0])
    if "cc" in instruction.parts:
        block.define(instruction.operands[1], values[1])


def _sources(block: BlockBuilder, instruction: Instruction, count: int, bits: int) -> list[Value]:
    first = 2 if "cc" in instruction.parts else 1
    operands = instruction.operands[first:]
    carries = instruction.parts[0].endswith("c")
    values = [block.value(operand, bits) for operand in operands[:count]]
    return [*values, block.value(operands[-1], 1) if carries else Constant(0, 1)]


_SUMS = ("add.cc", "addc.cc", "sub.cc", "subc.cc")
_PRODUCTS = tuple(f"{name}.{half}" for name in ("mad", "madc") for half in ("lo", "hi"))


def _lower_sum(block: BlockBuilder, instruction: Instruction) -> None:
    bits = TYPE_BITS[instruction.parts[-1]]
    _define(block, instruction, _sources(block, instruction, 2, bits), bits)


def _lower_product(block: BlockBuilder, instruction: Instruction) -> None:
    type_ = instruction.parts[-1]
    bits = TYPE_BITS[type_]
    a, b, c, carry = _sources(block, instruction, 3, bits)
    product = block.pure(binary(f"mul.{instruction.parts[1]}", type_), a, b)
    _define(block, instruction, [product, c, carry], bits)


def _operands(parts: tuple[str, ...]) -> str:
    """Decoding adds the carry, which .cc writes and addc, subc and madc read."""
    written = ", carry_out:pred" if "cc" in parts else ""
    addend = ", c" if parts[0].startswith("mad") else ""
    return f"d{written}, a, b{addend}" + (", carry_in:pred" if parts[0].endswith("c") else "")


@family(*_SUMS, destinations=2, operands=_operands, qualifiers=_TYPES)
def _sum_with_carry_out(block: BlockBuilder, instruction: Instruction) -> None:
    """add.cc, addc.cc, sub.cc, subc.cc: sums and differences that leave a carry or borrow."""
    _lower_sum(block, instruction)


@family("addc", "subc", operands=_operands, qualifiers=_TYPES)
def _sum_with_carry_in(block: BlockBuilder, instruction: Instruction) -> None:
    """addc, subc: sums and differences that take a carry or borrow."""
    _lower_sum(block, instruction)


@family(*(f"{name}.cc" for name in _PRODUCTS), destinations=2, operands=_operands, qualifiers=_TYPES)
def _product_with_carry_out(block: BlockBuilder, instruction: Instruction) -> None:
    """mad.lo.cc, mad.hi.cc, madc.lo.cc, madc.hi.cc: half a product, added, that leaves a carry."""
    _lower_product(block, instruction)


@family(*_PRODUCTS[2:], operands=_operands, qualifiers=_TYPES)
def _product_with_carry_in(block: BlockBuilder, instruction: Instruction) -> None:
    """madc.lo, madc.hi: half a product, added with the carry."""
    _lower_product(block, instruction)
