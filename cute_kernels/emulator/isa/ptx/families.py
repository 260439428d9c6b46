"""The table of opcode families: facts that are needed before anything is lowered.

Which operands an instruction has, which of them are destinations, whether the result can differ between the lanes of a
warp, and whether it can block. `graph.families` has the functions that lower them, and registers both.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from cute_kernels.emulator.isa.ptx import program
from cute_kernels.emulator.isa.ptx.operand_syntax import Slot, mismatch, read_forms
from cute_kernels.emulator.isa.ptx.qualifiers import read_grammar

#: (instruction, "may this operand differ between lanes?") -> may the result; one value per destination register if a
#: list is returned.
Varies = Callable[[program.Instruction, Callable[[program.Operand], bool]], "bool | list[bool]"]

#: Operands in the notation of `operand_syntax`, or a function of the opcode's parts that returns them.
Operands = str | Callable[[tuple[str, ...]], str]


def varies_with_operands(instruction: program.Instruction, varies: Callable[[program.Operand], bool]) -> bool:
    """A function of its operands: equal operands give equal results."""
    return any(varies(operand) for operand in instruction.operands[FAMILIES[find_prefix(instruction)].destinations :])


def always_varies(instruction: program.Instruction, varies: Callable[[program.Operand], bool]) -> bool:
    """Each lane has its own result by definition of the instruction."""
    return True


def never_varies(instruction: program.Instruction, varies: Callable[[program.Operand], bool]) -> bool:
    """All lanes get the same result by definition of the instruction."""
    return False


@dataclass(frozen=True)
class Family:
    """Properties of an opcode prefix."""

    destinations: int  # number of leading operands that are written
    varies: Varies  # whether the results can differ between lanes
    # the warp may have to wait here; such an instruction starts a basic block and is executed again from the start of
    # the block until it succeeds
    blocking: bool
    # a turn of a warp may end in front of a blocking instruction although it need not wait. Without, its block counts
    # as a part of the one before: what is granted at once leaves schedules as they are
    own_turn: bool
    reads_destinations: bool  # the destinations are operands as well (accumulators)
    doc: str  # what the family does, for the list of supported instructions
    operands: Operands | None  # what an instruction takes; None: the function that lowers it decides
    qualifiers: str  # parts of an opcode behind its prefix, in the notation of `ptx.qualifiers`


FAMILIES: dict[tuple[str, ...], Family] = {}


def register(prefixes: Iterable[str], facts: Family) -> list[tuple[str, ...]]:
    """Notes the facts of opcodes that start with any of the dotted ``prefixes``; these, split."""
    keys = [tuple(prefix.split(".")) for prefix in prefixes]
    for key in keys:
        if key in FAMILIES:
            raise ValueError(f"{'.'.join(key)} is registered twice")
        FAMILIES[key] = facts
    return keys


_LONGEST = 6


def find_prefix(instruction: program.Instruction) -> tuple[str, ...]:
    """The longest registered prefix of the opcode. Raises UnsupportedPTX: none is registered."""
    found = prefix_of(instruction.parts)
    if found is None:
        raise instruction.refuse(f"opcode {instruction.opcode!r} is not implemented")
    return found


@functools.cache  # asked many times for each instruction; families are registered before the first kernel is read
def prefix_of(parts: tuple[str, ...]) -> tuple[str, ...] | None:
    """The longest registered prefix of an opcode's parts, or None."""
    for length in range(min(_LONGEST, len(parts)), 0, -1):
        if parts[:length] in FAMILIES:
            return parts[:length]
    return None


def find_family(instruction: program.Instruction) -> Family:
    """The family of an instruction; raises UnsupportedPTX if there is none."""
    found = instruction.facts.get("family")
    if found is None:
        found = instruction.facts["family"] = FAMILIES[find_prefix(instruction)]
    return found


def registers_of(operand: program.Operand) -> Iterator[str]:
    if isinstance(operand, program.Register):
        yield operand.name
    elif isinstance(operand, program.Vector):
        for item in operand.items:
            if isinstance(item, program.Register):
                yield item.name
            else:
                yield from registers_of(item)
    elif isinstance(operand, program.Memory):
        yield from registers_of(operand.base)
        for item in operand.extra:
            yield from registers_of(item)
    elif isinstance(operand, program.Pair):
        yield from registers_of(operand.value)
        yield from registers_of(operand.predicate)
    elif isinstance(operand, program.Not):
        yield operand.register.name


