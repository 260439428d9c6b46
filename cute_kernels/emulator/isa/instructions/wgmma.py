"""Warpgroup matrix multiplication: wgmma.fence, mma_async, commit_group, wait_group.

The accumulators of a wgmma are filled in when it completes. `cute_kernels.emulator.isa.ptx.register_hazards` proves
before the kernel runs that nothing looks at them in between.
"""

from collections.abc import Collection
from dataclasses import dataclass

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.isa.ptx.families import always_varies, as_integer
from cute_kernels.emulator.isa.ptx.program import Instruction, Vector
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import Anchor, Value
from cute_kernels.emulator.machine.units.matrix.operands import BF16, E4M3, E5M2, F16, S8, TF32, U8, ElementType
from cute_kernels.emulator.machine.units.matrix.wgmma import Form


@dataclass(frozen=True)
class _Kind:
    """Operand types that go together (PTX ISA, wgmma.mma_async), and what all of their instructions have in common."""

    types: tuple[ElementType, ...]  # of A and of B
    d_types: tuple[str, ...] = ("f32",)  # of the accumulator
    columns: Collection[int] = range(8, 257, 8)  # N that exist

    @property
    def integers(self) -> bool:
        """Whether operands are integers, which have .satfinite in place of imm-scale."""
        return self.d_types == ("s32",)


_KINDS = (
    _Kind((F16,), ("f32", "f16")), _Kind((BF16,)), _Kind((TF32,)), _Kind((E4M3, E5M2), ("f32", "f16")),
    _Kind((S8, U8), ("s32",), (8, 16, 24, *range(32, 257, 16))),
)
_TYPES = {element.name: (kind, element) for kind in _KINDS for element in kind.types}
COMMIT, WAIT = "wgmma_commit", "wgmma_wait"  # operations of the core


def parse_form(instruction: Instruction) -> Form:
    """Reads the opcode and the immediate operands of a wgmma.mma_async."""
    shape, *saturate, d_type, a_name, b_name = instruction.parts[4:]
    (kind, a_type), (_, b_type) = _TYPES[a_name], _TYPES[b_name]
    a_in_registers = isinstance(instruction.operands[1], Vector)
    flags = [as_integer(instruction, operand) for operand in instruction.operands[4:]]
    scales, transposes = ([1, 1], []) if kind.integers else (flags[:2], flags[2:])
    if any(scale not in (1, -1) for scale in scales) or any(flag not in (0, 1) for flag in transposes):
        raise instruction.refuse("imm-scale is 1 or -1, imm-trans 0 or 1")
    return Form(
        n=int(shape[4:].partition("k")[0]), a_type=a_type, b_type=b_type, a_in_registers=a_in_registers,
        a_mn_major=bool(transposes[0]) if len(transposes) == 2 else False,
        b_mn_major=bool(transposes[-1]) if transposes else False, negate_a=scales[0] == -1, negate_b=scales[1] == -1,
        text=f"{instruction.opcode} at PTX line {instruction.line}", d_type=d_type, saturate=bool(saturate),
        instruction=instruction,
    )


class MmaAsync(Anchor):
    """A wgmma.mma_async, which bytecode/emitter.py emits."""

    def __init__(self, form: Form, accumulators: list[Value], a: list[Value], b: Value, accumulate: Value) -> None:
        self.form, self.accumulators, self.a, self.b, self.accumulate = form, accumulators, a, b, accumulate


def _operands(parts: tuple[str, ...]) -> str:
    """imm-trans exists for 16-bit types, and for A only with a descriptor."""
    shape, (d_type, a_name, _) = parts[4], parts[-3:]
    kind, element = _TYPES[a_name]
    d = f"{{d}}{int(shape[4:].partition('k')[0]) // (4 if d_type == 'f16' else 2)}:b32"
    scales = ", imm_scale_a:imm, imm_scale_b:imm" * (not kind.integers)
    of_a, of_b = (f", imm_trans_{name}:imm" * (element.nbytes == 2) for name in "ab")
    rest = f"b_desc:b64, scale_d:pred{scales}"
    return f"{d}, a_desc:b64, {rest}{of_a}{of_b}; {d}, {{a}}4:b32, {rest}{of_b}"


def _grammar(kind: _Kind) -> str:
    shapes = f"m64n{{{','.join(map(str, kind.columns))}}}k{32 // kind.types[0].nbytes}"
    operand = "|".join(element.name for element in kind.types)
    return f"sync aligned {shapes} {'satfinite? ' * kind.integers}{'|'.join(kind.d_types)} {operand} {operand}"


@family(
    "wgmma.mma_async", varies=always_varies, reads_destinations=True, operands=_operands,
    qualifiers="; ".join(map(_grammar, _KINDS)),
)  # fmt: skip
def _mma_async(block: BlockBuilder, instruction: Instruction) -> None:
    """wgmma.mma_async, dense: f16, bf16, tf32, e4m3, e5m2 into f32, f16, e4m3, e5m2 into f16, s8 and u8 into s32; A in
    registers or in shared memory."""
    form = parse_form(instruction)
    _refuse_partial(block, instruction)
    d, a, b, scale_d = instruction.operands[:4]
    accumulators = [block.whole(block.value(item, 32)) for item in d.items]
    fragments = [block.whole(block.value(item, 32)) for item in a.items] if form.a_in_registers else []
    first = fragments or [block.whole(block.value(a, 64))]
    second, accumulate = block.whole(block.value(b, 64)), block.value(scale_d, 1)
    anchor = MmaAsync(form, accumulators, first, second, accumulate)
    results = block.anchor(anchor, [("u32", False)] * form.registers, [*accumulators, *first, second, accumulate])
    for item, value in zip(d.items, results):
        block.define(item, value)


def _refuse_partial(block: BlockBuilder, instruction: Instruction) -> None:
    """wgmma is .aligned (PTX ISA); where lanes may have diverged, the mask says so when it executes."""
    if instruction.guard is not None:
        raise instruction.refuse("a guard on wgmma is not implemented")


@family("wgmma.fence", destinations=0, operands="", qualifiers="sync aligned")
def _fence(block: BlockBuilder, instruction: Instruction) -> None:
    """wgmma.fence: orders register accesses, which take effect in program order here; missing ones are found ahead."""
    _refuse_partial(block, instruction)
    if block.divergent:
        block.operation("wgmma_fence")


@family("wgmma.commit_group", destinations=0, operands="", qualifiers="sync aligned")
def _commit_group(block: BlockBuilder, instruction: Instruction) -> None:
    """wgmma.commit_group."""
    _refuse_partial(block, instruction)
    block.operation(COMMIT)


@family("wgmma.wait_group", destinations=0, blocking=True, operands="N:imm", qualifiers="sync aligned")
def _wait_group(block: BlockBuilder, instruction: Instruction) -> None:
    """wgmma.wait_group."""
    _refuse_partial(block, instruction)
    newest = as_integer(instruction, instruction.operands[0])
    if newest not in range(CONSTANTS["WGMMA_GROUPS"]):
        raise instruction.refuse("wait_group takes 0 to 7")
    block.operation(WAIT, order=newest, blocking=True)
