"""Matrices of a warp between memory and registers: ldmatrix, stmatrix, movmatrix. Of 16-bit elements they are 8x8.

Lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i. Of 8-bit elements, always transposed, ldmatrix loads
16x16 (.m16n16), which two registers of a lane hold, and stmatrix stores 16x8 (.m16n8), from one: 16 and 8 rows of 16
bytes in memory. Of elements of four or six bits, which become bytes with zeros above them, ldmatrix loads 16x16 as
well, and 8x16 (.m8n16), not transposed, which one register holds. ``core/memory.c`` says which elements a lane holds.
"""

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.isa.instructions.memory import Access, address_value
from cute_kernels.emulator.isa.ptx.families import always_varies
from cute_kernels.emulator.isa.ptx.program import Instruction, Operand, items_of
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import Value

_B16 = "sync aligned m8n8 x{1,2,4} trans? shared|shared::cta? b16"
_FORMATS = "shared|shared::cta? b8x16 b4x16_p64|b6x16_p32"
_PACKED = {"b4x16_p64": CONSTANTS["MATRICES_OF_FOURS"], "b6x16_p32": CONSTANTS["MATRICES_OF_SIXES"]}


def _address(block: BlockBuilder, instruction: Instruction, operand: Operand) -> Value:
    """Address of shared memory in 32 bits, or a generic one in 64."""
    return address_value(block, operand, 32 if {"shared", "shared::cta"} & set(instruction.parts) else 64)


def _kind(parts: tuple[str, ...], octets: str) -> int:
    """How the core calls the matrices; ``octets`` is the shape of those of 8-bit elements."""
    kind = "MATRICES_OF_BYTES" if octets in parts else "MATRICES_TRANSPOSED" if "trans" in parts else "MATRICES"
    return CONSTANTS[kind] | _PACKED.get(parts[-1], 0)


def _registers(parts: tuple[str, ...]) -> str:
    return f"{{r}}{int(parts[4][1:]) * (2 if 'm16n16' in parts else 1)}:b32"


@family(
    "ldmatrix", varies=always_varies, operands=lambda parts: f"{_registers(parts)}, [p]",
    qualifiers=f"{_B16}; sync aligned m16n16 x{{1,2}} trans shared|shared::cta? b8; "
    f"sync aligned m16n16 x{{1,2}} trans {_FORMATS}; sync aligned m8n16 x{{1,2,4}} {_FORMATS}",
)  # fmt: skip
def _ldmatrix(block: BlockBuilder, instruction: Instruction) -> None:
    """ldmatrix.m8n8.b16, with .trans; .m16n16.trans of .b8 and .b8x16; .m8n16 of .b8x16; of shared memory, by generic
    addresses too."""
    items = items_of(instruction.operands[0])
    address = _address(block, instruction, instruction.operands[1])
    anchor = Access("load_matrix", address, [_kind(instruction.parts, "m16n16")])
    for item, value in zip(items, block.anchor(anchor, [("u32", False)] * len(items), [address])):
        block.define(item, value)


@family(
    "stmatrix", destinations=0, operands=lambda parts: f"[p], {_registers(parts)}",
    qualifiers=f"{_B16}; sync aligned m16n8 x{{1,2,4}} trans shared|shared::cta? b8",
)  # fmt: skip
def _stmatrix(block: BlockBuilder, instruction: Instruction) -> None:
    """stmatrix.m8n8.b16, with .trans; .m16n8.trans.b8; to shared memory, by generic addresses too."""
    address = _address(block, instruction, instruction.operands[0])
    values = [block.whole(block.value(item, 32)) for item in items_of(instruction.operands[1])]
    block.anchor(Access("store_matrix", address, [_kind(instruction.parts, "m16n8")], values), [], [address, *values])


@family("movmatrix", varies=always_varies, operands="d:b32, a:b32", qualifiers="sync aligned m8n8 trans b16")
def _movmatrix(block: BlockBuilder, instruction: Instruction) -> None:
    """movmatrix.m8n8.trans.b16: a matrix in registers, transposed."""
    value = block.value(instruction.operands[1], 32)
    (result,) = block.operation("transpose", value, results=[("u32", False)])
    block.define(instruction.operands[0], result)
