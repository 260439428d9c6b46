"""Non-bulk asynchronous copies: cp.async, its groups, and arrivals on mbarriers when they are complete."""

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.isa.instructions.memory import address_value
from cute_kernels.emulator.isa.ptx.families import as_integer
from cute_kernels.emulator.isa.ptx.operand_syntax import policy_operand
from cute_kernels.emulator.isa.ptx.program import Immediate, Instruction, Not, Register
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import Constant, Value

_SIZES = {"ca": (4, 8, 16), "cg": (16,)}
_IGNORES = _EVERY = _COUNTED = CONSTANTS["FLAG"]  # of ``copy_lanes``, ``copies_wait`` and ``copies_arrive``


def _operands(parts: tuple[str, ...]) -> str:
    policy = policy_operand(parts)
    return f"[dst], [src], cpSize:imm{policy}; [dst], [src], cpSize:imm, srcSize:u32/pred{policy}"


@family(
    "cp.async.ca", "cp.async.cg", destinations=0, operands=_operands,
    qualifiers="shared|shared::cta global $policy? L2::{64,128,256}B?",
)  # fmt: skip
def _cp_async(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.ca, cp.async.cg: 4, 8 or 16 bytes per thread, with src-size or ignore-src."""
    parts = instruction.parts[2:]
    operands = list(instruction.operands)
    if "L2::cache_hint" in parts:
        operands.pop()  # an eviction priority
    nbytes = as_integer(instruction, operands[2])
    if nbytes not in _SIZES[parts[0]]:
        raise instruction.refuse(f"cp-size {nbytes}; legal for .{parts[0]} are {_SIZES[parts[0]]}")
    fourth: Value = Constant(nbytes, 32)
    flags = 0
    if len(operands) == 4:
        given = operands[3]
        if isinstance(given, Not) or isinstance(given, Register) and block.bits_of(given.name) == 1:
            fourth, flags = block.value(given, 1), _IGNORES
        elif isinstance(given, (Register, Immediate)):
            fourth = block.value(given, 32)
        else:
            raise instruction.refuse("src-size or ignore-src is expected")
    places = address_value(block, operands[0]), address_value(block, operands[1], 64)
    block.operation("copy_lanes", *places, fourth, flags=flags, order=nbytes)


@family("cp.async.commit_group", destinations=0, operands="", qualifiers="")
def _commit(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.commit_group."""
    block.operation("copies_commit")


@family(
    "cp.async.wait_group", "cp.async.wait_all", destinations=0, blocking=True,
    operands=lambda parts: "" if parts[2] == "wait_all" else "N:imm", qualifiers="",
)  # fmt: skip
def _wait(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.wait_group, cp.async.wait_all."""
    every = "wait_all" in instruction.parts[1:]
    newest = 0 if every else as_integer(instruction, instruction.operands[0])
    if not 0 <= newest < CONSTANTS["COPY_GROUPS"]:
        raise instruction.refuse(f"{newest} groups, executed are 0 to {CONSTANTS['COPY_GROUPS'] - 1}")
    block.operation("copies_wait", flags=_EVERY * every, order=newest, blocking=True)


@family("cp.async.mbarrier.arrive", destinations=0, operands="[addr]", qualifiers="noinc? shared|shared::cta? b64")
def _arrive(block: BlockBuilder, instruction: Instruction) -> None:
    """cp.async.mbarrier.arrive, with .noinc."""
    parts = instruction.parts[4:]
    if not {"shared", "shared::cta"} & set(parts):
        raise instruction.refuse("a generic address is not implemented; .shared is")
    where = address_value(block, instruction.operands[0])
    block.operation("copies_arrive", where, flags=_COUNTED * ("noinc" in parts))
