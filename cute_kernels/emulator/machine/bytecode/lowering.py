"""A kernel's basic blocks as graphs of values (`cute_kernels.emulator.machine.graph.block`), of which bytecode is made.

Everything that can be refused before a kernel runs is refused here: opcodes, qualifiers and operands that are not
implemented, and registers of wgmma that are touched too early.
"""

from __future__ import annotations

import dataclasses

from cute_kernels.emulator.isa.instructions import tcgen05
from cute_kernels.emulator.isa.instructions.members import gather
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.isa.ptx.families import CONTROL, check_operands
from cute_kernels.emulator.isa.ptx.flow import Block, analyse
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS, Instruction, Kernel, Module, Operand, Register, Vector
from cute_kernels.emulator.isa.ptx.register_hazards import check_registers
from cute_kernels.emulator.isa.ptx.targets import check_target
from cute_kernels.emulator.isa.ptx.tensor_loads import first_uses
from cute_kernels.emulator.machine.bytecode.context import Context
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import lower as lower_instruction
from cute_kernels.emulator.machine.graph.values import Constant, Value

# What taking an instruction apart raises that is of no form the function for its opcode knows: a missing operand, a
# register or a literal where the other is meant, a number that no register holds. A mistake of that function raises the
# same, which is why the report says so.
_NO_FORM = (LookupError, AttributeError, TypeError, ValueError, ArithmeticError)


def lower(
    ptx: str, kernel: str | None, block_shape: tuple[int, int, int], check: bool, registers: bool = True,
    single: bool = False,
) -> Lowering:
    """One kernel of a PTX text, checked, ready to be lowered; ``kernel`` None: the only entry. What is uniform in a
    warp depends on ``block_shape``, the threads of a CTA. ``check``: the race detector is told when values of a
    tcgen05.ld are used; ``registers``: registers of wgmma that are touched too early are looked for; ``single``: as for
    `analyse`. Raises UnsupportedPTX: something is not implemented (`Lowering.block` raises the most of it);
    IllegalAccess: a register of wgmma."""
    module = parse(ptx)
    entry = pick(module, kernel)
    check_operands(entry)
    check_target(module.target, module.version, entry.instructions)
    lowering = Lowering(module, _wide_in_halves(entry), block_shape, single)
    if registers:
        check_registers(lowering.flow)
    if check:
        lowering.uses = first_uses(lowering.flow)
    return lowering


def pick(module: Module, name: str | None) -> Kernel:
    """The entry with this name, or the only one. Raises ValueError: no such entry, or several and no name."""
    if name is None and len(module.kernels) == 1:
        return next(iter(module.kernels.values()))
    if name not in module.kernels:
        has = f"it has {', '.join(module.kernels) or 'none'}"
        if name is None:
            raise ValueError(f"kernel = None: must be a name where the module has several kernels; {has}")
        raise ValueError(f"kernel = {name!r}: must be in the module; {has}")
    return module.kernels[name]


class Lowering:
    """A kernel with its flow graph, ready to be lowered block by block."""

    def __init__(self, module: Module, kernel: Kernel, block_shape: tuple[int, int, int], single: bool = False) -> None:
        self.kernel = kernel
        self.flow = analyse(kernel, block_shape, single)
        self.context = Context(kernel, self.flow)
        self.uses: dict[int, tuple[int, ...]] = {}  # `tensor_loads.first_uses`

    def bits(self, register: str) -> int:
        return TYPE_BITS[self.kernel.registers[register]]

    def block(self, block: Block) -> tuple[BlockBuilder, Value | None]:
        """The graph of a block, and the condition of the branch at its end (None: it has one successor)."""
        registers, varying = self.kernel.registers, self.flow.varying
        builder = BlockBuilder(registers, varying, block.divergent, self.context)
        condition: Value | None = None
        for instruction in self.kernel.instructions[block.start : block.end]:
            builder.instruction = instruction
            if instruction.index in self.uses:
                builder.call(tcgen05.used, self.uses[instruction.index])
            guard = None
            if instruction.guard is not None:
                if self.kernel.registers.get(instruction.guard.register) != "pred":
                    raise instruction.refuse(f"the guard {instruction.guard.register} is no predicate")
                guard = builder.register(instruction.guard.register)
                if instruction.guard.negated:
                    guard = builder.logic_not(guard)
            if instruction.parts[0] in CONTROL:
                condition = guard
                continue
            if isinstance(guard, Constant):
                if not guard.value:
                    continue
                guard = None
            builder.guard = guard
            if instruction.index in self.flow.gathers:
                gather(builder, instruction)
            self._lower(builder, instruction)
            builder.guard = None
        return builder, condition if len(block.successors) > 1 else None

    @staticmethod
    def _lower(builder: BlockBuilder, instruction: Instruction) -> None:
        """Raises UnsupportedPTX also where operands are missing, too many, or of another kind than any form has."""
        try:
            lower_instruction(builder, instruction)
        except _NO_FORM as error:
            raise instruction.refuse(
                f"no form of {instruction.parts[0]} that is implemented has these qualifiers and operands, or the "
                "emulator is at fault "
                f"({type(error).__name__}: {error})"
            ) from error


# --- registers of 128 bits as pairs of 64 bits: nothing computes with all of their bits, and they live across blocks --

_HALVES = (".low", ".high")


def _wide_in_halves(kernel: Kernel) -> Kernel:
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
