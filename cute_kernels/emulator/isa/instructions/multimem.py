"""multimem: operations on multicast objects. There is one GPU here, so that an address stands for one place in memory.

A multicast object binds memory of several GPUs to one address. Of one GPU it is that GPU's memory alone: a reduction of
what all have is what this one has, and a store or reduction to all is one to this one. Every global address is taken
for one of such an object; whether a program has made one is not looked at.
"""

from dataclasses import replace

from cute_kernels.emulator.isa.instructions.atomic import lower_atomic, update_operands
from cute_kernels.emulator.isa.instructions.memory import lower_load, lower_store
from cute_kernels.emulator.isa.ptx.operand_syntax import HELD_IN, data_operand
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family

_OPERATIONS = ("min", "max", "add", "and", "or", "xor")
_ACCUMULATION = ("acc::f32", "acc::f16")


def _of_one_gpu(instruction: Instruction, name: str, *, keeps: bool = False) -> Instruction:
    """Instruction on global memory that ``multimem.<..>`` is on one GPU, as ``name``; ``keeps``: with the operation."""
    *given, type_ = (part for part in instruction.parts[2:] if part not in ("global", *_ACCUMULATION))
    operations = [part for part in given if part in _OPERATIONS]
    # Of numbers in memory only integers are compared, and of elements of eight bits pairs are loaded.
    if keeps and operations[0] in ("min", "max") and type_[0] not in "us" or type_ in ("e5m2", "e4m3"):
        raise instruction.refuse(f"{instruction.opcode} is not implemented")
    others = (part for part in given if part not in _OPERATIONS)
    parts = (name, *others, "global", *(operations if keeps else ()), HELD_IN.get(type_, type_))
    return replace(instruction, parts=parts)


_TOGETHER = "relaxed|release|acquire > $scope; $scope > relaxed|release|acquire"
_SUMS = ("add u32|s32|u64|f32|f64", "add v{2,4} f32", "add v{2,4}? f16x2|bf16x2")
_OTHERS = (
    "min|max {u,s}{32,64}", "and|or|xor b{32,64}", "add|min|max v{2,4,8} f16|bf16", "min|max v{2,4} f16x2|bf16x2",
)  # fmt: skip
#: Types that are read, but not combined in memory.
_READ = (
    "min|max f16x2|bf16x2", "add|min|max v{4,8} e5m2|e4m3", "add|min|max v{2,4,8} e5m2x2|e4m3x2",
    "add|min|max v{2,4}? e5m2x4|e4m3x4",
)  # fmt: skip


@family(
    "multimem.ld_reduce", operands=lambda parts: f"{data_operand('d', 'T', parts)}, [a]",
    qualifiers="; ".join((
        *(f"weak|relaxed|acquire? $scope? global? acc::f32|acc::f16? {form}" for form in (*_SUMS, *_OTHERS, *_READ)),
        _TOGETHER,
    )),
)  # fmt: skip
def _ld_reduce(block: BlockBuilder, instruction: Instruction) -> None:
    """multimem.ld_reduce, of the memory of one GPU: a load."""
    lower_load(block, _of_one_gpu(instruction, "ld"))


@family(
    "multimem.st", destinations=0, operands=update_operands,
    qualifiers="weak|relaxed|release? $scope? global? v{2,4,8}? {b,u,s}{32,64}|f32|f64|f16|f16x2|bf16|bf16x2; "
    f"{_TOGETHER}",
)  # fmt: skip
def _st(block: BlockBuilder, instruction: Instruction) -> None:
    """multimem.st, to the memory of one GPU: a store."""
    lower_store(block, _of_one_gpu(instruction, "st"))


@family(
    "multimem.red", destinations=0, operands=update_operands,
    qualifiers="; ".join((*(f"relaxed|release? $scope? global? {form}" for form in (*_SUMS, *_OTHERS)), _TOGETHER)),
)  # fmt: skip
def _red(block: BlockBuilder, instruction: Instruction) -> None:
    """multimem.red, on the memory of one GPU: a reduction."""
    lower_atomic(block, _of_one_gpu(instruction, "red", keeps=True), 0)