def written(instruction: program.Instruction) -> tuple[str, ...]:
    """Registers that the instruction writes."""
    found = instruction.facts.get("written")
    if found is None:
        count = 0 if instruction.parts[0] in CONTROL else find_family(instruction).destinations
        found = instruction.facts["written"] = _registers(instruction.operands[:count])
    return found


def read(instruction: program.Instruction) -> tuple[str, ...]:
    """Registers that the instruction reads, its guard included."""
    found = instruction.facts.get("read")
    if found is None:
        count = 0
        if instruction.parts[0] not in CONTROL and not find_family(instruction).reads_destinations:
            count = find_family(instruction).destinations
        found = _registers(instruction.operands[count:])
        if instruction.guard is not None:
            found += (instruction.guard.register,)
        instruction.facts["read"] = found
    return found


def _registers(operands: tuple[program.Operand, ...]) -> tuple[str, ...]:
    return tuple(name for operand in operands for name in registers_of(operand))


#: Operands of control flow, which is not a family: `cute_kernels.emulator.isa.ptx.flow` and `lowering` handle it.
CONTROL = {"bra": "tgt:label", "ret": "", "exit": ""}


@functools.cache
def arranged(opcode: str) -> tuple[str, ...]:
    """The parts of an opcode, in the order of its row where it is legal."""
    return arrange(tuple(opcode.split(".")))[0]


@functools.cache
def arrange(parts: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Parts in the order of the row of their opcode, and why they are illegal, or "". Without a row: as they are."""
    prefix = parts[:1] if parts[0] in CONTROL else prefix_of(parts)
    if prefix is None:
        return parts, ""
    grammar = read_grammar("uni?" if parts[0] in CONTROL else FAMILIES[prefix].qualifiers)
    behind, reason = grammar.arrange(parts[len(prefix) :])
    return (*prefix, *behind), reason and f"{'.'.join(parts)}: {reason}"


@functools.cache
def forms_of(parts: tuple[str, ...]) -> dict[int, list[tuple[Slot, ...]]] | None:
    """Operands that an opcode takes, by their number; None: it is none of a family, or of one without `operands`."""
    if parts[0] in CONTROL:
        return read_forms(CONTROL[parts[0]], parts, 0)
    found = prefix_of(parts)
    if found is None or FAMILIES[found].operands is None:
        return None
    operands = FAMILIES[found].operands
    return read_forms(operands(parts) if callable(operands) else operands, parts, FAMILIES[found].destinations)


@functools.cache
def _plain(parts: tuple[str, ...], count: int) -> tuple[frozenset[str], ...] | None:
    """Per operand the declared types of a register that is all of it: most instructions have nothing else."""
    forms = [] if arrange(parts)[1] else (forms_of(parts) or {}).get(count, [])
    return tuple(slot.simple for slot in forms[0]) if len(forms) == 1 else None


def check_operands(kernel: program.Kernel) -> None:
    """Refuses qualifiers that an opcode does not have, and operands of another number, kind or width than it takes.
    Raises UnsupportedPTX: it names the instruction, the operand, what is given and what is allowed."""
    registers = kernel.registers
    for instruction in kernel.instructions:
        operands = instruction.operands
        plain = _plain(instruction.parts, len(operands))
        if plain is not None:
            for allowed, operand in zip(plain, operands):
                if type(operand) is not program.Register or registers[operand.name] not in allowed:
                    break
            else:
                continue
        _check(instruction, registers)


def _check(instruction: program.Instruction, registers: dict[str, str]) -> None:
    reason = arrange(instruction.parts)[1]
    if reason:
        raise instruction.refuse(reason)
    forms = forms_of(instruction.parts)
    if forms is None:
        find_prefix(instruction)  # refuses opcodes that are not implemented
        return
    reason = mismatch(instruction, forms, registers)
    if reason is not None:
        raise instruction.refuse(reason)


def as_integer(instruction: program.Instruction, operand: program.Operand) -> int:
    """The value of an operand that must be an integer literal."""
    if not isinstance(operand, program.Immediate) or operand.float_bits:
        raise instruction.refuse(f"an integer literal is expected, {operand} found")
    return operand.value
