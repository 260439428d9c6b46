"""Matrices of a warp between memory and registers: ldmatrix, stmatrix, movmatrix. Of 16-bit elements they are 8x8.

Lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i. Of 8-bit elements, always transposed, ldmatrix loads
16x16 (.m16n16), which two registers of a lane hold, and stmatrix stores 16x8 (.m16n8), from one. They are 16 and 8 rows
of 16 bytes in memory. ``core/memory.c`` says which elements a lane holds.
"""

from __future__ import annotations

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.isa.instructions.memory import Access, address_value
from cute_kernels.emulator.isa.ptx.decode import Instruction, Operand, Vector
from cute_kernels.emulator.isa.ptx.families import always_varies
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import Value

_COUNTS = {"x1": 1, "x2": 2, "x4": 4}
_QUALIFIERS = "sync aligned m8n8 x1 x2 x4 trans shared shared::cta b16 b8"


def _address(block: BlockBuilder, instruction: Instruction, operand: Operand) -> Value:
    """Address of shared memory in 32 bits, or a generic one in 64."""
    return address_value(block, operand, 32 if {"shared", "shared::cta"} & set(instruction.parts) else 64)


def _form(instruction: Instruction, registers: Operand, shape: str) -> tuple[int, tuple[Operand, ...]]:
    """(how the core calls the matrices, register operands); ``shape`` is that of 8-bit elements."""
    parts = instruction.parts[1:]
    counts = [_COUNTS[part] for part in parts if part in _COUNTS]
    octets, each = parts[-1] == "b8", 2 if shape == "m16n16" else 1
    legal = shape in parts and "trans" in parts if octets else "m8n8" in parts and parts[-1] == "b16"
    if len(counts) != 1 or not legal or octets and each * counts[0] > 4:
        few = "x1 or x2" if each == 2 else "x1, x2 or x4"
        raise instruction.refuse(
            f"m8n8 matrices of b16, x1, x2 or x4, and {shape} ones of b8, {few}, transposed, are implemented"
        )
    items = registers.items if isinstance(registers, Vector) else (registers,)
    needed = counts[0] * (each if octets else 1)
    if len(items) != needed:
        raise instruction.refuse(f"{needed} registers are needed")
    kind = "MATRICES_OF_BYTES" if octets else "MATRICES_TRANSPOSED" if "trans" in parts else "MATRICES"
    return CONSTANTS[kind], items


@family("ldmatrix", varies=always_varies, operands="{r}:b32, [p]", qualifiers=f"m16n16 {_QUALIFIERS}")
def _ldmatrix(block: BlockBuilder, instruction: Instruction) -> None:
    """ldmatrix.m8n8.b16, with .trans; .m16n16.trans.b8; of shared memory, by generic addresses too."""
    kind, items = _form(instruction, instruction.operands[0], "m16n16")
    address = _address(block, instruction, instruction.operands[1])
    anchor = Access("load_matrix", address, [kind])
    for item, value in zip(items, block.anchor(anchor, [("u32", False)] * len(items), [address])):
        block.define(item, value)


@family("stmatrix", destinations=0, operands="[p], {r}:b32", qualifiers=f"m16n8 {_QUALIFIERS}")
def _stmatrix(block: BlockBuilder, instruction: Instruction) -> None:
    """stmatrix.m8n8.b16, with .trans; .m16n8.trans.b8; to shared memory, by generic addresses too."""
    kind, items = _form(instruction, instruction.operands[1], "m16n8")
    address = _address(block, instruction, instruction.operands[0])
    values = [block.whole(block.value(item, 32)) for item in items]
    block.anchor(Access("store_matrix", address, [kind], values), [], [address, *values])


@family("movmatrix", varies=always_varies, operands="d:b32, a:b32")
def _movmatrix(block: BlockBuilder, instruction: Instruction) -> None:
    """movmatrix.m8n8.trans.b16: a matrix in registers, transposed."""
    if instruction.parts[1:] != ("sync", "aligned", "m8n8", "trans", "b16"):
        raise instruction.refuse("movmatrix.sync.aligned.m8n8.trans.b16 is implemented")
    value = block.value(instruction.operands[1], 32)
    (result,) = block.operation("transpose", value, results=[("u32", False)])
    block.define(instruction.operands[0], result)
