"""Registers of 128 bits as pairs of 64 bits: nothing computes with all of their bits, and they live across blocks."""

from __future__ import annotations

import dataclasses

from cute_kernels.emulator.ptx.program import Instruction, Kernel, Operand, Register, Vector

_HALVES = (".low", ".high")


def in_halves(kernel: Kernel) -> Kernel:
    """The kernel with ``{low, high}`` in place of every register of 128 bits."""
    wide = {name for name, type_ in kernel.registers.items() if type_ == "b128"}
    if not wide:
        return kernel
    registers = {name: type_ for name, type_ in kernel.registers.items() if name not in wide}
    registers |= {name + half: "b64" for name in wide for half in _HALVES}
    instructions = tuple(_in_halves(instruction, wide) for instruction in kernel.instructions)
    return dataclasses.replace(kernel, registers=registers, instructions=instructions)


def _in_halves(instruction: Instruction, wide: set[str]) -> Instruction:
    operands = tuple(_halves(operand, wide) for operand in instruction.operands)
    return instruction if operands == instruction.operands else dataclasses.replace(instruction, operands=operands)


def _halves(operand: Operand, wide: set[str]) -> Operand:
    if isinstance(operand, Register) and operand.name in wide:
        return Vector(tuple(Register(operand.name + half) for half in _HALVES))
    if isinstance(operand, Vector):
        return Vector(tuple(_halves(item, wide) for item in operand.items))
    return operand
