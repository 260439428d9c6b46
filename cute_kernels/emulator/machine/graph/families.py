"""The functions that lower instructions, by opcode prefix.

A new family (another file ``instructions/<family>.py``) registers itself here when `instructions` imports it.
"""

from collections.abc import Callable

from cute_kernels.emulator.isa.ptx import families
from cute_kernels.emulator.isa.ptx.families import Family, Operands, Varies, find_prefix, varies_with_operands
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.graph.block import BlockBuilder

Lower = Callable[[BlockBuilder, Instruction], None]
LOWERINGS: dict[tuple[str, ...], Lower] = {}


def family(
    *prefixes: str, destinations: int = 1, varies: Varies = varies_with_operands, blocking: bool = False,
    own_turn: bool = True, reads_destinations: bool = False, operands: Operands | None, qualifiers: str = "",
) -> Callable[[Lower], Lower]:  # fmt: skip
    """Registers the decorated function for opcodes that start with any of the dotted ``prefixes``; see `Family`."""

    def register(lower: Lower) -> Lower:
        doc = lower.__doc__ or ""
        facts = Family(destinations, varies, blocking, own_turn, reads_destinations, doc, operands, qualifiers)
        LOWERINGS.update(dict.fromkeys(families.register(prefixes, facts), lower))
        return lower

    return register


def lower(block: BlockBuilder, instruction: Instruction) -> None:
    """Lowers an instruction by the function of its family; raises UnsupportedPTX if there is none."""
    LOWERINGS[find_prefix(instruction)](block, instruction)

