"""cvt to and from elements of four and six bits, and scales: e2m1x2, e2m3x2, e3m2x2, ue8m0x2.

Two e2m1 are one byte; of e2m3, e3m2 and ue8m0 each lies in a byte of its own. What the PTX ISA leaves open follows the
functions that NVIDIA's cuda_fp8.hpp (CUDA 13.0) has for hosts: scales ignore the sign.
"""

from __future__ import annotations

from cute_kernels.emulator.graph.block import BlockBuilder
from cute_kernels.emulator.graph.values import Pack, PureOp, Value, of_one_type
from cute_kernels.emulator.instructions.floats import float_to_float
from cute_kernels.emulator.ptx.decode import Instruction

FORMATS = ("e2m1x2", "e2m3x2", "e3m2x2")
SCALES = "ue8m0x2"


def convert_narrow(
    block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str
) -> Value | None:
    """The result of a cvt of one of these types; None: it has none of them.

    Raises:
        UnsupportedPTX: qualifiers or types that do not go together.
    """
    if not {target, source} & {*FORMATS, SCALES}:
        return None
    if target == SCALES and source in ("f32", "bf16x2"):
        return _to_scales(block, instruction, flags, source)
    if (target, source) == ("bf16x2", SCALES):
        _needs(instruction, flags, {"rn"})
        codes = block.split(block.value(instruction.operands[1], 16), 2)
        return Pack([block.pure(PureOp("cvt_bf16_ue8m0", ("u8",), "u16"), code) for code in codes])
    if target in FORMATS and source == "f32":
        return _from_floats(block, instruction, flags, target)
    if (target, source) == ("e2m1x2", "f16x2"):
        return _from_halves(block, instruction, flags, target)
    if source in FORMATS and target == "f16x2":
        return _to_halves(block, instruction, flags, source)
    raise instruction.refuse(f"cvt from {source} to {target} is not implemented")


def _needs(instruction: Instruction, flags: list[str], needed: set[str], *allowed: str) -> None:
    if not needed <= set(flags) or set(flags) - needed - set(allowed) or len(set(flags)) < len(flags):
        name = ".".join(instruction.parts)
        choice = f" and may have .{', .'.join(allowed)}" if allowed else ""
        raise instruction.refuse(f"{name}: it needs .{', .'.join(sorted(needed))}{choice}")


def _to_code(target: str, relu: bool) -> PureOp:
    """One f32 to a byte: to nearest even, what is too large to the largest number, NaN to the positive one."""
    return PureOp(f"cvt_{target}_f32{'_relu' if relu else ''}", ("f32",), "u8")


def _joined(block: BlockBuilder, target: str, low: Value, high: Value) -> Value:
    return block.pure(of_one_type("join_nibbles", "u8", 2), low, high) if target == "e2m1x2" else Pack([low, high])


def _from_floats(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str) -> Value:
    """a goes to the upper half."""
    _needs(instruction, flags, {"rn", "satfinite"}, "relu")
    high, low = (block.value(operand, 32) for operand in instruction.operands[1:])
    op = _to_code(target, "relu" in flags)
    return _joined(block, target, block.pure(op, low), block.pure(op, high))


def _from_halves(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str) -> Value:
    _needs(instruction, flags, {"rn", "satfinite"}, "relu")
    op, widen = _to_code(target, "relu" in flags), float_to_float("f32", "f16")
    halves = block.split(block.value(instruction.operands[1], 32), 2)
    parts = [block.pure(op, block.pure(widen, half)) for half in halves]
    return _joined(block, target, *parts)


def _from_code(source: str, relu: bool, shift: int) -> PureOp:
    """A byte to f16 bits, exactly; ``shift``: how far to the right the code is shifted first."""
    return PureOp(f"cvt_f16_{source}{'_relu' if relu else ''}_{shift}", ("u8",), "u16")


def _to_halves(block: BlockBuilder, instruction: Instruction, flags: list[str], source: str) -> Value:
    _needs(instruction, flags, {"rn"}, "relu")
    relu = "relu" in flags
    if source == "e2m1x2":
        pair = block.value(instruction.operands[1], 8)
        return Pack([block.pure(_from_code(source, relu, shift), pair) for shift in (0, 4)])
    parts = block.split(block.value(instruction.operands[1], 16), 2)
    return Pack([block.pure(_from_code(source, relu, 0), part) for part in parts])


# --- scales: powers of two from 2^-127 to 2^127, and NaN ------------------------------------------------------------


def _to_scales(block: BlockBuilder, instruction: Instruction, flags: list[str], source: str) -> Value:
    mode = "rp" if "rp" in flags else "rz"
    _needs(instruction, flags, {mode}, "satfinite")
    op = PureOp(f"cvt_ue8m0_f32_{mode}{'_satfinite' if 'satfinite' in flags else ''}", ("f32",), "u8")
    if source == "f32":
        high, low = (block.value(operand, 32) for operand in instruction.operands[1:])
        return Pack([block.pure(op, low), block.pure(op, high)])
    widen = float_to_float("f32", "bf16")
    halves = block.split(block.value(instruction.operands[1], 32), 2)
    return Pack([block.pure(op, block.pure(widen, half)) for half in halves])
