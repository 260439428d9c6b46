"""vabsdiff2 and vabsdiff4, and cvt.pack, of operations that others have.

All of them compute with 64 bits, where nothing overflows, and take the bits that they keep. nvcc makes no other video
instruction of the SIMD functions of CUDA C++ for chips since Ampere, and of these none with selectors; what else there
is in the PTX ISA (``vadd4``, ``vset2``, ``vmad``) is not implemented. Of many scalar forms an H100 gives other results
than the PTX ISA, by what ptxas makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cute_kernels.emulator.isa.instructions.integers import binary, shift_by
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import Constant, PureOp, Value


@dataclass(frozen=True)
class Numbers:
    """Arithmetic of a basic block with signed numbers of 64 bits."""

    block: BlockBuilder

    def do(self, name: str, a: Value, b: Value | int) -> Value:
        return self.block.pure(binary(name, "s64"), a, Constant(b, 64) if isinstance(b, int) else b)

    def field(self, value: Value, first: int, bits: int, *, signed: bool) -> Value:
        """Bits of a register, extended by their sign or by zeros."""
        type_ = "s64" if signed else "u64"
        extract = PureOp(f"bfe_{type_}", (type_, "u32", "u32"), type_)
        wide = self.block.resize(self.block.whole(value), 64)
        return self.block.pure(extract, wide, Constant(first, 32), Constant(bits, 32))

    def clamp(self, value: Value, bits: int, *, signed: bool) -> Value:
        """The nearest number of so many bits."""
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        return self.do("max", self.do("min", value, high), low)

    def pack(self, fields: Sequence[Value], bits: int) -> Value:
        """Fields side by side, the first one lowest: a register of 32 bits."""
        result: Value = Constant(0, 64)
        for number, value in enumerate(fields):
            low = self.block.pure(binary("and", "b64"), value, Constant((1 << bits) - 1, 64))
            moved = self.block.pure(shift_by("shl", "b64", number * bits), low) if number else low
            result = self.block.pure(binary("or", "b64"), result, moved)
        return self.block.resize(result, 32)


@family(
    "vabsdiff2", "vabsdiff4", operands="d:u32, a:u32, b:u32, c:u32",
    qualifiers="{u,s}32 {u,s}32 {u,s}32 sat? add?; add / sat",
)  # fmt: skip
def _vabsdiff(block: BlockBuilder, instruction: Instruction) -> None:
    """vabsdiff2 and vabsdiff4: differences of parts of two registers, side by side or added to the third operand."""
    numbers, lanes = Numbers(block), int(instruction.parts[0][-1])
    bits, signs = 32 // lanes, [type_ == "s32" for type_ in instruction.parts[1:4]]
    a, b, c = (block.value(operand, 32) for operand in instruction.operands[1:])
    results = []
    for first in range(0, 32, bits):
        x, y = (numbers.field(each, first, bits, signed=sign) for each, sign in zip((a, b), signs[1:]))
        difference = numbers.do("sub", numbers.do("max", x, y), numbers.do("min", x, y))
        saturates = "sat" in instruction.parts
        results.append(numbers.clamp(difference, bits, signed=signs[0]) if saturates else difference)
    if "add" in instruction.parts:
        total = numbers.field(c, 0, 32, signed=False)
        for result in results:
            total = numbers.do("add", total, result)
        block.define(instruction.operands[0], block.resize(total, 32))
    else:
        block.define(instruction.operands[0], numbers.pack(results, bits))


#: Results of cvt.pack: bits and whether they are signed.
_PACKED = {f"{kind}{bits}": (bits, kind == "s") for kind in "us" for bits in (16, 8, 4, 2)}


@family("cvt.pack.sat.u16.s32", "cvt.pack.sat.s16.s32", operands="d, a:s32, b:s32")
@family(
    *(f"cvt.pack.sat.{type_}.s32.b32" for type_, (bits, _) in _PACKED.items() if bits < 16),
    operands="d, a:s32, b:s32, c:b32",
)  # fmt: skip
def _cvt_pack(block: BlockBuilder, instruction: Instruction) -> None:
    """cvt.pack: two integers, each limited to a narrow type, side by side, the second one lowest; c lies above them."""
    bits, signed = _PACKED[instruction.parts[3]]
    numbers = Numbers(block)
    a, b, *c = (block.value(operand, 32) for operand in instruction.operands[1:])
    narrow = [numbers.clamp(numbers.field(value, 0, 32, signed=True), bits, signed=signed) for value in (b, a)]
    result = numbers.pack(narrow, bits)
    if c:
        above = block.pure(shift_by("shl", "b32", 2 * bits), block.whole(c[0]))
        result = block.pure(binary("or", "b32"), result, above)
    block.define(instruction.operands[0], result)
