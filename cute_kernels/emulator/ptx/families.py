"""The table of opcode families: facts that are needed before anything is lowered.

Which operands are destinations, whether the result can differ between the lanes of a warp, and whether the instruction
can block. `graph.families` has the functions that lower them, and registers both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from cute_kernels.emulator.ptx.decode import Immediate, Instruction, Memory, Not, Operand, Pair, Register, Vector

#: (instruction, "may this operand differ between lanes?") -> may the result; one value per destination register if a
#: list is returned.
Varies = Callable[[Instruction, Callable[[Operand], bool]], "bool | list[bool]"]


Qualifiers = str | Collection[str] | Callable[[tuple[str, ...]], Collection[str]]


def varies_with_operands(instruction: Instruction, varies: Callable[[Operand], bool]) -> bool:
    """A function of its operands: equal operands give equal results."""
    return any(varies(operand) for operand in instruction.operands[FAMILIES[find_prefix(instruction)].destinations :])


def always_varies(instruction: Instruction, varies: Callable[[Operand], bool]) -> bool:
    """Each lane has its own result by definition of the instruction."""
    return True


def never_varies(instruction: Instruction, varies: Callable[[Operand], bool]) -> bool:
    """All lanes get the same result by definition of the instruction."""
    return False


@dataclass(frozen=True)
class Family:
    """Properties of an opcode prefix.

    Attributes:
        destinations: number of leading operands that are written.
        varies: whether the results can differ between lanes.
        blocking: the warp may have to wait here; such an instruction starts a basic block and is executed again from
            the start of the block until it succeeds.
        own_turn: a turn of a warp may end in front of a blocking instruction although it need not wait. Without, its
            block counts as a part of the one before: what is granted at once leaves schedules as they are.
        reads_destinations: the destinations are operands as well (accumulators).
        doc: what the family does, for the list of supported instructions.
        qualifiers: parts of an opcode behind its prefix that are executed, or a function of all its parts that returns
            them; None: the function that lowers it decides.
    """

    destinations: int
    varies: Varies
    blocking: bool
    own_turn: bool
    reads_destinations: bool
    doc: str
    qualifiers: Qualifiers | None = None


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


def find_prefix(instruction: Instruction) -> tuple[str, ...]:
    """The longest registered prefix of the opcode.

    Raises:
        UnsupportedPTX: none is registered.
    """
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


def find_family(instruction: Instruction) -> Family:
    """The family of an instruction; raises UnsupportedPTX if there is none."""
    found = instruction.facts.get("family")
    if found is None:
        found = instruction.facts["family"] = FAMILIES[find_prefix(instruction)]
    return found


def registers_of(operand: Operand) -> Iterator[str]:
    """Names of all registers in an operand."""
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Vector):
        for item in operand.items:
            if isinstance(item, Register):
                yield item.name
            else:
                yield from registers_of(item)
    elif isinstance(operand, Memory):
        yield from registers_of(operand.base)
        for item in operand.extra:
            yield from registers_of(item)
    elif isinstance(operand, Pair):
        yield from registers_of(operand.value)
        yield from registers_of(operand.predicate)
    elif isinstance(operand, Not):
        yield operand.register.name


def written(instruction: Instruction) -> tuple[str, ...]:
    """Registers that the instruction writes."""
    found = instruction.facts.get("written")
    if found is None:
        count = 0 if instruction.parts[0] in CONTROL else find_family(instruction).destinations
        found = instruction.facts["written"] = _registers(instruction.operands[:count])
    return found


def read(instruction: Instruction) -> tuple[str, ...]:
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


def _registers(operands: tuple[Operand, ...]) -> tuple[str, ...]:
    return tuple(name for operand in operands for name in registers_of(operand))


#: Control flow is not a family: `cute_kernels.emulator.ptx.flow` and `lowering` handle it.
CONTROL = ("bra", "ret", "exit")


def check_qualifiers(instruction: Instruction, prefix: tuple[str, ...]) -> None:
    """Raises UnsupportedPTX for a part behind the prefix that is none of `Family.qualifiers`."""
    allowed = FAMILIES[prefix].qualifiers
    if callable(allowed):
        allowed = allowed(instruction.parts)
    for part in instruction.parts[len(prefix) :] if allowed is not None else ():
        if part not in allowed:
            raise instruction.refuse(f"qualifier .{part} of {instruction.parts[0]} is not implemented")


def as_integer(instruction: Instruction, operand: Operand) -> int:
    """The value of an operand that must be an integer literal."""
    if not isinstance(operand, Immediate) or operand.float_bits:
        raise instruction.refuse(f"an integer literal is expected, {operand} found")
    return operand.value
