"""Moves and addresses."""

from collections.abc import Callable

from cute_kernels.emulator.isa.instructions.integers import binary, shift_by
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS, Instruction, Operand, Register, Symbol, Vector
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import Constant, Pack, Value, of_one_type
from cute_kernels.emulator.machine.state.smem import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW


@family(
    "mov", operands=lambda parts: "d~, a~" if parts[-1][0] == "b" else "d, a",
    qualifiers="pred|$bits|$ints|f32|f64|b128",
)  # fmt: skip
def _mov(block: BlockBuilder, instruction: Instruction) -> None:
    """mov: registers, literals, addresses, special registers, packing and unpacking; an address may have an offset."""
    destination, source = instruction.operands
    bits = TYPE_BITS[instruction.parts[1]]
    if isinstance(source, Vector) and isinstance(destination, Register):
        widths = [block.bits_of(item.name) if isinstance(item, Register) else bits // len(source.items)
                  for item in source.items]  # fmt: skip
        block.define(destination, Pack([block.value(item, w) for item, w in zip(source.items, widths)]))
        return
    value = block.value(source, bits)
    if isinstance(source, Symbol) and source.offset:
        if bits not in (32, 64):
            raise instruction.refuse(f"{instruction.opcode} of an address is not implemented, .u32 and .u64 are")
        value = block.pure(binary("add", f"u{value.bits}"), value, Constant(source.offset, value.bits))
    block.define(destination, value)


def _cvta_varies(instruction: Instruction, varies: Callable[[Operand], bool]) -> bool:
    """An address of local memory stands for another place in each lane, so that what is loaded from it differs."""
    return "local" in instruction.parts or varies(instruction.operands[1])


@family(
    "cvta", "cvta.to", varies=_cvta_varies, operands="d, a",
    qualifiers="global|$shared|param|const|local u64",
)  # fmt: skip
def _cvta(block: BlockBuilder, instruction: Instruction) -> None:
    """cvta: generic addresses of global memory are the addresses themselves; shared, local, param have windows."""
    parts = instruction.parts[1:]
    space = parts[-2]
    source = block.value(instruction.operands[1], 64)
    window = {"local": LOCAL_WINDOW}.get(space, SHARED_WINDOW if space.startswith("shared") else 0)
    if window:
        op = binary("sub" if parts[0] == "to" else "add", "u64")
        source = block.pure(op, source, Constant(window, 64))
    if parts[0] == "param":
        # Symbols already have window addresses; those that went through registers of 32 bits have lost the window.
        source = block.pure(binary("or", "b64"), source, Constant(PARAM_WINDOW, 64))
    block.define(instruction.operands[0], source)


def _shared_address(block: BlockBuilder, instruction: Instruction) -> Value:
    """The first source, an address of shared memory or (without a space) a generic one, as 32 bits of a cluster's."""
    if instruction.parts[-1] == "u32":
        return block.value(instruction.operands[1], 32)
    address = block.whole(block.value(instruction.operands[1], 64))
    if "shared::cluster" not in instruction.parts:
        address = block.pure(binary("sub", "u64"), address, Constant(SHARED_WINDOW, 64))
    return block.resize(address, 32)


@family("mapa.shared::cluster.u32", "mapa.shared::cluster.u64", "mapa.u64", operands="d, a, b:u32")
def _lower_mapa(block: BlockBuilder, instruction: Instruction) -> None:
    """mapa: the same shared offset in another CTA of the cluster; of generic addresses too."""
    address, rank = _shared_address(block, instruction), block.value(instruction.operands[2], 32)
    # A rank outside the cluster is no error here: lanes that never use their result may compute it.
    result = block.pure(of_one_type("map_address", "u32", 2), address, rank)
    if instruction.parts[-1] == "u64":
        result = block.resize(result, 64)
        if "shared::cluster" not in instruction.parts:
            result = block.pure(binary("add", "u64"), result, Constant(SHARED_WINDOW, 64))
    block.define(instruction.operands[0], result)


@family("getctarank.shared::cluster.u32", "getctarank.shared::cluster.u64", "getctarank.u64", operands="d:u32, a")
def _getctarank(block: BlockBuilder, instruction: Instruction) -> None:
    """getctarank: CTA rank of a shared address; of generic addresses too."""
    address = _shared_address(block, instruction)
    block.define(instruction.operands[0], block.pure(shift_by("shr", "u32", 24), address))
