"""cvt to and from elements of four, six and eight bits, and scales: e2m1x2, e2m3x2, e3m2x2, e4m3x2, e5m2x2, ue8m0x2.

Two e2m1 are one byte; of e2m3, e3m2 and ue8m0 each lies in a byte of its own. What the PTX ISA leaves open follows the
functions that NVIDIA's cuda_fp8.hpp (CUDA 13.0) has for hosts: scales ignore the sign.
"""

from cute_kernels.emulator.isa.instructions.floats import float_to_float
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.values import Pack, PureOp, Value, of_one_type

FORMATS = ("e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2")
SCALES = "ue8m0x2"


def convert_narrow(
    block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str
) -> Value | None:
    """The result of a cvt of one of these types; None: it has none of them."""
    fours = target.endswith("x4")
    if not fours and not {target, source} & {*FORMATS, SCALES}:
        return None
    if target == SCALES:
        return _to_scales(block, instruction, flags, source)
    if source == SCALES:
        codes = block.split(block.value(instruction.operands[1], 16), 2)
        return Pack([block.pure(PureOp("cvt_bf16_ue8m0", ("u8",), "u16"), code) for code in codes])
    if fours:
        return _by_random(block, instruction, flags, f"{target[:-1]}2")
    if target in FORMATS:
        return _to_codes(block, instruction, flags, target, source)
    return _to_halves(block, instruction, flags, target, source)


def _joined(block: BlockBuilder, target: str, low: Value, high: Value) -> Value:
    return block.pure(of_one_type("join_nibbles", "u8", 2), low, high) if target == "e2m1x2" else Pack([low, high])


def _to_codes(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str) -> Value:
    """To nearest even, what is too large to the largest number; of two operands a goes to the upper half."""
    if source == "f32":
        high, low = (block.value(operand, 32) for operand in instruction.operands[1:])
    else:
        halves = block.split(block.value(instruction.operands[1], 32), 2)
        low, high = (block.pure(float_to_float("f32", source[:-2]), half) for half in halves)
    op = PureOp(f"cvt_{target}_f32{'_relu' if 'relu' in flags else ''}", ("f32",), "u8")
    return _joined(block, target, block.pure(op, low), block.pure(op, high))


def _by_random(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str) -> Value:
    """cvt.rs of {a, b, e, f}, the last one lowest: two share 16 random bits, one of them from the lowest bit on.

    The PTX ISA says which bits a pair has; that the first of the two has them in reverse was measured on B200.
    """
    bytes_ = block.split(block.value(instruction.operands[2], 32), 4)
    order = ((0, 2), (1, 3)) if target == "e2m1x2" else ((0, 1), (2, 3))
    of_pair = [Pack([bytes_[low], bytes_[high]]) for low, high in order]
    codes = []
    for place, operand in enumerate(reversed(instruction.operands[1].items)):
        op = PureOp(f"cvt_{target}_f32_rs{'_relu' if 'relu' in flags else ''}_{place % 2}", ("f32", "u16"), "u8")
        codes.append(block.pure(op, block.value(operand, 32), of_pair[place // 2]))
    if target == "e2m1x2":
        return Pack([_joined(block, target, *codes[:2]), _joined(block, target, *codes[2:])])
    return Pack(codes)


def _to_halves(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str) -> Value:
    """Exactly: FP16 and BF16 have the numbers of all of these formats."""
    four = source == "e2m1x2"
    value = block.value(instruction.operands[1], 8 if four else 16)
    places = ((value, 0), (value, 4)) if four else ((code, 0) for code in block.split(value, 2))
    halves = [block.pure(PureOp(f"cvt_f16_{source}_{shift}", ("u8",), "u16"), code) for code, shift in places]
    if "relu" in flags or target == "bf16x2":
        op = PureOp(f"cvt_{target[:-2]}_f32_rn{'_relu' if 'relu' in flags else ''}", ("f32",), "u16")
        halves = [block.pure(op, block.pure(float_to_float("f32", "f16"), half)) for half in halves]
    return Pack(halves)


# --- scales: powers of two from 2^-127 to 2^127, and NaN ------------------------------------------------------------


def _to_scales(block: BlockBuilder, instruction: Instruction, flags: list[str], source: str) -> Value:
    mode = "rp" if "rp" in flags else "rz"
    op = PureOp(f"cvt_ue8m0_f32_{mode}{'_satfinite' if 'satfinite' in flags else ''}", ("f32",), "u8")
    if source == "f32":
        high, low = (block.value(operand, 32) for operand in instruction.operands[1:])
        return Pack([block.pure(op, low), block.pure(op, high)])
    widen = float_to_float("f32", "bf16")
    halves = block.split(block.value(instruction.operands[1], 32), 2)
    return Pack([block.pure(op, block.pure(widen, half)) for half in halves])
