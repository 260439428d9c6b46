"""Extended-precision integer arithmetic: add.cc, addc, sub.cc, subc, mad.cc, madc.

They read and write one carry flag per thread, CC.CF (PTX ISA, "Extended-Precision Integer Arithmetic Instructions"). It
is a predicate register here, which `decode_body` adds to the operands when the instruction is decoded, so that the flow
analysis knows of it like of any other register.
"""

from cute_kernels.emulator.isa.instructions.integers import binary
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS, Instruction
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import Constant, PureOp

_TYPES = "{u,s}{32,64}"
_SUMS = ("add.cc", "addc.cc", "sub.cc", "subc.cc")
_PRODUCTS = tuple(f"{name}.{half}" for name in ("mad", "madc") for half in ("lo", "hi"))


def _operands(parts: tuple[str, ...]) -> str:
    """Decoding adds the carry, which .cc writes and addc, subc and madc read."""
    written = ", carry_out:pred" if "cc" in parts else ""
    addend = ", c" if parts[0].startswith("mad") else ""
    return f"d{written}, a, b{addend}" + (", carry_in:pred" if parts[0].endswith("c") else "")


@family(*_SUMS, destinations=2, operands=_operands, qualifiers=_TYPES)
@family("addc", "subc", operands=_operands, qualifiers=_TYPES)
@family(*(f"{name}.cc" for name in _PRODUCTS), destinations=2, operands=_operands, qualifiers=_TYPES)
@family(*_PRODUCTS[2:], operands=_operands, qualifiers=_TYPES)
def _with_carry(block: BlockBuilder, instruction: Instruction) -> None:
    """add.cc, sub.cc, mad.cc (.lo, .hi), addc, subc, madc, also with .cc: sums that leave or take a carry or borrow."""
    name, type_, leaves = instruction.parts[0], instruction.parts[-1], "cc" in instruction.parts
    bits = TYPE_BITS[type_]
    operands = list(instruction.operands[2 if leaves else 1 :])
    carry = block.value(operands.pop(), 1) if name.endswith("c") else Constant(0, 1)
    *factors, a, b = (block.value(operand, bits) for operand in operands)
    if factors:
        a = block.pure(binary(f"mul.{instruction.parts[1]}", type_), *factors, a)
    total, out = ("subc", "borrow") if name.startswith("sub") else ("addc", "carry")
    inputs = (f"u{bits}", f"u{bits}", "pred")
    result = block.pure(PureOp(f"{total}_u{bits}", inputs, f"u{bits}"), a, b, carry)
    left = block.pure(PureOp(f"{out}_u{bits}", inputs, "pred"), a, b, carry)
    block.define(instruction.operands[0], result)
    if leaves:
        block.define(instruction.operands[1], left)
